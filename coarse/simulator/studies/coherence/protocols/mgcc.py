"""MGCC: coherence by logical timestamps (chapter 4), as printed and as repaired."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from coarse.simulator.studies.coherence.caches import Block, Cache
from coarse.simulator.studies.coherence.controllers import RequestTracker
from coarse.simulator.studies.coherence.operations import (
    TIMESTAMP_BYTES,
    Hop,
    Kind,
    Locks,
    Operation,
    Shape,
    Waiting,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The protocol's constants, and which of its rules are repaired.

    Args:
        read_lease, write_lease: RdLease and WrLease.
        bits: Bits of a timestamp.
        writes_follow_leases: (a) A write's Mwts is memts + 1, as in Figure 4-2, not memts, as in Algorithm 3.
        reads_advance_clocks: (b) A read sets cts to at least the block's wts, as step 05 says and Algorithms 1 and 2
            do not.
        requests_carry_clocks: (c) Requests carry cts, and no lease or write begins before it.
        fills_keep_leases: (d) A cache takes the timestamps that it is given, whatever its cts is by then.
        stores_write_times: The TSU keeps a line's last wts, and reads get it.
        remembers_evicted: The TSU begins a new entry at the largest memts that it has evicted.
        overflow_ends_epoch: A timestamp that overflows makes all caches and the TSU begin anew, not only its block.
    """

    read_lease: int = 10
    write_lease: int = 5
    bits: int = 16
    writes_follow_leases: bool = False
    reads_advance_clocks: bool = False
    requests_carry_clocks: bool = False
    fills_keep_leases: bool = False
    stores_write_times: bool = False
    remembers_evicted: bool = False
    overflow_ends_epoch: bool = False

    @property
    def largest(self) -> int:
        """The largest timestamp."""
        return (1 << self.bits) - 1


PRINTED = Rules()
REPAIRED = Rules(
    writes_follow_leases=True,
    reads_advance_clocks=True,
    requests_carry_clocks=True,
    fills_keep_leases=True,
    stores_write_times=True,
    remembers_evicted=True,
    overflow_ends_epoch=True,
)


@dataclass(frozen=True, slots=True)
class Stamped:
    """A value with its timestamps, as a response carries it; `epoch` counts overflows."""

    value: int
    wts: int
    rts: int
    epoch: int


@dataclass(slots=True)
class Entry:
    """The TSU's entry of a line. wts is kept if the rules say so."""

    memts: int = 0
    wts: int = 0


class TimestampUnit:
    """TSU: memts of lines that caches may hold; full sets evict the lowest memts (section 4.2.6).

    Args:
        num_sets, num_ways: Size.
        remembers_evicted: As of Rules.
    """

    def __init__(self, num_sets: int, num_ways: int, *, remembers_evicted: bool) -> None:
        self._sets: list[dict[int, Entry]] = [{} for _ in range(num_sets)]
        self._num_ways, self._remembers = num_ways, remembers_evicted
        self._floor = 0

    def entry(self, line: int) -> Entry:
        entries = self._sets[line % len(self._sets)]
        if line not in entries:
            if len(entries) >= self._num_ways:
                self._evict(entries)
            entries[line] = Entry(self._floor, self._floor)
        return entries[line]

    def _evict(self, entries: dict[int, Entry]) -> None:
        lowest = min(entries, key=lambda line: entries[line].memts)
        if self._remembers:
            self._floor = max(self._floor, entries[lowest].memts)
        del entries[lowest]

    def clear(self) -> None:
        for entries in self._sets:
            entries.clear()
        self._floor = 0


class Level:
    """One cache with its logical clock: an L1 cache, or an L2 bank.

    Args:
        cache: Its blocks.
        released: As of Locks.
        rules: The protocol.
    """

    def __init__(self, cache: Cache, released: list[Waiting], rules: Rules) -> None:
        self.cache, self.rules = cache, rules
        self.locks = Locks(released)
        self.cts = 0

    def valid(self, line: int, clock: int) -> Block | None:
        """The block of a line, unless its lease is over at `clock`."""
        block = self.cache.find(line)
        if block is None or clock > block.rts:
            self.cache.misses += 1
            return None
        self.cache.hits += 1
        return block

    def passes(self, wts: int) -> None:
        """An operation took effect at logical time `wts`."""
        self.cts = max(self.cts, wts)

    def fill(self, line: int, given: Stamped, *, is_write: bool) -> Stamped:
        """Keeps a response's block, and returns it with the timestamps that it has here."""
        wts, rts = given.wts, given.rts
        if not self.rules.fills_keep_leases:
            wts = max(self.cts, wts)
            rts = max(wts + 1, rts)
        if rts > self.rules.largest:  # the printed overflow; repaired rules never get here
            wts = rts = 0
        self.cache.put(line, Block(given.value, wts, rts), self.cts)
        if is_write or self.rules.reads_advance_clocks:
            self.passes(wts)
        return Stamped(given.value, wts, rts, given.epoch)


