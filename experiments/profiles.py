"""Profiles of the machines that the experiments are about."""

from __future__ import annotations

from functools import cache
from typing import Any

from coarse.machine.catalogue import load_machine
from coarse.machine.links import LinkTable
from coarse.machine.partition_table import PartitionTable
from coarse.profiler.linked import profile_from_links
from coarse.profiler.profile import BOTH, PULL, PUSH, Profile


@cache
def get_profile(machine: str) -> Profile:
    """The profile of a machine with the paper's partition table of the same name.

    Raises:
        ValueError: If there is no such machine or no table for it.
    """
    return profile_from_links(*links_of(machine))


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
