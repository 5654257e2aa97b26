"""Session start: missing workers, duplicate ranks, and workers that died before."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
from pathlib import Path

import pytest
from harness import PROMPT_S, Worker

from coarse.env import WorkerIdentity
from coarse.rendezvous import workers as rendezvous
from coarse.session import Session
from coarse.settings import Settings
from coarse.startup import device_connections, device_processes
from coarse.store import DirectoryStore

SHORT_S = 1.0
"""A time-out that the test waits for."""


def join_and_stay(me):
    with me.join() as session:
        session.barrier()


class WatchedStore(DirectoryStore):
    """Reports this worker's uses of a key to the test, and waits for its answer."""

    def __init__(self, me: Worker, *, pause_at: str) -> None:
        super().__init__(me.directory / "store")
        me.store()
        self._me = me
        self._pause_at = pause_at

    def set(self, key: str, value: bytes) -> None:
        self._pause(f"set {key}")
        super().set(key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        self._pause(f"get {key}")
        return super().get(key, timeout_s)

    def _pause(self, step: str) -> None:
        if step == self._pause_at:
            self._pause_at = ""
            self._me.tell(step)
            self._me.hear()


def joining(pause_at, **settings):
    """A worker that joins, and pauses at its rank's place in `pause_at`."""

    def worker(me):
        store = WatchedStore(me, pause_at=pause_at.get(me.rank, ""))
        with Session.join(
            identity=me.identity, store=store, settings=Settings(timeout_s=60, **settings)
        ) as session:
            session.barrier()

    return worker


# ---- ranks ----


def test_a_worker_that_never_comes_is_named_after_the_time_out(job):
    def worker(me):
        me.join(timeout_s=SHORT_S)

    outcomes = [running.finish() for running in [job.start_worker(rank, 4, worker) for rank in (0, 2)]]
    first = min(outcomes, key=lambda outcome: outcome.ended_s)
    assert first.error == "RendezvousError"
    assert f": after {SHORT_S}" in first.message
    for outcome in outcomes:
        # The second worker may detect that the first one has ended.
        assert "workers 0, 2 have joined, waiting for 1, 3" in outcome.message


class TellingHandler(logging.Handler):
    """Sends log messages to the test."""

    def __init__(self, me: Worker) -> None:
        super().__init__()
        self._me = me

    def emit(self, record: logging.LogRecord) -> None:
        self._me.tell(record.getMessage())


def join_and_tell_the_log(me):
    if me.rank == 0:
        logging.getLogger("coarse").addHandler(TellingHandler(me))
    join_and_stay(me)


def test_who_has_joined_is_told_while_waiting(job, monkeypatch):
    monkeypatch.setattr(rendezvous, "PROGRESS_INTERVAL_S", 0.1)
    first = job.start_worker(0, 2, join_and_tell_the_log)
    assert first.hear().endswith("s: workers 0 have joined, waiting for 1")
    assert first.hear().startswith("[w0] ")
    second = job.start_worker(1, 2, join_and_tell_the_log)
    assert [running.finish().details for running in (first, second)] == ["", ""]


def test_an_interrupt_ends_the_wait(job, monkeypatch):
    monkeypatch.setattr(rendezvous, "PROGRESS_INTERVAL_S", 0.1)
    worker = job.start_worker(0, 2, join_and_tell_the_log)
    worker.hear()
    worker.signal(signal.SIGINT)
    assert worker.finish().error == "KeyboardInterrupt"


def test_a_rank_that_is_there_already_is_refused(job):
    workers = [job.start_worker(rank, 2, joining({0: "set devices/0"})) for rank in (0, 1)]
    assert workers[0].hear() == "set devices/0"
    twin = job.start_worker(1, 2, join_and_stay).finish()
    assert twin.error == "RendezvousError"
    assert "another process has already joined as rank 1" in twin.message
    workers[0].tell()
    assert [running.finish().details for running in workers] == ["", ""]


def test_workers_of_different_world_sizes_all_notice(job):
    outcomes = [
        running.finish()
        for running in (job.start_worker(0, 2, join_and_stay), job.start_worker(1, 3, join_and_stay))
    ]
    for rank, outcome in enumerate(outcomes):
        assert outcome.error == "RendezvousError"
        assert (
            f"worker {rank} has WORLD_SIZE={2 + rank}, but worker {1 - rank} has {3 - rank}"
            in outcome.message
        )


@pytest.mark.parametrize(
    ("numbers", "match"),
    [
        ((2, 2, 0, 2), "RANK=2 does not fit WORLD_SIZE=2: ranks run from 0 to 1"),
        ((-1, 2, 0, 2), "RANK=-1 does not fit"),
        ((0, 0, 0, 0), "WORLD_SIZE=0"),
        ((1, 2, 2, 2), "worker 1: LOCAL_RANK=2 does not fit LOCAL_WORLD_SIZE=2"),
        ((1, 2, 0, 4), "LOCAL_WORLD_SIZE=4 of WORLD_SIZE=2"),
    ],
)
def test_ranks_that_cannot_be_are_refused(numbers, match):
    rank, world_size, local_rank, local_world_size = numbers
    with pytest.raises(rendezvous.RendezvousError, match=match):
        WorkerIdentity(
            rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size
        )


# ---- deaths ----

PLACES = {
    "before the others have come": (1, {1: "get worker/2"}, 2),
    "before the devices are there": (1, {1: "get devices/0", 0: "set devices/0"}, 3),
    "the leader, before it starts devices": (0, {0: "get worker/1"}, 3),
    "the leader, after it started devices": (0, {0: "set devices/0"}, 3),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_worker_that_dies_while_others_join_is_named(job, place):
    victim, pauses, num_started = PLACES[place]
    workers = [job.start_worker(rank, 3, joining(pauses, memory_devices=2)) for rank in range(num_started)]
    for rank in pauses:
        assert workers[rank].hear() == pauses[rank]
    killed_s = workers[victim].kill()
    for running in workers:
        if running.rank == victim:
            continue
        if running.rank in pauses:
            running.tell()
        outcome = running.finish()
        assert outcome.error == "WorkerLostError", outcome
        assert f"worker {victim} (pid {workers[victim].pid})" in outcome.message
        assert outcome.ended_s - killed_s < PROMPT_S


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_dies_while_others_wait_for_the_devices_welcome_is_named(job, victim, monkeypatch):
    """Worker 2 has not connected to any device yet, so no device can welcome a worker."""

    def worker(me):
        def pause_and_read(directory):
            me.tell("devices are there")
            me.hear()
            return read_token(directory)

        if me.rank == 2:
            monkeypatch.setattr(device_connections, "read_token", pause_and_read)
        join_and_stay(me)

    read_token = device_connections.read_token
    workers = job.start(3, worker)
    assert workers[2].hear() == "devices are there"
    killed_s = workers[victim].kill()
    for running in workers:
        if running.rank == victim:
            continue
        if running.rank == 2:
            running.tell()
        outcome = running.finish()
        assert outcome.error == "WorkerLostError", outcome
        assert f"worker {victim} (pid {workers[victim].pid})" in outcome.message
        assert outcome.ended_s - killed_s < PROMPT_S


# ---- failures ----


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_workers_say_who_failed_first_and_why(job, tmp_path, world_size, culprit):
    """A file stands where the folder of its timeline should be."""
    (tmp_path / "file").touch()

    def worker(me):
        refused = {"timeline": str(tmp_path / "file" / "trace.json.gz")} if me.rank == culprit else {}
        me.join(**refused)

    outcomes = job.outcomes(world_size, worker)
    own = outcomes.pop(culprit)
    assert own.error == "NotADirectoryError"
    for outcome in outcomes:
        assert outcome.error == "RendezvousError", outcome
        assert f": worker {culprit} failed at the start: {own.message}. This follows" in outcome.message


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_memory_devices_that_a_failure_ends_do_not_hide_it(job, monkeypatch, culprit):
    """The first worker kills them, and they end by themselves when another leaves."""
    read_token = device_connections.read_token

    def worker(me):
        def fail(_):
            raise PermissionError(13, "no token")

        monkeypatch.setattr(device_connections, "read_token", fail if me.rank == culprit else read_token)
        me.join()

    outcomes = job.outcomes(3, worker)
    assert outcomes.pop(culprit).error == "PermissionError"
    for outcome in outcomes:
        assert f": worker {culprit} failed at the start: [Errno 13] no token" in outcome.message, outcome


# ---- memory devices ----


def test_devices_that_cannot_be_started_are_told_to_all_workers(job, monkeypatch):
    def fail(_):
        raise OSError(11, "no more processes")

    monkeypatch.setattr(device_processes, "_start", fail)
    first, second = job.outcomes(2, join_and_stay)
    assert "no more processes" in first.message
    assert second.error == "MemoryDeviceLostError"
    assert "worker 0 could not start memory devices" in second.message
    assert "no more processes" in second.message
    assert "This follows from an error of worker 0" in second.message


def test_a_worker_that_waits_long_for_memory_devices_says_so(job, monkeypatch):
    start, (told, go_on) = device_processes._start, os.pipe()

    def start_when_told(device_job):
        os.read(told, 1)
        return start(device_job)

    def worker(me):
        if me.rank == 1:
            handler = logging.Handler(logging.WARNING)
            handler.emit = lambda record: me.tell(record.getMessage())
            logging.getLogger("coarse").addHandler(handler)
        with me.join(memory_devices=1, warn_after_s=0.3):
            logging.getLogger("coarse").handlers.clear()

    monkeypatch.setattr(device_processes, "_start", start_when_told)
    workers = job.start(2, worker)
    said = workers[1].hear()
    os.write(go_on, b"!")
    os.close(go_on)
    os.close(told)
    assert [running.finish().details for running in workers] == ["", ""]
    assert re.match(
        rf"\[w1\] has waited \d s for worker 0 \(pid {workers[0].pid}\) to start memory devices; ", said
    )


def test_a_device_that_ends_at_once_is_told_to_all_workers(job, monkeypatch):
    monkeypatch.setattr(device_processes.sys, "executable", "/bin/false")
    first, second = job.outcomes(2, join_and_stay)
    assert first.error == "MemoryDeviceLostError", first
    # Worker 0 may notice while it still sends the job to the device, and may have ended when worker 1 notices.
    assert re.search("md0|could not start memory devices", first.message)
    assert second.error in ("MemoryDeviceLostError", "WorkerLostError"), second
    assert re.search("md0|could not start|memory devices ended|worker 0", second.message)


def test_a_session_that_closes_where_no_thread_starts_waits_for_its_devices(job, monkeypatch):
    """An interpreter that exits starts no threads from Python 3.12 on."""

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    def worker(me):
        with me.join(memory_devices=1) as session:
            devices = session.device_pids
            monkeypatch.setattr(device_processes.threading.Thread, "start", refuse)
        return [device for device in devices if Path("/proc", str(device)).exists()], len(devices)

    monkeypatch.setattr("coarse.session._DEVICE_EXIT_TIMEOUT_S", 60.0)
    assert job.run(2, worker) == [[[], 1], [[], 0]]


def test_devices_get_their_job_by_descriptor_and_no_secret_by_argv(job):
    def worker(me):
        with me.join() as session:
            session.barrier()
            me.tell(session.device_pids)
            me.hear()

    workers = job.start(2, worker)
    pids = workers[0].hear()
    workers[1].hear()
    assert sorted(job.device_pids()) == sorted(pids)
    for pid in pids:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        assert command[1:5] == [b"-m", b"coarse", b"device", b"--job-fd"]
        assert command[5].isdigit()
    assert not any(job.temporary.iterdir()), "once everybody is there, no file or socket has a name"
    for running in workers:
        running.tell()
    assert [running.finish().details for running in workers] == ["", ""]


def test_the_directory_of_a_session_is_private_while_it_starts(job):
    workers = [job.start_worker(rank, 2, joining({0: "set devices/0"}, memory_devices=1)) for rank in (0, 1)]
    assert workers[0].hear() == "set devices/0"
    (directory,) = job.temporary.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in directory.iterdir()} == {"token", "md0.sock"}
    assert (directory / "token").stat().st_mode & 0o777 == 0o600
    assert len(bytes.fromhex((directory / "token").read_text())) == 32
    workers[0].tell()
    assert [running.finish().details for running in workers] == ["", ""]


@pytest.mark.parametrize("keep_devices", [0.0, 5.0])
def test_the_temporary_directory_may_be_too_deep_for_addresses_of_sockets(job, keep_devices):
    job.temporary /= "of_a_cluster" * 12
    job.temporary.mkdir(mode=0o700)
    job.run(2, lambda me: me.join(keep_devices=keep_devices).close())


def test_memory_devices_may_open_as_many_files_as_the_system_lets_them(job):
    def worker(me):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, most), most))
        with me.join() as session:
            session.barrier()
            return [resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in session.device_pids]

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert job.run(2, worker)[0] == [[hard, hard]] * 2


def test_a_second_session_in_the_same_store_is_refused(job):
    def worker(me):
        join_and_stay(me)
        with pytest.raises(rendezvous.RendezvousError, match="has already joined as rank"):
            join_and_stay(me)

    job.run(2, worker)


def test_what_a_worker_announces_is_json_of_plain_values(job):
    job.run(2, join_and_stay)
    announced = json.loads((job.directory / "store").joinpath("worker%2F%1.value").read_bytes())
    assert announced["world_size"] == 2
    assert set(announced) == {"world_size", "host", "pid", "started", "liveness_host", "liveness_port"}
