"""Which memory device serves which workers of a node (COARSE paper, section IV-B: the GPU partition table)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEVICE_KINDS = ("host",)
"""Kinds of memory that a memory device can own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDeviceEntry:
    """One memory device.

    Args:
        kind: One of DEVICE_KINDS.
        workers: Local ranks whose local proxy it is; may be empty.

    Raises:
        ValueError: If the kind is unknown.
    """

    kind: str = "host"
    workers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in DEVICE_KINDS:
            raise ValueError(f"kind {self.kind!r} is none of {', '.join(DEVICE_KINDS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionTable:
    """The memory devices of a node and the workers of each. Immutable; the same on every worker.

    Args:
        devices: In the order of their numbers.

    Raises:
        ValueError: If a worker has no memory device, or two.

    Example:
        >>> PartitionTable.even(num_workers=4, num_devices=2).local_device(3)
        1
    """

    devices: tuple[MemoryDeviceEntry, ...]

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError("a partition table needs at least one memory device")
        workers = sorted(worker for device in self.devices for worker in device.workers)
        for expected, worker in enumerate(workers):
            if worker < expected:
                raise ValueError(f"worker {worker} has two memory devices")
            if worker > expected:
                raise ValueError(f"worker {expected} has no memory device although worker {worker} has one")

    @property
    def num_devices(self) -> int:
        """How many memory devices there are."""
        return len(self.devices)

    @property
    def num_workers(self) -> int:
        """How many workers they serve."""
        return sum(len(device.workers) for device in self.devices)

    def local_device(self, worker: int) -> int:
        """The memory device that a worker shares a switch with."""
        return next(number for number, device in enumerate(self.devices) if worker in device.workers)

    @classmethod
    def even(cls, *, num_workers: int, num_devices: int) -> PartitionTable:
        """Deals workers out in even blocks: 1:1, 2:1, n:1. Devices beyond the workers serve nobody directly."""
        blocks: list[list[int]] = [[] for _ in range(num_devices)]
        for worker in range(num_workers):
            blocks[worker * num_devices // num_workers].append(worker)
        return cls.of_workers(blocks)

    @classmethod
    def of_workers(cls, workers: Sequence[Sequence[int]]) -> PartitionTable:
        """Host-memory devices that serve the given local ranks each."""
        return cls(devices=tuple(MemoryDeviceEntry(workers=tuple(block)) for block in workers))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PartitionTable:
        """Reads a table from a TOML file.

        A `[[memory_device]]` section each, with `workers = [0, 1]` and, if it is not "host", a `kind`.

        Raises:
            ValueError: If the file cannot be read as a table; the message names the file and the section.
        """
        try:
            document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"partition table {os.fspath(path)}: {error}") from None
        unknown = sorted(set(document) - {"memory_device"})
        sections = document.get("memory_device", [])
        if unknown or not isinstance(sections, list):
            raise ValueError(
                f"partition table {os.fspath(path)}: expected [[memory_device]] sections, found {', '.join(unknown)}"
            )
        try:
            return cls(devices=tuple(_entry(number, section) for number, section in enumerate(sections)))
        except ValueError as error:
            raise ValueError(f"partition table {os.fspath(path)}: {error}") from None


def choose_partition_table(path: str, *, num_workers: int, num_devices: int) -> PartitionTable:
    """The table in the file `path`, or an even one where there is no path.

    Args:
        path: Of a TOML file; "" for none.
        num_workers: Workers of this node.
        num_devices: For an even table; 0 stands for one per worker.

    Raises:
        ValueError: If the table cannot be read or is for another number of workers.
    """
    if not path:
        return PartitionTable.even(num_workers=num_workers, num_devices=num_devices or num_workers)
    table = PartitionTable.load(path)
    if table.num_workers != num_workers:
        raise ValueError(
            f"partition table {path} is for {table.num_workers} workers, this job has {num_workers} on this node"
        )
    return table


def _entry(number: int, section: Any) -> MemoryDeviceEntry:
    where = f"memory_device {number}"
    if not isinstance(section, dict) or set(section) - {"kind", "workers"}:
        raise ValueError(f"{where}: expected `workers` and `kind`, found {section!r}")
    workers = section.get("workers", [])
    if not isinstance(workers, list) or not all(type(worker) is int and worker >= 0 for worker in workers):
        raise ValueError(f"{where}: workers={workers!r} is no list of local ranks")
    try:
        return MemoryDeviceEntry(kind=section.get("kind", "host"), workers=tuple(workers))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
