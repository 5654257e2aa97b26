"""Replicas: if any memory device is lost, training continues bitwise equal from its neighbour, without files."""

from __future__ import annotations

import os
import random
import signal

import numpy as np
import pytest
from harness import LIMIT_S, job_of_test
from persistent_training import STEPS, WORKERS, finish, join, register, take_step, train

from coarse.errors import MemoryDeviceLostError
from coarse.settings import Settings
from coarse.wire.persistent_sessions import PersistentDevices, find_session_directory

REPLICATED = {"replicas": 1}


@pytest.fixture(scope="module")
def undisturbed():
    """Digest of a run without replicas and without lost devices."""
    with job_of_test() as job:
        return job.run(WORKERS, lambda me: train(me, 0))[0][2]


def kept_devices():
    """The persistent devices of the running session; called in a worker."""
    return PersistentDevices.read(find_session_directory("test", "session"))


def kills(device, rank, step, place):
    """Worker `rank` kills a memory device at that place, and waits for the consequences."""

    def reach(me, group, now, here):
        if (me.rank, now, here) == (rank, step, place):
            os.kill(kept_devices().pids[device], signal.SIGKILL)
            me.session.barrier()  # the other worker never reaches it

    return reach


def lose(job, attempt, reach, **settings):
    """Runs an attempt in which a memory device is lost."""
    outcomes = job.outcomes(
        WORKERS, lambda me: train(me, attempt, lambda *at: reach(me, *at), **REPLICATED, **settings)
    )
    assert {outcome.error for outcome in outcomes} == {"MemoryDeviceLostError"}, outcomes
    return outcomes


def test_replicas_change_no_bit(job, undisturbed):
    assert finish(job, 0, **REPLICATED) == (0, None, undisturbed)


@pytest.mark.parametrize(
    ("num_devices", "device", "place", "steps"),
    [
        (2, 0, "backward.push 2", {3}),
        (2, 0, "step.push 2", {3, 4}),
        (2, 1, "step.push 1", {3, 4}),
        (2, 1, "step.pull", {3, 4}),
        (3, 0, "step.pull", {3, 4}),
        (3, 1, "backward.push 1", {3}),
        (3, 2, "step.push 3", {3, 4}),
    ],
)
def test_training_goes_on_without_any_one_device(job, undisturbed, num_devices, device, place, steps):
    lose(job, 0, kills(device, 1, 4, place), memory_devices=num_devices)
    first, _, digest = finish(job, 1, memory_devices=num_devices, **REPLICATED)
    assert first in steps
    assert digest == undisturbed


def test_losses_one_after_the_other_change_no_bit(job, undisturbed):
    """Loses a device, its keeper, a worker, and the first device's successor."""
    lose(job, 0, kills(0, 0, 2, "step.push 1"))
    lose(job, 1, kills(1, 1, 3, "step.push 3"))

    def dies(me, group, now, here):
        if (me.rank, now, here) == (1, 4, "step.push 2"):
            os.kill(os.getpid(), signal.SIGKILL)

    job.outcomes(WORKERS, lambda me: train(me, 2, lambda *at: dies(me, *at), **REPLICATED))
    lose(job, 3, kills(0, 1, 5, "step.pull"))
    first, _, digest = finish(job, 4, **REPLICATED)
    assert first in (4, 5)
    assert digest == undisturbed


def test_a_device_that_stands_still_is_lost(job, undisturbed):
    workers = job.start(WORKERS, lambda me: train(me, 0, _tells_and_waits(me), heartbeat_s=0.5, **REPLICATED))
    job.stop_device(workers[0].hear()[0])
    for worker in workers:
        worker.tell()
    assert {worker.finish().error for worker in workers} == {"MemoryDeviceLostError"}
    assert finish(job, 1, **REPLICATED)[2] == undisturbed


@pytest.mark.parametrize("seed", range(2))
def test_devices_that_are_lost_whenever_change_no_bit(job, undisturbed, seed):
    """Killed from outside, at random places."""
    chance = random.Random(seed)
    for attempt in range(2):
        workers = job.start(
            WORKERS, lambda me, attempt=attempt: train(me, attempt, _tells_and_waits(me), **REPLICATED)
        )
        pids = workers[0].hear()
        for _ in range(chance.randrange(100_000)):
            pass
        job.kill_device(chance.choice(pids))
        for worker in workers:
            worker.tell()
        assert {worker.finish().error for worker in workers} == {"MemoryDeviceLostError"}
    assert finish(job, 2, **REPLICATED)[2] == undisturbed


