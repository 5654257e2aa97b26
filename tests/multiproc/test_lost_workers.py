"""Workers are lost and the others go on: every result is over exactly the whole contributions that had arrived."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import numpy as np
import pytest

from coarse.errors import WorkerLostError
from coarse.profiler.routing import RoutingTable
from coarse.schema import TensorSpec

SMALL, LARGE = 100, 300_000
ALL, OTHERS = 1 + 2 + 4, 1 + 4
"""Sums of what workers 0 to 2 push, 2**rank: with worker 1, and without."""

LOST = 1


def specs(op="sum"):
    return [
        TensorSpec(name=name, dtype="float32", num_elements=number, op=op)
        for name, number in (("small", SMALL), ("large", LARGE))
    ]


def values_of(group):
    return [np.frombuffer(group.buffer(index), dtype=np.float32) for index in range(2)]


def fill(me, group, index):
    values_of(group)[index][:] = 2**me.rank


def take_step(me, group):
    """Pushes and pulls both tensors; returns the sum and the number of contributors of each."""
    for index in range(2):
        fill(me, group, index)
        group.push(index)
    contributors = group.pull_all()
    values = values_of(group)
    assert all(np.unique(each).size == 1 for each in values), "a result with half a contribution"
    return [[float(each[0]), number] for each, number in zip(values, contributors, strict=True)]


def losing(lose, *, op="sum", steps=3, **settings):
    """Workers that take steps; `lose` runs on worker LOST instead of its second step, until it is killed.

    Each hears from the test before it takes its second step; worker 0 first tells the pids of the memory devices.
    """

    def worker(me):
        with me.join(**{"min_workers": 2, "memory_devices": 2, **settings}) as session:
            group = session.register("weights", specs(op))
            # Large tensors go to another memory device than small ones.
            session.adopt_routing(RoutingTable(lat_proxy=0, bw_proxy=1, threshold_bytes=10_000))
            assert take_step(me, group)[0][1] == 3
            me.tell(session.device_pids)
            me.hear()
            if me.rank == LOST:
                lose(me, group)
                me.tell("ready")
                signal.pause()
            taken = [take_step(me, group) for _ in range(steps)]
            return taken, session.members

    return worker


def push(group, *indices):
    for index in indices:
        group.push(index)
    group.flush()


def before_its_push(me, group):
    pass


def with_half_a_slot_written(me, group):
    values_of(group)[1][: LARGE // 2] = 1e9


def after_one_push(me, group):
    fill(me, group, 0)
    push(group, 0)


def after_all_pushes(me, group):
    for index in range(2):
        fill(me, group, index)
    push(group, 0, 1)


def run_loss(job, lose, *, before=lambda pids: None, after=lambda pids: None, others=OTHERS, **settings):
    """The survivors' results of the step of the loss. `before` runs before it, `after` when the worker is dead."""
    workers = job.start(3, losing(lose, **settings))
    pids, *_ = [worker.hear() for worker in workers]
    before(pids)
    workers[LOST].tell()
    assert workers[LOST].hear() == "ready"
    workers[LOST].kill()
    assert workers[LOST].finish().exit_code == -signal.SIGKILL
    survivors = [workers[0], workers[2]]
    for survivor in survivors:
        survivor.tell()
    after(pids)
    outcomes = [survivor.finish() for survivor in survivors]
    assert not any(outcome.error for outcome in outcomes), [outcome.details for outcome in outcomes]
    assert outcomes[0].value == outcomes[1].value, "all survivors have the same results"
    taken, members = outcomes[0].value
    assert taken[1:] == [[[others, 2], [others, 2]]] * (len(taken) - 1)
    assert members == [0, 2]
    return taken[0]


