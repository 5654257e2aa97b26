"""Dual synchronisation in host memory: the direct all-reduce gives the same bits as the memory devices."""

from __future__ import annotations

import hashlib
import os
import re
import signal

import numpy as np
import pytest
from test_replanning import LEARNED, train
from test_sync import floats, slot, sync

from coarse.errors import RendezvousError, WorkerLostError
from coarse.machine.host import read_host
from coarse.machine.partition_table import PartitionTable
from coarse.profiler.curve import Curve, CurvePoint
from coarse.profiler.profile import MEASURED, Profile, host_key, profile_key
from coarse.schema import TensorSpec

KIB = 1 << 10
LAYERS = floats([f"layer{i}" for i in range(6)], 160 * KIB // 4, op="mean")
TABLE = PartitionTable.even(num_workers=2, num_devices=2)
SHARDS = {"memory_devices": 2, "shard_bytes": 64 * KIB, "profile": "off"}


def profile_of_host(gbytes_per_s, *, paths_share_links):
    """A profile with equal paths."""
    key = profile_key(TABLE, host_key(read_host()))
    points = tuple(
        CurvePoint(nbytes=size, time_us=1 + size / gbytes_per_s / 1e3)
        for size in (4 * KIB, 64 * KIB, 1024 * KIB)
    )
    return Profile(
        kind=MEASURED,
        key=key,
        time_budget_s=1.0,
        paths_share_links=paths_share_links,
        curves={path: Curve(points=points) for path in key.paths()},
    )


def decided(session):
    return [line for line in session.decisions() if line.startswith("dual synchronisation")]


@pytest.mark.parametrize(("dual_sync", "num_offloaded"), [("400KiB", 5), ("0", 0), ("1GiB", 12)])
def test_a_size_is_what_goes_to_the_memory_devices(job, dual_sync, num_offloaded):
    def worker(me, how):
        with me.join(how, dual_sync=how, **SHARDS) as session:
            digest = train(session, LEARNED + 3)
            return (
                digest,
                decided(session),
                [line for line in session.decisions() if line.startswith("direct all-reduce:")],
            )

    devices_alone = {digest for digest, _, _ in job.run(2, lambda me: worker(me, "off"))}
    outcomes = job.run(2, lambda me: worker(me, dual_sync))
    assert {digest for digest, _, _ in outcomes} == devices_alone, "numbers stay"
    for _, split, ways in outcomes:
        assert f": {num_offloaded} of 12 shards" in split[0]
        assert ways == (
            [f"direct all-reduce: {12 - num_offloaded} by all-to-all"] if num_offloaded < 12 else []
        )


@pytest.mark.parametrize("algorithm", ["auto", "gather", "direct", "exchange"])
@pytest.mark.parametrize("num_workers", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3)), 4])
def test_every_kind_of_tensor_has_the_bits_of_memory_devices(job, num_workers, algorithm):
    specs = [
        TensorSpec(name=f"{dtype} {op} {length}", dtype=dtype, num_elements=length, op=op)
        for dtype in ("float32", "float64", "float16")
        for op in ("sum", "mean", "max")
        for length in (5, 40_011)
    ]

    def worker(me, how):
        settings = {"memory_devices": 2, "shard_bytes": 16 * KIB, "gather_bytes": KIB, "profile": "off"}
        with me.join(f"{algorithm} {how}", dual_sync=how, algorithm=algorithm, **settings) as session:
            group = session.register("gradients", specs)
            noise, digest = np.random.default_rng(me.rank), hashlib.sha256()
            for _ in range(LEARNED + 3):
                sync(group, range(len(specs)), lambda spec: noise.standard_normal(spec.num_elements))
                for index in range(len(specs)):
                    digest.update(group.buffer(index))
            return digest.hexdigest()

    digests = {
        digest for how in ("off", "0") for digest in job.run(num_workers, lambda me, how=how: worker(me, how))
    }
    assert len(digests) == 1


