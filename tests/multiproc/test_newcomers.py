"""Newcomers take the places of lost workers. Worker r pushes 2**r, so that a sum is the set of its contributors."""

from __future__ import annotations

import signal

import numpy as np
import pytest
from harness import LIMIT_S

from coarse.schema import TensorSpec
from coarse.session import Session
from coarse.settings import Settings
from coarse.startup.newcomer import Invitation

SMALL, LARGE = 33, 400_000
LOST = 1
SETTINGS = {"min_workers": 1, "on_loss": "replace", "memory_devices": 2, "timeout_s": LIMIT_S}
ALL, OTHERS = [7.0, 3, 7.0, 3], [5.0, 2, 5.0, 2]


def specs(large=LARGE):
    sizes = {"small": (SMALL, "sum"), "large": (large, "sum"), "stop": (1, "max")}
    return [
        TensorSpec(name=name, dtype="float32", num_elements=number, op=op)
        for name, (number, op) in sizes.items()
    ]


def train(me, session, group, *, more=lambda session: [], greeting=None):
    """Takes steps until the test has made the file `stop`, in the same number on all workers.

    Returns:
        The sums and numbers of contributors wherever they differ from those of the step before, by step; what `more`
        returns follows. Then the last step, and the members.
    """
    values = [np.frombuffer(group.buffer(index), dtype=np.float32) for index in range(3)]
    step = session.join_training()
    last, changes, is_over = None, [], False
    while not is_over:
        session.begin_step()
        step += 1
        for index, value in enumerate((2**me.rank, 2**me.rank, (me.directory / "stop").exists())):
            values[index][:] = value
            group.push(index)
        contributors = group.pull_all()
        assert all(np.unique(each).size == 1 for each in values), "a result with half a contribution"
        taken = [float(values[0][0]), contributors[0], float(values[1][0]), contributors[1], *more(session)]
        is_over = bool(values[2][0])
        if step == 3 and greeting is not None:
            me.tell(greeting)
        if taken != last:
            changes.append([step, taken])
            last = taken
    return changes, step, session.members


def founding(*, settings=None, **options):
    """Workers that train, and tell the invitation to their session after a few steps."""

    def worker(me):
        with me.join(**SETTINGS, **(settings or {})) as session:
            session.barrier()
            session.release_buffers()
            group = session.register("weights", specs())
            return train(me, session, group, greeting=session.invitation.to_fields(), **options)

    return worker


def entering(invitation, *, before=lambda me: None, after=lambda me: None, large=LARGE, **options):
    """A newcomer, which says when it is built and when it is a member; `before` and `after` run then."""

    def worker(me):
        settings = Settings(**SETTINGS)
        with Session.enter(
            identity=me.identity, invitation=Invitation(**invitation), settings=settings
        ) as session:
            assert session.is_newcomer
            session.barrier()  # returns at once
            session.release_buffers()
            group = session.register("weights", specs(large))
            me.tell("built")
            before(me)
            me.tell(session.join_training())
            after(me)
            return train(me, session, group, **options)

    return worker


def begin(job, *, world_size=3, **options):
    """Starts the workers; returns them and the invitation."""
    workers = job.start(world_size, founding(**options))
    invitation, *_ = [worker.hear() for worker in workers]
    return workers, invitation


def lose(worker):
    worker.kill()
    assert worker.finish().exit_code == -signal.SIGKILL


def end(job, workers):
    (job.directory / "stop").touch()
    outcomes = [worker.finish() for worker in workers]
    assert not any(outcome.error for outcome in outcomes), [outcome.details for outcome in outcomes]
    return [outcome.value for outcome in outcomes]


def test_a_newcomer_contributes_from_the_same_step_on_all_workers(job):
    workers, invitation = begin(job)
    lose(workers[LOST])
    newcomer = job.start_worker(LOST, 3, entering(invitation))
    assert newcomer.hear() == "built"
    first = newcomer.hear() + 1
    values = end(job, [workers[0], newcomer, workers[2]])
    assert values[0] == values[2]
    changes, last, members = values[0]
    assert changes[0] == [1, ALL]
    assert changes[-2][1] == OTHERS
    assert changes[-1] == [first, ALL]
    assert values[1] == [[[first, ALL]], last, [0, 1, 2]]
    assert members == [0, 1, 2]


