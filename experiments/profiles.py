"""Profiles of the machines in the experiments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, TypeVar

from coarse.bench.harness.commands import BenchError
from coarse.bench.harness.rendezvous import SessionCommands
from coarse.bench.harness.worker_pool import WorkerPool
from coarse.bench.pace import Paced, Pacing, keep_pace, lateness_us
from coarse.machine.catalogue import load_machine
from coarse.machine.links import LinkTable
from coarse.machine.partition_table import PartitionTable
from coarse.machine.wiring import link_table
from coarse.profiler.curve import Curve, CurvePoint
from coarse.profiler.link_plan import plan_links
from coarse.profiler.linked import profile_from_links
from coarse.profiler.profile import BOTH, PULL, PUSH, Profile, as_json, from_json
from coarse.profiler.routing import RoutingTable
from coarse.session import Session
from coarse.settings import Settings
from coarse.tuning.measure import MeasurePlan, measure_profile
from experiments.quiet import MOST_BUSY, measure_in_quiet

T = TypeVar("T")

HOST = "host"
"""This machine, with two workers and two memory devices."""

HOST_PLAN = MeasurePlan(budget_s=3.0)

SMALL_PLAN = MeasurePlan(sizes=tuple(4096 << power for power in range(7)), budget_s=8.0)
"""Up to 256 KiB: sizes whose time is mostly latency, on which thresholds depend. One repeat of all on aws-p3 takes
2 s."""

SMALL_TIME_DILATION = 200.0
"""Reduces the weight of the host's wake-ups, tens of microseconds, to a small part of a latency of ten."""

SESSIONS = 3
"""Sessions that measure the small sizes: how late a host wakes its processes differs more between sessions than
between the repeats of one."""

LARGE_PLAN = MeasurePlan(sizes=tuple(524288 << power for power in range(7)), budget_s=18.0)
"""512 KiB to 32 MiB: one repeat of all on aws-p3 takes 15 s."""

TIME_DILATION = 20.0
"""For large sizes, whose copies by the host hide behind the links' time."""

MOST_ERROR = 0.05
"""Largest accepted average delay of arrivals, as a share of the shortest transfer; most are many times as long.
Curves are more exact, because they are of the fastest repeats."""

LIMIT_S = 600.0
"""Time limit of a measurement; of one with more dilation than planned, in proportion."""