def test_workers_without_a_gradient_and_workers_that_have_joined(job):
    """Memory devices reduce tensors with absent contributions; a joined worker skips the direct all-reduce."""

    def worker(me):
        with me.join(dual_sync="0", **SHARDS) as session:
            group = session.register("gradients", floats(["a", "b"], 1000, op="mean"))
            for _ in range(LEARNED):
                sync(group, range(2), lambda spec: 2.0**me.rank)
            slot(group, 0)[:], slot(group, 1)[:] = 2.0**me.rank, 2.0**me.rank
            group.push(0)
            group.push(1, present=me.rank == 0)
            contributors = group.pull_all()
            means = [float(slot(group, index)[0]) for index in range(2)]
            slot(group, 0)[:], slot(group, 1)[:] = 2.0**me.rank, 2.0**me.rank
            group.push(0, joined=me.rank == 1)
            group.push(1, joined=me.rank == 1)
            group.pull_all()
            return contributors, means, [float(slot(group, index)[0]) for index in range(2)]

    assert job.run(2, worker) == [[[2, 1], [1.5, 0.5], [1.0, 1.0]]] * 2


def test_groups_may_end_their_steps_in_any_order(job):
    def worker(me):
        with me.join(dual_sync="0", **SHARDS) as session:
            groups = [session.register(name, floats(["t"], 50_000, op="sum")) for name in ("one", "other")]
            for group in groups:
                for _ in range(LEARNED):
                    sync(group, [0], lambda spec: 1.0)
            for step in range(20):
                for number, group in enumerate(groups):
                    slot(group, 0)[:] = 2.0**me.rank * (1 + number + step)
                    group.push(0)
                for number, group in enumerate(groups):
                    group.pull_all()
                    assert (slot(group, 0) == 3.0 * (1 + number + step)).all()

    job.run(2, worker)


def test_tensors_that_are_pulled_one_by_one_stay_with_the_memory_devices(job):
    def worker(me):
        with me.join(dual_sync="0", **SHARDS) as session:
            group = session.register("gradients", LAYERS)
            for _ in range(LEARNED + 1):
                for index in range(6):
                    group.push(index)
                group.pull(0)
                group.pull_all()
            return decided(session)

    for (why,) in job.run(2, worker):
        assert "pulled one by one" in why


def test_a_worker_that_dies_in_direct_allreduce_ends_the_session(job):
    def worker(me):
        with me.join(dual_sync="0", **SHARDS) as session:
            group = session.register("gradients", LAYERS)
            for _ in range(LEARNED):
                sync(group, range(6), lambda spec: 1.0)
            for index in range(6):
                group.push(index)
            if me.rank == 1:  # everything is pushed, but this worker's piece never arrives
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(WorkerLostError, match="worker 1"):
                group.pull_all()

    survivor, victim = job.outcomes(2, worker)
    assert survivor.error == "", survivor
    assert victim.exit_code == -signal.SIGKILL


@pytest.mark.parametrize(
    ("gbytes_per_s", "share_links", "expected"),
    [
        (1e3, True, r": 12 of 12 shards.* keep up with everything"),
        pytest.param(0.02, True, r": [0-8] of 12 shards.* both finish together", marks=pytest.mark.slow),
        (0.02, False, r": [5-8] of 12 shards.* both finish together"),
    ],
)
def test_auto_goes_by_the_profile(job, tmp_path, gbytes_per_s, share_links, expected):
    """On a host whose links are far faster than the backward pass, and on slower ones."""
    profile_of_host(gbytes_per_s, paths_share_links=share_links).save(tmp_path / "profile.json")

    def worker(me, how):
        settings = {**SHARDS, "profile": str(tmp_path / "profile.json"), "dual_sync": how}
        with me.join(how, **settings) as session:
            return train(session, LEARNED + 2, compute_s=0.01), decided(session)

    devices_alone = {digest for digest, _ in job.run(2, lambda me: worker(me, "off"))}
    outcomes = job.run(2, lambda me: worker(me, "auto"))
    assert {digest for digest, _ in outcomes} == devices_alone
    assert outcomes[0][1] == outcomes[1][1], "all decide the same"
    assert re.search(expected, outcomes[0][1][0]), outcomes[0][1]


def test_without_a_profile_there_is_no_estimate_and_it_says_so(job):
    def worker(me):
        with me.join(dual_sync="auto", **SHARDS) as session:
            train(session, LEARNED + 1)
            return decided(session)

    for (why,) in job.run(2, worker):
        assert "no profile is available" in why
        assert "coarse profile" in why


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "ring", "dual_sync": "64KiB"}, "ring"),
        ({"own_path": "ring", "dual_sync": "64KiB"}, "COARSE_OWN_PATH"),
    ],
)
def test_what_it_cannot_do_is_refused_at_the_start(job, settings, message):
    def worker(me):
        with pytest.raises((RendezvousError, ValueError), match=message):
            me.join(**{**SHARDS, **settings})

    job.run(2, worker)
