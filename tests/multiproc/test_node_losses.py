"""Workers are lost in a job of several nodes: the workers of all nodes go on, with equal results."""

from __future__ import annotations

import os
import re
import signal

import numpy as np
import pytest
from test_leaving import training as training_until_one_leaves
from test_lost_workers import LARGE, SMALL, die, push, raise_error, specs, values_of
from test_nodes import node_of
from test_optimizer import ADAM_STATES, LENGTHS, array, digest, means, write_settings

from coarse.client.tensor_group import UpdateKind
from coarse.errors import WorkerLostError
from coarse.profiler.routing import RoutingTable

SHAPE = (2, 2)
ALL = 15.0
"""The sum of what workers 0 to 3 push, 2**rank."""


def join(me, shape=SHAPE, **settings):
    return me.join(**{"node": node_of(me.rank, shape), "min_workers": 1, "memory_devices": 2, **settings})


def register(session):
    group = session.register("weights", specs())
    # Large tensors go to another memory device than small ones; shards belong to both nodes.
    session.adopt_routing(RoutingTable(lat_proxy=0, bw_proxy=1, threshold_bytes=10_000))
    return group


def take_step(me, group):
    """Pushes and pulls both tensors; returns the sum and the number of contributors of each."""
    for index, values in enumerate(values_of(group)):
        values[:] = 2**me.rank
        group.push(index)
    contributors = group.pull_all()
    return [summary(group, index, number) for index, number in enumerate(contributors)]


def summary(group, index, number):
    """The sum, or the sums of the tensor's shards if they differ, and the number of contributors."""
    sums = sorted({float(each) for each in values_of(group)[index]})
    return [sums[0] if len(sums) == 1 else sums, number]


def others_than(*lost, shape=SHAPE):
    return [rank for rank in range(sum(shape)) if rank not in lost]


def sum_without(*lost, shape=SHAPE):
    return float(2 ** sum(shape) - 1 - sum(2**rank for rank in lost))


# ---- where the worker is when it is lost ----


def before_its_push(me, group):
    pass