_OF_REAL_LINKS = Pacing(lateness_us=0.0, error=0.0, time_dilation=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions:
    """The profiles of one machine that several sessions have measured.

    Args:
        measured: The profile of each session, and the pacing of its small sizes. Large sizes are of one more session,
            and in all profiles.
        pacing: That of all sessions with the largest error; None for the host, whose links are its own.
    """

    measured: tuple[Paced[Profile], ...]
    pacing: Pacing | None = None

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """The profile of each session."""
        return tuple(each.value for each in self.measured)


def get_sessions(machine: str, *, is_quick: bool = False) -> Sessions:
    """The profiles that real sessions measure: one of the host, or several of another machine's emulated links.

    Other machines use the partition table of the same name. A process measures each machine once, also if that fails:
    each experiment would be refused only after minutes.

    Args:
        machine: HOST, or the name of a machine profile.
        is_quick: One session alone, which measures each path and size once.

    Raises:
        PaceError: If this host cannot emulate the machine's links in time.
        BusyMachineError: If other work takes this host's processors in each attempt, unless it is a quick run.
        ValueError: If the machine or its table does not exist.
    """
    found = _try_sessions(machine, is_quick)
    if isinstance(found, BenchError):
        raise found
    return found


@cache
def _try_sessions(machine: str, is_quick: bool) -> Sessions | BenchError:
    try:
        return _measure_sessions(machine, is_quick=is_quick)
    except BenchError as error:
        return error


def _measure_sessions(machine: str, *, is_quick: bool) -> Sessions:
    if machine == HOST:
        profile = _measure_host(is_quick=is_quick)
        return Sessions(measured=(Paced(value=profile, pacing=_OF_REAL_LINKS),))
    large = keep_pace(
        f"profile of {machine}, large sizes",
        lambda dilation: _emulate(machine, hurried(LARGE_PLAN, is_quick), dilation, TIME_DILATION),
        time_dilation=TIME_DILATION,
        most_error=MOST_ERROR,
    )
    small = [
        keep_pace(
            f"profile of {machine}, small sizes",
            lambda dilation: _emulate(machine, hurried(SMALL_PLAN, is_quick), dilation, SMALL_TIME_DILATION),
            time_dilation=SMALL_TIME_DILATION,
            most_error=MOST_ERROR,
        )
        for _ in range(1 if is_quick else SESSIONS)
    ]
    return Sessions(
        measured=tuple(replace(each, value=join_sizes(each.value, large.value)) for each in small),
        pacing=max((each.pacing for each in (large, *small)), key=lambda pacing: pacing.error),
    )


@cache
def get_profile(machine: str, *, is_quick: bool = False) -> Profile:
    """The profile of all sessions of get_sessions(): of emulated links, the fastest repeat of each size."""
    return fastest_of(get_sessions(machine, is_quick=is_quick).profiles)


def pacing_as_json(machine: str, *, is_quick: bool = False) -> dict[str, float]:
    """The pacing of get_sessions(), for results; nothing for the host."""
    pacing = get_sessions(machine, is_quick=is_quick).pacing
    return {} if pacing is None else pacing.as_json()


def _measure_host(*, is_quick: bool) -> Profile:
    def attempt() -> Profile:
        return measure(2, {"memory_devices": 2}, hurried(HOST_PLAN, is_quick))[0]

    most_busy = math.inf if is_quick else MOST_BUSY
    return measure_in_quiet("profile of this machine", attempt, most_busy=most_busy)


def _emulate(machine: str, plan: MeasurePlan, time_dilation: float, planned: float) -> Paced[Profile]:
    """Measures with a time dilation, in time that grows with it from the plan's at the planned one.

    The pacing error is the average delay of arrivals as a share of the shortest transfer.
    """
    settings = {"machine": machine, "partition_table": machine, "time_dilation": time_dilation}
    stretch = time_dilation / planned
    stretched = replace(plan, budget_s=plan.budget_s * stretch)
    num_workers = PartitionTable.load(machine).num_workers
    profile, late_us = measure(num_workers, settings, stretched, limit_s=LIMIT_S * stretch)
    error = late_us / _shortest_us(machine, min(plan.sizes))
    return Paced(value=profile, pacing=Pacing(lateness_us=late_us, error=error, time_dilation=time_dilation))


def _shortest_us(machine: str, nbytes: int) -> float:
    """Least time of a push by the machine's file: a measured one would contain the delays."""
    profile = profile_from_links(*links_of(machine), sizes=(nbytes,))
    return min(curve.latency_us for path, curve in profile.curves.items() if path.kind == PUSH)


def join_sizes(small: Profile, large: Profile) -> Profile:
    """One profile of the sizes of two, which have the same paths and no common size."""
    curves = {
        path: Curve(points=(*curve.points, *large.curves[path].points))
        for path, curve in small.curves.items()
    }
    # Emulated time is part of the key; a plan needs the rest.
    return replace(small, curves=curves, time_budget_s=small.time_budget_s + large.time_budget_s)


def fastest_of(profiles: Sequence[Profile]) -> Profile:
    """One profile of several sessions: the fastest time of each path and size, whose spread ends at the slowest.

    Emulated transfers are never too fast, so that the fastest is the least delayed.
    """
    first = profiles[0]
    if len(profiles) == 1:
        return first
    curves = {
        path: Curve(points=tuple(map(_fastest, *(profile.curves[path].points for profile in profiles))))
        for path in first.curves
    }
    return replace(first, curves=curves, time_budget_s=sum(each.time_budget_s for each in profiles))


def _fastest(*points: CurvePoint) -> CurvePoint:
    fastest = min(points, key=lambda point: point.time_us)
    slowest_us = max(point.time_us + point.spread_us for point in points)
    return replace(
        fastest,
        spread_us=slowest_us - fastest.time_us,
        num_repeats=sum(point.num_repeats for point in points),
    )


def hurried(plan: MeasurePlan, is_quick: bool) -> MeasurePlan:
    """The plan, or one that measures each path and size only once."""
    return replace(plan, budget_s=0.0) if is_quick else plan


def measure(
    num_workers: int, settings: dict[str, Any], plan: MeasurePlan, *, limit_s: float = LIMIT_S
) -> tuple[Profile, float]:
    """The profile, and the average delay of arrivals in the machine's microseconds; 0 for the host's links."""
    with WorkerPool("profile", ProfileCommands, num_workers, settings) as pool:
        profile, late_us = pool.ask("measure", limit_s, **asdict(plan))[0]
    return from_json(profile), late_us


class ProfileCommands(SessionCommands):
    """The commands of a worker that measures links."""

    def measure(self, sizes: Sequence[int], budget_s: float) -> tuple[dict[str, Any], float]:
        """The profile that all workers measure together, as JSON, and the links' lateness (us)."""
        plan = MeasurePlan(sizes=tuple(sizes), budget_s=budget_s)
        return measure_lateness(self.session, lambda: as_json(measure_profile(self.session, plan)))


def measure_lateness(session: Session, measure: Callable[[], T]) -> tuple[T, float]:
    """Calls a function; returns its result, and the average delay of arrivals in the machine's microseconds."""
    if session.emulation is None:
        return measure(), 0.0
    before = session.emulation.pacing()
    result = measure()
    return result, lateness_us(before, session.emulation.pacing(), session.settings.time_dilation)


def plan_tables(profile: Profile) -> tuple[RoutingTable, ...]:
    """The routing tables that the workers of a session with this profile use."""
    plan = plan_links(profile, "", local_devices=profile.key.local_devices, settings=Settings())
    return plan.tables


def links_of(machine: str) -> tuple[LinkTable, list[int]]:
    """The machine's links under the partition table of its name, and the local memory device of each worker."""
    table = PartitionTable.load(machine)
    local_devices = [table.local_device(worker) for worker in range(table.num_workers)]
    return link_table(load_machine(machine), table), local_devices


def curves_as_json(profile: Profile, worker: int = 0) -> dict[str, Any]:
    """The curves of one worker, for results: [bytes, microseconds] of each size, by path."""
    paths = [path for path in profile.curves if path.kind in (PUSH, PULL, BOTH) and path.source == worker]
    return {
        "kind": profile.kind,
        "machine": profile.key.machine,
        "worker": worker,
        "local_device": profile.key.local_devices[worker],
        "curves": {
            str(path): [[point.nbytes, round(point.time_us, 3)] for point in profile.curves[path].points]
            for path in paths
        },
    }