def _tells_and_waits(me):
    """Reports the first step of this attempt, and waits in the last step until a device is lost."""
    steps = []

    def reach(group, step, place):
        if place != "backward.push 0":
            return
        steps.append(step)
        if len(steps) == 1 and me.rank == 0:
            me.tell(kept_devices().pids)
        if step == STEPS:
            me.hear()

    return reach


def test_a_device_that_is_lost_while_it_waits_comes_back(job, undisturbed):
    """No worker trains, and only the neighbour has a copy of the lost device's contents."""

    def dies(me, group, now, here):
        if (me.rank, now, here) == (1, 4, "step.prepare"):
            os.kill(os.getpid(), signal.SIGKILL)

    job.outcomes(WORKERS, lambda me: train(me, 0, lambda *at: dies(me, *at), **REPLICATED))
    kept = PersistentDevices.read(next(job.temporary.rglob("kept.json")).parent)
    job.kill_device(kept.pids[0])
    assert finish(job, 1, **REPLICATED) == (3, [3, 2, 3, 3], undisturbed)


def _meet_until_lost(session, rank, device):
    """Worker 0 kills the device after a barrier; another worker may learn of it before it has left that barrier."""
    session.barrier()
    if rank == 0:
        os.kill(kept_devices().pids[device], signal.SIGKILL)
    while True:
        session.barrier()


def test_values_that_workers_have_stored_outlive_their_device(job):
    names = [f"value {number}" for number in range(6)]  # each device has some of them

    def store(me):
        with join(me, 0, **REPLICATED) as session:
            take_step(register(session), me.rank, 1)
            for number, name in enumerate(names):
                if number % WORKERS == me.rank:
                    session.store(name, np.full(3, number, dtype=np.uint8))
            with pytest.raises(MemoryDeviceLostError, match="Its neighbour has a copy"):
                _meet_until_lost(session, me.rank, 1)
            raise ValueError("to be started again")

    def load(me, attempt, device):
        with join(me, attempt, **REPLICATED) as session:
            register(session)
            found = [bytes(session.load(name).value)[0] for name in names]
            if device is None:
                session.barrier()
                return found
            with pytest.raises(MemoryDeviceLostError):
                _meet_until_lost(session, me.rank, device)
            raise ValueError(found)

    assert {outcome.error for outcome in job.outcomes(WORKERS, store)} == {"ValueError"}
    # The replicas are complete again before the second device is lost.
    for outcome in job.outcomes(WORKERS, lambda me: load(me, 1, 0)):
        assert (outcome.error, outcome.message) == ("ValueError", str(list(range(6)))), outcome
    assert job.run(WORKERS, lambda me: load(me, 2, None)) == [list(range(6))] * WORKERS


def test_both_devices_lost_is_a_new_start(job, undisturbed):
    def reach(me, group, now, here):
        if (me.rank, now, here) == (0, 4, "step.push 1"):
            for pid in kept_devices().pids:
                os.kill(pid, signal.SIGKILL)

    lose(job, 0, reach)
    assert finish(job, 1, **REPLICATED) == (0, None, undisturbed)


# ---- refusals ----


def refusal(job, **settings):
    """The error of the worker that would start the memory devices."""

    def joins(me):
        join(me, 0, **REPLICATED, **settings)

    outcome, other = job.outcomes(WORKERS, joins)
    assert outcome.error == "ValueError"
    assert other.error  # the same error, or that the first worker has left
    return outcome.message


def test_a_single_device_has_no_neighbour(job):
    assert "there is only one; start two or more" in refusal(job, memory_devices=1)


def test_gradients_in_one_memory_could_be_lost_with_it(job):
    table = job.directory / "table.toml"
    table.write_text("[[memory_device]]\nworkers = [0, 1]\n[[memory_device]]\nworkers = []\n")
    assert "one device serves all workers" in refusal(job, partition_table=str(table))


def test_replicas_need_devices_that_are_kept():
    with pytest.raises(ValueError, match="COARSE_REPLICAS=1 needs COARSE_KEEP_DEVICES"):
        Settings(replicas=1)
    with pytest.raises(ValueError, match="COARSE_REPLICAS=2 is out of range"):
        Settings(replicas=2, keep_devices=LIMIT_S)
