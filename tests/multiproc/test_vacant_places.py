"""Workers join in places that were vacant from the start. Worker r pushes 2**r: a sum is a set of contributors."""

from __future__ import annotations

import random
import signal

import pytest
from harness import LIMIT_S
from test_newcomers import begin, end, entering, lose, reduced, specs

from coarse.cli.workers.joining import join as ask_for_workers
from coarse.status.address import find_addresses

FOUNDERS, PLACES = 2, 4
TURNS = 12
SETTINGS = {"max_workers": PLACES}


def founders(job, **options):
    return begin(job, world_size=FOUNDERS, settings=SETTINGS, **options)


def join(job, rank, invitation, **options):
    """Starts a worker; returns it and the first step to which it contributes."""
    worker = job.start_worker(rank, PLACES, entering(invitation, **options))
    assert worker.hear() == "built"
    return worker, worker.hear() + 1


def leave(worker):
    worker.signal(signal.SIGTERM)
    assert worker.finish().error == "SystemExit"


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
    lose(workers[1])
    leave(workers[0])
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


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_workers_come_and_go_at_random(job, seed):
    """At the end, the steps are those of the workers that live: nothing is left of all others."""
    draw = random.Random(seed)
    workers, invitation = founders(job, more=reduced)
    present = dict(enumerate(workers))
    for turn in range(TURNS):
        vacant = [rank for rank in range(PLACES) if rank not in present]
        if len(present) == 1 or (vacant and draw.random() < 0.5):
            present[vacant[0]], _ = join(job, vacant[0], invitation, more=reduced)
            continue
        one = present.pop(draw.choice(sorted(present)))
        if draw.random() < 0.3 and turn < TURNS - 1:  # the last step might be that of the loss
            lose(one)
        else:
            leave(one)
    ranks = sorted(present)
    for changes, _, members in end(job, [present[rank] for rank in ranks]):
        assert members == ranks
        assert changes[-1][1] == both(ranks, float(sum(2**rank for rank in ranks)))


def test_without_a_launcher_nobody_starts_workers(job, capsys):
    workers, _ = founders(job)
    (name,) = {each.job for each in find_addresses() if each.pid == workers[0].pid}
    assert ask_for_workers(name, 1) == 1
    assert f"job {name} takes no workers: start it by `coarse run`" in capsys.readouterr().err
    end(job, workers)


def test_vacant_places_have_no_memory_devices_of_their_own(job):
    def worker(me):
        with me.join(min_workers=1, max_workers=PLACES, timeout_s=LIMIT_S) as session:
            group = session.register("weights", specs())
            group.push(0)
            assert group.pull(0) == FOUNDERS
            served = [each.workers for each in session.partition_table.devices]
            return len(session.device_pids), session.members, session.num_places, served

    values = job.run(FOUNDERS, worker)
    common = [[0, 1], PLACES, [[0, 2], [1, 3]]]
    assert values == [[FOUNDERS, *common], [0, *common]]
