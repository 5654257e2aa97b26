"""Replanning while a job trains: dual synchronisation after the first steps, routes when links change."""

from __future__ import annotations

import hashlib
import itertools
import operator
import time

import numpy as np
import pytest
from attempts import best_of
from test_sync import floats, sync

from coarse.bench.replay.trace import compute_until
from coarse.profiler.profile import BOTH, ContradictoryFiguresError, PathId
from coarse.tuning import replanner
from coarse.tuning.first_steps import TIMED_STEPS
from coarse.tuning.measure import time_paths

KIB = 1 << 10
LAYERS = floats([f"layer{i}" for i in range(6)], 160 * KIB // 4, op="mean")
LARGE = floats(["first", "last"], 1024 * KIB // 4, op="mean")
P3 = {"machine": "aws-p3", "time_dilation": 4.0, "memory_devices": 2, "shard_bytes": 64 * KIB}
LEARNED = 1 + TIMED_STEPS
REMOTE_OF_W0 = "gpu 0 = gpu 3"


def train(session, steps, *, layers=LAYERS, compute_s=0.0, after_step=None):
    """Pushes the layers from last to first, as a backward pass does; returns a digest of all results."""
    noise = np.random.default_rng(session.identity.rank)
    group = session.register("gradients", layers)
    digest = hashlib.sha256()

    def backward(spec, ready):
        gradient = noise.standard_normal(spec.num_elements, dtype=np.float32)
        compute_until(ready)
        return gradient

    for step in range(steps):
        begin = time.perf_counter()
        moments = iter([begin + compute_s * (number + 1) / len(layers) for number in range(len(layers))])
        sync(
            group, range(len(layers) - 1, -1, -1), lambda spec, moments=moments: backward(spec, next(moments))
        )
        for index in range(len(layers)):
            digest.update(group.buffer(index))
        if after_step is not None:
            after_step(step)
    return digest.hexdigest()


def between_workers(session):
    return [each for each in session.emulation.transfers() if max(each.source, each.target) < 2]


@pytest.mark.parametrize(("dual_sync", "num_offloaded"), [("off", 12), ("400KiB", 5), ("0", 0), ("1GiB", 12)])
def test_the_last_shards_go_by_direct_allreduce(job, dual_sync, num_offloaded):
    def worker(me):
        settings = {**P3, "dual_sync": dual_sync, "own_path": "ring", "transfer_log": 10_000}
        with me.join(replan_steps=0, **settings) as session:
            digest = train(session, LEARNED + 2)
            session.barrier()
            transfers = between_workers(session)
            decided = [line for line in session.decisions() if line.startswith("dual synchronisation")]
            metrics, own = session.metrics(), {"worker": str(me.rank)}
            replans = metrics.total("coarse_replans_total", **own)
            by_workers = metrics.total("coarse_pushed_shards_total", **own, algorithm="workers")
            session.barrier()
        return digest, len(transfers), decided, replans, by_workers

    outcomes = job.run(2, worker)
    assert len({digest for digest, *_ in outcomes}) == 1
    for _, num_transfers, decided, replans, by_workers in outcomes:
        assert replans == (num_offloaded < 12)
        assert by_workers == 2 * (12 - num_offloaded), "in the two steps after learning"
        # A shard circulates in two iterations; both workers send in each.
        shards = 12 - num_offloaded
        assert num_transfers == 2 * shards * 2 * 2
        assert len(decided) == (dual_sync != "off")
        assert all(f": {num_offloaded} of 12 shards" in line for line in decided)


def test_dual_synchronisation_changes_no_bit(job):
    def worker(me, dual_sync):
        with me.join(f"dual {dual_sync}", dual_sync=dual_sync, replan_steps=0, **P3) as session:
            return train(session, LEARNED + 2)

    digests = {
        digest
        for dual_sync in ("off", "auto", "480KiB", "0")
        for digest in job.run(3, lambda me, dual_sync=dual_sync: worker(me, dual_sync))
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("own_path", "num_transfers"),
    [
        ("ring", 4 * 3),
        ("all-gather", 3 * 2),
        ("all-to-all", 2 * 3 * 2),
        ("two-way-ring", 4 * 3 * 2),
        ("tree", 2 * 2 * 2),
    ],
)
def test_the_way_of_direct_allreduce_changes_transfers_and_no_bit(job, own_path, num_transfers):
    def worker(me, how):
        settings = {**P3, "memory_devices": 3, "dual_sync": "0", "own_path": how, "transfer_log": 10_000}
        with me.join(how, replan_steps=0, **settings) as session:
            digest = train(session, LEARNED + 1)
            session.barrier()
            transfers = [each for each in session.emulation.transfers() if max(each.source, each.target) < 3]
            decided = [line for line in session.decisions() if line.startswith("direct all-reduce:")]
            session.barrier()
        return digest, len(transfers), decided

    planned = job.run(3, lambda me: worker(me, "auto"))
    asked = job.run(3, lambda me: worker(me, own_path))
    assert {digest for digest, _, _ in planned} == {digest for digest, _, _ in asked}
    for _, transfers, decided in asked:
        assert (
            transfers == 6 * 2 * num_transfers
        )  # two shards of each of six layers, in the single step after learning
        assert decided == [f"direct all-reduce: 12 by {own_path}"]


def test_where_offloading_does_not_pay_the_workers_do_it_all(job):
    """COARSE paper, sections V-C and V-E: T4."""

    def worker(me):
        # Backward time per byte as for BERT-large on a T4: 0.16 ms for 1 MB.
        settings = {**P3, "machine": "aws-g4dn", "memory_devices": 4, "time_dilation": 1000.0}
        settings["shard_bytes"] = 256 * KIB  # whole layers
        with me.join(replan_steps=0, **settings) as session:
            train(session, LEARNED, compute_s=1000 * 0.2e-3)
            return [line for line in session.decisions() if line.startswith("dual synchronisation")]

    for (decided,) in job.run(4, worker):
        assert ": 0 of 6 shards" in decided
        assert "offloading does not pay" in decided


def test_a_link_that_degrades_in_mid_training_is_left_and_taken_again(job):
    every = 3
    degraded_after, restored_after = LEARNED + every, LEARNED + 4 * every
    steps = restored_after + 3 * every + 1

    def worker(me, name, change):
        settings = {**P3, "shard_bytes": 1024 * KIB}
        with me.join(name, dual_sync="off", replan_steps=every, **settings) as session:

            def after_step(step):
                if me.rank == 0 and change and step in (degraded_after, restored_after):
                    session.emulation.set_bandwidth(REMOTE_OF_W0, 0.5 if step == degraded_after else 16.0)
                session.barrier()

            digest = train(session, steps, layers=LARGE, after_step=after_step)
            moves = [line for line in session.decisions() if line.startswith("step")]
            return digest, moves, session.routing.bw_proxy

    quiet = job.run(2, lambda me: worker(me, "quiet", False))

    def check(attempt):
        changed = job.run(2, lambda me: worker(me, f"changed {attempt}", True))
        assert {digest for digest, _, _ in changed} == {digest for digest, _, _ in quiet}, "numbers stay"
        assert changed[0][1] == changed[1][1], "every worker decides the same at the same step"
        assert [bw_proxy for _, _, bw_proxy in changed] == [1, 0], "as before"
        left, *_, taken = moves = changed[0][1]
        assert len(moves) == 2
        assert "w0 goes to md0 instead of" in left
        assert "md1" in taken
        when = [int(line.split(":")[0].removeprefix("step ")) for line in moves]
        assert degraded_after < when[0] <= degraded_after + 1 + every
        assert restored_after < when[1] <= restored_after + 1 + every

    best_of(check)


def test_real_traffic_alone_shows_that_its_link_degrades(job):
    """No probe uses the active route after the first measurement."""
    every = 3
    degraded_after = LEARNED + every
    in_use = PathId(kind=BOTH, source=0, target=1)

    def worker(me, name):
        looks = []

        def without_probes_in_use(session, probes, cells):
            if looks:
                cells = {**cells, in_use: []}
            looks.append(cells[in_use])
            return time_paths(session, probes, cells)

        replanner.time_paths = without_probes_in_use
        settings = {**P3, "shard_bytes": 1024 * KIB}
        with me.join(name, dual_sync="off", replan_steps=every, **settings) as session:

            def after_step(step):
                if me.rank == 0 and step == degraded_after:
                    session.emulation.set_bandwidth(REMOTE_OF_W0, 0.5)
                session.barrier()

            assert session.routing.bw_proxy == 1 - me.rank
            train(session, degraded_after + 1 + every, layers=LARGE, after_step=after_step)
            return looks, [line for line in session.decisions() if line.startswith("step")]

    def check(attempt):
        for looks, moves in job.run(2, lambda me: worker(me, f"traffic {attempt}")):
            assert len(looks[0]) == 3, "nothing was known of traffic"
            assert not any(looks[1:])
            assert [line.split(" instead")[0] for line in moves] == [
                f"step {degraded_after + every}: w0 goes to md0"
            ]
            assert "timings from traffic" in moves[0]

    best_of(check)


def test_a_route_in_use_is_timed_by_its_traffic_and_keeps_its_curve(job):
    def check(attempt):
        def worker(me):
            cells = []
            known = []

            def note_probes(session, probes, asked):
                cells.append([(path.source == path.target, sizes) for path, sizes in asked.items()])
                return time_paths(session, probes, asked)

            replanner.time_paths = note_probes
            settings = {**P3, "shard_bytes": 1024 * KIB}
            with me.join(str(attempt), dual_sync="off", replan_steps=2, **settings) as session:

                def after_step(step):
                    (own,) = session._plan._steps._replanners
                    known.append(own._profile.curves[PathId(kind=BOTH, source=me.rank, target=1 - me.rank)])

                train(session, LEARNED + 7, layers=LARGE, after_step=after_step)
                return cells, [curve.time_us(1024 * KIB) for curve in known[LEARNED:]]

        for cells, times_us in job.run(2, worker):
            first, *others = cells
            assert all(sizes == [4 * KIB, 1024 * KIB, 4096 * KIB] for _, sizes in first)
            assert len(others) == 3
            for is_idle, sizes in (each for asked in others for each in asked):
                assert sizes == ([4 * KIB, 1024 * KIB, 4096 * KIB] if is_idle else [4 * KIB])
            assert times_us == pytest.approx([times_us[0]] * len(times_us), rel=1e-6), (
                "whatever the host is busy with"
            )

    best_of(check)


def test_links_that_stay_as_they_are_leave_routes_alone(job):
    def check(attempt):
        def worker(me):
            settings = {**P3, "shard_bytes": 1024 * KIB}
            with me.join(str(attempt), dual_sync="off", replan_steps=1, **settings) as session:
                train(session, LEARNED + 6, layers=LARGE)
                return [line for line in session.decisions() if line.startswith("step")]

        assert job.run(2, worker) == [[], []]

    best_of(check)


def test_times_that_contradict_each_other_change_nothing(job, monkeypatch):
    """As can happen on a busy machine."""
    looks = []

    def contradict(profile, times):
        looks.append(times)
        raise ContradictoryFiguresError("both w0-md0: more at once than alone")

    monkeypatch.setattr(replanner, "refresh_profile", contradict)

    def worker(me):
        with me.join(dual_sync="off", replan_steps=2, **P3) as session:
            train(session, LEARNED + 6)
            return len(looks), [line for line in session.decisions() if line.startswith("step")]

    first, second = job.run(2, worker)
    assert first == second
    assert first[0] > 1
    assert first[1] == []


def test_a_link_that_loses_a_little_from_look_to_look_is_left_at_last(job, monkeypatch):
    def worker(me):
        with me.join(dual_sync="off", replan_steps=1, **{**P3, "shard_bytes": 1024 * KIB}) as session:
            factors = itertools.accumulate(itertools.repeat(1.08), operator.mul)
            known = []

            def slower_each_time(session, probes, cells):
                (watching,) = session._plan._steps._replanners
                known.append(watching._profile)
                used = PathId(kind=BOTH, source=0, target=watching._tables[0].bw_proxy)
                factor = next(factors)
                return {
                    path: {
                        size: known[0].curves[path].time_us(size) * (factor if path == used else 1.0)
                        for size in sizes
                    }
                    for path, sizes in cells.items()
                }

            monkeypatch.setattr(replanner, "time_paths", slower_each_time)
            monkeypatch.setattr(replanner, "times_of_traffic", lambda *_, **__: {})
            train(session, LEARNED + 30, layers=LARGE)
            return [line for line in session.decisions() if line.startswith("step") and "w0 goes" in line]

    first, second = job.run(2, worker)
    assert first == second
    assert len(first) >= 1


def test_looking_at_links_costs_a_hundredth_of_the_time(job):
    def worker(me):
        with me.join(dual_sync="off", replan_steps=-1, **P3) as session:
            begin = time.monotonic()
            train(session, LEARNED)
            step_s = (time.monotonic() - begin) / LEARNED
            (replanner,) = session._plan._steps._replanners
            steps_apart = replanner._next_look - LEARNED
            return steps_apart, step_s

    (apart, step_s), (other, _) = job.run(2, worker)
    assert apart == other, "all look at the same step"
    assert 10 <= apart <= 10_000
    assert step_s > 0


def test_a_size_that_cannot_be_is_refused(job):
    def worker(me):
        with pytest.raises(ValueError, match="COARSE_DUAL_SYNC"):
            me.join(dual_sync="much", **P3)

    job.run(1, worker)
