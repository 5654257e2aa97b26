"""DirectoryStore: details beyond the suite of all stores (tests/conformance)."""

from __future__ import annotations

import pytest

from coarse.store import DirectoryStore


def test_keys_cannot_leave_the_directory(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    store = DirectoryStore(inside)
    for key in ("../outside", "/outside", "..", "a/../../outside", "\0"):
        store.set(key, b"x")
        store.add(key, 1)
    assert list(tmp_path.iterdir()) == [inside]


def test_a_directory_that_is_not_there_is_an_error_at_once(tmp_path):
    with pytest.raises(FileNotFoundError):
        DirectoryStore(tmp_path / "missing").set("key", b"x")
    with pytest.raises(FileNotFoundError):
        DirectoryStore(tmp_path / "missing").add("key", 1)