@pytest.mark.parametrize("lose", [before_its_push, with_half_a_slot_written])
@pytest.mark.parametrize("memory_devices", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_worker_that_has_not_pushed_is_absent(job, lose, memory_devices):
    first = run_loss(job, lose, memory_devices=memory_devices)
    assert first == [[OTHERS, 2], [OTHERS, 2]]


def test_a_worker_counts_in_what_it_has_pushed_and_nowhere_else(job):
    assert run_loss(job, after_one_push) == [[ALL, 3], [OTHERS, 2]]


def stop(job, *devices):
    return lambda pids: [job.stop_device(pids[device]) for device in devices]


def go_on(job, *devices):
    return lambda pids: [job.signal_device(pids[device], signal.SIGCONT) for device in devices]


@pytest.mark.parametrize("devices", [(0, 1), (0,), (1,)], ids=["all devices", "one device", "the other one"])
def test_a_contribution_that_no_device_has_taken_counts(job, devices):
    first = run_loss(job, after_all_pushes, before=stop(job, *devices), after=go_on(job, *devices))
    assert first == [[ALL, 3], [ALL, 3]]


def test_no_device_stands_in_before_all_have_taken_what_there_is(job):
    """One device still has a contribution in its queue, the other one has none: both wait."""
    first = run_loss(job, after_one_push, before=stop(job, 0), after=go_on(job, 0))
    assert first == [[ALL, 3], [OTHERS, 2]]


def test_means_are_over_those_that_contributed(job):
    small, large = run_loss(job, after_one_push, op="mean", others=OTHERS / 2)
    assert small == [pytest.approx(ALL / 3), 3]
    assert large == [OTHERS / 2, 2]


def test_a_worker_that_dies_before_it_pulls_is_in_the_result(job):
    def worker(me):
        with me.join(min_workers=2, memory_devices=2) as session:
            group = session.register("weights", specs())
            session.barrier()
            if me.rank == LOST:
                after_all_pushes(me, group)
                me.tell()
                signal.pause()
            first = take_step(me, group)
            me.tell()
            me.hear()
            return first, take_step(me, group)

    workers = job.start(3, worker)
    for running in workers:
        running.hear()
    workers[LOST].kill()
    for survivor in (workers[0], workers[2]):
        survivor.tell()
    for survivor in (workers[0], workers[2]):
        assert survivor.finish().value == [[[ALL, 3], [ALL, 3]], [[OTHERS, 2], [OTHERS, 2]]]


# ---- how workers are lost ----


def training(*, steps=6, lose=None, lost=LOST, **settings):
    """Workers that take steps; `lose` runs on worker `lost` before its third one."""

    def worker(me):
        changes = []
        with me.join(**{"min_workers": 1, "memory_devices": 2, **settings}) as session:
            session.on_change(lambda change: changes.append([len(taken) + 1, *change.new]))
            group = session.register("weights", specs())
            me.tell(session.device_pids)
            taken = []
            for step in range(1, steps + 1):
                if step == 3 and me.rank == lost:
                    lose(me)
                taken.append(take_step(me, group))
            session.barrier()
            return taken, changes

    return worker


def raise_error(me):
    raise ValueError("a batch that cannot be")


def die(me):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("lose", [die, raise_error])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_others_go_on_without_any_worker_that_is_killed_or_fails(job, lose, lost):
    """Worker 0 has started the memory devices."""
    workers = job.start(3, training(lose=lose, lost=lost))
    outcomes = [running.finish() for running in workers]
    assert outcomes.pop(lost).exit_code != 0
    without = float(7 - 2**lost)
    members = [rank for rank in range(3) if rank != lost]
    for outcome in outcomes:
        assert not outcome.error, outcome.details
        taken, changes = outcome.value
        assert taken == [[[7.0, 3]] * 2] * 2 + [[[without, 2]] * 2] * 4
        assert changes == [[3, *members]], "all learn of it after the same step"


def test_workers_are_lost_one_after_the_other_until_too_few_are_left(job):
    def worker(me):
        with me.join(min_workers=2, memory_devices=2) as session:
            group = session.register("weights", specs())
            for step in range(1, 100):
                if (me.rank, step) in ((1, 3), (3, 5)):
                    die(me)
                me.tell(take_step(me, group)[0])
            return "too long"

    workers = job.start(4, worker)
    heard = [workers[0].hear() for _ in range(5)]
    assert heard == [[15.0, 4]] * 2 + [[13.0, 3]] * 2 + [[5.0, 2]]
    workers[2].kill()
    outcome = workers[0].finish()
    assert outcome.error == "WorkerLostError"
    for rank in (1, 2, 3):
        assert f"worker {rank} (pid {workers[rank].pid}) died at " in outcome.message
    assert "its last contribution was step 2. Then worker 3" in outcome.message
    assert "1 worker(s) are left, and COARSE_MIN_WORKERS=2" in outcome.message


def test_a_worker_that_is_stopped_is_not_lost(job):
    workers = job.start(3, losing(before_its_push, steps=1))
    for running in workers:
        running.hear()
    workers[LOST].stop()
    for survivor in (workers[0], workers[2]):
        survivor.tell()
    workers[LOST].signal(signal.SIGCONT)
    workers[LOST].tell()
    assert workers[LOST].hear() == "ready"
    workers[LOST].kill()
    for survivor in (workers[0], workers[2]):
        assert survivor.finish().value == [[[[OTHERS, 2], [OTHERS, 2]]], [0, 2]]


def test_a_worker_that_ends_before_the_others_is_no_loss(job):
    def worker(me):
        with me.join(min_workers=1, memory_devices=2) as session:
            group = session.register("weights", specs())
            for _ in range(2 if me.rank == LOST else 3):
                take_step(me, group)

    for outcome in (running.finish() for running in job.start(3, worker)):
        assert outcome.error in ("", "WorkerLostError")
        assert not outcome.error or "worker(s) 1 closed the session while others" in outcome.message


# ---- what survivors can do ----


def surviving(function, *, world_size=3, lost=LOST):
    """Workers of which one dies after a step; the others then call `function`."""

    def worker(me):
        with me.join(min_workers=1, memory_devices=2) as session:
            group = session.register("weights", specs())
            take_step(me, group)
            if me.rank == lost:
                die(me)
            take_step(me, group)
            return function(me, session)

    return worker


def values_of_survivors(job, function, **options):
    outcomes = [running.finish() for running in job.start(3, surviving(function, **options))]
    survivors = [outcome for outcome in outcomes if outcome.exit_code != -signal.SIGKILL]
    assert len(survivors) == 2
    assert not any(outcome.error for outcome in survivors), [outcome.details for outcome in survivors]
    return [outcome.value for outcome in survivors]


@pytest.mark.parametrize("lost", [0, 1])
def test_survivors_register_and_release_groups(job, lost):
    def register(me, session):
        group = session.register("later", specs())
        sums = [each[0] for each in take_step(me, group)]
        group.close()
        again = session.register("again", specs())
        return sums, [each[0] for each in take_step(me, again)]

    without = float(7 - 2**lost)
    assert values_of_survivors(job, register, lost=lost) == [[[without] * 2] * 2] * 2


def test_survivors_reduce_and_broadcast_arrays(job):
    def reduce(me, session):
        sums = np.full(1000, 2.0**me.rank)
        session.all_reduce(sums)
        copied = np.full(1000, float(me.rank))
        session.broadcast(copied, root=2)
        return float(sums[0]), float(copied[-1])

    assert values_of_survivors(job, reduce) == [[5.0, 2.0]] * 2


def test_a_broadcast_by_a_lost_worker_is_an_error_of_this_call_alone(job):
    def broadcast(me, session):
        values = np.zeros(1000)
        with pytest.raises(WorkerLostError, match="nobody has contributed"):
            session.broadcast(values, root=LOST)
        session.all_reduce(values := np.ones(3))
        return values.tolist()

    assert values_of_survivors(job, broadcast) == [[2.0] * 3] * 2


def test_survivors_store_and_load_values(job):
    def store(me, session):
        if me.rank == 0:
            session.store("what", np.arange(10.0))
        session.barrier()
        return float(np.frombuffer(session.load("what").value, dtype=np.float64).sum())

    assert values_of_survivors(job, store) == [45.0] * 2


def test_a_loss_delays_the_others_by_less_than_a_tenth_of_a_second(job):
    """In the best of a few attempts, because a busy machine may take longer."""
    delays_s = []

    def worker(me):
        with me.join(f"store{len(delays_s)}", min_workers=2, memory_devices=2) as session:
            group = session.register("weights", specs())
            took_s = []
            for step in range(100):
                if me.rank == LOST and step == 50:
                    die(me)
                began_s = time.monotonic()
                take_step(me, group)
                took_s.append(time.monotonic() - began_s)
            return max(took_s) - float(np.quantile(took_s, 0.99, method="lower"))

    while not delays_s or (min(delays_s) >= 0.1 and len(delays_s) < 5):
        ended = [running.finish() for running in job.start(3, worker)]
        assert not ended[0].error, ended[0].details
        delays_s.append(max(ended[rank].value for rank in (0, 2)))
    assert min(delays_s) < 0.1, delays_s


# ---- what is refused at start ----


def test_a_job_that_cannot_go_on_is_refused_at_start(job):
    def worker(me):
        with me.join(min_workers=3):
            pass

    for outcome in job.outcomes(2, worker):
        assert outcome.error == "RendezvousError"
        assert "COARSE_MIN_WORKERS=3, but the job has 2 worker" in outcome.message


def test_torchrun_is_refused(job, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def worker(me):
        with me.join(min_workers=1):
            pass

    for outcome in job.outcomes(2, worker):
        assert outcome.error == "RendezvousError"
        assert "torchrun ends all workers when one ends" in outcome.message


def request(values):
    return "weights/small", values.ctypes.data, values.ctypes.data, values.nbytes


def test_tensors_are_reduced_by_name_without_a_lost_worker(job):
    weights = [0.25, 0.5, 0.25]

    def worker(me):
        with (
            me.join(min_workers=2) as session,
            contextlib.closing(session.open_async_reducer()) as reducer,
        ):
            group = reducer.register("weights", specs())
            found = []
            for step in range(2):
                values = np.full(SMALL, 2**me.rank, np.float32)
                reducer.reduce_all([request(values)], weights)
                found.append(
                    [*np.unique(values).tolist(), group.contributors(0), sorted(group.absent_workers())]
                )
                if step == 0:
                    me.tell()
                    me.hear()
            session.remove_members(group.absent_workers())
            return found, session.members

    workers = job.start(3, worker)
    for each in workers:
        each.hear()
    workers[LOST].kill()
    workers[LOST].finish()
    survivors = [workers[0], workers[2]]
    for survivor in survivors:
        survivor.tell()
    for outcome in [survivor.finish() for survivor in survivors]:
        assert not outcome.error, outcome.details
        # The weight of worker 1, half of all, goes to the others.
        assert outcome.value == [[[ALL, 3, []], [2 * OTHERS, 2, [LOST]]], [0, 2]]


def test_reducing_by_name_is_refused_where_new_workers_may_join(job):
    def worker(me):
        with (
            me.join(min_workers=1, on_loss="replace") as session,
            pytest.raises(ValueError, match="new workers cannot join a job that reduces tensors by name"),
        ):
            session.open_async_reducer()

    job.run(2, worker)
