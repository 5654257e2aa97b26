"""`coarse status` and the notice of a stall: they name who is waited for and where it is, and need no cooperation."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from subprocess import PIPE

import numpy as np
import pytest
from harness import LIMIT_S
from run_harness import all_end_within, environment, spawned
from test_faults import Telling, floats
from test_security import NOBODY, needs_root

from coarse.cli.status import describe_job
from coarse.status.address import MEMORY_DEVICE, WORKER, Address, find_addresses, job_id
from coarse.status.requests import ask
from coarse.status.responder import Responder

pytest.importorskip("coarse.kernels._native", reason="needs the native module")

TRAIN = """\
import logging, os, signal, sys
import numpy as np
from coarse.env import WorkerIdentity
from coarse.schema import TensorSpec
from coarse.session import Session
from coarse.store import DirectoryStore

logging.basicConfig(format="%(message)s")
identity = WorkerIdentity.from_environment()
session = Session.join(identity=identity, store=DirectoryStore(sys.argv[1]))
group = session.register("weights", [TensorSpec(name="a", dtype="float32", num_elements=8, op="mean")])

def train(step):
    group.push(0)
    group.pull_all()

def read_a_slow_batch():
    os.write(1, f"worker {os.getpid()}\\n".encode())
    signal.pause()

for step in range(12):
    if step == 10 and identity.rank == 1:
        read_a_slow_batch()
    train(step)
