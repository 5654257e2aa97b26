"""Workers that crash leave parameters and states of one step, bitwise exact, to the next attempt."""

from __future__ import annotations

import os
import random
import signal
import time

import numpy as np
import pytest
from harness import open_descriptors
from persistent_training import LENGTHS, STATES, STEPS, WORKERS, finish, join, register, take_step, train

from coarse.errors import RendezvousError, SchemaMismatchError
from coarse.process.scratch import remove_if_abandoned
from coarse.startup import device_connections
from coarse.wire.socket_directory import socket_path


@pytest.fixture(scope="module")
def undisturbed():
    """Digest of a run without a crash."""
    from harness import job_of_test

    with job_of_test() as job:
        results = job.run(WORKERS, lambda me: train(me, 0))
    assert results[0] == results[1]
    return results[0][2]


def crash(job, attempt, reach, *, num_workers=WORKERS, **settings):
    """Runs an attempt in which a worker dies; returns how each worker ended."""
    outcomes = job.outcomes(
        num_workers, lambda me: train(me, attempt, lambda *at: reach(me, *at), **settings)
    )
    assert any(outcome.exit_code == -signal.SIGKILL for outcome in outcomes), outcomes
    assert {outcome.error for outcome in outcomes if outcome.exit_code != -signal.SIGKILL} <= {
        "WorkerLostError"
    }
    return outcomes


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def dies_at(rank, step, place):
    def reach(me, group, now, here):
        if (me.rank, now, here) == (rank, step, place):
            die()

    return reach


# ---- where workers die ----


@pytest.mark.parametrize("memory_devices", [1, 2, 3])
@pytest.mark.parametrize("place", ["backward.push 2", "step.prepare", "step.push 0"])
def test_a_step_that_no_worker_of_some_has_begun_is_taken_again(job, undisturbed, place, memory_devices):
    crash(job, 0, dies_at(1, 4, place), memory_devices=memory_devices)
    assert finish(job, 1, memory_devices=memory_devices) == (3, [3, 2, 3, 3], undisturbed)


