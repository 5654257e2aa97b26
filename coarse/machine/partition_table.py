"""Assigns a node's workers to its memory devices (COARSE paper, section IV-B: the GPU partition table)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coarse.machine.fields import FieldError, check_distinct
from coarse.machine.memory_name import PLACE_KEYS, MemoryName
from coarse.machine.named_files import find, names_in

if TYPE_CHECKING:
    from coarse.machine.toml_lines import TomlDocument

_TABLES = Path(__file__).with_name("partition_tables")
_EXAMPLES = {"node": "node = 2", "path": 'path = "/dev/dax0.0"', "device": 'device = "cuda:4"'}
_GPU = "cuda:"  # GPU names follow PyTorch
_KEYS = ("kind", "workers", "gpu", *filter(None, PLACE_KEYS.values()))
_HOST = MemoryName()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDeviceEntry:
    """One memory device.

    Args:
        memory: The memory that it owns.
        workers: Local ranks of the workers whose local proxy it is; may be empty.
        gpu: The emulated machine's GPU that represents it; None to let the machine choose.
    """

    memory: MemoryName = _HOST
    workers: tuple[int, ...] = ()
    gpu: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionTable:
    """The memory devices of a node and the workers of each. Immutable; the same on every worker.

    Args:
        devices: In the order of their numbers.
        worker_gpus: The emulated machine's GPUs that represent workers, by local rank; () to let the machine choose.

    Raises:
        ValueError: If a worker has no memory device, or two; if a GPU is named twice, or only some GPUs are named; if
            two memory devices use the same DAX device; if some memory devices own GPUs and others do not.

    Example:
        >>> PartitionTable.even(num_workers=4, num_devices=2).local_device(3)
        1
    """

    devices: tuple[MemoryDeviceEntry, ...]
    worker_gpus: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.devices:
            raise FieldError("memory_device", "a partition table needs at least one memory device")
        self._check_workers()
        self._check_gpus()
        self._check_dax()
        if self.is_on_gpus and any(device.memory.kind != "cuda" for device in self.devices):
            raise FieldError(
                "memory_device",
                f"some memory devices are on GPUs, others are not: {', '.join(self.memories)}. All must be on "
                "GPUs, or none",
            )

    def _check_workers(self) -> None:
        owners: dict[int, int] = {}
        for number, device in enumerate(self.devices):
            for worker in device.workers:
                if worker in owners:
                    raise FieldError(
                        f"memory_device.{number}.workers",
                        f"worker {worker} has two memory devices: {owners[worker]} and {number}"
                        if owners[worker] != number
                        else f"worker {worker} has two memory devices: {number}, which names it twice",
                    )
                owners[worker] = number
        if not owners:
            raise FieldError("memory_device", "no memory device has a worker")
        for worker in range(max(owners)):
            if worker not in owners:
                raise FieldError(
                    "memory_device",
                    f"worker {worker} has no memory device although worker {max(owners)} has one",
                )

    def _check_gpus(self) -> None:
        gpus = [device.gpu for device in self.devices]
        if not any(gpu is not None for gpu in gpus) and not self.worker_gpus:
            return
        if len(self.worker_gpus) != self.num_workers:
            raise FieldError(
                "worker_gpus",
                f"worker_gpus names {len(self.worker_gpus)} GPUs for {self.num_workers} workers",
            )
        for number, device in enumerate(self.devices):
            if device.gpu is None:
                raise FieldError(f"memory_device.{number}", f"memory device {number} names no GPU, others do")
            first = gpus.index(device.gpu)
            if first < number:
                raise FieldError(
                    f"memory_device.{number}.gpu",
                    f"GPU {device.gpu} is named twice: as memory devices {first} and {number}",
                )
            if device.gpu in self.worker_gpus:
                worker = self.worker_gpus.index(device.gpu)
                raise FieldError(
                    f"memory_device.{number}.gpu",
                    f"GPU {device.gpu} is named twice: as memory device {number} and as worker {worker}",
                )
        check_distinct("worker_gpus", self.worker_gpus, "GPU")

    def _check_dax(self) -> None:
        owners: dict[MemoryName, int] = {}
        for number, device in enumerate(self.devices):
            owner = owners.setdefault(device.memory, number)
            if device.memory.kind == "dax" and owner != number:
                raise FieldError(
                    f"memory_device.{number}.path",
                    f"memory devices {owner} and {number} both use {device.memory.place}, which only one can "
                    "use; give all its workers to one memory device",
                )

    @property
    def num_devices(self) -> int:
        """Number of memory devices."""
        return len(self.devices)

    @property
    def num_workers(self) -> int:
        """Number of workers that they serve."""
        return sum(len(device.workers) for device in self.devices)

    def workers_in(self, memory: str) -> tuple[int, ...]:
        """The workers whose local memory devices own the memory with this name."""
        return tuple(
            worker for device in self.devices if str(device.memory) == memory for worker in device.workers
        )

    def local_device(self, worker: int) -> int:
        """The memory device that is a worker's local proxy."""
        return next(number for number, device in enumerate(self.devices) if worker in device.workers)

    @property
    def is_on_gpus(self) -> bool:
        """Whether memory devices own GPU memory."""
        return any(device.memory.kind == "cuda" for device in self.devices)

    @property
    def memories(self) -> tuple[str, ...]:
        """Names of the memory devices' memories, in their order."""
        return tuple(str(device.memory) for device in self.devices)

    def with_places(self, count: int) -> PartitionTable:
        """This table for `count` workers in all, of which each further one has the memory device with the fewest."""
        blocks = [list(device.workers) for device in self.devices]
        for worker in range(self.num_workers, count):
            min(blocks, key=len).append(worker)
        pairs = zip(self.devices, blocks, strict=True)
        return replace(self, devices=tuple(replace(each, workers=tuple(block)) for each, block in pairs))

    @classmethod
    def even(
        cls, *, num_workers: int, num_devices: int, memories: Sequence[MemoryName] = ()
    ) -> PartitionTable:
        """Assigns workers in even blocks: 1:1, 2:1, n:1. Devices in excess of the workers serve none directly.

        Args:
            num_workers, num_devices: Numbers of workers and memory devices.
            memories: Memory of each device; the host's if empty.
        """
        blocks: list[list[int]] = [[] for _ in range(num_devices)]
        for worker in range(num_workers):
            blocks[worker * num_devices // num_workers].append(worker)
        return cls.of_workers(blocks, memories)

    @classmethod
    def of_workers(
        cls, workers: Sequence[Sequence[int]], memories: Sequence[MemoryName] = ()
    ) -> PartitionTable:
        """A table with the given local ranks for each memory device, and the given memories or else the host's."""
        owned = memories or [_HOST] * len(workers)
        return cls(
            devices=tuple(
                MemoryDeviceEntry(memory=memory, workers=tuple(block))
                for memory, block in zip(owned, workers, strict=True)
            )
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PartitionTable:
        """Reads a table from a TOML file.

        Each memory device has a `[[memory_device]]` section with `workers = [0, 1]` and, unless its kind is "host", a
        `kind` and a place: `kind = "numa"` with `node = 2`, `kind = "dax"` with `path = "/dev/dax0.0"`,
        `kind = "cuda"` with `device = "cuda:4"`. The GPUs of an emulated machine that represent them are given by
        `gpu = 1` in each section and `worker_gpus = [0, 2]` before the first section.

        Args:
            path: Path of the file, or one of `partition_table_names`.

        Raises:
            ValueError: If the file is not a valid table; the message names the file and, if possible, the line.
        """
        from coarse.machine.toml_lines import read_toml

        file = path if Path(path).is_file() else find(path, _TABLES, what="partition table")
        try:
            return _table(read_toml(file))
        except ValueError as error:
            raise ValueError(f"partition table {error}") from None


def partition_table_names() -> list[str]:
    """Names of the tables that come with COARSE, from the paper's runs."""
    return names_in(_TABLES)


def choose_partition_table(
    path: str, *, num_workers: int, devices: int | Sequence[MemoryName]
) -> PartitionTable:
    """The table in the file `path`, or an even table without a path.

    Args:
        path: Path of a TOML file, or the name of a table that comes with COARSE; "" for none.
        num_workers: Number of workers of this node.
        devices: For an even table: number of memory devices, 0 for one per worker, or the memory of each.

    Raises:
        ValueError: If the table cannot be read or is for another number of workers.
    """
    if not path:
        if isinstance(devices, int):
            return PartitionTable.even(num_workers=num_workers, num_devices=devices or num_workers)
        return PartitionTable.even(num_workers=num_workers, num_devices=len(devices), memories=devices)
    table = PartitionTable.load(path)
    if table.num_workers != num_workers:
        raise ValueError(
            f"partition table {path} is for {table.num_workers} workers, but this job has {num_workers} on this node"
        )
    return table


def _table(document: TomlDocument) -> PartitionTable:
    unknown = sorted(set(document.values) - {"memory_device", "worker_gpus"})
    sections = document.values.get("memory_device", [])
    if unknown or not isinstance(sections, list):
        found = ", ".join(unknown) or "memory_device"
        raise document.error((found,), f"expected [[memory_device]] sections, found {found}")
    worker_gpus = document.values.get("worker_gpus", [])
    if not _is_list_of_numbers(worker_gpus):
        raise document.error(("worker_gpus",), f"worker_gpus={worker_gpus!r} is not a list of GPUs")
    devices = tuple(_entry(document, number, section) for number, section in enumerate(sections))
    try:
        return PartitionTable(devices=devices, worker_gpus=tuple(worker_gpus))
    except FieldError as error:
        raise document.error_at(error.field, str(error)) from None


def _entry(document: TomlDocument, number: int, section: Any) -> MemoryDeviceEntry:
    key, where = ("memory_device", number), f"memory_device {number}"
    if not isinstance(section, dict) or set(section) - set(_KEYS):
        raise document.error(key, f"{where}: expected `workers` and `kind` or `gpu`, found {section!r}")
    workers, gpu = section.get("workers", []), section.get("gpu")
    if not _is_list_of_numbers(workers):
        raise document.error((*key, "workers"), f"{where}: workers={workers!r} is not a list of local ranks")
    if gpu is not None and not _is_list_of_numbers([gpu]):
        raise document.error((*key, "gpu"), f"{where}: gpu={gpu!r} is not the number of a GPU")
    try:
        return MemoryDeviceEntry(memory=_memory(section), workers=tuple(workers), gpu=gpu)
    except FieldError as error:
        raise document.error((*key, error.field), f"{where}: {error}") from None


def _memory(section: Mapping[str, Any]) -> MemoryName:
    """The memory given by the kind and the kind's key for the place.

    Raises:
        FieldError: If the keys do not fit together.
    """
    kind = str(section.get("kind", "host"))
    expected = PLACE_KEYS.get(kind, "")
    for name in filter(None, PLACE_KEYS.values()):
        if name in section and name != expected:
            raise FieldError(name, f"{name} has no meaning for kind {kind!r}")
    if expected and expected not in section:
        raise FieldError("kind", f"kind {kind!r} needs a key such as {_EXAMPLES[expected]}")
    return MemoryName(kind=kind, place=_place(expected, section[expected]) if expected else "")


def _place(key: str, value: Any) -> str:
    """The place that a key's value names; raises FieldError unless the value has the key's type."""
    if key == "node":
        is_fit = type(value) is int
    else:
        is_fit = isinstance(value, str) and (key != "device" or value.startswith(_GPU))
    if not is_fit:
        raise FieldError(key, f"found {key}={value!r}, expected a value such as {_EXAMPLES[key]}")
    return str(value).removeprefix(_GPU) if key == "device" else str(value)


def _is_list_of_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
