"""Processes die, stop or leave: the survivors learn in time which one it was, and nothing is left behind."""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from harness import LIMIT_S, PROMPT_S

from coarse.errors import OutOfDeviceMemoryError
from coarse.schema import TensorSpec

SHORT_S = 3.0
"""A time-out that the test waits for."""


def floats(names="ab", num_elements=1000):
    return [TensorSpec(name=name, dtype="float32", num_elements=num_elements, op="sum") for name in names]


def training(*, before_push=False, before_pull=False, steps=1, **settings):
    """A worker that synchronises; worker 1 waits for the test at one place."""

    def worker(me):
        with me.join(**settings) as session:
            group = session.register("weights", floats())
            session.barrier()
            me.tell(session.device_pids)
            for _ in range(steps):
                if before_push and me.rank == 1:
                    me.hear()
                group.push(0)
                group.flush()
                if before_pull and me.rank == 1:
                    me.hear()
                assert group.pull(0) == me.world_size
            session.barrier()

    return worker


def started(job, world_size, worker):
    """Running workers that have reached the synchronisation, and the pids of the memory devices."""
    workers = job.start(world_size, worker)
    pids = [running.hear() for running in workers]
    return workers, pids[0]


def check_lost(outcome, since_s, *what):
    assert outcome.error == "WorkerLostError", outcome
    for text in what:
        assert text in outcome.message
    assert outcome.ended_s - since_s < PROMPT_S


# ---- workers ----


