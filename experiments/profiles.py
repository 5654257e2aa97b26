"""Profiles of the machines in the experiments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from coarse.bench.harness.rendezvous import SessionCommands
from coarse.bench.harness.worker_pool import WorkerPool
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
    with WorkerPool("profile", ProfileCommands, num_workers, settings) as pool:
        return from_json(pool.ask("measure", **asdict(plan))[0])


class ProfileCommands(SessionCommands):
    """The commands of a worker that measures links."""

    def measure(self, sizes: Sequence[int], budget_s: float) -> dict[str, Any]:
        """The profile that all workers measure together, as JSON."""
        return as_json(measure_profile(self.session, MeasurePlan(sizes=tuple(sizes), budget_s=budget_s)))


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
