"""Every storage passes the same suite, and behaves like plain dictionaries under all operations."""

from __future__ import annotations

import mmap
import os
import struct

import pytest
from storage_suite import VALUE_BYTES, run_storage_suite, storage_machine, value

from coarse.errors import SnapshotLostError
from coarse.kernels import _native
from coarse.machine.host import read_numa_nodes
from coarse.proxy.memory import DeviceMemory, HostMemory
from coarse.proxy.memory.dax import DaxMemory
from coarse.proxy.memory.numa import NumaMemory
from coarse.proxy.storage import VersionedStorage
from coarse.wire.registration import DTYPE_NUMBERS, OP_NUMBERS
from coarse.wire.segments import Segment

_PATIENCE_S = 0.01
_DEVICE_BYTES = 256 << 20  # a sparse file
_VERSION = struct.Struct("<I")


class Replaced:
    """VersionedStorage: each value in its own segment, which the next version replaces.

    Args:
        memory: Memory of the values.
    """

    def __init__(self, memory: DeviceMemory | None = None) -> None:
        self._memory = memory or HostMemory()
        self._storage = VersionedStorage()
        self._segments: list[Segment] = []
        for key, num_bytes in VALUE_BYTES.items():
            self.put(key, bytes(num_bytes))

    def put(self, key: str, value: bytes) -> int:
        segment = self._memory.allocate("test", len(value))
        self._segments.append(segment)
        with segment.map() as target:
            target[:] = value
        return self._storage.put(key, segment)

    def get(self, key: str, snapshot: int = 0) -> tuple[int, bytes]:
        found = self._storage.get(key, snapshot)
        assert found.segment is not None
        with found.segment.map(read_only=True) as mapped:
            return found.version, bytes(mapped)

    def snapshot(self) -> int:
        return self._storage.snapshot()

    def release(self, snapshot: int) -> None:
        self._storage.release(snapshot)

    def old_bytes(self) -> int:
        held = sum(segment.num_bytes for segment in self._segments if segment.fd >= 0)
        return held - sum(VALUE_BYTES.values())

    def close(self) -> None:
        self._storage.close()


class UpdatedInPlace:
    """The snapshots of an optimizer's parameters: each value stays in place, after its version.

    Args:
        pool_bytes: Limit for old versions.
    """

    def __init__(self, pool_bytes: int = 1 << 30) -> None:
        self._shards = {key: number for number, key in enumerate(VALUE_BYTES)}
        self._offsets, end = {}, 0
        shards = []
        for key, num_bytes in VALUE_BYTES.items():
            self._offsets[key] = end
            elements = (_VERSION.size + num_bytes) // 4
            dtype, op = DTYPE_NUMBERS["float32"], OP_NUMBERS["mean"]
            shards.append((self._shards[key], elements, end, dtype, op, 0, False))
            end += -(-elements * 4 // 64) * 64
        plan = _native.GroupPlan(id=1, num_clients=1, slot_bytes=end, shards=shards, num_states=0)
        self._fds = [
            _native.create_sealed_memory("test", end),
            _native.create_sealed_memory("test", _native.SNAPSHOT_REQUEST_BYTES),
            _native.create_sealed_memory("test", _native.snapshot_control_bytes(plan)),
            _native.create_sparse_sealed_memory("test", _native.snapshot_pool_bytes(plan)),
        ]
        values, request, control, pool = self._fds
        self._values = mmap.mmap(values, end)
        self._trigger = _native.SnapshotTrigger(request, control, 0)
        self._native = _native.SnapshotReader(plan, values, -1, request, control, pool, _PATIENCE_S)
        self._native.set_limit(pool_bytes)
        for key, num_bytes in VALUE_BYTES.items():
            self.put(key, bytes(num_bytes))

    def put(self, key: str, value: bytes) -> int:
        version = self.get(key)[0] + 1
        self._native.keep(self._shards[key])
        stored = _VERSION.pack(version) + value
        self._values[self._offsets[key] : self._offsets[key] + len(stored)] = stored
        return version

    def get(self, key: str, snapshot: int = 0) -> tuple[int, bytes]:
        length = _VERSION.size + VALUE_BYTES[key]
        stored = bytearray(self._values[self._offsets[key] : self._offsets[key] + length])
        if snapshot and not self._native.read(snapshot, self._shards[key], 0, stored):
            is_lost = self._native.is_lost(snapshot)
            raise SnapshotLostError("the pool was full" if is_lost else "it was released or never begun")
        return _VERSION.unpack_from(stored)[0], bytes(stored[_VERSION.size :])

    def snapshot(self) -> int:
        return self._trigger.begin()

    def release(self, snapshot: int) -> None:
        self._native.release(snapshot)

    def old_bytes(self) -> int:
        return self._native.statistics().taken_bytes

    def close(self) -> None:
        self._values.close()
        for fd in self._fds:
            os.close(fd)


def test_storage_that_replaces_values():
    run_storage_suite(Replaced)


@pytest.mark.skipif(not read_numa_nodes(), reason="this kernel knows no NUMA nodes")
def test_storage_on_a_numa_node():
    memory = NumaMemory(read_numa_nodes()[0].node)
    run_storage_suite(lambda: Replaced(memory))


def test_storage_on_a_dax_device(tmp_path):
    """A file replaces the device. When all values are released, all of it is free again."""
    device = tmp_path / "dax0.0"
    device.touch()
    os.truncate(device, _DEVICE_BYTES)
    memory = DaxMemory(str(device))
    run_storage_suite(lambda: Replaced(memory))
    assert memory.available_bytes() == _DEVICE_BYTES
    memory.close()


def test_storage_that_is_updated_in_place():
    run_storage_suite(UpdatedInPlace)


def test_a_full_pool_stays_bounded_and_gives_up_the_snapshot():
    pool_bytes = 24 << 10  # room for one largest value, not for two
    storage = UpdatedInPlace(pool_bytes)
    snapshot = storage.snapshot()
    for key in ("large", "more"):
        storage.put(key, value(key, 1))
    assert storage.get("more") == (2, value("more", 1))
    with pytest.raises(SnapshotLostError, match="was full"):
        storage.get("more", snapshot)
    assert storage.old_bytes() <= pool_bytes
    storage.release(snapshot)
    assert storage.put("more", value("more", 2)) == 3
    assert storage.old_bytes() == 0
    storage.close()


TestReplaced = storage_machine(Replaced).TestCase
TestUpdatedInPlace = storage_machine(UpdatedInPlace).TestCase