@pytest.mark.parametrize("memory_devices", [1, pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("place", ["before_push", "before_pull"])
def test_the_death_of_a_worker_is_told_to_all_others(job, place, memory_devices):
    workers, _ = started(job, 3, training(**{place: True}, steps=3, memory_devices=memory_devices))
    killed_s = workers[1].kill()
    for survivor in (workers[0], workers[2]):
        check_lost(
            survivor.finish(),
            killed_s,
            f"worker {survivor.rank}: worker 1 (pid {workers[1].pid}) died",
            "its last contribution was step",
            "Start the job again",
        )
    assert workers[1].finish().exit_code == -signal.SIGKILL


@pytest.mark.parametrize("dies", ["a worker", "a memory device"])
def test_survivors_hear_of_a_death_within_a_second(job, dies):
    """In the best of a few attempts, because a busy machine may take longer; other tests use PROMPT_S."""
    took_s = []
    while not took_s or (min(took_s) >= 1.0 and len(took_s) < 5):
        workers, pids = started(job, 3, training(before_push=True, memory_devices=2))
        killed_s = workers[1].kill() if dies == "a worker" else job.kill_device(pids[1])
        if dies == "a memory device":
            workers[1].tell()
        outcomes = [running.finish() for running in workers]
        took_s.append(max(outcome.ended_s for outcome in outcomes if outcome.error) - killed_s)
    assert min(took_s) < 1.0, took_s


def test_the_death_of_the_worker_that_started_the_devices_is_no_different(job):
    def worker(me):
        with me.join() as session:
            group = session.register("weights", floats())
            session.barrier()
            me.tell()
            if me.rank == 0:
                me.hear()
            group.push(0)
            group.pull(0)

    workers = job.start(3, worker)
    for running in workers:
        running.hear()
    killed_s = workers[0].kill()
    for survivor in workers[1:]:
        check_lost(survivor.finish(), killed_s, f"worker 0 (pid {workers[0].pid}) died")


def test_a_step_that_everyone_pushed_completes_without_one_of_them(job):
    """Killed between push and pull: the survivors get the result of that step, and fail in the next one."""

    def worker(me):
        with me.join() as session:
            group = session.register("weights", floats())
            values = np.frombuffer(group.buffer(0), dtype=np.float32)
            values[:] = 2**me.rank
            group.push(0)
            group.flush()
            me.tell("pushed")
            me.hear()
            assert group.pull(0) == 3
            me.tell(float(values[0]))
            group.push(0)
            group.pull(0)

    workers = job.start(3, worker)
    for running in workers:
        assert running.hear() == "pushed"
    # Worker 0 pulls, so the step is complete before worker 2 dies.
    workers[0].tell()
    assert workers[0].hear() == 7
    workers[2].kill()
    workers[1].tell()
    assert workers[1].hear() == 7
    for survivor in workers[:2]:
        outcome = survivor.finish()
        assert outcome.error == "WorkerLostError"
        assert f"worker 2 (pid {workers[2].pid}) died; its last contribution was step" in outcome.message


@pytest.mark.parametrize("use", ["all_reduce", "register", "pull_all"])
def test_the_death_of_a_worker_ends_every_kind_of_wait(job, use):
    def worker(me):
        with me.join(memory_devices=2) as session:
            group = session.register("weights", floats())
            session.barrier()
            me.tell()
            if me.rank == 1:
                me.hear()
            group.push(0)
            uses = {
                "all_reduce": lambda: session.all_reduce(np.ones(1_000_000)),
                "register": lambda: session.register("more", floats()),
                "pull_all": group.pull_all,
            }
            uses[use]()

    workers = job.start(3, worker)
    for running in workers:
        running.hear()
    killed_s = workers[1].kill()
    for survivor in (workers[0], workers[2]):
        check_lost(survivor.finish(), killed_s, f"worker 1 (pid {workers[1].pid}) died")


def test_after_a_loss_every_use_tells_it_again_at_once(job):
    def worker(me):
        session = me.join(memory_devices=2)
        group = session.register("weights", floats())
        session.barrier()
        me.tell()
        if me.rank == 1:
            me.hear()
        group.push(0)
        messages = []
        for use in (
            lambda: group.pull(0),
            lambda: group.pull(0),
            group.pull_all,
            session.barrier,
            lambda: session.register("more", floats()),
        ):
            with pytest.raises(Exception, match="died") as caught:
                use()
            messages.append(f"{caught.type.__name__} {caught.value}")
        session.close()
        return messages

    workers = job.start(2, worker)
    for running in workers:
        running.hear()
    killed_s = workers[1].kill()
    outcome = workers[0].finish()
    assert len(outcome.value) == 5, outcome.details
    assert len(set(outcome.value)) == 1
    assert outcome.value[0].startswith("WorkerLostError worker 0: worker 1 (pid ")
    assert outcome.ended_s - killed_s < PROMPT_S


@pytest.mark.parametrize("memory_devices", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("use", ["pull", "register", "all_reduce"])
def test_a_worker_that_leaves_while_others_go_on_is_told_not_waited_for(job, use, memory_devices):
    def worker(me):
        with me.join(memory_devices=memory_devices) as session:
            group = session.register("weights", floats())
            group.push(0)
            group.pull(0)
            session.barrier()
            if me.rank == 2:
                return
            me.tell()
            me.hear()
            if use == "register":
                session.register("more", floats())
            elif use == "all_reduce":
                session.all_reduce(np.ones(10))
            else:
                group.push(0)
                group.pull(0)

    workers = job.start(3, worker)
    workers[2].finish()
    for running in workers[:2]:
        running.hear()
        running.tell()
    for running in workers[:2]:
        outcome = running.finish()
        assert outcome.error == "WorkerLostError", outcome
        assert "worker(s) 2 closed the session while others still synchronise" in outcome.message
        assert (
            "their last contributions were step 1 of worker 2. Give every worker the same number"
            in outcome.message
        )


def test_a_worker_that_leaves_with_an_error_is_what_others_are_to_look_at(job):
    def worker(me):
        with me.join(memory_devices=2) as session:
            group = session.register("weights", floats())
            session.barrier()
            if me.rank == 1:
                raise ArithmeticError("of its own")
            group.push(0)
            group.pull(0)

    workers = job.start(2, worker)
    assert workers[1].finish().error == "ArithmeticError"
    outcome = workers[0].finish()
    assert outcome.error == "WorkerLostError", outcome
    assert "worker(s) 1 left with an error of their own" in outcome.message
    assert "see their output" in outcome.message


def test_workers_may_leave_one_after_the_other(job):
    """A complete last step is not lost because another worker left earlier."""

    def worker(me):
        with me.join(memory_devices=2) as session:
            group = session.register("weights", floats())
            for _ in range(20):
                group.push(0)
                group.push(1)
                assert group.pull_all() == [3, 3]

    for _ in range(5):
        job.run(3, worker)
        for path in (job.directory / "store").iterdir():
            path.unlink()


class Telling(logging.Handler):
    """Sends the first warning of a worker to the test."""

    def __init__(self, me, something=""):
        super().__init__(logging.WARNING)
        self._me = me
        self._something = something

    def emit(self, record):
        if self._something in record.getMessage():
            logging.getLogger("coarse").removeHandler(self)
            self._me.tell(record.getMessage())


@pytest.mark.parametrize("use", ["pull", "pull_all", "register", "all_reduce"])
def test_a_long_wait_names_the_late_worker_while_it_goes_on(job, use):
    def worker(me):
        with me.join(warn_after_s=0.2) as session:
            group = session.register("weights", floats())
            session.barrier()
            me.tell()
            if me.rank == 1:
                me.hear()  # the test has seen the worker's name
            else:
                logging.getLogger("coarse").addHandler(Telling(me))
            if use == "register":
                session.register("more", floats())
            elif use == "all_reduce":
                session.all_reduce(np.ones(10))
            else:
                group.push(0)
                group.pull(0) if use == "pull" else group.pull_all()

    workers = job.start(2, worker)
    for running in workers:
        running.hear()
    said = workers[0].hear()
    workers[1].tell()
    assert [running.finish().details for running in workers] == ["", ""]
    assert re.match(r"\[w0\] has waited \d s for ", said)
    assert f"worker 1 (pid {workers[1].pid})" in said
    assert " s (COARSE_TIMEOUT_S)" in said
    if use in ("pull", "pull_all"):
        assert "'a' of weights (not pushed by worker(s) 1)" in said
        assert "if it ran out of data first, give all workers as many batches" in said


def test_workers_at_different_places_are_told_where_the_other_one_is(job):
    """As at the end of the shorter of two datasets: one worker evaluates while the other still trains."""

    def worker(me):
        with me.join(warn_after_s=0.2, timeout_s=SHORT_S) as session:
            group = session.register("weights", floats())
            session.barrier()
            # A message before the other worker's push does not contain that worker's place.
            logging.getLogger("coarse").addHandler(Telling(me, "is itself waiting for"))
            group.push(me.rank)
            group.pull(me.rank)

    workers = job.start(2, worker)
    said = [running.hear() for running in workers]
    for rank, (text, awaited) in enumerate(zip(said, "ba", strict=True)):
        other = f"worker {1 - rank} (pid {workers[1 - rank].pid})"
        assert (
            f"{other} is itself waiting for '{awaited}' of weights, which worker {rank} has not pushed"
            in text
        )
        assert "If one of them ran out of data first, give all workers as many batches" in text
    ends = [running.finish() for running in workers]
    assert {outcome.error for outcome in ends} <= {"SyncTimeoutError", "WorkerLostError"}
    assert any("is itself waiting for" in outcome.message for outcome in ends)


def test_short_waits_say_nothing(job):
    def worker(me):
        heard = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: heard.append(record.getMessage())
        logging.getLogger("coarse").addHandler(handler)
        with me.join() as session:
            group = session.register("weights", floats())
            for _ in range(3):
                group.push(0)
                group.pull_all()
        return [text for text in heard if "has waited" in text]

    assert job.run(2, worker) == [[], []]


def test_a_worker_that_goes_on_in_time_is_not_missed(job):
    workers, _ = started(job, 2, training(before_push=True))
    workers[1].stop()
    workers[1].tell()
    workers[1].signal(signal.SIGCONT)
    assert [worker.finish().details for worker in workers] == ["", ""]


@pytest.mark.slow
def test_a_job_that_was_stopped_as_a_whole_for_longer_than_the_time_out_goes_on(job):
    """As with Ctrl-Z: a waiting worker must not count that time against the others."""

    def worker(me):
        with me.join(memory_devices=1, heartbeat_s=2.0) as session:
            group = session.register("weights", floats())
            session.barrier()
            session.limit_waits(2 * SHORT_S)
            me.tell(session.device_pids)
            if me.rank == 1:
                me.hear()
            group.push(0)
            group.pull(0)
            me.tell()

    workers, device_pids = started(job, 2, worker)
    time.sleep(0.5)  # worker 0 has begun to wait
    job.stop_device(device_pids[0])
    for running in workers:
        running.stop()
    time.sleep(2 * SHORT_S)
    workers[0].signal(signal.SIGCONT)
    time.sleep(0.5)  # it has checked
    job.signal_device(device_pids[0], signal.SIGCONT)
    workers[1].signal(signal.SIGCONT)
    workers[1].tell()
    for running in workers:
        running.hear()
    assert [running.finish().details for running in workers] == ["", ""]


def test_a_worker_that_stands_still_is_named_after_the_time_out(job):
    def worker(me):
        with me.join(timeout_s=SHORT_S) as session:
            group = session.register("weights", floats())
            session.barrier()
            me.tell()
            if me.rank == 2:
                me.hear()
            group.push(0)
            group.push(1)
            try:
                group.pull_all()
            finally:
                me.tell()
                me.hear()

    workers = job.start(3, worker)
    for running in workers:
        running.hear()
    stopped_s = workers[2].stop()
    for running in workers[:2]:
        running.hear()
    for running in workers[:2]:
        running.tell()
    for running in workers[:2]:
        outcome = running.finish()
        assert outcome.error == "SyncTimeoutError"
        assert f"waited {SHORT_S} s for 'a' of weights (not pushed by worker(s) 2); 'b' of" in outcome.message
        assert outcome.ended_s - stopped_s < LIMIT_S


# ---- memory devices ----


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_the_death_of_a_memory_device_is_told_to_all_workers(job, algorithm, victim):
    workers, device_pids = started(job, 3, training(before_push=True, memory_devices=2, algorithm=algorithm))
    killed_s = job.kill_device(device_pids[victim])
    workers[1].tell()
    for running in workers:
        outcome = running.finish()
        assert outcome.error == "MemoryDeviceLostError", outcome
        assert f"memory device md{victim} (pid {device_pids[victim]})" in outcome.message
        assert "parameters are those of the step before" in outcome.message
        assert outcome.ended_s - killed_s < PROMPT_S
        if running.rank == 0:
            assert "was killed by SIGKILL" in outcome.message


def test_who_leaves_because_of_a_memory_device_is_not_taken_for_the_reason(job):
    """As if the others noticed the end of the worker before the end of the device."""

    def worker(me):
        with me.join(memory_devices=2) as session:
            session.barrier()
            if me.rank == 1:
                session._client.linked()._connections[0].send(
                    {"type": "lost", "device": 1, "is_silent": False}
                )
                return
            session.barrier()

    workers = job.start(2, worker)
    outcome = workers[0].finish()
    assert outcome.error == "MemoryDeviceLostError", outcome
    assert "memory device md1 died" in outcome.message
    workers[1].finish()


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_a_signal_to_all_processes_of_a_job_is_for_the_workers(job, number):
    """As batch systems send them: workers may still need to save the contents of memory devices."""
    workers, device_pids = started(job, 2, training(before_push=True, memory_devices=2))
    for pid in device_pids:
        job.signal_device(pid, signal.Signals[number])
    workers[1].tell()
    assert [running.finish().details for running in workers] == ["", ""]


def test_a_memory_device_that_may_not_map_tensors_refuses_them(job):
    """The device and the session continue."""

    def worker(me):
        with me.join(memory_devices=2) as session:
            session.barrier()
            if me.rank == 0:
                pid = session.device_pids[1]
                mapped = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
                resource.prlimit(pid, resource.RLIMIT_AS, (mapped + (1 << 20),) * 2)
            session.barrier()
            with pytest.raises(
                OutOfDeviceMemoryError, match=r"md1 .* cannot serve the tensors 'large'.*ulimit"
            ):
                session.register("large", floats(num_elements=5_000_000))
            session.barrier()

    job.run(2, worker)


@pytest.mark.parametrize("use", ["all_reduce", "register", "pull"])
def test_the_death_of_an_idle_memory_device_is_told_at_the_next_use(job, use):
    def worker(me):
        with me.join(memory_devices=2) as session:
            group = session.register("weights", floats())
            session.barrier()
            me.tell(session.device_pids)
            me.hear()
            if use == "register":
                session.register("more", floats())
            elif use == "all_reduce":
                session.all_reduce(np.ones(10))
            else:
                group.push(0)
                group.pull(0)

    workers, device_pids = started(job, 2, worker)
    job.kill_device(device_pids[1])
    job.await_end(device_pids[1])
    for running in workers:
        running.tell()
    for running in workers:
        outcome = running.finish()
        assert outcome.error == "MemoryDeviceLostError", outcome
        assert f"memory device md1 (pid {device_pids[1]})" in outcome.message


def test_a_memory_device_that_stands_still_is_named_after_the_time_out(job):
    def worker(me):
        with me.join(memory_devices=2, timeout_s=SHORT_S) as session:
            group = session.register("weights", floats())
            session.barrier()
            me.tell(session.device_pids)
            me.hear()
            group.push(0)
            try:
                group.pull(0)
            finally:
                me.tell()
                me.hear()

    workers, device_pids = started(job, 2, worker)
    job.stop_device(device_pids[1])
    for running in workers:
        running.tell()
    for running in workers:
        running.hear()
    job.signal_device(device_pids[1], signal.SIGCONT)
    for running in workers:
        running.tell()
    outcomes = [running.finish() for running in workers]
    assert [outcome.error for outcome in outcomes] == ["SyncTimeoutError"] * 2
    assert "'a' of weights (not pushed by worker(s) 1)" in outcomes[0].message
    assert f"not processed by memory device md1 (pid {device_pids[1]})" in outcomes[1].message


HEARTBEAT_S = 2.0


def training_beside_a_stopped_device(use, *, memory_devices=2, **settings):
    """A worker that synchronises once, then repeatedly after a signal from the test."""

    def worker(me):
        with me.join(memory_devices=memory_devices, **settings) as session:
            group = session.register("weights", floats())
            session.barrier()
            me.tell(session.device_pids)
            me.hear()
            uses = {
                "pull": lambda: (group.push(0), group.pull(0)),
                "all_reduce": lambda: session.all_reduce(np.ones(1_000_000)),
                "register": lambda: session.register("more", floats()),
                "store": lambda: [session.store(f"value {i}", np.ones(3)) for i in range(16)],
            }
            uses[use]()

    return worker


@pytest.mark.parametrize(
    ("use", "memory_devices", "victim"),
    [
        ("pull", 1, 0),
        ("pull", 2, 0),
        ("all_reduce", 2, 1),
        ("register", 2, 1),
        ("store", 2, 0),
        ("store", 1, 0),
    ],
)
def test_a_memory_device_that_stands_still_is_lost_within_twice_the_heartbeat(
    job, use, memory_devices, victim
):
    worker = training_beside_a_stopped_device(use, memory_devices=memory_devices, heartbeat_s=HEARTBEAT_S)
    workers, device_pids = started(job, 2, worker)
    job.stop_device(device_pids[victim])
    asked_s = time.monotonic()
    for running in workers:
        running.tell()
    outcomes = [running.finish() for running in workers]
    for outcome in outcomes:
        assert outcome.error == "MemoryDeviceLostError", outcome
        assert f"memory device md{victim} (pid {device_pids[victim]})" in outcome.message
        assert outcome.ended_s - asked_s < HEARTBEAT_S + PROMPT_S
    # The first worker to notice it ends the session and the device; the other worker may notice that instead.
    said = "has given no sign of life for more than 2 s (COARSE_HEARTBEAT_S)"
    assert any(said in outcome.message for outcome in outcomes), outcomes
    assert all(said in outcome.message or "died" in outcome.message for outcome in outcomes), outcomes
    job.await_end(device_pids[victim])  # it must not continue after all waiting workers have gone


def test_a_memory_device_that_stands_still_is_told_to_workers_that_wait_for_another_one(job):
    """The other devices report it: worker 0 waits for a reduction in which only worker 1's device takes part."""

    def worker(me):
        with me.join(memory_devices=3, heartbeat_s=HEARTBEAT_S) as session:
            group = session.register("weights", floats())
            session.barrier()
            me.tell(session.device_pids)
            me.hear()
            if me.rank == 0:
                me.hear()
            group.push(0)
            group.pull(0)

    workers, device_pids = started(job, 3, worker)
    stopped_s = job.stop_device(device_pids[2])
    for running in workers[1:]:
        running.tell()
    for running in workers[1:]:
        outcome = running.finish()
        assert outcome.error == "MemoryDeviceLostError", outcome
        assert f"memory device md2 (pid {device_pids[2]})" in outcome.message
        assert outcome.ended_s - stopped_s < HEARTBEAT_S + PROMPT_S
    for _ in range(2):
        workers[0].tell()
    outcome = workers[0].finish()
    assert outcome.error == "MemoryDeviceLostError", outcome
    job.await_end(device_pids[2])


def test_a_memory_device_that_goes_on_in_time_is_not_missed(job):
    worker = training_beside_a_stopped_device("pull", heartbeat_s=LIMIT_S)
    workers, device_pids = started(job, 2, worker)
    job.stop_device(device_pids[1])
    for running in workers:
        running.tell()
    job.signal_device(device_pids[1], signal.SIGCONT)
    assert [running.finish().details for running in workers] == ["", ""]


def test_more_workers_than_processors_miss_no_heartbeat(job):
    def worker(me):
        with me.join(memory_devices=4, heartbeat_s=HEARTBEAT_S, sync_cores=2) as session:
            group = session.register("weights", floats("abcd", 500_000))
            for _ in range(20):
                for index in range(4):
                    group.push(index)
                assert group.pull_all() == [8] * 4

    job.run(8, worker)


# ---- models that differ ----

DIFFERENCES = {
    "name": (floats("ab"), floats("ac"), "tensor 1 is 'b' of 1000 x float32 (sum) on worker 0, 'c' of"),
    "length": (
        floats("a"),
        floats("a", 999),
        "'a' of 1000 x float32 (sum) on worker 0, 'a' of 999 x float32",
    ),
    "dtype": (
        floats("a"),
        [TensorSpec(name="a", dtype="float16", num_elements=1000, op="sum")],
        "float32 (sum) on worker 0, 'a' of 1000 x float16 (sum) on worker 2",
    ),
    "op": (
        floats("a"),
        [TensorSpec(name="a", dtype="float32", num_elements=1000, op="max")],
        "1000 x float32 (sum) on worker 0, 'a' of 1000 x float32 (max) on worker 2",
    ),
    "number": (floats("abc"), floats("a"), "worker 0 has 3 tensors, the other 1; the first extra one is 'b'"),
    "more": (floats("a"), floats("ab"), "worker 2 has 2 tensors, the other 1; the first extra one is 'b'"),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
@pytest.mark.parametrize("memory_devices", [1, 2])
def test_models_that_differ_are_refused_on_every_worker_with_the_first_difference(
    job, difference, memory_devices
):
    usual, other, match = DIFFERENCES[difference]

    def worker(me):
        with me.join(memory_devices=memory_devices) as session:
            with pytest.raises(Exception, match="workers 0 and 2 differ") as caught:
                session.register("model", other if me.rank == 2 else usual)
            # A refusal is not a lost process: the session continues.
            group = session.register("model", usual)
            group.push(0)
            assert group.pull(0) == 3
            session.barrier()
        return [caught.type.__name__, str(caught.value)]

    for error, message in job.run(3, worker):
        assert error == "SchemaMismatchError"
        assert message.startswith("model: ")
        assert match in message


def test_settings_that_differ_are_refused(job):
    def worker(me):
        with me.join(shard_bytes=1 << (16 + me.rank)) as session:
            session.register("model", floats())

    for outcome in job.outcomes(2, worker):
        assert outcome.error == "SchemaMismatchError"
        assert "shard_bytes=65536" in outcome.message
        assert "shard_bytes=131072" in outcome.message


# ---- memory ----


@pytest.mark.parametrize("num_elements", [1 << 40, 1 << 61])
@pytest.mark.parametrize("memory_devices", [1, 2])
def test_memory_that_cannot_be_had_is_refused_before_any_is_taken(job, memory_devices, num_elements):
    def worker(me):
        with me.join(memory_devices=memory_devices) as session:
            with pytest.raises(MemoryError) as caught:
                session.register("huge model", floats("a", num_elements))
            group = session.register("small model", floats())
            group.push(0)
            assert group.pull(0) == 2
        return [type(caught.value).__name__, str(caught.value)]

    needed_mib = 2 * num_elements * 4 / 2**20
    for error, message in job.run(2, worker):
        assert error == "OutOfDeviceMemoryError"
        assert f"huge model: 2 workers need {needed_mib:.1f} MiB of device memory for 1 tensors" in message
        assert "MiB are available" in message
