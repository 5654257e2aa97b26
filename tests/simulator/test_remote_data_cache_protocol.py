"""Coherence of remote data caches: no read is older than allowed, and each planted error makes one so."""

from __future__ import annotations

import pytest
from coherence_scenarios import check_scenario
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coarse.simulator.studies.remote_data_cache.caches.oracle import violations
from coarse.simulator.studies.remote_data_cache.caches.protocol import Home, RemoteCache, Sharing, System
from coarse.simulator.studies.remote_data_cache.caches.remote_cache import Coherence

SOFTWARE, HARDWARE = Coherence.SOFTWARE, Coherence.HARDWARE
SEEDS = range(100)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([(SOFTWARE, 1), (SOFTWARE, 2), (HARDWARE, 1)]), st.integers(min_value=0))
@example(
    (HARDWARE, 1), 3423277
)  # a fetched line that became invalid is newer than what the node's write installs
@example((HARDWARE, 1), 4063)
def test_no_read_returns_a_value_older_than_allowed(kind, seed):
    coherence, num_streams = kind
    check_scenario(coherence, seed, num_streams=num_streams)


def test_scenarios_use_what_they_are_about():
    """Hits, invalidations and resets occur, or the oracle would have nothing to find."""
    hardware = [check_scenario(HARDWARE, seed) for seed in SEEDS]
    assert sum(each.num_hits for each in hardware) > 5 * len(SEEDS)
    assert sum(each.num_invalidations for each in hardware) > 5 * len(SEEDS)
    software = [check_scenario(SOFTWARE, seed) for seed in SEEDS]
    assert sum(each.num_hits for each in software) > 3 * len(SEEDS)
    assert sum(cache.num_reset_lines for each in software for cache in each.caches) > len(SEEDS)


def test_without_coherence_the_oracle_finds_stale_reads():
    system = System(num_nodes=2, cache_lines=4, coherence=Coherence.NONE)
    system.read(0, 1)
    system.deliver_all()
    system.write(1, 1)
    system.deliver_all()
    system.read(0, 1)
    assert list(violations(system)) == ["node 0, stream 0 read value 0 of line 1 in kernel 0, after value 1"]


# ---- planted errors: each must make a read return a value older than allowed ----


def loses_an_invalidation(monkeypatch):
    told = System.told_of
    monkeypatch.setattr(System, "told_of", lambda self, writer, home: told(self, writer, home)[1:])


def acknowledges_a_write_before_all_have_answered(monkeypatch):
    monkeypatch.setattr(System, "awaited_of", lambda self, told: set())


def does_not_advance_the_epoch(monkeypatch):
    monkeypatch.setattr(RemoteCache, "next_epoch", lambda self, stream: False)


def starts_epochs_again_without_a_reset(monkeypatch):
    monkeypatch.setattr(RemoteCache, "reset", lambda self: None)


def compares_the_epoch_of_another_stream(monkeypatch):
    monkeypatch.setattr(
        RemoteCache, "is_current", lambda self, held, stream: held.epoch == self.epoch(stream)
    )


def installs_a_fill_after_its_invalidation(monkeypatch):
    monkeypatch.setattr(System, "_outdate", lambda self, node, line, but=None: None)


def gives_a_fill_the_epoch_of_its_arrival(monkeypatch):
    install = RemoteCache.install

    def late(self, pending, value):
        pending.epoch = self.epoch(pending.stream)
        install(self, pending, value)

    monkeypatch.setattr(RemoteCache, "install", late)


def installs_a_fill_from_before_the_reset(monkeypatch):
    monkeypatch.setattr(
        System, "_next_epoch", lambda self, node, stream: self.caches[node].next_epoch(stream)
    )


def lets_a_read_join_an_outdated_fetch(monkeypatch):
    def joins(self, pending, operation):
        same = (pending.node, pending.line) == (operation.node, operation.line)
        return same and not pending.is_write

    monkeypatch.setattr(System, "may_join", joins)


def stays_private_on_a_remote_write(monkeypatch):
    def after(self, before):
        return Sharing.PRIVATE if before is Sharing.PRIVATE else Sharing.READ_WRITE_SHARED

    monkeypatch.setattr(Home, "after_remote_write", after)


def stays_private_on_a_remote_read(monkeypatch):
    def after(self, before):
        return before if before is not Sharing.UNCACHED else Sharing.READ_SHARED

    monkeypatch.setattr(Home, "after_remote_read", after)


def becomes_private_before_all_have_answered(monkeypatch):
    after = Home.after_local_write

    def early(self, before):
        return Sharing.PRIVATE if self._chance.random() < 0.5 else after(self, before)

    monkeypatch.setattr(Home, "after_local_write", early)


def takes_read_shared_for_private(monkeypatch):
    write = Home.write

    def quiet(self, line, value, *, is_remote):
        before = self.sharing_of(line)
        return write(self, line, value, is_remote=is_remote) and before is not Sharing.READ_SHARED

    monkeypatch.setattr(Home, "write", quiet)


def keeps_the_writers_own_copy(monkeypatch):
    invalidate, write = RemoteCache.invalidate, System.write

    def keeping(self, node, line, stream=0):
        monkeypatch.setattr(RemoteCache, "invalidate", lambda cache, line: None)
        operation = write(self, node, line, stream)
        monkeypatch.setattr(RemoteCache, "invalidate", invalidate)
        return operation

    monkeypatch.setattr(System, "write", keeping)
    monkeypatch.setattr(System, "_written", _without_install(System._written))


def _without_install(written):
    def without(self, pending):
        pending.is_stale = True
        written(self, pending)

    return without


def compares_no_tag(monkeypatch):
    def find(self, line, stream):
        held = self.sets.get(line % self.num_lines)
        return held if held is not None and self.is_current(held, stream) else None

    monkeypatch.setattr(RemoteCache, "find", find)


PLANTED = (
    (HARDWARE, loses_an_invalidation),
    (HARDWARE, acknowledges_a_write_before_all_have_answered),
    (HARDWARE, installs_a_fill_after_its_invalidation),
    (HARDWARE, lets_a_read_join_an_outdated_fetch),
    (HARDWARE, stays_private_on_a_remote_write),
    (HARDWARE, stays_private_on_a_remote_read),
    (HARDWARE, becomes_private_before_all_have_answered),
    (HARDWARE, takes_read_shared_for_private),
    (HARDWARE, keeps_the_writers_own_copy),
    (HARDWARE, compares_no_tag),
    (SOFTWARE, does_not_advance_the_epoch),
    (SOFTWARE, starts_epochs_again_without_a_reset),
    (SOFTWARE, compares_the_epoch_of_another_stream),
    (SOFTWARE, gives_a_fill_the_epoch_of_its_arrival),
    (SOFTWARE, installs_a_fill_from_before_the_reset),
    (SOFTWARE, lets_a_read_join_an_outdated_fetch),
)


@pytest.mark.parametrize(
    ("coherence", "plant"), PLANTED, ids=lambda part: getattr(part, "__name__", getattr(part, "value", ""))
)
def test_a_planted_error_is_found(coherence, plant, monkeypatch):
    num_streams = 2 if coherence is SOFTWARE else 1
    for seed in SEEDS:
        check_scenario(coherence, seed, num_streams=num_streams)
    plant(monkeypatch)
    assert any(is_stale(coherence, seed, num_streams) for seed in SEEDS), "no read is too old"


def is_stale(coherence, seed, num_streams):
    try:
        check_scenario(coherence, seed, num_streams=num_streams)
    except AssertionError:
        return True
    return False
