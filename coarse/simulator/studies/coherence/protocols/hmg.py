"""HMG: GPUs with memory of their own cache each other's lines in L2; a directory at the home invalidates sharers.

A write waits until all other copies are gone, so that programs are sequentially consistent. The runs for times do not
wait for writes, as under scoped consistency.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator

from coarse.simulator.studies.coherence.caches import Block
from coarse.simulator.studies.coherence.operations import Hop, Kind, Operation, Shape, Waiting
from coarse.simulator.studies.coherence.protocols.rdma import Links
from coarse.simulator.studies.coherence.protocols.uncoherent import CacheWithLocks


class SharingCache(CacheWithLocks):
    """A cache that knows who below it has a copy, and which fills in flight are stale by the time they arrive."""

    def __init__(
        self,
        num_sets: int,
        num_ways: int,
        released: list[Waiting],
        stride: int = 1,
        pages: tuple[int, int] = (1, 1),
    ) -> None:
        super().__init__(num_sets, num_ways, released, stride, pages)
        self.sharers: defaultdict[int, set[int]] = defaultdict(set)
        self._stale: set[int] = set()

    def invalidate(self, line: int) -> None:
        """Drops the copy, and the one in flight."""
        self.cache.drop(line)
        if line in self.locks:
            self._stale.add(line)

    def fill(self, line: int, block: Block) -> tuple[bool, tuple[int, Block] | None]:
        """Keeps a block unless it was invalidated on its way; returns whether it did, and what made room."""
        if line in self._stale:
            self._stale.discard(line)
            return False, None
        return True, self.cache.put(line, block)


class Hmg:
    """Caches with directories, PCIe and the memory of each GPU.

    Args:
        shape: Sizes.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.released: list[Waiting] = []
        self.values: dict[int, int] = {}
        self.l1 = [SharingCache(shape.l1_sets, shape.l1_ways, self.released) for _ in range(shape.num_cus)]
        self.l2 = [
            SharingCache(shape.l2_sets, shape.l2_ways, self.released, shape.banks, shape.pages)
            for _ in range(shape.num_gpus * shape.banks)
        ]
        self.directory: defaultdict[int, set[int]] = defaultdict(set)
        """GPUs other than the home that may have a copy."""
        self.links = Links(shape.num_gpus)
        self.remote = self.dram = self.invalidations = 0

    def read(self, cu: int, line: int) -> Operation:
        level = self.l1[cu]
        while line in level.locks:
            yield level.locks[line]
        block = level.find(line)
        if block is not None:
            return block.value
        level.locks.hold(line)
        value, may_keep = yield from self._read_l2(cu, line)
        if may_keep:
            level.fill(line, Block(value))
        level.locks.free(line)
        return value

    def write(self, cu: int, line: int, value: int) -> Operation:
        """Goes to the home; the writer keeps no copy."""
        level, gpu, home = self.l1[cu], self.shape.gpu_of(cu), self.shape.home_of(line)
        while line in level.locks:
            yield level.locks[line]
        level.locks.hold(line)
        yield self.links.within(gpu, Kind.WRITE_REQUEST)
        self.remote += gpu != home
        if gpu != home:
            yield from self.links.send(gpu, home, Kind.WRITE_REQUEST)
        yield from self._write_home(home, line, value)
        if gpu != home:
            yield from self.links.send(home, gpu, Kind.ACK)
        yield self.links.within(gpu, Kind.ACK)
        level.fill(line, Block(value))
        level.cache.drop(line)
        level.locks.free(line)
        return value

    def end_kernel(self) -> list[Operation]:
        """Nothing: the directories keep caches coherent."""
        return []

    def flush(self) -> None:
        """As of Rdma."""
        self.dram += sum(len(bank.cache.clear()) for bank in self.l2)

    def statistics(self) -> dict[str, int]:
        return {
            "L1 hits": sum(level.cache.hits for level in self.l1),
            "L1 misses": sum(level.cache.misses for level in self.l1),
            "L2 hits": sum(level.cache.hits for level in self.l2),
            "L2 misses": sum(level.cache.misses for level in self.l2),
            "accesses to memory": self.dram,
            "remote": self.remote,
            "invalidations": self.invalidations,
        }

    def _read_l2(self, cu: int, line: int) -> Generator[Hop | Waiting, None, tuple[int, bool]]:
        """Returns the value, and whether L1 may keep it."""
        gpu, home = self.shape.gpu_of(cu), self.shape.home_of(line)
        bank = self.l2[self.shape.home_bank_of(gpu, line)]
        yield self.links.within(gpu, Kind.READ_REQUEST)
        while line in bank.locks:
            yield bank.locks[line]
        block, is_kept = bank.find(line), True
        if block is not None:
            value = block.value
            bank.sharers[line].add(cu)
        elif gpu == home:
            bank.locks.hold(line)
            value = yield from self._fill_home(bank, home, line)
            bank.sharers[line].add(cu)
            bank.locks.free(line)
        else:
            bank.locks.hold(line)
            value = yield from self._read_remote(gpu, home, line)
            is_kept, _ = bank.fill(line, Block(value))
            if is_kept:
                bank.sharers[line].add(cu)
            bank.locks.free(line)
        yield self.links.within(gpu, Kind.READ_RESPONSE)
        return value, is_kept

    def _read_remote(self, gpu: int, home: int, line: int) -> Operation:
        self.remote += 1
        bank = self.l2[self.shape.home_bank_of(home, line)]
        yield from self.links.send(gpu, home, Kind.READ_REQUEST)
        while line in bank.locks:
            yield bank.locks[line]
        bank.locks.hold(line)
        block = bank.find(line)
        value = block.value if block is not None else (yield from self._fill_home(bank, home, line))
        self.directory[line].add(gpu)
        bank.locks.free(line)
        yield from self.links.send(home, gpu, Kind.READ_RESPONSE)
        return value

    def _write_home(self, home: int, line: int, value: int) -> Generator[Hop | Waiting, None, None]:
        """Nobody reads the new value at the home before all old copies are gone."""
        bank = self.l2[self.shape.home_bank_of(home, line)]
        while line in bank.locks:
            yield bank.locks[line]
        bank.locks.hold(line)
        block = bank.find(line)
        if block is None:
            block = Block(value)
            yield from self._put_home(bank, home, line, block)
        block.value, block.is_dirty = value, True
        self.values[line] = value
        yield from self._invalidate_l1(home, bank, line)
        sharers, self.directory[line] = self.directory[line], set()
        for gpu in sorted(sharers):
            yield from self._invalidate_gpu(home, gpu, line)
        bank.locks.free(line)

    def _invalidate_gpu(self, home: int, gpu: int, line: int) -> Generator[Hop | Waiting, None, None]:
        bank = self.l2[self.shape.home_bank_of(gpu, line)]
        yield from self.links.send(home, gpu, Kind.INVALIDATION)
        bank.invalidate(line)
        yield from self._invalidate_l1(gpu, bank, line)
        yield from self.links.send(gpu, home, Kind.ACK)

    def _invalidate_l1(self, gpu: int, bank: SharingCache, line: int) -> Generator[Hop | Waiting, None, None]:
        for cu in sorted(bank.sharers.pop(line, ())):
            self.invalidations += 1
            yield self.links.within(gpu, Kind.INVALIDATION)
            self.l1[cu].invalidate(line)

    def _fill_home(self, bank: SharingCache, home: int, line: int) -> Operation:
        yield from self._access_dram(home)
        block = Block(self.values.get(line, 0))
        yield from self._put_home(bank, home, line, block)
        return block.value

    def _put_home(
        self, bank: SharingCache, home: int, line: int, block: Block
    ) -> Generator[Hop | Waiting, None, None]:
        removed = bank.cache.put(line, block)
        if removed is not None and removed[1].is_dirty:
            yield from self._access_dram(home)

    def _access_dram(self, home: int) -> Generator[Hop | Waiting, None, None]:
        self.dram += 1
        yield self.links.dram[home]
        yield self.links.dram_latency[home]
