"""A watcher of other workers first receives their remaining messages, then the report of their end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coarse.env import WorkerIdentity
from coarse.errors import MemoryDeviceLostError, ProfileError, RendezvousError, WorkerLostError, follow_up
from coarse.rendezvous.workers import PeerWatch, WorkerAddress, host_identity
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


def watches(store, count):
    """One of each worker of a job on this node."""
    identities = (
        WorkerIdentity(rank=rank, world_size=count, local_rank=rank, local_world_size=count)
        for rank in range(count)
    )
    return [PeerWatch(identity, store=store) for identity in identities]


def test_what_the_first_worker_failed_of_is_what_all_say(tmp_path):
    first, second, third = watches(DirectoryStore(tmp_path), 3)
    own = RendezvousError("worker 0: no such profile")
    assert first.first_failure(own) is own
    expected = "worker {}: worker 0 failed at the start: no such profile. This follows from an error of worker 0; see"
    with pytest.raises(RendezvousError, match=expected.format(1)):
        second.check()
    for consequence in (MemoryDeviceLostError("worker 2: md0 died"), OSError("connection refused")):
        with pytest.raises(RendezvousError, match=expected.format(2)), third.telling():
            raise consequence


def test_what_follows_from_another_error_is_nobodys_first_failure(tmp_path):
    first, second, third = watches(DirectoryStore(tmp_path), 3)
    with pytest.raises(MemoryDeviceLostError, match="md0 died"), second.telling():
        raise MemoryDeviceLostError("worker 1: md0 died")  # as all of its node notice
    told = RendezvousError(follow_up("worker 1: worker 0 could not start memory devices", "worker 0"))
    assert second.first_failure(told) is told
    third.check()
    first.first_failure(RendezvousError("worker 0: no room"))
    with pytest.raises(RendezvousError, match="worker 0 failed at the start: no room"):
        third.check()


def test_a_lost_worker_is_named_and_not_the_one_that_noticed(tmp_path, gone):
    noticing, other = watches(DirectoryStore(tmp_path), 2)
    noticing.add(2, gone)
    with pytest.raises(WorkerLostError) as caught, noticing.telling():
        noticing.check()
    with pytest.raises(WorkerLostError, match=rf"^worker 1: worker 2 \(pid {gone.pid}\) died while [^:]*$"):
        other.check()
    assert str(caught.value).startswith("worker 0: worker 2 ")


def test_two_that_fail_of_the_same_both_say_it(tmp_path):
    first, second = watches(DirectoryStore(tmp_path), 2)
    errors = [ProfileError(f"worker {rank}: md0 could not start: no room") for rank in range(2)]
    assert [
        watch.first_failure(error) for watch, error in zip((first, second), errors, strict=True)
    ] == errors


def test_a_store_that_is_gone_hides_no_error(tmp_path, gone):
    class GoneStore(DirectoryStore):
        def get(self, key, timeout_s):
            raise RendezvousError("the store is gone")

    (watch,) = watches(GoneStore(tmp_path), 1)
    own = ValueError("no room")
    assert watch.first_failure(own) is own
    watch.check()
    watch.add(1, gone)
    with pytest.raises(WorkerLostError, match="worker 1"):
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
