"""Updates the curves of a profile from a few new timings: dynamic profiling (COARSE paper, section III-E)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from coarse.profiler.curve import Curve, CurvePoint
from coarse.profiler.profile import BOTH, PULL, PUSH, PathId, Profile


def rescale_curve(curve: Curve, times_us: Mapping[int, float]) -> Curve:
    """The curve after some of its sizes were timed again.

    Multiplies every time of the curve by the ratio new / old of the timed sizes around it. Between two timed sizes,
    the ratio is interpolated on logarithmic scales, so that a temporary change of a link leaves no trace. Outside of
    them, the ratio of the nearest size applies.

    Args:
        curve: The curve before.
        times_us: New times in microseconds by size in bytes; at least one.

    Raises:
        ValueError: If `times_us` is empty, or a time is not above 0.
    """
    if not times_us:
        raise ValueError("rescaling a curve needs at least one new time")
    sizes = sorted(times_us)
    factors = [times_us[size] / curve.time_us(size) for size in sizes]
    if not all(0 < factor < math.inf for factor in factors):
        raise ValueError(f"new times must be above 0 and finite: {dict(times_us)}")
    logarithms = [math.log(size) for size in sizes]

    def moved(point: CurvePoint) -> CurvePoint:
        factor = math.exp(float(np.interp(math.log(point.nbytes), logarithms, np.log(factors))))
        return replace(point, time_us=point.time_us * factor, spread_us=point.spread_us * factor)

    return Curve(points=tuple(moved(point) for point in curve.points))


def refresh_profile(profile: Profile, times_us: Mapping[PathId, Mapping[int, float]]) -> Profile:
    """The profile after some paths were timed again.

    A push and a pull alone change by the ratios of both at once, unless they were timed themselves. Other paths keep
    their curves.

    Raises:
        ValueError: If a path is not one of the profile's, or a time is not above 0.
        ContradictoryFiguresError: If new times contradict those of other paths, as may happen on a busy machine.
    """
    unknown = sorted(set(times_us) - set(profile.curves))
    if unknown:
        raise ValueError(f"{unknown[0]}: the profile has no such path")
    times_us = {**_alone(profile, times_us), **times_us}
    curves = {
        path: rescale_curve(curve, times_us[path]) if path in times_us else curve
        for path, curve in profile.curves.items()
    }
    return replace(profile, curves=curves)


def _alone(
    profile: Profile, times_us: Mapping[PathId, Mapping[int, float]]
) -> dict[PathId, dict[int, float]]:
    """Times of pushes and pulls alone, for paths where both at once were timed."""
    found: dict[PathId, dict[int, float]] = {}
    for both, times in times_us.items():
        for path in (replace(both, kind=PUSH), replace(both, kind=PULL)):
            if both.kind == BOTH and path in profile.curves:
                alone, together = profile.curves[path], profile.curves[both]
                found[path] = {
                    size: alone.time_us(size) * time_us / together.time_us(size)
                    for size, time_us in times.items()
                }
    return found


def largest_change(profile: Profile, times_us: Mapping[PathId, Mapping[int, float]]) -> float:
    """The largest relative change of a time from the profile's, over all paths and sizes: 0.1 is ten per cent."""
    return max(
        (
            abs(time_us / profile.curves[path].time_us(size) - 1)
            for path, times in times_us.items()
            for size, time_us in times.items()
        ),
        default=0.0,
    )
