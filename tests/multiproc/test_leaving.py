"""Workers leave after SIGTERM and the others go on: each step has the whole contribution of the leaver, or none."""

from __future__ import annotations

import signal

import pytest
from test_lost_workers import specs, take_step
from test_newcomers import ALL, LOST, OTHERS, begin, end, entering

STEPS_AFTERWARDS = 3
MOST_STEPS = 100_000


def training(leaver, **settings):
    """Workers that take steps until some after one has left; that one tells its steps, and lives on for a while."""

    def worker(me):
        taken, members = [], None
        with me.join(**{"min_workers": 2, "memory_devices": 2, **settings}) as session:
            group = session.register("weights", specs())
            last = MOST_STEPS
            while len(taken) < last:
                try:
                    session.begin_step()
                except SystemExit:
                    me.tell(len(taken))
                    me.hear()
                    raise
                taken.append(take_step(me, group))
                if len(taken) == 3:
                    me.tell("trains")
                members = session.members
                if last == MOST_STEPS and me.rank != leaver and leaver not in members:
                    last = len(taken) + STEPS_AFTERWARDS
            return taken, members, session.metrics().total("coarse_failures_total")

    return worker


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_worker_leaves_between_two_steps(job, leaver):
    workers = job.start(3, training(leaver))
    assert [worker.hear() for worker in workers] == ["trains"] * 3
    workers[leaver].signal(signal.SIGTERM)
    num_whole = workers[leaver].hear()
    others = [rank for rank in range(3) if rank != leaver]
    outcomes = [workers[rank].finish() for rank in others]  # none of them waits for the end of its process
    assert not any(outcome.error for outcome in outcomes), [outcome.details for outcome in outcomes]
    without = [[float(7 - 2**leaver), 2]] * 2
    for outcome in outcomes:
        taken, members, num_failures = outcome.value
        assert taken == [[[7.0, 3]] * 2] * num_whole + [without] * (1 + STEPS_AFTERWARDS)
        assert members == others
        assert num_failures == 0
    workers[leaver].tell()
    left = workers[leaver].finish()
    assert (left.error, left.message) == ("SystemExit", "0")


def test_without_enough_others_the_signal_ends_the_worker(job):
    workers = job.start(3, training(LOST, min_workers=3))
    assert [worker.hear() for worker in workers] == ["trains"] * 3
    workers[LOST].signal(signal.SIGTERM)
    assert workers[LOST].finish().exit_code == -signal.SIGTERM
    for rank in (0, 2):
        outcome = workers[rank].finish()
        assert outcome.error == "WorkerLostError"
        assert "2 worker(s) are left, and COARSE_MIN_WORKERS=3" in outcome.message


def test_when_more_leave_than_can_be_spared_the_others_learn_who_has_left(job):
    def worker(me):
        with me.join(min_workers=2, memory_devices=2) as session:
            group = session.register("weights", specs())
            for step in range(MOST_STEPS):
                if me.rank != 0 and step == 3:
                    session.leave()
                    return
                take_step(me, group)

    workers = job.start(3, worker)
    outcome = workers[0].finish()
    assert outcome.error == "WorkerLostError"
    assert "1 worker(s) are left, and COARSE_MIN_WORKERS=2" in outcome.message
    for rank in (1, 2):
        assert f"worker {rank} (pid {workers[rank].pid}) left at " in outcome.message
        assert not workers[rank].finish().error


def test_a_job_that_needs_all_workers_lets_none_leave(job):
    def worker(me):
        with me.join() as session:
            with pytest.raises(ValueError, match=r"others need it.*COARSE_MIN_WORKERS"):
                session.leave()
            session.barrier()
            return signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    assert job.run(2, worker) == [True, True]


def test_a_newcomer_takes_the_place_that_was_left_and_leaves_too(job):
    workers, invitation = begin(job)
    workers[LOST].signal(signal.SIGTERM)
    assert workers[LOST].finish().error == "SystemExit"
    for _ in range(2):
        newcomer = job.start_worker(LOST, 3, entering(invitation))
        assert newcomer.hear() == "built"
        first = newcomer.hear() + 1
        newcomer.signal(signal.SIGTERM)
        assert newcomer.finish().error == "SystemExit"
    values = end(job, [workers[0], workers[2]])
    assert values[0] == values[1]
    changes = values[0][0]
    assert [taken for _, taken in changes] == [ALL, OTHERS, ALL, OTHERS, ALL, OTHERS]
    assert changes[4][0] == first