def with_half_a_slot_written(me, group):
    values_of(group)[1][: LARGE // 2] = 1e9


def after_one_push(me, group):
    values_of(group)[0][:] = 2**me.rank
    push(group, 0)


def after_all_pushes(me, group):
    for values in values_of(group):
        values[:] = 2**me.rank
    push(group, 0, 1)


WITH, WITHOUT = "with", "without"


@pytest.mark.parametrize(
    ("lose", "small", "large"),
    [
        (before_its_push, WITHOUT, WITHOUT),
        (with_half_a_slot_written, WITHOUT, WITHOUT),
        (after_one_push, WITH, WITHOUT),
        (after_all_pushes, WITH, WITH),
    ],
)
@pytest.mark.parametrize("lost", [0, 3])
def test_each_shard_has_the_whole_contribution_of_a_lost_worker_or_none(job, lose, small, large, lost):
    def worker(me):
        with join(me) as session:
            group = register(session)
            assert take_step(me, group)[0] == [ALL, 4]
            me.tell()
            me.hear()
            if me.rank == lost:
                lose(me, group)
                me.tell("ready")
                signal.pause()
            taken = [(take_step(me, group), session.members) for _ in range(3)]
            return taken

    workers = job.start(4, worker)
    for running in workers:
        running.hear()
    workers[lost].tell()
    assert workers[lost].hear() == "ready"
    workers[lost].kill()
    members = others_than(lost)
    for rank in members:
        workers[rank].tell()
    results = {WITH: [ALL, 4], WITHOUT: [sum_without(lost), 3]}
    outcomes = [workers[rank].finish() for rank in members]
    assert not any(outcome.error for outcome in outcomes), [outcome.details for outcome in outcomes]
    for outcome in outcomes:
        first, *rest = outcome.value
        assert first[0] == [results[small], results[large]]
        assert rest == [[[results[WITHOUT]] * 2, members]] * 2
        assert first[1] == outcomes[0].value[0][1], "all learn of it after the same step"


def training(*, shape=SHAPE, steps=6, lose=None, lost=1, **settings):
    """Workers that take steps; `lose` runs on worker `lost` before its third one."""

    def worker(me):
        changes = []
        with join(me, shape, **settings) as session:
            session.on_change(lambda change: changes.append([len(taken) + 1, *change.new]))
            group = register(session)
            taken = []
            for step in range(1, steps + 1):
                if step == 3 and me.rank == lost:
                    lose(me)
                taken.append(take_step(me, group))
            session.barrier()
            return taken, changes

    return worker


@pytest.mark.parametrize("lose", [die, raise_error])
@pytest.mark.parametrize(
    ("shape", "lost"),
    [
        ((2, 2), 0),
        ((2, 2), 1),
        ((2, 2), 2),
        pytest.param((1, 3), 3, marks=pytest.mark.slow),
        pytest.param((2, 2, 2), 4, marks=pytest.mark.slow),
    ],
)
def test_all_nodes_go_on_without_a_worker_that_is_killed_or_fails(job, lose, shape, lost):
    """Workers 0 and 2 have started the memory devices of their nodes."""
    size = sum(shape)
    workers = job.start(size, training(shape=shape, lose=lose, lost=lost))
    outcomes = [running.finish() for running in workers]
    assert outcomes.pop(lost).exit_code != 0
    for outcome in outcomes:
        assert not outcome.error, outcome.details
        taken, changes = outcome.value
        assert taken[:2] == [[[2.0**size - 1, size]] * 2] * 2
        assert taken[2:] == [[[sum_without(lost, shape=shape), size - 1]] * 2] * 4
        assert changes == [[3, *others_than(lost, shape=shape)]], "all learn of it after the same step"


def test_a_worker_of_each_node_is_lost_until_too_few_are_left(job):
    def worker(me):
        with join(me, (3, 2), min_workers=3) as session:
            group = register(session)
            for step in range(1, 100):
                if (me.rank, step) in ((0, 3), (4, 5)):
                    die(me)
                me.tell(take_step(me, group)[0])
            return "too long"

    workers = job.start(5, worker)
    for survivor in (1, 2, 3):
        heard = [workers[survivor].hear() for _ in range(6)]
        assert heard == [[31.0, 5]] * 2 + [[30.0, 4]] * 2 + [[14.0, 3]] * 2
    workers[2].kill()
    for survivor in (1, 3):
        outcome = workers[survivor].finish()
        assert outcome.error == "WorkerLostError"
        for rank in (0, 2, 4):
            assert re.search(rf"worker {rank} \(pid {workers[rank].pid}\) died at ", outcome.message)
        assert "2 worker(s) are left, and COARSE_MIN_WORKERS=3" in outcome.message


def test_a_worker_leaves_between_two_steps(job):
    leaver = 3

    def worker(me):
        own = training_until_one_leaves(leaver, node=node_of(me.rank, SHAPE), min_workers=1)
        return own(me)

    workers = job.start(4, worker)
    assert [running.hear() for running in workers] == ["trains"] * 4
    workers[leaver].signal(signal.SIGTERM)
    num_whole = workers[leaver].hear()
    for rank in others_than(leaver):
        outcome = workers[rank].finish()
        assert not outcome.error, outcome.details
        taken, members, num_failures = outcome.value
        assert taken[:num_whole] == [[[ALL, 4]] * 2] * num_whole
        assert taken[num_whole:] == [[[sum_without(leaver), 3]] * 2] * (len(taken) - num_whole)
        assert members == others_than(leaver)
        assert num_failures == 0
    workers[leaver].tell()
    assert workers[leaver].finish().error == "SystemExit"


def test_the_last_worker_of_a_node_is_not_asked_to_leave_but_ended(job):
    """Its memory devices end with it, without which the other node goes on."""
    workers = job.start(
        3, lambda me: training_until_one_leaves(2, node=node_of(me.rank, (2, 1)), min_workers=1)(me)
    )
    assert [running.hear() for running in workers] == ["trains"] * 3
    workers[2].signal(signal.SIGTERM)
    assert workers[2].finish().exit_code == -signal.SIGTERM
    for survivor in workers[:2]:
        outcome = survivor.finish()
        assert not outcome.error, outcome.details
        _, members, _ = outcome.value
        assert members == [0, 1]


# ---- parameters and states in the memory devices of each node ----


def train_adam(me, group, step, *, by_mean):
    """A step; by a mean that is pulled first, or in one push."""
    for index, spec in enumerate(group.specs):
        generator = np.random.default_rng([me.rank, step, index])
        array(group.buffer(index))[:] = generator.normal(size=spec.num_elements).astype(np.float32)
    if by_mean:
        for index in range(len(LENGTHS)):
            group.push(index, update=UpdateKind.MEASURE)
        group.pull_all()
        group.continue_step()
    write_settings(group, step)
    for index in range(len(LENGTHS)):
        group.push(index, update=UpdateKind.UPDATE_BY_MEAN if by_mean else UpdateKind.UPDATE)
        if me.dies_at == (step, index):
            group.flush()
            die(me)
    group.pull_all()


@pytest.mark.parametrize("by_mean", [False, True])
@pytest.mark.parametrize("lost", [0, 3])
def test_parameters_and_states_stay_equal_on_all_nodes(job, by_mean, lost):
    """Worker `lost` dies between two pushes of an update."""

    def worker(me):
        me.dies_at = (3, 0) if me.rank == lost else None
        with join(me, shard_bytes=64 << 10) as session:
            group = session.register_parameters("model", means(*LENGTHS), state_names=ADAM_STATES)
            members = []
            for step in range(1, 7):
                train_adam(me, group, step, by_mean=by_mean)
                members.append(session.members)
            digests = digest(group)
            session.barrier()
            return digests, members

    workers = job.start(4, worker)
    outcomes = [running.finish() for running in workers]
    assert outcomes.pop(lost).exit_code == -signal.SIGKILL
    assert not any(outcome.error for outcome in outcomes), [outcome.details for outcome in outcomes]
    assert [outcome.value for outcome in outcomes] == [outcomes[0].value] * 3, "equal bits, equal members"
    assert outcomes[0].value[1][-1] == others_than(lost)


# ---- what survivors can do ----


def surviving(function, *, lost):
    def worker(me):
        with join(me) as session:
            group = register(session)
            take_step(me, group)
            if me.rank == lost:
                die(me)
            take_step(me, group)
            return function(me, session)

    return worker


def values_of_survivors(job, function, *, lost):
    outcomes = [running.finish() for running in job.start(4, surviving(function, lost=lost))]
    outcomes.pop(lost)
    assert not any(outcome.error for outcome in outcomes), [outcome.details for outcome in outcomes]
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("lost", [0, 2, 3])
def test_survivors_register_and_release_groups(job, lost):
    def register_more(me, session):
        group = session.register("later", specs())
        sums = [each[0] for each in take_step(me, group)]
        group.close()
        again = session.register("again", specs())
        return sums, [each[0] for each in take_step(me, again)], session.members

    expected = [[sum_without(lost)] * 2, [sum_without(lost)] * 2, others_than(lost)]
    assert values_of_survivors(job, register_more, lost=lost) == [expected] * 3


def test_survivors_reduce_and_broadcast_arrays(job):
    def reduce(me, session):
        sums = np.full(1000, 2.0**me.rank)
        session.all_reduce(sums)
        copied = np.full(SMALL, float(me.rank))
        session.broadcast(copied, root=3)
        with pytest.raises(WorkerLostError, match="nobody has contributed"):
            session.broadcast(copied, root=2)
        return float(sums[0]), float(copied[-1])

    assert values_of_survivors(job, reduce, lost=2) == [[sum_without(2), 3.0]] * 3


# ---- what is refused at start ----


@pytest.mark.parametrize(
    ("shape", "settings", "reason"),
    [
        ((1, 1), {"node_compression": "int8"}, "each of the 2 nodes has one worker"),
        ((2, 1), {"on_loss": "replace"}, "workers can join a job of one node only"),
        ((2, 1), {"max_workers": 5}, "workers can join a job of one node only"),
        ((2, 1), {"min_workers": 4}, "COARSE_MIN_WORKERS=4, but the job has 3 worker"),
    ],
)
def test_a_job_that_cannot_go_on_is_refused_at_start(job, shape, settings, reason):
    def worker(me):
        with join(me, shape, **settings):
            pass

    for outcome in job.outcomes(sum(shape), worker):
        assert outcome.error == "RendezvousError"
        assert reason in outcome.message


def test_the_first_workers_of_all_nodes_may_be_lost(job):
    """They have started the memory devices, and leave nothing behind."""

    def worker(me):
        with join(me) as session:
            group = register(session)
            for step in range(1, 8):
                if (me.rank, step) in ((0, 3), (2, 5)):
                    os.kill(os.getpid(), signal.SIGKILL)
                take_step(me, group)
            session.barrier()
            return session.members

    outcomes = [running.finish() for running in job.start(4, worker)]
    assert [outcomes[rank].value for rank in (1, 3)] == [[1, 3]] * 2, [each.details for each in outcomes]
