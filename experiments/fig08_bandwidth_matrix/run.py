"""Figure 8: bidirectional bandwidth between every worker and memory device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coarse.profiler.figures import draw_bandwidth_matrix
from coarse.profiler.profile import BOTH, Profile
from experiments.common import Experiment, Finding, Options, Outcome, main
from experiments.expectation import Check, Expectation, judge_all
from experiments.profiles import get_profile, pacing_as_json

PAPER_GBYTES_PER_S = {"aws-p3": (9.0, 16.0), "sdsc-p100": (25.0, 18.0)}
"""Figure 8: local and remote, both directions together, by machine."""

ALIKE = ("aws-g4dn",)
"""Machines whose local and remote bandwidths are equal (section V-C)."""

TOLERANCE = 0.1
"""Largest accepted relative difference from the paper's bandwidth, which it gives in whole GB/s."""

ALIKE_WITHIN = 0.05
"""Largest accepted difference of remote/local from 1: the paper shows no difference in its plot."""


def bandwidths(profile: Profile) -> list[list[float]]:
    """GB/s of both directions together, by worker and memory device."""
    return [
        [
            2 * profile.curve(BOTH, worker, device).peak_gbytes_per_s
            for device in range(profile.key.num_devices)
        ]
        for worker in range(profile.key.num_workers)
    ]


def compare(profile: Profile) -> Finding:
    """All local and all remote pairs, compared with the paper's two figures."""
    matrix, local_devices = bandwidths(profile), profile.key.local_devices
    local = [matrix[worker][device] for worker, device in enumerate(local_devices)]
    remote = [
        gbytes_per_s
        for worker, row in enumerate(matrix)
        for device, gbytes_per_s in enumerate(row)
        if device != local_devices[worker]
    ]
    return Finding(
        ran=f"bandwidth both ways, {profile.key.machine}",
        checks=_checks(profile, local, remote),
        note="" if profile.key.machine in PAPER_GBYTES_PER_S else _note(local, remote),
        kind=profile.kind,
    )


def run(options: Options) -> Outcome:
    """Profiles each machine."""
    profiles = [get_profile(machine, is_quick=options.is_quick) for machine in options.machines]
    return Outcome(
        findings=[compare(profile) for profile in profiles],
        data=[
            _as_json(profile) | pacing_as_json(machine, is_quick=options.is_quick)
            for machine, profile in zip(options.machines, profiles, strict=True)
        ],
        pictures={f"matrix-{profile.key.machine}": draw_bandwidth_matrix(profile) for profile in profiles},
    )


def _checks(profile: Profile, local: Sequence[float], remote: Sequence[float]) -> tuple[Check, ...]:
    machine, uncertainty = profile.key.machine, _uncertainty(profile)
    if machine in PAPER_GBYTES_PER_S:
        near, far = PAPER_GBYTES_PER_S[machine]
        return tuple(
            judge_all(_bandwidth(what, gbytes_per_s), values, uncertainty=uncertainty)
            for what, gbytes_per_s, values in (("local", near, local), ("remote", far, remote))
        )
    if machine in ALIKE:
        alike = Expectation(what="remote / local", low=1, high=1, tolerance=ALIKE_WITHIN, source="V-C")
        ratios = [far / near for near in local for far in remote]
        return (judge_all(alike, ratios, uncertainty=2 * uncertainty),)
    return ()


def _uncertainty(profile: Profile) -> float:
    """The largest uncertainty of a repeat among the largest transfers, as a share of their time."""
    largest = [curve.points[-1] for path, curve in profile.curves.items() if path.kind == BOTH]
    return max(point.spread_us / point.time_us for point in largest)


def _bandwidth(what: str, gbytes_per_s: float) -> Expectation:
    return Expectation(
        what=what,
        low=gbytes_per_s,
        high=gbytes_per_s,
        tolerance=TOLERANCE * gbytes_per_s,
        unit=" GB/s",
        source="Fig 8",
    )


def _note(local: Sequence[float], remote: Sequence[float]) -> str:
    return f"local {_range(local)}" + (f", remote {_range(remote)}" if remote else "") + " GB/s"


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _as_json(profile: Profile) -> dict[str, Any]:
    return {
        "kind": profile.kind,
        "machine": profile.key.machine,
        "local_devices": list(profile.key.local_devices),
        "gbytes_per_s_both_directions": bandwidths(profile),
    }


EXPERIMENT = Experiment(
    name="fig08_bandwidth_matrix",
    figure="Fig 8",
    machines=("aws-g4dn", "aws-p3", "sdsc-p100", "host"),
    assumption="the paper's bandwidths, which the files contain: the rows check the emulation",
    minutes=3,
    run=run,
)

if __name__ == "__main__":
    raise SystemExit(main(EXPERIMENT))
