"""Scratch: a process removes the remains of a killed one, but no memory in use."""

from __future__ import annotations

import os
import signal
import time

import pytest

from coarse.process.scratch import Scratch, hold, remove_if_abandoned


def make_old(path):
    long_ago = time.time() - 1000
    os.utime(path, (long_ago, long_ago))


def leave(parent):
    """A directory of a process that was killed."""
    pid = os.fork()
    if pid == 0:
        (Scratch("test", parent=parent).path / "file").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    (left,) = parent.iterdir()
    return left


def test_is_private_and_goes_at_the_end_of_the_block(tmp_path):
    with Scratch("test", parent=tmp_path) as path:
        assert path.parent == tmp_path
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "folder").mkdir()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_with_the_next_one(tmp_path):
    make_old(leave(tmp_path))
    Scratch("test", parent=tmp_path).remove()
    assert list(tmp_path.iterdir()) == []


def test_what_is_young_may_not_be_held_yet(tmp_path):
    left = leave(tmp_path)
    Scratch("test", parent=tmp_path).remove()
    assert list(tmp_path.iterdir()) == [left]


def test_what_is_in_use_stays_however_old_it_is(tmp_path):
    with Scratch("test", parent=tmp_path) as path:
        make_old(path)
        Scratch("test", parent=tmp_path).remove()
        assert path.exists()


def test_one_of_several_holders_is_enough(tmp_path):
    scratch = Scratch("test", parent=tmp_path)
    other = hold(scratch.path)
    make_old(scratch.path)
    os.close(scratch._lock)
    remove_if_abandoned(scratch.path)
    assert scratch.path.exists()
    os.close(other)
    remove_if_abandoned(scratch.path)
    assert not scratch.path.exists()


@pytest.mark.parametrize("kind", ["file", "link", "of another name"])
def test_nothing_else_is_removed(tmp_path, kind):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    place = tmp_path / "coarse-scratch-test-1"
    if kind == "file":
        place.touch()
    elif kind == "link":
        place.symlink_to(elsewhere)
    for path in tmp_path.iterdir():
        make_old(path)
    before = set(tmp_path.iterdir())
    Scratch("test", parent=tmp_path).remove()
    assert set(tmp_path.iterdir()) == before
