"""Protocols of shared memory: programs are sequentially consistent, and each planted error is found."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coarse.simulator.studies.coherence import fig_4_2
from coarse.simulator.studies.coherence.caches import Block, Cache
from coarse.simulator.studies.coherence.controllers import RequestTracker
from coarse.simulator.studies.coherence.interleaving import (
    Access,
    count_violations,
    is_sequentially_consistent,
    random_programs,
    run,
)
from coarse.simulator.studies.coherence.operations import Hop, Kind, Shape, Waiting
from coarse.simulator.studies.coherence.protocols.gtsc import Gtsc
from coarse.simulator.studies.coherence.protocols.hmg import Hmg, SharingCache
from coarse.simulator.studies.coherence.protocols.mgcc import (
    PRINTED,
    REPAIRED,
    Level,
    Mgcc,
    TimestampedMemory,
)
from coarse.simulator.studies.coherence.protocols.rdma import Rdma
from coarse.simulator.studies.coherence.protocols.uncoherent import Uncoherent

ONE = Shape(cus_per_gpu=2)
TWO_BANKS = Shape(cus_per_gpu=2, banks=2)
TWO_GPUS = Shape(num_gpus=2, cus_per_gpu=1)
FOUR_CUS = Shape(num_gpus=2, cus_per_gpu=2)
TINY = replace(FOUR_CUS, l1_sets=1, l1_ways=1, l2_sets=1, l2_ways=1)
FEW_BITS = replace(REPAIRED, bits=5)

PROTOCOLS = {
    "MGCC, one bank": lambda: Mgcc(ONE, tsu_sets=4),
    "MGCC, two banks": lambda: Mgcc(TWO_BANKS, tsu_sets=4),
    "MGCC, two GPUs": lambda: Mgcc(TWO_GPUS, tsu_sets=4),
    "MGCC, caches of one line": lambda: Mgcc(TINY, tsu_sets=4),
    "MGCC, TSU of one entry": lambda: Mgcc(FOUR_CUS, tsu_sets=1, tsu_ways=1),
    "MGCC, timestamps of 5 bits": lambda: Mgcc(FOUR_CUS, FEW_BITS, tsu_sets=4),
    "G-TSC": lambda: Gtsc(TWO_BANKS),
    "G-TSC, caches of one line": lambda: Gtsc(replace(TINY, num_gpus=1, cus_per_gpu=3)),
    "HMG": lambda: Hmg(FOUR_CUS),
    "HMG, three GPUs": lambda: Hmg(replace(TWO_GPUS, num_gpus=3)),
    "HMG, caches of one line": lambda: Hmg(TINY),
}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_programs_are_sequentially_consistent(name):
    assert count_violations(PROTOCOLS[name], 300, seed=11) == 0


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(PROTOCOLS)), st.integers(0, 2**32), st.integers(1, 7), st.integers(1, 3))
def test_any_program_in_any_order_is_sequentially_consistent(name, seed, length, num_lines):
    chance, protocol = random.Random(seed), PROTOCOLS[name]()
    num_cus = protocol.shape.num_cus
    programs = random_programs(chance, num_cus=num_cus, length=length, lines=range(num_lines))
    assert is_sequentially_consistent(programs, run(protocol, programs, chance))


@pytest.mark.parametrize("shape", [ONE, TWO_BANKS, TWO_GPUS])
def test_mgcc_as_printed_is_not_sequentially_consistent(shape):
    assert count_violations(lambda: Mgcc(shape, PRINTED, tsu_sets=4), 600) > 0


@pytest.mark.parametrize("seed", [234, 1510])  # found by a search over seeds
def test_messages_that_overtake_each_other_need_fills_that_keep_their_lease(seed):
    def is_consistent(rules):
        chance, protocol = random.Random(seed), Mgcc(FOUR_CUS, rules, tsu_sets=4)
        programs = random_programs(chance, num_cus=4, length=6, lines=(0, 1, 2))
        return is_sequentially_consistent(programs, run(protocol, programs, chance))

    assert not is_consistent(replace(REPAIRED, fills_keep_leases=False))
    assert is_consistent(REPAIRED)


@pytest.mark.parametrize(
    "make", [lambda: Rdma(TWO_GPUS), lambda: Uncoherent(TWO_GPUS, writes_back=True)], ids=["RDMA", "WB-NC"]
)
def test_machines_without_coherence_are_not_sequentially_consistent(make):
    assert count_violations(make, 300) > 0


def test_the_oracle_knows_store_buffering_and_the_order_of_one_cu():
    x, y = 0, 1
    buffered = [[Access(x, 1), Access(y)], [Access(y, 2), Access(x)]]
    assert not is_sequentially_consistent(buffered, [[1, 0], [2, 0]])
    assert is_sequentially_consistent(buffered, [[1, 0], [2, 1]])
    backwards = [[Access(x, 1), Access(x, 2)], [Access(x), Access(x)]]
    assert not is_sequentially_consistent(backwards, [[1, 2], [2, 1]])
    assert is_sequentially_consistent(backwards, [[1, 2], [0, 2]])


# ---- planted errors: each must break a program ----


def a_lease_is_too_long_by_one(monkeypatch):
    granted = TimestampedMemory.read
    monkeypatch.setattr(
        TimestampedMemory,
        "read",
        lambda self, line, clock: replace(granted(self, line, clock), rts=self.tsu.entry(line).memts + 1),
    )
    return lambda: Mgcc(TWO_GPUS, tsu_sets=4)


def a_write_begins_when_the_lease_ends(monkeypatch):
    rules = replace(REPAIRED, writes_follow_leases=False)
    return lambda: Mgcc(TWO_GPUS, rules, tsu_sets=4)


def a_write_does_not_advance_memts(monkeypatch):
    write = TimestampedMemory.write

    def forgetful(self, line, value, clock):
        before = self.tsu.entry(line).memts
        given = write(self, line, value, clock)
        self.tsu.entry(line).memts = before
        return given

    monkeypatch.setattr(TimestampedMemory, "write", forgetful)
    return lambda: Mgcc(TWO_GPUS, tsu_sets=4)


def clocks_stand_still(monkeypatch):
    monkeypatch.setattr(Level, "passes", lambda self, wts: None)
    return lambda: Mgcc(ONE, tsu_sets=4)


def reads_do_not_advance_clocks(monkeypatch):
    return lambda: Mgcc(ONE, replace(REPAIRED, reads_advance_clocks=False), tsu_sets=4)


def requests_carry_no_clock(monkeypatch):
    rules = replace(REPAIRED, requests_carry_clocks=False, fills_keep_leases=False)
    return lambda: Mgcc(TWO_BANKS, rules, tsu_sets=4)


def a_hit_ignores_the_lease(monkeypatch):
    monkeypatch.setattr(Level, "valid", lambda self, line, clock: self.cache.find(line))
    return lambda: Mgcc(TWO_GPUS, tsu_sets=4)


def a_fill_of_an_older_epoch_stays(monkeypatch):
    monkeypatch.setattr(
        Mgcc,
        "_fill",
        lambda self, level, line, given, *, is_write: level.fill(line, given, is_write=is_write),
    )
    return lambda: Mgcc(FOUR_CUS, FEW_BITS, tsu_sets=4)


def an_overflow_resets_one_block_only(monkeypatch):
    return lambda: Mgcc(TWO_GPUS, replace(FEW_BITS, overflow_ends_epoch=False), tsu_sets=4)


def the_tsu_forgets_evicted_lines(monkeypatch):
    return lambda: Mgcc(TWO_GPUS, replace(REPAIRED, remembers_evicted=False), tsu_sets=1, tsu_ways=1)


def an_invalidation_of_a_gpu_is_lost(monkeypatch):
    def lost(self, home, gpu, line):
        yield from self.links.send(home, gpu, Kind.INVALIDATION)

    monkeypatch.setattr(Hmg, "_invalidate_gpu", lost)
    return lambda: Hmg(TWO_GPUS)


def an_invalidation_of_an_l1_cache_is_lost(monkeypatch):
    def lost(self, gpu, bank, line):
        yield self.links.within(gpu, Kind.INVALIDATION)

    monkeypatch.setattr(Hmg, "_invalidate_l1", lost)
    return lambda: Hmg(ONE)


def a_fill_in_flight_is_kept_after_its_invalidation(monkeypatch):
    monkeypatch.setattr(SharingCache, "invalidate", lambda self, line: self.cache.drop(line))
    return lambda: Hmg(FOUR_CUS)


def a_sharer_is_not_recorded(monkeypatch):
    class Forgetful(Hmg):
        def __init__(self, shape):
            super().__init__(shape)
            self.directory = type(self.directory)(lambda: _Nobody())

    class _Nobody(set):
        def add(self, gpu):
            pass

    return lambda: Forgetful(TWO_GPUS)


def a_renewal_keeps_old_data(monkeypatch):
    keep = Gtsc._keep

    def stale(self, cu, line, given):
        held = self.l1[cu].find(line)
        keep(self, cu, line, replace(given, value=held.value) if held else given)

    monkeypatch.setattr(Gtsc, "_keep", stale)
    return lambda: Gtsc(ONE)


def an_evicted_lease_is_forgotten(monkeypatch):
    class Forgetful(Gtsc):
        _evicted = property(lambda self: 0, lambda self, rts: None)

    return lambda: Forgetful(replace(TINY, num_gpus=1, cus_per_gpu=2, l1_ways=2))


PLANTED = [
    a_lease_is_too_long_by_one,
    a_write_begins_when_the_lease_ends,
    a_write_does_not_advance_memts,
    clocks_stand_still,
    reads_do_not_advance_clocks,
    requests_carry_no_clock,
    a_hit_ignores_the_lease,
    a_fill_of_an_older_epoch_stays,
    an_overflow_resets_one_block_only,
    the_tsu_forgets_evicted_lines,
    an_invalidation_of_a_gpu_is_lost,
    an_invalidation_of_an_l1_cache_is_lost,
    a_fill_in_flight_is_kept_after_its_invalidation,
    a_sharer_is_not_recorded,
    a_renewal_keeps_old_data,
    an_evicted_lease_is_forgotten,
]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_every_planted_error_is_found(plant, monkeypatch):
    make = plant(monkeypatch)
    assert any(count_violations(make, 100, seed=seed, length=7) for seed in range(30))


# ---- parts ----


def finish(operation):
    return fig_4_2.finish(operation)[0]


def test_the_worked_example_has_the_figures_of_the_document():
    inside, across = ({state.step[:4]: state for state in fig_4_2.states(num_gpus=gpus)} for gpus in (1, 2))
    for steps in (inside, across):
        assert steps["I0-2"].stamps == (8, 12)
        assert steps["I0-2"].clocks == (8, 0)
        assert steps["I1-2"].clocks == (8, 11)
        assert (steps["I0-3"].value, steps["I0-3"].reached) == (0, "L1")
        assert steps["I1-3"].value == 1
    assert (inside["I1-3"].reached, across["I1-3"].reached) == ("L2", "memory")


def test_the_worked_example_differs_under_the_printed_algorithm():
    steps = {state.step[:4]: state for state in fig_4_2.states(num_gpus=1, rules=PRINTED)}
    assert steps["I0-2"].stamps == (7, 12)
    assert steps["I1-2"].clocks == (7, 10)


def test_the_trace_has_a_row_for_each_step_of_both_panels():
    table = fig_4_2.trace()
    assert [row[0] for row in table.rows] == ["a"] * 6 + ["b"] * 6
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_a_full_set_gives_up_its_oldest_block_or_the_oldest_expired_one():
    cache = Cache(1, 2)
    cache.put(0, Block(0, rts=9))
    cache.put(1, Block(1, rts=3))
    assert cache.put(2, Block(2, rts=9), clock=5) == (1, Block(1, rts=3))
    assert cache.put(3, Block(3, rts=9), clock=5) == (0, Block(0, rts=9))


def test_sets_are_chosen_by_the_place_in_the_lines_own_memory():
    cache = Cache(2, 1, pages=(1, 4))
    cache.put(0, Block(0))
    assert cache.put(4, Block(4)) is None
    assert cache.put(8, Block(8)) == (0, Block(0))


def test_a_request_waits_for_its_line_and_for_a_slot():
    released = []
    tracker = RequestTracker(0, released, slots=2, holds_slots_to_the_end=True)
    order = []
    first, same, other, late = (
        tracker.serve(line, lambda number=number: order.append(number))
        for number, line in enumerate((7, 7, 8, 9))
    )
    assert isinstance(next(first), Hop)
    waits = next(same)
    assert isinstance(waits, Waiting)
    waits.append(same)
    assert isinstance(next(other), Hop)
    full = next(late)
    assert isinstance(full, Waiting)
    full.append(late)
    assert order == [0, 2]
    next(first)
    with pytest.raises(StopIteration):
        next(first)
    assert [waiting for queue in released for waiting in queue] == [late, same]
    next(late)
    assert order == [0, 2, 3]


def test_messages_carry_the_timestamps_of_the_document():
    protocol = Mgcc(ONE)
    sizes = {
        hop.kind: hop.nbytes for hop in fig_4_2.finish(protocol.read(0, 5))[1] if "memory" in hop.part[0]
    }
    sizes |= {
        hop.kind: hop.nbytes for hop in fig_4_2.finish(protocol.write(0, 6, 1))[1] if "memory" in hop.part[0]
    }
    del sizes[Kind.SERVICE]
    assert sizes == {
        Kind.READ_REQUEST: 12 + 2,
        Kind.READ_RESPONSE: 80 + 4,
        Kind.WRITE_REQUEST: 76 + 2,
        Kind.WRITE_RESPONSE: 76 + 4,
    }


def test_an_overflow_of_16_bits_begins_a_new_epoch():
    protocol = Mgcc(ONE)
    value = 0
    while protocol.memory.epoch == 0:
        value += 1
        finish(protocol.write(0, 3, value))
    assert value == (2**16 - 1 - 11) // 5 + 2  # the first for which the lease of a read might not fit
    assert finish(protocol.read(1, 3)) == value
    assert protocol.memory.tsu.entry(3).memts < 32


def test_gtsc_renews_a_lease_without_data():
    protocol = Gtsc(ONE)
    finish(protocol.read(0, 5))
    for value in (1, 2):
        finish(protocol.write(0, 6, value))
    assert finish(protocol.read(0, 5)) == 0
    assert protocol.renewals == 1


def test_gtsc_refuses_several_gpus():
    with pytest.raises(ValueError, match="one GPU, not 2"):
        Gtsc(TWO_GPUS)


def test_operations_that_wait_for_each_other_are_an_error():
    protocol = Mgcc(ONE)
    protocol.l1[0].locks.hold(0)
    with pytest.raises(RuntimeError, match="deadlock: 1 operations"):
        run(protocol, [[Access(0)], []], random.Random(0))
