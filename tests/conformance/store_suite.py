"""Guarantees of every coarse.store.Store: run_store_suite(make_store) checks an implementation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from coarse.store import Store

_LIMIT_S = 20.0

KEYS = ("devices", "worker/1", "a.b", "a.c", "a~b", "a/b", "a b", "..", ".", "a.counter", "größe", "A", "%41")
"""All different, although their file or network names may be similar."""


def run_store_suite(make_store: Callable[[], Store]) -> None:
    """Checks a Store.

    Args:
        make_store: Opens the same store again at each call, as each worker of a job does.

    Raises:
        AssertionError: Naming the guarantee that does not hold.
    """
    for check in (
        _check_a_value_is_what_was_set_last,
        _check_keys_do_not_meet,
        _check_values_are_any_bytes,
        _check_a_value_that_is_there_needs_no_time,
        _check_get_waits_for_another_worker,
        _check_get_gives_up_and_names_the_key,
        _check_counters_start_at_nothing,
        _check_additions_do_not_get_lost,
        _check_values_are_never_seen_half_written,
    ):
        check(make_store)


def _check_a_value_is_what_was_set_last(make_store: Callable[[], Store]) -> None:
    make_store().set("last", b"first")
    make_store().set("last", b"second")
    assert make_store().get("last", _LIMIT_S) == b"second"


def _check_keys_do_not_meet(make_store: Callable[[], Store]) -> None:
    store = make_store()
    for key in KEYS:
        store.set(key, key.encode())
    for key in KEYS:
        assert store.add(f"count {key}", len(key)) == len(key)
    assert {key: store.get(key, _LIMIT_S) for key in KEYS} == {key: key.encode() for key in KEYS}


def _check_values_are_any_bytes(make_store: Callable[[], Store]) -> None:
    store = make_store()
    for value in (b"\0", bytes(range(256)), b"x" * 100_000):
        store.set("bytes", value)
        assert store.get("bytes", _LIMIT_S) == value


def _check_a_value_that_is_there_needs_no_time(make_store: Callable[[], Store]) -> None:
    store = make_store()
    store.set("there", b"1")
    assert store.get("there", 0.0) == b"1"


def _check_get_waits_for_another_worker(make_store: Callable[[], Store]) -> None:
    ours, theirs = make_store(), make_store()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ours.get, "later", _LIMIT_S)
        theirs.set("later", b"now")
        assert waiting.result(_LIMIT_S) == b"now"


def _check_get_gives_up_and_names_the_key(make_store: Callable[[], Store]) -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="never/set"):
        make_store().get("never/set", 0.05)
    assert 0.05 <= time.monotonic() - started < _LIMIT_S


def _check_counters_start_at_nothing(make_store: Callable[[], Store]) -> None:
    store = make_store()
    assert [store.add("counter", amount) for amount in (1, 41, -2, 0)] == [1, 42, 40, 40]


def _check_additions_do_not_get_lost(make_store: Callable[[], Store]) -> None:
    num_workers, num_additions = 4, 50
    start = threading.Barrier(num_workers)

    def add() -> list[int]:
        store = make_store()
        start.wait(_LIMIT_S)
        return [store.add("many", 1) for _ in range(num_additions)]

    with ThreadPoolExecutor(num_workers) as pool:
        results = [running.result(_LIMIT_S) for running in [pool.submit(add) for _ in range(num_workers)]]
    # Exactly one worker receives each number: this detects a second owner of a rank.
    assert sorted(value for values in results for value in values) == list(
        range(1, num_workers * num_additions + 1)
    )


def _check_values_are_never_seen_half_written(make_store: Callable[[], Store]) -> None:
    values = [bytes([i]) * 20_000 for i in range(20)]
    writer, reader = make_store(), make_store()
    writer.set("large", values[0])
    with ThreadPoolExecutor() as pool:
        writing = pool.submit(lambda: [writer.set("large", value) for value in values])
        while not writing.done():
            assert reader.get("large", _LIMIT_S) in values
        writing.result()