"""


@pytest.fixture
def stalled(tmp_path):
    """A job whose worker 1 stays in read_a_slow_batch(); the launcher and the id of the job."""
    (tmp_path / "store").mkdir(mode=0o700)
    (tmp_path / "train.py").write_text(TRAIN)
    script = tmp_path / "train.py"
    with spawned("-n", "2", script, tmp_path / "store", stdout=PIPE, stderr=PIPE) as launcher:
        pid = int(launcher.stdout.readline().split()[-1])
        (job,) = {each.job for each in find_addresses() if each.pid == pid}
        yield launcher, job


def coarse_status(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "coarse", "status", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def lines_of(job, *arguments):
    done = coarse_status(job, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_each_process_says_where_it_is_and_what_it_waits_for(stalled):
    _, job = stalled
    until = time.monotonic() + LIMIT_S
    while "waits" not in (said := lines_of(job))[1]:
        assert time.monotonic() < until, said
    assert said[0] == f"job {job}: train.py, 2 workers, 2 memory devices"
    waits = r"worker 0  pid \d+ +step 10 +waits \d+ s for 'a' of weights \(not pushed by worker\(s\) 1\)"
    place = r"is in read_a_slow_batch \(train.py:19\), from <module> \(train.py:23\); synchronised \d+ s ago"
    assert re.fullmatch(waits, said[1])
    assert re.fullmatch(rf"worker 1  pid \d+ +step 10 +{place}", said[2])
    assert [re.sub(r"\d{2,}", "PID", line).split() for line in said[3:]] == [
        [f"md{device}", "pid", "PID", "serves", "workers", f"{device}"] for device in (0, 1)
    ]


def test_stacks_are_those_of_all_threads(stalled, tmp_path):
    _, job = stalled
    said = lines_of(job, "--stacks")
    assert f"        train ({tmp_path}/train.py:15)" in said
    assert f"        read_a_slow_batch ({tmp_path}/train.py:19)" in said
    assert sum("MainThread" in line for line in said) == 4
    assert any("_serve (" in line and "coarse/proxy/device.py" in line for line in said)


def test_the_notice_says_where_the_late_worker_is_long_before_the_usual_one(stalled):
    launcher, _ = stalled
    said = launcher.stderr.readline()
    while b"has waited" not in said:
        assert said, "the job ended"
        said = launcher.stderr.readline()
    assert re.search(
        rb"\[w0\] has waited \d+ s for 'a' of weights \(not pushed by worker\(s\) 1\)\. worker 1 \(pid \d+\) is in "
        rb"read_a_slow_batch \(train.py:19\), from <module> \(train.py:23\); it last synchronised \d+ s ago",
        said,
    )
    assert 5 <= int(re.search(rb"has waited (\d+) s", said)[1]) < 30


def test_a_stopped_process_is_described_by_the_kernel(stalled):
    _, job = stalled
    (stopped,) = [each for each in find_addresses(job) if (each.role, each.number) == (WORKER, 1)]
    os.kill(stopped.pid, signal.SIGSTOP)
    says = f"worker 1  pid {stopped.pid:<8} does not answer: it is stopped (SIGSTOP or Ctrl-Z); kill -CONT"
    assert lines_of(job)[2].startswith(says)
    assert len(lines_of(job)) == 5
    os.kill(stopped.pid, signal.SIGCONT)
    assert "read_a_slow_batch" in lines_of(job)[2]


def test_a_killed_job_is_not_listed(stalled):
    launcher, job = stalled
    addresses = find_addresses(job)
    assert [each.role for each in addresses] == [WORKER] * 2 + [MEMORY_DEVICE] * 2
    ends = {each.process: os.pidfd_open(each.pid) for each in addresses}
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait(timeout=LIMIT_S)
    assert all_end_within(LIMIT_S, ends) == []
    for end in ends.values():
        os.close(end)
    done = coarse_status(job)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"coarse status: no job {job} of this user runs on this node\n"


def test_a_late_worker_that_is_stopped_is_named_so_in_the_notice(job):
    def worker(me):
        with me.join(warn_after_s=0.5) as session:
            group = session.register("weights", floats())
            session.barrier()
            me.tell()
            if me.rank == 1:
                me.hear()
            else:
                logging.getLogger("coarse").addHandler(Telling(me, "does not answer"))
            group.push(0)
            group.pull(0)

    workers = job.start(2, worker)
    for running in workers:
        running.hear()
    workers[1].stop()
    said = workers[0].hear()
    workers[1].signal(signal.SIGCONT)
    workers[1].tell()
    assert f"worker 1 (pid {workers[1].pid}) does not answer: it is stopped" in said
    assert [running.finish().details for running in workers] == ["", ""]


@pytest.fixture
def responder():
    made = Responder(Address.of_this_process(job_id("of a test"), WORKER, 7), lambda: {"step": 3})
    yield made
    made.close()


def test_a_process_of_this_user_is_answered(responder):
    answers = ask([responder.address], timeout_s=LIMIT_S)
    assert [answer.report["step"] for answer in answers] == [3]


@needs_root
def test_another_user_is_refused(responder):
    child = os.fork()
    if child == 0:
        code = 2
        try:
            os.setuid(NOBODY)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
                stranger.settimeout(LIMIT_S)
                stranger.connect(responder.address.name)
                try:
                    stranger.sendall(b"stacks")
                    code = 0 if stranger.recv(1) == b"" else 1
                except (ConnectionResetError, BrokenPipeError):
                    code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs_root
def test_a_socket_of_another_user_is_not_asked():
    address = Address.of_this_process(job_id("of a test"), WORKER, 8)
    ready, at_work = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(NOBODY)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(address.name)
            listener.listen()
            os.write(at_work, b".")
            signal.pause()
        finally:
            os._exit(1)
    assert os.read(ready, 1) == b"."
    try:
        assert address in find_addresses()
        assert ask([address]) == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(at_work)


def test_a_fork_does_not_answer_for_its_parent(responder):
    ready, at_work = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            responder.close()  # does nothing to the parent's
            os.write(at_work, b"0" if responder._listener.fileno() < 0 else b"1")
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(ready, 1) == b"0"
        responder.close()
        assert responder.address not in find_addresses()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(at_work)


def test_a_session_answers_until_it_is_closed(job):
    def worker(me):
        session = me.join()
        mine = [each for each in find_addresses() if each.pid == os.getpid()]
        session.all_reduce(np.ones(4))
        session.close()
        return [each.number for each in mine], [each for each in find_addresses() if each.pid == os.getpid()]

    assert job.run(2, worker) == [[[0], []], [[1], []]]


def test_a_loop_of_all_reduce_alone_shows_that_it_goes_on(job):
    def worker(me):
        with me.join() as session:
            for _ in range(5):
                session.all_reduce(np.ones(4))
            (own,) = [each for each in find_addresses() if each.pid == os.getpid()]
            said = list(describe_job(own.job, ask([own]), with_stacks=False))
            session.barrier()
            return said[1]

    for said in job.run(2, worker):
        assert int(re.search(r" step 0, (\d+) shards pushed ", said)[1]) >= 5


def test_a_stopped_memory_device_is_named_in_the_notice(job):
    def worker(me):
        with me.join(warn_after_s=0.5, memory_devices=1, heartbeat_s=0.0) as session:
            group = session.register("weights", floats())
            session.barrier()
            logging.getLogger("coarse").addHandler(Telling(me, "SIGSTOP"))
            me.tell(session.device_pids)
            me.hear()
            group.push(0)
            group.pull(0)

    workers = job.start(2, worker)
    (device,), _ = (running.hear() for running in workers)
    job.stop_device(device)
    for running in workers:
        running.tell()
    said = [running.hear() for running in workers]
    job.signal_device(device, signal.SIGCONT)
    assert [running.finish().details for running in workers] == ["", ""]
    for text in said:
        assert (
            f"md0 (pid {device}): it is stopped (SIGSTOP or Ctrl-Z); kill -CONT {device} continues it" in text
        )


def test_a_program_that_closes_all_descriptors_ends_the_answers():
    ready, at_work = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            made = Responder(Address.of_this_process(job_id("of a test"), WORKER, 9), dict)
            os.close(made._listener.fileno())
            made._thread.join(LIMIT_S)
            os.write(at_work, b"1" if made._thread.is_alive() else b"0")
        finally:
            os._exit(0)
    assert os.read(ready, 1) == b"0"
    os.waitpid(child, 0)
    os.close(ready)
    os.close(at_work)


def test_a_question_that_fails_does_not_end_the_answers():
    reports = iter([{"step": 1}])
    made = Responder(Address.of_this_process(job_id("of a test"), WORKER, 10), lambda: next(reports))
    try:
        answers = [ask([made.address], timeout_s=LIMIT_S) for _ in range(2)]
        assert [len(each) for each in answers] == [1, 0]
        assert made._thread.is_alive()
    finally:
        made.close()
