"""A watcher of other workers first receives their remaining messages, then the report of their end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coarse.env import WorkerIdentity
from coarse.errors import WorkerLostError
from coarse.rendezvous import PeerWatch, WorkerAddress, host_identity
from coarse.store import DirectoryStore


@pytest.fixture
def gone():
    """The address of a worker that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return WorkerAddress(host=host_identity(""), pid=ended.pid, started=1)


def test_the_last_words_of_a_worker_that_ended_before_it_was_watched_are_heard(tmp_path, gone):
    store = DirectoryStore(tmp_path)
    store.set("why", b"no such device")
    with PeerWatch(WorkerIdentity(rank=1, world_size=2, local_rank=1, local_world_size=2)) as watch:
        watch.add(0, gone)
        assert watch.get(store, "why", 10.0) == b"no such device"
        with pytest.raises(WorkerLostError, match=rf"worker 0 \(pid {gone.pid}\) died while"):
            watch.get(store, "what it never said", 10.0)
        with pytest.raises(WorkerLostError):
            watch.check()


def test_a_host_is_known_where_a_sandbox_hides_its_boot(monkeypatch):
    read = Path.read_text

    def hide(path, *args, **kwargs):
        if "/proc/sys/" in str(path):
            raise PermissionError(path)
        return read(path, *args, **kwargs)

    known = host_identity("n1")
    monkeypatch.setattr(Path, "read_text", hide)
    boot, *rest = host_identity("n1").split("/")
    assert boot.startswith(f"{os.uname().nodename} btime ")
    assert rest == known.split("/")[1:]