def test_worker_zero_is_replaced(job):
    workers, invitation = begin(job)
    lose(workers[0])
    newcomer = job.start_worker(0, 3, entering(invitation))
    newcomer.hear()
    first = newcomer.hear() + 1
    values = end(job, [newcomer, *workers[1:]])
    assert values[1] == values[2]
    assert values[1][0][-2:] == [[values[1][0][-2][0], [6.0, 2, 6.0, 2]], [first, ALL]]
    assert values[0] == [[[first, ALL]], values[1][1], [0, 1, 2]]


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_newcomer_that_is_lost_is_replaced(job, place):
    """Before it is a member, and when it is one that has pushed nothing."""
    workers, invitation = begin(job)
    lose(workers[LOST])
    for _ in range(2):
        dying = job.start_worker(LOST, 3, entering(invitation, **{place: lambda me: signal.pause()}))
        assert dying.hear() == "built"
        if place == "after":
            dying.hear()
        lose(dying)
    newcomer = job.start_worker(LOST, 3, entering(invitation))
    newcomer.hear()
    first = newcomer.hear() + 1
    values = end(job, [workers[0], newcomer, workers[2]])
    assert values[0] == values[2]
    assert values[0][0][-2:] == [[values[0][0][-2][0], OTHERS], [first, ALL]]
    assert values[1][0] == [[first, ALL]]


def test_two_workers_are_replaced(job):
    workers, invitation = begin(job, world_size=4)
    for rank in (1, 3):
        lose(workers[rank])
    newcomers = [job.start_worker(rank, 4, entering(invitation)) for rank in (1, 3)]
    firsts = [newcomer.hear() and newcomer.hear() + 1 for newcomer in newcomers]
    values = end(job, [workers[0], newcomers[0], workers[2], newcomers[1]])
    assert values[0] == values[2]
    assert values[0][0][-1] == [max(firsts), [15.0, 4, 15.0, 4]]
    for first, (changes, last, members) in zip(firsts, (values[1], values[3]), strict=True):
        assert changes[0][0] == first
        assert changes == [each for each in values[0][0] if each[0] >= first]
        assert (last, members) == (values[0][1], [0, 1, 2, 3])


def reduced(session):
    """A sum over all workers that take this step, through buffers that are not registered."""
    value = np.array([2.0**session.identity.rank])
    session.all_reduce(value)
    return [float(value[0])]


def test_a_newcomer_reduces_arrays_with_the_others(job):
    workers, invitation = begin(job, more=reduced)
    lose(workers[LOST])
    newcomer = job.start_worker(LOST, 3, entering(invitation, more=reduced))
    newcomer.hear()
    first = newcomer.hear() + 1
    values = end(job, [workers[0], newcomer, workers[2]])
    assert values[0] == values[2]
    assert values[0][0][-1] == values[1][0][0] == [first, [*ALL, 7.0]]


def test_a_newcomer_with_other_tensors_fails_and_the_others_go_on(job):
    workers, invitation = begin(job)
    lose(workers[LOST])
    outcome = job.start_worker(LOST, 3, entering(invitation, large=LARGE + 1)).finish()
    assert outcome.error == "SchemaMismatchError"
    assert "'large' of 400000 x float32 (sum) on worker 0" in outcome.message
    values = end(job, [workers[0], workers[2]])
    assert values[0][2] == [0, 2]


def test_a_place_that_is_taken_is_refused(job):
    workers, invitation = begin(job)

    def worker(me):
        Session.enter(
            identity=me.identity,
            invitation=Invitation(**invitation),
            settings=Settings(**{**SETTINGS, "timeout_s": 1.0}),
        )

    outcome = job.start_worker(LOST, 3, worker).finish()
    assert outcome.error == "RendezvousError"
    assert "the job still has a worker of this rank" in outcome.message
    end(job, workers)


def test_a_newcomer_that_comes_too_late_is_told(job):
    workers, invitation = begin(job)
    lose(workers[LOST])
    late = job.start_worker(LOST, 3, entering(invitation, before=lambda me: me.hear()))
    assert late.hear() == "built"
    end(job, [workers[0], workers[2]])
    late.tell()
    outcome = late.finish()
    assert outcome.error == "WorkerLostError"
    assert "the other workers have finished before this one could take part" in outcome.message