class TimestampedMemory:
    """Memory with its controllers and TSU (Algorithm 3).

    Args:
        shape: Sizes.
        rules: The protocol.
        released: As of Locks.
        tsu_sets, tsu_ways: Size of the TSU.
    """

    def __init__(
        self, shape: Shape, rules: Rules, released: list[Waiting], tsu_sets: int, tsu_ways: int
    ) -> None:
        self.rules = rules
        self.values: dict[int, int] = {}
        self.tsu = TimestampUnit(tsu_sets, tsu_ways, remembers_evicted=rules.remembers_evicted)
        self.controllers = [RequestTracker(number, released) for number in range(shape.controllers)]
        self.epoch = 0

    def read(self, line: int, clock: int) -> Stamped:
        entry, rules = self.tsu.entry(line), self.rules
        memts = max(entry.memts, clock) if rules.requests_carry_clocks else entry.memts
        entry.memts = self._within_bits(memts + rules.read_lease, rules.read_lease)
        wts = entry.wts if rules.stores_write_times else entry.memts - rules.read_lease
        return Stamped(self.values.get(line, 0), wts, entry.memts, self.epoch)

    def write(self, line: int, value: int, clock: int) -> Stamped:
        entry, rules = self.tsu.entry(line), self.rules
        wts = entry.memts + (1 if rules.writes_follow_leases else 0)
        if rules.requests_carry_clocks:
            wts = max(wts, clock)
        entry.memts = self._within_bits(max(entry.memts + rules.write_lease, wts), rules.write_lease)
        entry.wts = min(wts, entry.memts)  # lower after an overflow
        self.values[line] = value
        return Stamped(value, entry.wts, entry.memts, self.epoch)

    def _within_bits(self, memts: int, lease: int) -> int:
        return memts if memts <= self.rules.largest else lease


