"""Workers join in places that were vacant from the start. Worker r pushes 2**r: a sum is a set of contributors."""

from __future__ import annotations

import signal

from harness import LIMIT_S
from test_newcomers import begin, end, entering, lose, reduced, specs

FOUNDERS, PLACES = 2, 4
SETTINGS = {"max_workers": PLACES}


def founders(job, **options):
    return begin(job, world_size=FOUNDERS, settings=SETTINGS, **options)


def join(job, rank, invitation, **options):
    """Starts a worker; returns it and the first step to which it contributes."""
    worker = job.start_worker(rank, PLACES, entering(invitation, **options))
    assert worker.hear() == "built"
    return worker, worker.hear() + 1


def both(ranks, *more):
    """The results of a step, of a small and of a large tensor."""
    return [float(sum(2**rank for rank in ranks)), len(ranks)] * 2 + [*more]


def test_a_worker_joins_from_the_same_step_on_all_workers(job):
    workers, invitation = founders(job)
    newcomer, first = join(job, 2, invitation)
    values = end(job, [*workers, newcomer])
    assert values[0] == values[1]
    changes, last, members = values[0]
    assert changes == [[1, both([0, 1])], [first, both([0, 1, 2])]]
    assert values[2] == [[changes[1]], last, [0, 1, 2]]
    assert members == [0, 1, 2]


def test_all_places_fill_up_and_founders_leave(job):
    """Those that have joined then do what the first workers did, such as providing buffers."""
    workers, invitation = founders(job, more=reduced)
    for rank in range(FOUNDERS, PLACES):
        workers.append(join(job, rank, invitation, more=reduced)[0])
    workers[0].signal(signal.SIGTERM)
    assert workers[0].finish().error == "SystemExit"
    lose(workers[1])
    values = end(job, workers[2:])
    assert values[0][0][-1] == values[1][0][-1]
    assert values[0][0][-1][1] == both([2, 3], 12.0)
    assert values[0][2] == [2, 3]


def test_a_place_is_vacant_again_when_its_worker_is_lost(job):
    workers, invitation = founders(job)
    for _ in range(2):
        newcomer, _ = join(job, 3, invitation)
        lose(newcomer)
    newcomer, first = join(job, 3, invitation)
    values = end(job, [*workers, newcomer])
    assert values[0] == values[1]
    assert values[0][0][-2:] == [[values[0][0][-2][0], both([0, 1])], [first, both([0, 1, 3])]]


def test_vacant_places_have_no_memory_devices_of_their_own(job):
    def worker(me):
        with me.join(min_workers=1, max_workers=PLACES, timeout_s=LIMIT_S) as session:
            group = session.register("weights", specs())
            group.push(0)
            assert group.pull(0) == FOUNDERS
            return len(session.device_pids), session.members, session.num_places

    values = job.run(FOUNDERS, worker)
    assert values == [[FOUNDERS, [0, 1], PLACES], [0, [0, 1], PLACES]]
