"""Profiles of the machines in the experiments."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from coarse.bench.process_pool import ProcessPool, Seat
from coarse.machine.catalogue import load_machine
from coarse.machine.links import LinkTable
from coarse.machine.partition_table import PartitionTable
from coarse.machine.wiring import link_table
from coarse.profiler.link_plan import plan_links
from coarse.profiler.profile import BOTH, PULL, PUSH, Profile, as_json, from_json
from coarse.profiler.routing import RoutingTable
from coarse.settings import Settings
from coarse.tuning.measure import MeasurePlan, measure_profile

HOST = "host"
"""This machine, with two workers and two memory devices."""

HOST_PLAN = MeasurePlan(budget_s=3.0)

EMULATED_PLAN = MeasurePlan(sizes=tuple(4096 << power for power in range(14)), budget_s=28.0)
"""Up to 32 MiB: one repeat of all on aws-p3 takes 15 s. Small sizes need many repeats for stable latencies."""

TIME_DILATION = 20.0
"""Reduces the weight of the host's wake-ups by this factor; its copies hide behind the links' time."""


@cache
def get_profile(machine: str, *, is_quick: bool = False) -> Profile:
    """The profile that a real session measures: of the host, or of another machine's emulated links.

    Other machines use the partition table of the same name. A process measures each profile once.

    Args:
        machine: HOST, or the name of a machine profile.
        is_quick: Measures each path and size only once.

    Raises:
        ValueError: If the machine or its table does not exist.
    """
    if machine == HOST:
        return _measure(2, {"memory_devices": 2}, _hurried(HOST_PLAN, is_quick))
    settings = {"machine": machine, "partition_table": machine, "time_dilation": TIME_DILATION}
    return _measure(PartitionTable.load(machine).num_workers, settings, _hurried(EMULATED_PLAN, is_quick))


def _hurried(plan: MeasurePlan, is_quick: bool) -> MeasurePlan:
    return replace(plan, budget_s=0.0) if is_quick else plan


def _measure(num_workers: int, settings: dict[str, Any], plan: MeasurePlan) -> Profile:
    with ProcessPool(num_workers, _work) as crew:
        return from_json(crew.ask((settings, plan))[0])


def _work(seat: Seat) -> None:
    """A worker: receives settings and a plan, returns the profile that all workers measured together."""
    settings, plan = seat.hear()
    with seat.join("session", **settings) as session:
        seat.tell(as_json(measure_profile(session, plan)))
        seat.hear()


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
