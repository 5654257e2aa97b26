"""Guarantees of every storage: run_storage_suite() checks an implementation, storage_machine() against a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coarse.errors import SnapshotLostError

VALUE_BYTES = {"small": 8, "page": 4092, "more": 5000, "large": 20_000}
"""The keys of a tested storage, and the length of their values. Each starts at version 1 with all zeros."""

MOST_SNAPSHOTS = 4


class TestedStorage(Protocol):
    """The interface through which the suite uses an implementation."""

    def put(self, key: str, value: bytes) -> int:
        """Makes `value` the newest value of `key`; returns its version."""

    def get(self, key: str, snapshot: int = 0) -> tuple[int, bytes]:
        """Version and value: the newest ones, or those of a snapshot."""

    def snapshot(self) -> int:
        """Begins a snapshot."""

    def release(self, snapshot: int) -> None:
        """Releases a snapshot."""

    def old_bytes(self) -> int:
        """Bytes of versions that only snapshots refer to."""

    def close(self) -> None:
        """Releases everything."""


MakeStorage = Callable[[], TestedStorage]


def run_storage_suite(make_storage: MakeStorage) -> None:
    """Checks a storage.

    Raises:
        AssertionError: Naming the guarantee that does not hold.
    """
    for check in (
        _check_a_value_is_what_was_put_last,
        _check_a_snapshot_holds_what_was_there,
        _check_snapshots_are_independent,
        _check_only_the_first_update_after_a_snapshot_costs_memory,
        _check_versions_go_with_the_last_snapshot,
        _check_a_snapshot_that_was_released_is_gone,
    ):
        check(make_storage)


def value(key: str, number: int) -> bytes:
    """A value whose every byte identifies its key and number."""
    return bytes([number % 256]) * VALUE_BYTES[key]


def _check_a_value_is_what_was_put_last(make_storage: MakeStorage) -> None:
    storage = make_storage()
    assert storage.get("page") == (1, value("page", 0))
    assert [storage.put("page", value("page", number)) for number in (7, 8)] == [2, 3]
    assert storage.get("page") == (3, value("page", 8))
    assert storage.get("small") == (1, value("small", 0))
    assert storage.old_bytes() == 0
    storage.close()


def _check_a_snapshot_holds_what_was_there(make_storage: MakeStorage) -> None:
    storage = make_storage()
    storage.put("more", value("more", 1))
    snapshot = storage.snapshot()
    for number in (2, 3):
        storage.put("more", value("more", number))
    assert storage.get("more", snapshot) == (2, value("more", 1))
    assert storage.get("large", snapshot) == (1, value("large", 0))
    assert storage.get("more") == (4, value("more", 3))
    storage.close()


def _check_snapshots_are_independent(make_storage: MakeStorage) -> None:
    storage = make_storage()
    snapshots = []
    for number in range(1, MOST_SNAPSHOTS + 1):
        storage.put("page", value("page", number))
        snapshots.append(storage.snapshot())
    storage.put("page", value("page", 99))
    storage.release(snapshots[1])
    for number in (1, 3, 4):
        assert storage.get("page", snapshots[number - 1]) == (number + 1, value("page", number))
    storage.close()


def _check_only_the_first_update_after_a_snapshot_costs_memory(make_storage: MakeStorage) -> None:
    storage = make_storage()
    storage.snapshot()
    assert storage.old_bytes() == 0
    storage.put("large", value("large", 1))
    taken = storage.old_bytes()
    assert VALUE_BYTES["large"] <= taken < VALUE_BYTES["large"] + 8192
    storage.put("large", value("large", 2))
    assert storage.old_bytes() == taken
    storage.close()


def _check_versions_go_with_the_last_snapshot(make_storage: MakeStorage) -> None:
    storage = make_storage()
    first, second = storage.snapshot(), storage.snapshot()
    storage.put("large", value("large", 1))
    storage.release(first)
    assert storage.get("large", second) == (1, value("large", 0))
    assert storage.old_bytes() >= VALUE_BYTES["large"]
    storage.release(second)
    assert storage.old_bytes() == 0
    storage.release(second)
    assert storage.get("large") == (2, value("large", 1))
    storage.close()


def _check_a_snapshot_that_was_released_is_gone(make_storage: MakeStorage) -> None:
    storage = make_storage()
    snapshot = storage.snapshot()
    storage.release(snapshot)
    for missing in (snapshot, snapshot + 1):
        with pytest.raises(SnapshotLostError, match="was released or never begun"):
            storage.get("small", missing)
    storage.close()


def storage_machine(make_storage: MakeStorage) -> type[RuleBasedStateMachine]:
    """Random updates, snapshots, reads and releases, against plain dictionaries."""

    class StorageMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.storage = make_storage()
            self.newest = {key: (1, value(key, 0)) for key in VALUE_BYTES}
            self.held: dict[int, dict[str, tuple[int, bytes]]] = {}
            self.last = 0

        @rule(key=st.sampled_from(list(VALUE_BYTES)), number=st.integers(0, 255))
        def update(self, key: str, number: int) -> None:
            version = self.newest[key][0] + 1
            self.newest[key] = (version, value(key, number))
            assert self.storage.put(key, value(key, number)) == version

        @precondition(lambda self: self.is_place_free())
        @rule()
        def begin(self) -> None:
            number = self.storage.snapshot()
            assert number > self.last
            self.last = number
            self.held[number] = dict(self.newest)

        @precondition(lambda self: self.held)
        @rule(data=st.data())
        def release(self, data: st.DataObject) -> None:
            number = data.draw(st.sampled_from(sorted(self.held)))
            del self.held[number]
            self.storage.release(number)
            with pytest.raises(SnapshotLostError):
                self.storage.get("small", number)

        @precondition(lambda self: self.held)
        @rule(data=st.data(), key=st.sampled_from(list(VALUE_BYTES)))
        def read(self, data: st.DataObject, key: str) -> None:
            number = data.draw(st.sampled_from(sorted(self.held)))
            assert self.storage.get(key, number) == self.held[number][key]

        @invariant()
        def newest_values_are_right(self) -> None:
            assert {key: self.storage.get(key) for key in VALUE_BYTES} == self.newest

        @invariant()
        def memory_is_that_of_what_changed(self) -> None:
            old = [
                key
                for values in self.held.values()
                for key, found in values.items()
                if found != self.newest[key]
            ]
            most = sum(VALUE_BYTES[key] + 8192 for key in old)
            least = sum(VALUE_BYTES[key] for key in set(old))
            assert least <= self.storage.old_bytes() <= most

        def is_place_free(self) -> bool:
            """Snapshots use places in turn: the next place must be free."""
            return self.last + 1 - MOST_SNAPSHOTS not in self.held

        def teardown(self) -> None:
            for number, values in self.held.items():
                assert {key: self.storage.get(key, number) for key in VALUE_BYTES} == values
                self.storage.release(number)
            assert self.storage.old_bytes() == 0
            self.storage.close()

    StorageMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
    return StorageMachine
