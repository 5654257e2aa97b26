"""G-TSC: timestamps within one GPU (section 4.1). L2 orders; requests carry the logical time of their CU."""

from __future__ import annotations

from collections.abc import Generator

from coarse.simulator.studies.coherence.caches import Block, Cache
from coarse.simulator.studies.coherence.operations import (
    TIMESTAMP_BYTES,
    Hop,
    Kind,
    Locks,
    Operation,
    Shape,
    Waiting,
)
from coarse.simulator.studies.coherence.protocols.uncoherent import CacheWithLocks


class Gtsc:
    """L1 caches with leases from one GPU's L2, which renews a lease without data if the value is still the same.

    Args:
        shape: Sizes; one GPU.
        lease: Logical time that a read or a write is valid for.

    Raises:
        ValueError: If there are several GPUs.
    """

    def __init__(self, shape: Shape, *, lease: int = 10) -> None:
        if shape.num_gpus != 1:
            raise ValueError(f"G-TSC orders within one GPU, not {shape.num_gpus}")
        self.shape, self._lease = shape, lease
        self.released: list[Waiting] = []
        self.values: dict[int, int] = {}
        self.warpts = [0] * shape.num_cus
        self.l1 = [Cache(shape.l1_sets, shape.l1_ways) for _ in range(shape.num_cus)]
        self.locks = [Locks(self.released) for _ in range(shape.num_cus)]
        self.l2 = [
            CacheWithLocks(shape.l2_sets, shape.l2_ways, self.released, shape.banks)
            for _ in range(shape.banks)
        ]
        self._evicted = 0  # the largest rts of a line that memory alone has
        self._hops = _Hops()
        self.renewals = 0

    def read(self, cu: int, line: int) -> Operation:
        locks, cache = self.locks[cu], self.l1[cu]
        while line in locks:
            yield locks[line]
        block = cache.find(line)
        if block is not None and self.warpts[cu] <= block.rts:
            cache.hits += 1
            self.warpts[cu] = max(self.warpts[cu], block.wts)
            return block.value
        cache.misses += 1
        locks.hold(line)
        yield self._hops.read
        held = yield from self._l2_block(line)
        held.rts = max(held.rts, held.wts + self._lease, self.warpts[cu] + self._lease)
        given = Block(held.value, held.wts, held.rts)
        is_renewal = block is not None and block.wts == given.wts
        self.renewals += is_renewal
        yield self._hops.renewal if is_renewal else self._hops.read_response
        self._keep(cu, line, given)
        return given.value

    def write(self, cu: int, line: int, value: int) -> Operation:
        locks = self.locks[cu]
        while line in locks:
            yield locks[line]
        locks.hold(line)
        yield self._hops.write
        held = yield from self._l2_block(line)
        held.wts = max(held.rts + 1, self.warpts[cu])
        held.rts = held.wts + self._lease
        held.value, held.is_dirty = value, True
        given = Block(value, held.wts, held.rts)
        yield self._hops.write_response
        self._keep(cu, line, given)
        return value

    def end_kernel(self) -> list[Operation]:
        """Nothing: timestamps keep caches coherent."""
        return []

    def statistics(self) -> dict[str, int]:
        return {
            "L1 hits": sum(cache.hits for cache in self.l1),
            "L1 misses": sum(cache.misses for cache in self.l1),
            "renewals": self.renewals,
        }

    def _keep(self, cu: int, line: int, given: Block) -> None:
        self.l1[cu].put(line, given)
        self.warpts[cu] = max(self.warpts[cu], given.wts)
        self.locks[cu].free(line)

    def _l2_block(self, line: int) -> Generator[Hop | Waiting, None, Block]:
        bank = self.l2[line % self.shape.banks]
        while line in bank.locks:
            yield bank.locks[line]
        block = bank.find(line)
        if block is None:
            bank.locks.hold(line)
            yield self._hops.memory
            block = Block(self.values.get(line, 0), self._evicted, self._evicted + self._lease)
            removed = bank.cache.put(line, block)
            if removed is not None:
                self.values[removed[0]] = removed[1].value
                self._evicted = max(self._evicted, removed[1].rts)
            bank.locks.free(line)
        return block


class _Hops:
    """Requests carry warpts and the block's wts, responses wts and rts."""

    def __init__(self) -> None:
        def hop(part: str, kind: Kind, timestamps: int) -> Hop:
            return Hop((part, 0), kind, kind.nbytes + timestamps * TIMESTAMP_BYTES)

        self.read = hop("L2 up", Kind.READ_REQUEST, 2)
        self.read_response = hop("L2 down", Kind.READ_RESPONSE, 2)
        self.renewal = hop("L2 down", Kind.ACK, 2)
        self.write = hop("L2 up", Kind.WRITE_REQUEST, 1)
        self.write_response = hop("L2 down", Kind.ACK, 2)
        self.memory = Hop(("memory", 0), Kind.SERVICE, 0)
