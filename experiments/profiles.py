"""Profiles of the machines that the experiments are about."""

from __future__ import annotations

from functools import cache
from typing import Any

from coarse.machine.catalogue import load_machine
from coarse.machine.links import LinkTable
from coarse.machine.partition_table import PartitionTable
from coarse.profiler.linked import profile_from_links
from coarse.profiler.measure import MeasurePlan, measure_profile
from coarse.profiler.profile import BOTH, PULL, PUSH, Profile, as_json, from_json
from experiments.crew import Crew, Seat

HOST = "host"
"""The machine at hand, with two workers and two memory devices."""

HOST_BUDGET_S = 3.0


@cache
def get_profile(machine: str) -> Profile:
    """The profile of a machine: measured of the host, simulated from the links of any other.

    Others have the partition table of their name. Each is made once in a process.

    Raises:
        ValueError: If there is no such machine or no table for it.
    """
    return measure_host() if machine == HOST else profile_from_links(*links_of(machine))


def measure_host() -> Profile:
    """Measures the links of a real session of two workers here."""
    with Crew(2, _measure) as crew:
        return from_json(crew.ask({"memory_devices": 2})[0])


def _measure(seat: Seat) -> None:
    """A worker: hears settings, answers the profile that the workers measured together."""
    with seat.join("session", **seat.hear()) as session:
        seat.tell(as_json(measure_profile(session, MeasurePlan(budget_s=HOST_BUDGET_S))))
        seat.hear()


def links_of(machine: str) -> tuple[LinkTable, list[int]]:
    """The links of a machine under the partition table of its name, and the local memory device of each worker."""
    table = PartitionTable.load(machine)
    local_devices = [table.local_device(worker) for worker in range(table.num_workers)]
    return load_machine(machine).link_table(table), local_devices


def curves_as_json(profile: Profile, worker: int = 0) -> dict[str, Any]:
    """The curves of one worker, for results: by path, [bytes, microseconds] of each size."""
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
