"""Profiles of the machines in the experiments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any, TypeVar

from coarse.bench.harness.rendezvous import SessionCommands
from coarse.bench.harness.worker_pool import WorkerPool
from coarse.bench.pace import Paced, Pacing, keep_pace, lateness_us
from coarse.machine.catalogue import load_machine
from coarse.machine.links import LinkTable
from coarse.machine.partition_table import PartitionTable
from coarse.machine.wiring import link_table
from coarse.profiler.link_plan import plan_links
from coarse.profiler.profile import BOTH, PULL, PUSH, Profile, as_json, from_json
from coarse.profiler.routing import RoutingTable
from coarse.session import Session
from coarse.settings import Settings
from coarse.tuning.measure import MeasurePlan, measure_profile
from experiments.quiet import require_quiet

T = TypeVar("T")

HOST = "host"
"""This machine, with two workers and two memory devices."""

HOST_PLAN = MeasurePlan(budget_s=3.0)

EMULATED_PLAN = MeasurePlan(sizes=tuple(4096 << power for power in range(14)), budget_s=28.0)
"""Up to 32 MiB: one repeat of all on aws-p3 takes 15 s. Small sizes need many repeats for stable latencies."""

TIME_DILATION = 20.0
"""Reduces the weight of the host's wake-ups by this factor; its copies hide behind the links' time."""

MOST_ERROR = 0.25
"""Largest accepted average delay of arrivals, as a share of the shortest latency of a worker and a memory device.
Thresholds follow from latencies, and a quarter is their accuracy (experiments/switch_over). Curves are more exact:
they are of the fastest repeats."""

_LIMIT_S = 600.0
"""Time limit of a measurement without dilation beyond TIME_DILATION."""


@cache
def get_profile(machine: str, *, is_quick: bool = False) -> Profile:
    """The profile that a real session measures: of the host, or of another machine's emulated links.

    Other machines use the partition table of the same name. A process measures each profile once.

    Args:
        machine: HOST, or the name of a machine profile.
        is_quick: Measures each path and size only once.

    Raises:
        PaceError: If this host cannot emulate the machine's links in time.
        BusyMachineError: If other work takes this host's processors, unless it is a quick run.
        ValueError: If the machine or its table does not exist.
    """
    if machine == HOST:
        if not is_quick:
            require_quiet("profile of this machine")
        return measure(2, {"memory_devices": 2}, hurried(HOST_PLAN, is_quick))[0]
    return get_paced_profile(machine, is_quick=is_quick).value


@cache
def get_paced_profile(machine: str, *, is_quick: bool = False) -> Paced[Profile]:
    """As get_profile(), for another machine than the host, with the pacing of its measurement."""
    return keep_pace(
        f"profile of {machine}",
        lambda dilation: _emulate(machine, hurried(EMULATED_PLAN, is_quick), dilation),
        time_dilation=TIME_DILATION,
        most_error=MOST_ERROR,
    )


def pacing_as_json(machine: str, *, is_quick: bool = False) -> dict[str, float]:
    """The pacing of get_profile()'s measurement, for results; nothing for the host, whose links are its own."""
    return {} if machine == HOST else get_paced_profile(machine, is_quick=is_quick).pacing.as_json()


def _emulate(machine: str, plan: MeasurePlan, time_dilation: float) -> Paced[Profile]:
    settings = {"machine": machine, "partition_table": machine, "time_dilation": time_dilation}
    stretched = replace(plan, budget_s=plan.budget_s * time_dilation / TIME_DILATION)
    profile, late_us = measure(PartitionTable.load(machine).num_workers, settings, stretched)
    error = late_us / _shortest_latency_us(machine)
    return Paced(value=profile, pacing=Pacing(lateness_us=late_us, error=error, time_dilation=time_dilation))


def _shortest_latency_us(machine: str) -> float:
    links, _ = links_of(machine)
    return min(
        links.path(links.worker(worker), links.device(device)).latency_us
        for worker in range(links.num_workers)
        for device in range(links.num_devices)
    )


def hurried(plan: MeasurePlan, is_quick: bool) -> MeasurePlan:
    """The plan, or one that measures each path and size only once."""
    return replace(plan, budget_s=0.0) if is_quick else plan


def measure(num_workers: int, settings: dict[str, Any], plan: MeasurePlan) -> tuple[Profile, float]:
    """The profile, and the average delay of arrivals in the machine's microseconds; 0 for the host's links."""
    limit_s = _LIMIT_S * settings.get("time_dilation", TIME_DILATION) / TIME_DILATION
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
