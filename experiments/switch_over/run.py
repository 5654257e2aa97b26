"""Switch-over sizes: from which size on another proxy or another direct all-reduce is faster.

Predicted from alpha-beta fits, and compared with a real session's measurements on emulated links.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coarse.bench.harness.rendezvous import SessionCommands
from coarse.bench.harness.worker_pool import COMMAND_TIMEOUT_S, WorkerPool
from coarse.bench.pace import Paced, Pacing, keep_pace
from coarse.client.tensor_group import TensorGroup
from coarse.machine.partition_table import PartitionTable
from coarse.profiler.curve import Curve, CurvePoint
from coarse.profiler.direct_allreduce import ALL_GATHER, ALL_TO_ALL, RING, Collectives
from coarse.profiler.figures import draw_crossings, format_size
from coarse.profiler.linked import collectives_from_links
from coarse.profiler.profile import BOTH, EMULATED, Profile
from coarse.profiler.routing import RoutingTable
from coarse.profiler.switchover import SwitchOver, compare_crossings, measure_crossing, predict_crossing
from coarse.schema import TensorSpec
from experiments.common import Experiment, Finding, Options, Outcome, main
from experiments.expectation import PREDICTED, CategoryCheck, Check, Expectation, Measured, NumberCheck
from experiments.profiles import (
    Sessions,
    get_profile,
    get_sessions,
    links_of,
    measure_lateness,
    pacing_as_json,
    plan_tables,
)

MACHINES = ("aws-p3", "sdsc-p100")
WAYS = (ALL_GATHER, ALL_TO_ALL, RING)
"""Algorithms of the direct all-reduce, those with few latencies first."""

SIZES = tuple(4096 << power for power in range(10))
"""4 KiB to 2 MiB, the size of a shard."""

TIME_DILATION = 400.0
"""A latency of 20 us becomes 8 ms on the host; delayed polling adds a few per cent to it."""

SESSIONS, REPEATS = 3, 3
"""Sessions that time the direct all-reduce, and repeats of each: delays differ between sessions, too."""

AGREES_WITHIN = 0.25
"""Accepted relative error: about the accuracy of a measured latency, to which the crossing is proportional."""

_WHOLE_TENSORS = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """The workers' measurements of the direct all-reduce: its time by algorithm and size.

    Args:
        curves: Medians of the repeats.
        repeats: The curves of each repeat, of all sessions.
    """

    machine: str
    num_workers: int
    curves: Mapping[str, Curve]
    repeats: tuple[Mapping[str, Curve], ...] = ()

    @classmethod
    def from_repeats(cls, machine: str, num_workers: int, repeats_us: NDArray[np.float64]) -> Timings:
        """The medians, from microseconds by repeat, algorithm and size."""
        return cls(
            machine=machine,
            num_workers=num_workers,
            curves=_curves(np.median(repeats_us, axis=0)),
            repeats=tuple(map(_curves, repeats_us)),
        )

    def crossing(self, small: str, large: str, model: Collectives) -> SwitchOver:
        """The size from which `large` is faster, by the model and by the measurements."""
        return SwitchOver(
            predicted_bytes=predict_crossing(model[small], model[large]),
            measured_bytes=measure_crossing(self.curves[small], self.curves[large]),
        )

    def crossings(self, small: str, large: str) -> list[float]:
        """The sizes from which `large` is faster, of those repeats that have one."""
        found = (measure_crossing(curves[small], curves[large]) for curves in self.repeats)
        return [nbytes for nbytes in found if nbytes]


# ---- workers ----


def time_direct_allreduce(
    machine: str, *, sessions: int, repeats: int, time_dilation: float = TIME_DILATION
) -> Paced[Timings]:
    """Times the direct all-reduce of a machine's workers for every algorithm and size, one tensor at a time.

    The pacing error is the average delay of arrivals as a share of the shortest all-reduce; of several sessions the
    largest.

    Raises:
        PaceError: If this host cannot emulate the machine's links in time.
    """
    ran = [
        keep_pace(
            f"direct all-reduce on {machine}",
            lambda dilation: _time_direct_allreduce(machine, repeats, dilation),
            time_dilation=time_dilation,
        )
        for _ in range(sessions)
    ]
    repeats_us = np.concatenate([paced.value for paced in ran])
    return Paced(
        value=Timings.from_repeats(machine, PartitionTable.load(machine).num_workers, repeats_us),
        pacing=max((paced.pacing for paced in ran), key=lambda pacing: pacing.error),
    )


def _time_direct_allreduce(machine: str, repeats: int, time_dilation: float) -> Paced[NDArray[np.float64]]:
    """Microseconds of one session by repeat, algorithm and size."""
    settings = {"machine": machine, "partition_table": machine, "time_dilation": time_dilation}
    settings |= {"dual_sync": "off", "shard_bytes": _WHOLE_TENSORS}
    num_workers = PartitionTable.load(machine).num_workers
    timeout_s = COMMAND_TIMEOUT_S * time_dilation / TIME_DILATION
    with WorkerPool("switch-over", DirectAllreduceCommands, num_workers, settings) as pool:
        answers = pool.ask("measure", timeout_s, repeats=repeats)
    seconds = np.array([of_worker for of_worker, _ in answers]) / time_dilation
    late_us = answers[0][1]
    # The last worker to push waited for no other: the shortest time of all workers is the links' time.
    repeats_us = seconds.min(axis=0) * 1e6
    error = late_us / float(np.median(repeats_us, axis=0).min())
    return Paced(
        value=repeats_us, pacing=Pacing(lateness_us=late_us, error=error, time_dilation=time_dilation)
    )


def _curves(times_us: NDArray[np.float64]) -> dict[str, Curve]:
    """The curve of each way, from its times by way and size."""
    return {
        way: Curve(
            points=tuple(CurvePoint(nbytes=n, time_us=us) for n, us in zip(SIZES, of_way, strict=True))
        )
        for way, of_way in zip(WAYS, times_us.tolist(), strict=True)
    }


class DirectAllreduceCommands(SessionCommands):
    """The commands of a worker that times the direct all-reduce."""

    def measure(self, repeats: int) -> tuple[list[list[list[float]]], float]:
        """Seconds of the host, of each repeat by algorithm and size, and the links' lateness (us)."""
        specs = [
            TensorSpec(name=format_size(n), dtype="float32", num_elements=n // 4, op="mean") for n in SIZES
        ]
        group = self.session.register("tensors", specs)
        assert isinstance(group, TensorGroup)  # the job has several workers
        return measure_lateness(
            self.session, lambda: [[self._time_sizes(group, way) for way in WAYS] for _ in range(repeats)]
        )

    def _time_sizes(self, group: TensorGroup, way: str) -> list[float]:
        group.use_direct_allreduce(dict.fromkeys(range(len(SIZES)), way))
        seconds = []
        for tensor in range(len(SIZES)):
            self.session.barrier()
            begin = time.perf_counter()
            group.push(tensor)
            group.pull(tensor)
            seconds.append(time.perf_counter() - begin)
        return seconds


# ---- what comes out ----


def compare_proxies(
    sessions: Sessions, profile: Profile, tables: Sequence[RoutingTable]
) -> tuple[Finding, dict[str, Any]]:
    """LatProxy against BwProxy for the first worker.

    Args:
        sessions: The profiles of several sessions; their crossings give the range.
        profile: That of all sessions together.
        tables: Its routing tables.
    """
    machine, table = profile.key.machine, tables[0]
    ran = f"LatProxy to BwProxy, {machine}"
    if table.lat_proxy == table.bw_proxy:
        finding = Finding(ran=ran, note="one proxy is the fastest at every size", kind=profile.kind)
        return finding, {"kind": profile.kind, "machine": machine, "what": ran, "crossing": None}
    small, large = (profile.curve(BOTH, 0, proxy) for proxy in (table.lat_proxy, table.bw_proxy))
    crossing = compare_crossings(small, large)
    ends = [
        nbytes
        for each in sessions.measured
        for nbytes in _uncertain_crossings(
            each.value.curve(BOTH, 0, table.lat_proxy),
            each.value.curve(BOTH, 0, table.bw_proxy),
            late_us=each.pacing.lateness_us,
        )
    ]
    finding = _finding(ran, crossing, profile.kind, small.points[-1].nbytes, ends)
    return finding, _data(machine, ran, crossing, profile.kind)


def _uncertain_crossings(small: Curve, large: Curve, *, late_us: float) -> list[float]:
    """The crossings of two curves that are off in opposite directions, by their uncertainties and by `late_us`."""
    found = (measure_crossing(_off(small, sign, late_us), _off(large, -sign, late_us)) for sign in (-1, 1))
    return [nbytes for nbytes in found if nbytes]


def _off(curve: Curve, sign: int, late_us: float) -> Curve:
    return Curve(
        points=tuple(
            replace(point, time_us=max(point.time_us + sign * (point.spread_us + late_us), point.time_us / 2))
            for point in curve.points
        )
    )


def compare_ways(timings: Timings, model: Collectives) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Every two algorithms of the direct all-reduce, with the links that all workers use at once."""
    findings, data = [], []
    for small, large in combinations(WAYS, 2):
        if model[small] == model[large]:  # with two workers: each one sends the same amount to the other
            continue
        ran = f"{small} to {large} among {timings.num_workers} workers, {timings.machine}"
        crossing = timings.crossing(small, large, model)
        ends = timings.crossings(small, large)
        findings.append(_finding(ran, crossing, EMULATED, SIZES[-1], ends))
        data.append(_data(timings.machine, ran, crossing, EMULATED))
    curves = {
        way: [[p.nbytes, round(p.time_us, 3)] for p in curve.points] for way, curve in timings.curves.items()
    }
    return findings, [
        *data,
        {"kind": EMULATED, "machine": timings.machine, "what": "direct all-reduce", "curves": curves},
    ]


def run(options: Options) -> Outcome:
    """Profiles each machine, and times its workers' direct all-reduce."""
    findings: list[Finding] = []
    data: list[dict[str, Any]] = []
    pictures = {}
    for machine in (each for each in options.machines if each in MACHINES):
        profile = get_profile(machine, is_quick=options.is_quick)
        sessions = get_sessions(machine, is_quick=options.is_quick)
        finding, values = compare_proxies(sessions, profile, plan_tables(profile))
        findings.append(finding)
        data.append(values | pacing_as_json(machine, is_quick=options.is_quick))
        options.progress(f"{machine}: direct all-reduce")
        num_sessions, repeats = (1, 1) if options.is_quick else (SESSIONS, REPEATS)
        paced = time_direct_allreduce(machine, sessions=num_sessions, repeats=repeats)
        timings = paced.value
        model = collectives_from_links(links_of(machine)[0])
        more_findings, more_values = compare_ways(timings, model)
        findings += more_findings
        data += [more | paced.pacing.as_json() for more in more_values]
        pictures[f"own-path-{machine}"] = draw_crossings(
            timings.curves, model, whereof=f"{machine}, {timings.num_workers} workers ({EMULATED})"
        )
    return Outcome(findings=findings, data=data, pictures=pictures)


def _finding(
    ran: str, crossing: SwitchOver, kind: str, largest_bytes: int, ends: Sequence[float] = ()
) -> Finding:
    return Finding(ran=ran, checks=(_check(crossing, largest_bytes, ends),), kind=kind)


def _check(crossing: SwitchOver, largest_bytes: int, ends: Sequence[float] = ()) -> Check:
    """Two sizes are compared as numbers. If one of them does not exist, both are compared in words.

    Args:
        crossing: The predicted and the measured size.
        largest_bytes: Of the tested sizes.
        ends: Measured sizes of single repeats.
    """
    if crossing.predicted_bytes and crossing.measured_bytes:
        predicted_kib = crossing.predicted_bytes / 1024
        tolerance = AGREES_WITHIN * predicted_kib
        unit, low, high = " KiB on", predicted_kib, predicted_kib
        expectation = Expectation(
            what="from", low=low, high=high, tolerance=tolerance, unit=unit, source=PREDICTED
        )
        sizes = [nbytes / 1024 for nbytes in (crossing.measured_bytes, *ends)]
        measured = Measured(value=sizes[0], low=min(sizes), high=max(sizes))
        return NumberCheck(expectation=expectation, measured=measured)
    predicted, measured = (
        _words(size, largest_bytes) for size in (crossing.predicted_bytes, crossing.measured_bytes)
    )
    return CategoryCheck(category=predicted, categories=(measured,), source=PREDICTED)


def _data(machine: str, what: str, crossing: SwitchOver, kind: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "machine": machine,
        "what": what,
        "predicted_bytes": crossing.predicted_bytes,
        "measured_bytes": crossing.measured_bytes,
    }


def _words(nbytes: float | None, largest_bytes: int) -> str:
    if nbytes is None or nbytes > largest_bytes:
        return f"not faster up to {format_size(largest_bytes)}"
    return "faster at every size" if nbytes <= SIZES[0] else f"from {format_size(nbytes)} on"


EXPERIMENT = Experiment(
    name="switch_over",
    figure="S*",
    machines=("aws-p3", "sdsc-p100"),
    assumption="latencies of the machine files",
    minutes=1.1,
    run=run,
)

if __name__ == "__main__":
    raise SystemExit(main(EXPERIMENT))
