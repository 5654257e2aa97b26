"""The parts of a timeline: their folder, and what each records of its process and its tensor groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PARTS_SUFFIX = ".parts"
EVENTS_SUFFIX = ".events"
NAMES_SUFFIX = ".jsonl"

WORKER = "worker"
MEMORY_DEVICE = "memory device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of the job, as its part of the timeline describes it.

    Args:
        role: WORKER or MEMORY_DEVICE.
        number: Rank of a worker, or number of a memory device on its node.
        node: Number of its node.
        attempt: 0 for the job's first attempt, 1 after the first restart, and so on.
        num_clients: Workers of the node, which the emulated links count first.
    """

    role: str
    number: int
    node: int
    attempt: int
    num_clients: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNames:
    """The names of a tensor group's parts.

    Args:
        session: Number of the client within its process.
        group: The group's number in its session.
        name: The group's name.
        ranks: The node's workers, by client number.
        device_pids: The memory devices of the session on this node.
        tensors: The tensors' names.
        tensor_of_shard: The tensor of each shard.
    """

    session: int
    group: int
    name: str
    ranks: Sequence[int]
    device_pids: Sequence[int]
    tensors: Sequence[str]
    tensor_of_shard: Sequence[int]


def parts_folder(target: Path) -> Path:
    """The folder to which the processes of a job write the parts of the trace `target`."""
    return target.with_name(target.name + PARTS_SUFFIX)