@pytest.mark.parametrize("memory_devices", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_memory_devices_have_begun_is_finished_by_them(
    job, undisturbed, rank, count, memory_devices
):
    """The other worker has pushed everything; this worker dies after the updates of its tensors below `count`."""

    def reach(me, group, step, place):
        if (me.rank, step, place) == (rank, 4, f"step.push {count}"):
            for index in range(count):
                group.pull(index)
            die()

    crash(job, 0, reach, memory_devices=memory_devices)
    assert finish(job, 1, memory_devices=memory_devices) == (4, [4, 2, 4, 4], undisturbed)


@pytest.mark.parametrize("place", ["step.pull", "step.done"])
def test_the_step_is_whole_or_not_there_after_everything_was_pushed(job, undisturbed, place):
    crash(job, 0, dies_at(0, 4, place))
    first, _, found = finish(job, 1)
    assert first == 4 if place == "step.done" else first in (3, 4)
    assert found == undisturbed


def test_all_workers_can_die_at_once(job, undisturbed):
    def reach(me, group, step, place):
        if (step, place) == (4, f"step.push {2 + me.rank}"):
            for index in range(2):
                group.pull(index)
            die()

    crash(job, 0, reach)
    assert finish(job, 1) == (4, [4, 2, 4, 4], undisturbed)


def test_a_crash_in_the_first_step_starts_from_scratch(job, undisturbed):
    crash(job, 0, dies_at(1, 1, "step.prepare"))
    assert finish(job, 1) == (0, None, undisturbed)


def test_crashes_one_after_the_other_change_no_bit(job, undisturbed):
    """Including a crash before the new workers have registered, and one before their first step."""
    crash(job, 0, dies_at(1, 3, "backward.push 1"))
    crash(job, 1, dies_at(0, 3, "step.push 0"))

    def joins_and_dies(me):
        with join(me, 2):
            die()

    assert {outcome.exit_code for outcome in job.outcomes(WORKERS, joins_and_dies)} == {-signal.SIGKILL}
    crash(job, 3, dies_at(1, 5, "step.pull"))
    first, _, found = finish(job, 4)
    assert first in (4, 5)
    assert found == undisturbed


@pytest.mark.parametrize("seed", range(4))
def test_workers_that_die_whenever_change_no_bit(job, undisturbed, seed):
    """Killed from outside, at random places."""
    chance = random.Random(seed)
    reached = []
    for attempt in range(3):
        workers = job.start(WORKERS, lambda me, attempt=attempt: train(me, attempt, _tells_steps(me)))
        last = min(STEPS, (reached[-1] if reached else 0) + 1 + chance.randrange(2))
        victim = chance.choice(workers)
        while (step := victim.hear()) < last:
            pass
        for _ in range(chance.randrange(20_000)):
            pass
        victim.kill()
        reached.append(step)
        for worker in workers:
            worker.finish()
    assert finish(job, 3)[2] == undisturbed


def _tells_steps(me):
    def reach(group, step, place):
        if place == "backward.push 0":
            me.tell(step)

    return reach


# ---- errors without a crash ----


def test_a_worker_that_raises_leaves_its_step_to_the_next_attempt(job, undisturbed):
    def fail(me, *at):
        if at[1:] == (4, "step.prepare"):
            raise ValueError("boom")

    outcomes = job.outcomes(WORKERS, lambda me: train(me, 0, lambda *at: fail(me, *at)))
    assert {outcome.error for outcome in outcomes} == {"ValueError"}
    assert finish(job, 1) == (3, [3, 2, 3, 3], undisturbed)


def test_values_that_workers_have_stored_are_there_again(job):
    def store(me):
        with join(me, 0) as session:
            take_step(register(session), me.rank, 1)
            session.store(f"mine {me.rank}", np.full(3, me.rank, dtype=np.uint8))
            session.barrier()
            die()

    def load(me):
        with join(me, 1) as session:
            assert register(session).recovered.step == 1
            session.barrier()
            return [bytes(session.load(f"mine {rank}").value).hex() for rank in range(WORKERS)]

    job.outcomes(WORKERS, store)
    assert job.run(WORKERS, load) == [["000000", "010101"]] * WORKERS


# ---- refusals and ends ----


def test_another_model_is_refused_with_the_first_difference(job):
    def other(me, lengths, names):
        with join(me, 1) as session, pytest.raises(SchemaMismatchError) as caught:
            register(session, lengths, names)
        return str(caught.value)

    crash(job, 0, dies_at(1, 3, "step.prepare"))
    for text in job.run(WORKERS, lambda me: other(me, (70_001, 34, 40_000, 5), STATES)):
        assert "model: memory devices have kept it after step 2" in text
        assert "tensor 1 was '1' of 33 x float32 and is now '1' of 34 x float32" in text


def test_another_optimizer_is_refused(job):
    def other(me):
        with join(me, 1) as session, pytest.raises(SchemaMismatchError, match="momentum_buffer"):
            register(session, LENGTHS, ("momentum_buffer",))

    crash(job, 0, dies_at(1, 3, "step.prepare"))
    job.run(WORKERS, other)


def test_workers_that_leave_after_a_refusal_end_the_job(job):
    """Also if one leaves before a memory device has received the other's request: then nothing is kept."""

    def asks_for_another_length(me):
        with join(me, memory_devices=2) as session:
            connection = session._client.linked()._connections[1]
            if me.rank == 1:
                send = connection.send

                def send_late(*message):
                    time.sleep(0.5)
                    send(*message)

                connection.send = send_late
            with pytest.raises(SchemaMismatchError):
                register(session, [length + me.rank for length in LENGTHS])

    job.run(WORKERS, asks_for_another_length)


def test_another_number_of_workers_is_refused(job):
    def joins(me):
        with pytest.raises(
            Exception,
            match=r"kept memory devices serve the workers \(\(0,\), \(1,\)\).*\(\(0,\), \(1,\), \(2,\)\)",
        ):
            join(me, 1)

    crash(job, 0, dies_at(1, 3, "step.prepare"), keep=2.0)
    job.run(3, joins)


def test_several_nodes_are_refused(job):
    def joins(me):
        with pytest.raises(RendezvousError, match="kept within one node"):
            join(me, 0, node=str(me.rank))

    job.run(WORKERS, joins)


def device_pids(job, attempt=0, **settings):
    """Crashes an attempt; returns its waiting memory devices."""
    crash(job, attempt, dies_at(1, 3, "step.prepare"), **settings)
    return job.device_pids()


def test_memory_devices_end_when_their_time_is_over(job):
    pids = device_pids(job, keep=0.5)
    for pid in pids:
        job.await_end(pid)
    assert list(job.temporary.iterdir()) == []


def train_anew(me):
    """The first attempt of another run of the same job."""
    me.directory = me.directory / "again"
    me.directory.mkdir(exist_ok=True)
    return train(me, 0)


def test_a_new_run_of_the_job_starts_anew_and_ends_those_that_wait(job, undisturbed):
    pids = device_pids(job)
    assert len(pids) == WORKERS

    assert job.run(WORKERS, train_anew)[0] == [0, None, undisturbed]
    assert not set(pids) & set(job.device_pids())


def test_all_that_wait_are_ended_before_a_new_run_starts(job, undisturbed, monkeypatch):
    """Also if the first device has ended before the second one receives the request."""
    pids = device_pids(job)

    def path_after_a_while(directory, device):
        time.sleep(0.3 * device)
        return socket_path(directory, device)

    monkeypatch.setattr(device_connections, "socket_path", path_after_a_while)
    assert job.run(WORKERS, train_anew)[0] == [0, None, undisturbed]
    for pid in pids:
        job.await_end(pid)


def test_the_next_job_leaves_those_that_wait_alone(job, undisturbed):
    device_pids(job)
    (token,) = job.temporary.rglob("token")
    os.utime(token.parent, (1, 1))
    remove_if_abandoned(token.parent)
    first, _, found = finish(job, 1)
    assert (first, found) == (2, undisturbed)


def test_those_that_wait_end_when_they_are_told_to(job):
    pids = device_pids(job)
    job.signal_device(pids[1], signal.SIGTERM)
    for pid in pids:
        job.await_end(pid)
    assert list(job.temporary.iterdir()) == []


def test_those_that_are_told_to_end_wait_for_no_other_attempt(job):
    def stops(me):
        with join(me, 0) as session:
            take_step(register(session), me.rank, 1)
            me.tell(session.device_pids)
            me.hear()
            die()

    workers = job.start(WORKERS, stops)
    pids = {pid for worker in workers for pid in worker.hear()}
    for pid in pids:
        job.signal_device(pid, signal.SIGTERM)
    for worker in workers:
        worker.tell()
        worker.finish()
    for pid in pids:
        job.await_end(pid)
    assert list(job.temporary.iterdir()) == []


def test_nothing_is_kept_of_a_memory_device_that_was_lost(job, undisturbed):
    """The other device ends too, and the next attempt starts from the beginning."""
    pids = device_pids(job)
    job.kill_device(pids[0])
    for pid in pids:
        job.await_end(pid)
    assert finish(job, 1) == (0, None, undisturbed)


def test_a_memory_device_that_is_lost_while_training_ends_the_others(job):
    def loses(me):
        with join(me, 0) as session:
            group = register(session)
            take_step(group, me.rank, 1)
            me.tell(session.device_pids)
            me.hear()
            take_step(group, me.rank, 2)

    workers = job.start(WORKERS, loses)
    pids = [pid for worker in workers for pid in worker.hear()]
    job.kill_device(pids[1])
    for worker in workers:
        worker.tell()
    assert {worker.finish().error for worker in workers} == {"MemoryDeviceLostError"}
    job.await_end(pids[0])


def test_attempts_leave_no_descriptors_behind(job):
    """All descriptors that an attempt opens in a memory device are closed when the next attempt runs."""

    def counts(me, attempt):
        with join(me, attempt) as session:
            group = register(session)
            take_step(group, me.rank, (group.recovered.step if group.recovered else 0) + 1)
            session.barrier()
            me.tell()
            me.hear()
            die()

    counted = []
    for attempt in range(4):
        workers = job.start(WORKERS, lambda me, attempt=attempt: counts(me, attempt))
        for worker in workers:
            worker.hear()
        counted.append([open_descriptors(pid) for pid in sorted(job.device_pids())])
        for worker in workers:
            worker.kill()
            worker.finish()
    assert counted[1] == counted[2] == counted[3]
    assert finish(job, 4)[0] == 4


def test_every_later_attempt_finds_directories_that_only_this_user_can_enter(job):
    device_pids(job)
    directories = [path for path in job.temporary.rglob("*") if path.is_dir()]
    assert len(directories) == 3
    assert {path.stat().st_mode & 0o777 for path in directories} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in job.temporary.rglob("token")} == {0o600}
    finish(job, 1)
