"""Curves and profiles for planner tests: closed forms, and random ones from hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from coarse.profiler.alpha_beta import AlphaBeta
from coarse.profiler.curve import Curve, CurvePoint
from coarse.profiler.profile import BOTH, MEASURED, Profile, ProfileKey

SIZES = tuple(4096 << i for i in range(15))  # 4 KiB to 64 MiB


def path(alpha_us, gbytes_per_s):
    return AlphaBeta(alpha_us=alpha_us, beta_gbytes_per_s=gbytes_per_s)


def curve_of(model, sizes=SIZES):
    return Curve(points=tuple(CurvePoint(nbytes=size, time_us=model.time_us(size)) for size in sizes))


def line(alpha_us, gbytes_per_s, sizes=SIZES):
    return curve_of(path(alpha_us, gbytes_per_s), sizes)


def key_of(local_devices=(0, 1), num_devices=2, **changes):
    values = {
        "machine": "host",
        "host": "0123456789abcdef",
        "local_devices": tuple(local_devices),
        "num_devices": num_devices,
        "versions": {"coarse": "0.1.0", "kernel": "6.18"},
    }
    return ProfileKey(**{**values, **changes})


def profile_of(key=None, *, local=(5, 10), remote=(8, 8), kind=MEASURED, **changes):
    """Local and remote paths of (alpha in us, beta in GB/s each way); those among workers or devices are remote."""
    key = key or key_of()

    def curve(link):
        at_local = link.kind not in ("devices", "workers") and key.local_devices[link.source] == link.target
        alpha_us, gbytes_per_s = local if at_local else remote
        return line(alpha_us, gbytes_per_s if link.kind == BOTH else 1.2 * gbytes_per_s)

    values = {
        "kind": kind,
        "key": key,
        "time_budget_s": 4.0,
        "paths_share_links": False,
        "curves": {link: curve(link) for link in key.paths()},
    }
    return Profile(**{**values, **changes})


times_us = st.floats(0.01, 1e7)
sizes = st.integers(1, 1 << 28)
models = st.builds(path, st.floats(0.0, 1e4), st.floats(1e-3, 1e3))
points = st.builds(CurvePoint, nbytes=sizes, time_us=times_us, spread_us=st.floats(0, 1e6))
curves = st.lists(points, min_size=1, max_size=12, unique_by=lambda point: point.nbytes).map(
    lambda drawn: Curve(points=tuple(drawn))
)
