"""Shared memory without coherence: caches are emptied at the end of a kernel (TSM-WB-NC-RC and TSM-WT-NC-RC).

The answer to a write carries the block if the L2 bank does not have it, as in Algorithm 5.
"""

from __future__ import annotations

from collections.abc import Generator

from coarse.simulator.studies.coherence.caches import Block, Cache
from coarse.simulator.studies.coherence.controllers import RequestTracker
from coarse.simulator.studies.coherence.operations import Hop, Kind, Locks, Operation, Shape, Waiting


class CacheWithLocks:
    """A cache, and its lines in flight.

    Args:
        num_sets, num_ways, stride, pages: As of Cache.
        released: As of Locks.
    """

    def __init__(
        self,
        num_sets: int,
        num_ways: int,
        released: list[Waiting],
        stride: int = 1,
        pages: tuple[int, int] = (1, 1),
    ) -> None:
        self.cache = Cache(num_sets, num_ways, stride, pages)
        self.locks = Locks(released)

    def find(self, line: int) -> Block | None:
        """As of Cache; counts."""
        block = self.cache.find(line)
        if block is None:
            self.cache.misses += 1
        else:
            self.cache.hits += 1
        return block


class Uncoherent:
    """L1 caches write through; L2 banks write back or through; all share memory.

    Args:
        shape: Sizes.
        writes_back: Whether L2 keeps written lines until they are evicted.
        holds_slots_to_the_end: As of RequestTracker.
    """

    def __init__(self, shape: Shape, *, writes_back: bool, holds_slots_to_the_end: bool = False) -> None:
        self.shape, self._writes_back = shape, writes_back
        self.released: list[Waiting] = []
        self.values: dict[int, int] = {}
        self.controllers = [
            RequestTracker(number, self.released, holds_slots_to_the_end=holds_slots_to_the_end)
            for number in range(shape.controllers)
        ]
        self.l1 = [CacheWithLocks(shape.l1_sets, shape.l1_ways, self.released) for _ in range(shape.num_cus)]
        self.l2 = [
            CacheWithLocks(shape.l2_sets, shape.l2_ways, self.released, shape.banks)
            for _ in range(shape.num_gpus * shape.banks)
        ]
        self._hops = [MemoryHops(gpu) for gpu in range(shape.num_gpus)]

    def read(self, cu: int, line: int) -> Operation:
        level = self.l1[cu]
        while line in level.locks:
            yield level.locks[line]
        block = level.find(line)
        if block is not None:
            return block.value
        level.locks.hold(line)
        value = yield from self._read_l2(self.shape.gpu_of(cu), line)
        level.cache.put(line, Block(value))
        level.locks.free(line)
        return value

    def write(self, cu: int, line: int, value: int) -> Operation:
        level = self.l1[cu]
        while line in level.locks:
            yield level.locks[line]
        level.locks.hold(line)
        yield from self._write_l2(self.shape.gpu_of(cu), line, value)
        level.cache.put(line, Block(value))
        level.locks.free(line)
        return value

    def end_kernel(self) -> list[Operation]:
        for level in self.l1:
            level.cache.clear()
        return [
            self._write_back(number // self.shape.banks, line, block)
            for number, bank in enumerate(self.l2)
            for line, block in bank.cache.clear()
        ]

    def statistics(self) -> dict[str, int]:
        return {
            "L1 hits": sum(level.cache.hits for level in self.l1),
            "L1 misses": sum(level.cache.misses for level in self.l1),
            "L2 hits": sum(level.cache.hits for level in self.l2),
            "L2 misses": sum(level.cache.misses for level in self.l2),
            "accesses to memory": sum(each.accesses for each in self.controllers),
        }

    def _read_l2(self, gpu: int, line: int) -> Operation:
        hops, bank = self._hops[gpu], self.l2[self.shape.bank_of(gpu, line)]
        yield hops.l1_read
        while line in bank.locks:
            yield bank.locks[line]
        block = bank.find(line)
        if block is not None:
            value = block.value
        else:
            bank.locks.hold(line)
            yield hops.read
            value = yield from self._serve(line, None)
            yield hops.read_response
            yield from self._keep(gpu, bank, line, Block(value))
            bank.locks.free(line)
        yield hops.l1_read_response
        return value

    def _write_l2(self, gpu: int, line: int, value: int) -> Operation:
        hops, bank = self._hops[gpu], self.l2[self.shape.bank_of(gpu, line)]
        yield hops.l1_write
        while line in bank.locks:
            yield bank.locks[line]
        bank.locks.hold(line)
        is_hit = bank.find(line) is not None
        if not self._writes_back:
            yield hops.write
            yield from self._serve(line, value)
            yield hops.ack if is_hit else hops.write_response
        yield from self._keep(gpu, bank, line, Block(value, is_dirty=self._writes_back))
        bank.locks.free(line)
        yield hops.l1_ack
        return value

    def _keep(
        self, gpu: int, bank: CacheWithLocks, line: int, block: Block
    ) -> Generator[Hop | Waiting, None, None]:
        """A dirty block that makes room is written first (section 4.4.1)."""
        removed = bank.cache.put(line, block)
        if removed is not None and removed[1].is_dirty:
            yield from self._write_back(gpu, *removed)

    def _write_back(self, gpu: int, line: int, block: Block) -> Operation:
        yield self._hops[gpu].write
        value = yield from self._serve(line, block.value)
        yield self._hops[gpu].write_response
        return value

    def _serve(self, line: int, value: int | None) -> Operation:
        def effect() -> int:
            if value is not None:
                self.values[line] = value
            return self.values.get(line, 0)

        return (yield from self.controllers[line % len(self.controllers)].serve(line, effect))


class MemoryHops:
    """All messages of one GPU, without timestamps."""

    def __init__(self, gpu: int) -> None:
        def hop(part: str, kind: Kind) -> Hop:
            return Hop((part, gpu), kind, kind.nbytes)

        self.l1_read = hop("L2 up", Kind.READ_REQUEST)
        self.l1_read_response = hop("L2 down", Kind.READ_RESPONSE)
        self.l1_write = hop("L2 up", Kind.WRITE_REQUEST)
        self.l1_ack = hop("L2 down", Kind.ACK)
        self.read = hop("memory up", Kind.READ_REQUEST)
        self.read_response = hop("memory down", Kind.READ_RESPONSE)
        self.write = hop("memory up", Kind.WRITE_REQUEST)
        self.write_response = hop("memory down", Kind.WRITE_RESPONSE)
        self.ack = hop("memory down", Kind.ACK)
