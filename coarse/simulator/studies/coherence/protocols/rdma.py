"""GPUs with memory of their own that reach each other's over PCIe (MGPU-RDMA, section 3.2).

A line has a home: the GPU in whose memory it lies. Its L2 bank there is the only one that caches it. A miss of an L1
cache goes to that bank, over PCIe if it is another GPU's.
"""

from __future__ import annotations

from collections.abc import Generator

from coarse.simulator.studies.coherence.caches import Block
from coarse.simulator.studies.coherence.operations import Hop, Kind, Operation, Shape, Waiting
from coarse.simulator.studies.coherence.protocols.uncoherent import CacheWithLocks


class Rdma:
    """Caches, PCIe and the memory of each GPU; L2 banks write back.

    Args:
        shape: Sizes.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.released: list[Waiting] = []
        self.values: dict[int, int] = {}
        self.l1 = [CacheWithLocks(shape.l1_sets, shape.l1_ways, self.released) for _ in range(shape.num_cus)]
        self.l2 = [
            CacheWithLocks(shape.l2_sets, shape.l2_ways, self.released, shape.banks, shape.pages)
            for _ in range(shape.num_gpus * shape.banks)
        ]
        self.links = Links(shape.num_gpus)
        self.remote = self.dram = 0

    def read(self, cu: int, line: int) -> Operation:
        level, gpu, home = self.l1[cu], self.shape.gpu_of(cu), self.shape.home_of(line)
        while line in level.locks:
            yield level.locks[line]
        block = level.find(line)
        if block is not None:
            return block.value
        level.locks.hold(line)
        self.remote += gpu != home
        yield from self.links.send(gpu, home, Kind.READ_REQUEST)
        value = yield from self._access_home(home, line, None)
        yield from self.links.send(home, gpu, Kind.READ_RESPONSE)
        level.cache.put(line, Block(value))
        level.locks.free(line)
        return value

    def write(self, cu: int, line: int, value: int) -> Operation:
        level, gpu, home = self.l1[cu], self.shape.gpu_of(cu), self.shape.home_of(line)
        while line in level.locks:
            yield level.locks[line]
        level.locks.hold(line)
        self.remote += gpu != home
        yield from self.links.send(gpu, home, Kind.WRITE_REQUEST)
        yield from self._access_home(home, line, value)
        yield from self.links.send(home, gpu, Kind.ACK)
        level.cache.put(line, Block(value))
        level.locks.free(line)
        return value

    def end_kernel(self) -> list[Operation]:
        """L1 caches may hold what another GPU has written; L2 banks hold only their own memory's lines."""
        for level in self.l1:
            level.cache.clear()
        return []

    def flush(self) -> None:
        """Counts the write-backs of what L2 banks still hold, as the copy to the processor needs them."""
        self.dram += sum(len(bank.cache.clear()) for bank in self.l2)

    def statistics(self) -> dict[str, int]:
        return {
            "L1 hits": sum(level.cache.hits for level in self.l1),
            "L1 misses": sum(level.cache.misses for level in self.l1),
            "L2 hits": sum(level.cache.hits for level in self.l2),
            "L2 misses": sum(level.cache.misses for level in self.l2),
            "accesses to memory": self.dram,
            "remote": self.remote,
        }

    def _access_home(self, home: int, line: int, value: int | None) -> Operation:
        """Reads or writes at the line's home bank."""
        bank = self.l2[self.shape.home_bank_of(home, line)]
        while line in bank.locks:
            yield bank.locks[line]
        block = bank.find(line)
        if block is None:
            bank.locks.hold(line)
            if value is None:
                yield from self._access_dram(home)
            block = Block(self.values.get(line, 0))
            removed = bank.cache.put(line, block)
            if removed is not None and removed[1].is_dirty:
                yield from self._access_dram(home)
            bank.locks.free(line)
        if value is not None:
            block.value, block.is_dirty = value, True
            self.values[line] = value
        return block.value

    def _access_dram(self, home: int) -> Generator[Hop | Waiting, None, None]:
        self.dram += 1
        yield self.links.dram[home]
        yield self.links.dram_latency[home]


class Links:
    """Messages between GPUs, within one, and to its memory.

    Args:
        num_gpus: Number of GPUs.
    """

    def __init__(self, num_gpus: int) -> None:
        kinds = list(Kind)
        names = ("L2 up", "L2 down", "PCIe out", "PCIe in")
        self._hops = {
            (name, gpu, kind): Hop((name, gpu), kind, kind.nbytes)
            for name in names
            for gpu in range(num_gpus)
            for kind in kinds
        }
        self.dram = [Hop(("DRAM", gpu), Kind.SERVICE, Kind.SERVICE.nbytes) for gpu in range(num_gpus)]
        self.dram_latency = [Hop(("memory", gpu), Kind.SERVICE, 0) for gpu in range(num_gpus)]

    def send(self, source: int, target: int, kind: Kind) -> Generator[Hop | Waiting, None, None]:
        """From a GPU's CUs or L2 to the L2 or CUs of the same or another one."""
        if source == target:
            yield self.within(source, kind)
        else:
            yield self._hops["PCIe out", source, kind]
            yield self._hops["PCIe in", target, kind]

    def within(self, gpu: int, kind: Kind) -> Hop:
        is_request = kind in (Kind.READ_REQUEST, Kind.WRITE_REQUEST)
        return self._hops["L2 up" if is_request else "L2 down", gpu, kind]