class Mgcc:
    """Caches, links and memory under MGCC.

    Args:
        shape: Sizes.
        rules: The protocol.
        tsu_ways, tsu_sets: Size of the TSU; by default an entry for each line of all L2 caches, 8 ways.
    """

    def __init__(
        self, shape: Shape, rules: Rules = REPAIRED, *, tsu_ways: int = 8, tsu_sets: int = 0
    ) -> None:
        self.shape, self.rules = shape, rules
        self.released: list[Waiting] = []
        lines = shape.num_gpus * shape.banks * shape.l2_sets * shape.l2_ways
        self.memory = TimestampedMemory(
            shape, rules, self.released, tsu_sets or max(1, lines // tsu_ways), tsu_ways
        )
        self.l1 = [self._level(shape.l1_sets, shape.l1_ways) for _ in range(shape.num_cus)]
        num_banks = shape.num_gpus * shape.banks
        self.l2 = [self._level(shape.l2_sets, shape.l2_ways, shape.banks) for _ in range(num_banks)]
        self._hops = [_Hops(gpu) for gpu in range(shape.num_gpus)]

    def read(self, cu: int, line: int) -> Operation:
        """Algorithm 1."""
        level = self.l1[cu]
        while line in level.locks:
            yield level.locks[line]
        block = level.valid(line, level.cts)
        if block is not None:
            if self.rules.reads_advance_clocks:
                level.passes(block.wts)
            return block.value
        level.locks.hold(line)
        given = yield from self._read_l2(self.shape.gpu_of(cu), line, level.cts)
        self._fill(level, line, given, is_write=False)
        level.locks.free(line)
        return given.value

    def write(self, cu: int, line: int, value: int) -> Operation:
        """Algorithm 4: through to memory, hit or miss."""
        level = self.l1[cu]
        while line in level.locks:
            yield level.locks[line]
        level.locks.hold(line)
        block = level.valid(line, level.cts)
        if block is not None:
            block.value = value
        given = yield from self._write_l2(self.shape.gpu_of(cu), line, value, level.cts)
        self._fill(level, line, given, is_write=True)
        level.locks.free(line)
        return value

    def end_kernel(self) -> list[Operation]:
        """Nothing: timestamps keep caches coherent."""
        return []

    def statistics(self) -> dict[str, int]:
        return {
            "L1 hits": sum(level.cache.hits for level in self.l1),
            "L1 misses": sum(level.cache.misses for level in self.l1),
            "L2 hits": sum(level.cache.hits for level in self.l2),
            "L2 misses": sum(level.cache.misses for level in self.l2),
            "accesses to memory": sum(each.accesses for each in self.memory.controllers),
        }

    def _read_l2(self, gpu: int, line: int, cts: int) -> Generator[Hop | Waiting, None, Stamped]:
        """Algorithm 2, with the messages to and from L1."""
        hops, bank = self._hops[gpu], self.l2[self.shape.bank_of(gpu, line)]
        epoch = self.memory.epoch
        yield hops.l1_read
        while line in bank.locks:
            yield bank.locks[line]
        clock = self._clock(bank, cts, epoch)
        block = bank.valid(line, clock)
        if block is not None:
            if self.rules.reads_advance_clocks:
                bank.passes(block.wts)
            given = Stamped(block.value, block.wts, block.rts, self.memory.epoch)
        else:
            bank.locks.hold(line)
            epoch = self.memory.epoch
            yield hops.read
            given = yield from self._serve_read(line, clock, epoch)
            yield hops.read_response
            given = self._fill(bank, line, given, is_write=False)
            bank.locks.free(line)
        yield hops.l1_read_response
        return given

    def _write_l2(self, gpu: int, line: int, value: int, cts: int) -> Generator[Hop | Waiting, None, Stamped]:
        """Algorithm 5, with the messages to and from L1. A bank that has the block needs its timestamps only."""
        hops, bank = self._hops[gpu], self.l2[self.shape.bank_of(gpu, line)]
        epoch = self.memory.epoch
        yield hops.l1_write
        while line in bank.locks:
            yield bank.locks[line]
        bank.locks.hold(line)
        clock = self._clock(bank, cts, epoch)
        block = bank.valid(line, clock)
        if block is not None:
            block.value = value
        epoch = self.memory.epoch
        yield hops.write
        given = yield from self._serve_write(line, value, clock, epoch)
        yield hops.write_response if block is None else hops.ack
        given = self._fill(bank, line, given, is_write=True)
        bank.locks.free(line)
        yield hops.l1_ack
        return given

    def _clock(self, bank: Level, cts: int, epoch: int) -> int:
        """The logical time of a request at an L2 bank; a clock of an older epoch counts for nothing."""
        if self.rules.requests_carry_clocks and epoch == self.memory.epoch:
            return max(bank.cts, cts)
        return bank.cts

    def _serve_read(self, line: int, clock: int, epoch: int) -> Generator[Hop | Waiting, None, Stamped]:
        def effect() -> Stamped:
            self._make_room_in_time(line, clock if epoch == self.memory.epoch else 0)
            return self.memory.read(line, clock if epoch == self.memory.epoch else 0)

        return (yield from self._controller(line).serve(line, effect))

    def _serve_write(
        self, line: int, value: int, clock: int, epoch: int
    ) -> Generator[Hop | Waiting, None, Stamped]:
        def effect() -> Stamped:
            self._make_room_in_time(line, clock if epoch == self.memory.epoch else 0)
            return self.memory.write(line, value, clock if epoch == self.memory.epoch else 0)

        return (yield from self._controller(line).serve(line, effect))

    def _controller(self, line: int) -> RequestTracker:
        return self.memory.controllers[line % len(self.memory.controllers)]

    def _make_room_in_time(self, line: int, clock: int) -> None:
        """Begins a new epoch if the line's next timestamp could overflow."""
        rules = self.rules
        if not rules.overflow_ends_epoch:
            return
        next_time = max(self.memory.tsu.entry(line).memts + 1, clock) + max(
            rules.read_lease, rules.write_lease
        )
        if next_time > rules.largest:
            self.begin_epoch()

    def begin_epoch(self) -> None:
        """Empties all caches and the TSU; logical time begins at 0."""
        self.memory.epoch += 1
        self.memory.tsu.clear()
        for level in (*self.l1, *self.l2):
            level.cache.clear()
            level.cts = 0

    def _fill(self, level: Level, line: int, given: Stamped, *, is_write: bool) -> Stamped:
        if given.epoch != self.memory.epoch:  # of an older epoch: good for its reader, not for the cache
            return given
        return level.fill(line, given, is_write=is_write)

    def _level(self, sets: int, ways: int, stride: int = 1) -> Level:
        return Level(Cache(sets, ways, stride), self.released, self.rules)


class _Hops:
    """All messages of one GPU. Between L1 and L2 as between L2 and memory (section 4.2.7)."""

    def __init__(self, gpu: int) -> None:
        one, two = TIMESTAMP_BYTES, 2 * TIMESTAMP_BYTES
        self.l1_read = _hop("L2 up", gpu, Kind.READ_REQUEST, one)
        self.l1_read_response = _hop("L2 down", gpu, Kind.READ_RESPONSE, two)
        self.l1_write = _hop("L2 up", gpu, Kind.WRITE_REQUEST, one)
        self.l1_ack = _hop("L2 down", gpu, Kind.ACK, two)
        self.read = _hop("memory up", gpu, Kind.READ_REQUEST, one)
        self.read_response = _hop("memory down", gpu, Kind.READ_RESPONSE, two)
        self.write = _hop("memory up", gpu, Kind.WRITE_REQUEST, one)
        self.write_response = _hop("memory down", gpu, Kind.WRITE_RESPONSE, two)
        self.ack = _hop("memory down", gpu, Kind.ACK, two)


def _hop(part: str, gpu: int, kind: Kind, timestamps: int) -> Hop:
    return Hop((part, gpu), kind, kind.nbytes + timestamps)
