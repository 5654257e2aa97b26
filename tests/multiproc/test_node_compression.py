"""Gradients that travel between nodes in fewer bytes (COARSE_NODE_COMPRESSION); nodes as in test_nodes.py."""

from __future__ import annotations

import hashlib
import os
import shutil
import time

import numpy as np
import pytest
from test_nodes import allow_all, block, enter_namespace, namespaces, node_of
from test_optimizer import ADAM_STATES, LENGTHS, digest, means, take_steps
from test_sync import SMALL_SHARDS, floats, slot

from coarse.errors import OutOfDeviceMemoryError

LOSSY = ("bf16", "fp16", "int8")
SHAPES = [(2, 2), (1, 1, 1)]
STEPS = 5
NUM_ELEMENTS = 20_011


def gradient(rank, step):
    values = np.random.default_rng((rank, step)).standard_normal(NUM_ELEMENTS).astype(np.float32)
    return values * np.float32(0.01)


def mean(world_size, step):
    return np.mean([gradient(rank, step).astype(np.float64) for rank in range(world_size)], axis=0)


def average(group, values):
    """One step of a group of one tensor; a copy of its average."""
    slot(group, 0)[:] = values
    group.push(0)
    group.pull_all()
    return slot(group, 0).copy()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("compression", LOSSY)
def test_all_workers_get_the_same_bits_in_every_run_near_the_mean(job, compression, shape):
    world_size = sum(shape)

    def worker(me):
        settings = {"node_compression": compression, **SMALL_SHARDS}
        with me.join(node=node_of(me.rank, shape), **settings) as session:
            digests = []
            for run in range(2):
                group = session.register(f"run {run}", means(NUM_ELEMENTS), are_gradients=True)
                seen = hashlib.sha256()
                for step in range(STEPS):
                    found = average(group, gradient(me.rank, step))
                    np.testing.assert_allclose(found, mean(world_size, step), rtol=0, atol=1e-3)
                    assert not np.array_equal(found, mean(world_size, step).astype(np.float32))
                    seen.update(found.tobytes())
                digests.append(seen.hexdigest())
            return digests

    assert len({each for digests in job.run(world_size, worker) for each in digests}) == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_with_error_feedback_approach_a_constant_gradient(job, shape):
    world_size, steps = sum(shape), 200

    def worker(me):
        with me.join(node=node_of(me.rank, shape), node_compression="int8") as session:
            group = session.register("model", means(NUM_ELEMENTS), are_gradients=True)
            exact, total, worst = mean(world_size, 0), np.zeros(NUM_ELEMENTS), 0.0
            for _ in range(steps):
                found = average(group, gradient(me.rank, 0))
                worst = max(worst, float(np.abs(found - exact).max()))
                total += found
            largest = np.abs(exact).max()
            return worst / largest, np.abs(total / steps - exact).max() / largest

    for worst, of_mean in job.run(world_size, worker):
        assert worst > 2e-3, "single steps are off"
        assert of_mean < 1e-3


@pytest.mark.parametrize(("compression", "ratio"), [("bf16", 0.5), ("fp16", 0.5), ("int8", 0.26)])
def test_fewer_bytes_leave_a_node(job, compression, ratio):
    def worker(me):
        sent = {}
        for setting in ("none", compression):
            with me.join(store=setting, node=f"n{me.rank}", node_compression=setting) as session:
                group = session.register("model", means(1 << 20), are_gradients=True)
                before = session.metrics().total("coarse_node_sent_bytes_total")
                for _ in range(STEPS):
                    group.push(0)
                    group.pull_all()
                session.barrier()  # whose frames come after those of the steps
                sent[setting] = session.metrics().total("coarse_node_sent_bytes_total") - before
        return sent

    for sent in job.run(2, worker):
        assert sent["none"] == pytest.approx(STEPS * 4 << 20, rel=0.05)
        assert sent[compression] / sent["none"] == pytest.approx(ratio, abs=0.02)


@pytest.mark.parametrize("compression", LOSSY)
def test_all_else_stays_exact(job, compression):
    """Sums, means that are no gradients, other dtypes, arrays and broadcasts."""

    def worker(me):
        values = gradient(me.rank, 0)
        exact = (gradient(0, 0) + gradient(1, 0)) / np.float32(2)
        with me.join(node=f"n{me.rank}", node_compression=compression) as session:
            sums = session.register("sums", floats("a", NUM_ELEMENTS), are_gradients=True)
            assert np.array_equal(average(sums, values), exact * np.float32(2))
            other = session.register("means", means(NUM_ELEMENTS))
            assert np.array_equal(average(other, values), exact)
            wide = session.register("wide", means(NUM_ELEMENTS, dtype="float64"), are_gradients=True)
            assert np.array_equal(
                average(wide, values.astype(np.float64)),
                (gradient(0, 0).astype(np.float64) + gradient(1, 0).astype(np.float64)) / 2,
            )
            array = values.copy()
            session.all_reduce(array, op="mean")
            assert np.array_equal(array, exact)
            session.broadcast(array, root=1)
            assert np.array_equal(array, exact)

    job.run(2, worker)


def test_one_node_keeps_full_precision(job):
    def worker(me):
        with me.join(node_compression="int8") as session:
            group = session.register("model", means(NUM_ELEMENTS), are_gradients=True)
            found = average(group, gradient(me.rank, 0))
            assert np.array_equal(found, (gradient(0, 0) + gradient(1, 0)) / np.float32(2))
            return session.decisions()

    for decisions in job.run(2, worker):
        assert (
            "compression between nodes: none: COARSE_NODE_COMPRESSION=int8, but there is one node"
            in decisions
        )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("compression", LOSSY)
def test_an_optimizer_keeps_the_same_bits_on_every_node(job, compression, shape):
    def worker(me):
        settings = {"node_compression": compression, "shard_bytes": 64 << 10}
        with me.join(node=node_of(me.rank, shape), **settings) as session:
            group = session.register_parameters("model", means(*LENGTHS), state_names=ADAM_STATES)
            take_steps(group, me.rank)
            return digest(group), session.decisions()

    found = job.run(sum(shape), worker)
    assert len({bits for bits, _ in found}) == 1
    for _, decisions in found:
        line = (
            f"compression between nodes: float32 gradients as {compression}, set by COARSE_NODE_COMPRESSION"
        )
        assert line in decisions


@pytest.mark.parametrize("compression", LOSSY)
def test_nan_and_infinity_arrive_in_their_places(job, compression):
    def worker(me):
        with me.join(node=f"n{me.rank}", node_compression=compression) as session:
            group = session.register("model", means(NUM_ELEMENTS), are_gradients=True)
            for step in range(3):
                values, expected = gradient(me.rank, step), mean(2, step)
                if step == 1:
                    values[[5, 9_000]] = [np.inf, np.nan] if me.rank == 0 else 0.01
                    values[19_000] = -np.inf
                    expected[[5, 9_000, 19_000]] = [np.inf, np.nan, -np.inf]
                np.testing.assert_allclose(average(group, values), expected, rtol=0, atol=1e-3)

    job.run(2, worker)


def test_unlike_settings_of_nodes_are_refused_with_both(job):
    def worker(me):
        me.join(node=f"n{me.rank}", node_compression=("int8", "bf16")[me.rank])

    for outcome in job.outcomes(2, worker):
        assert outcome.error == "RendezvousError"
        assert "COARSE_NODE_COMPRESSION is" in outcome.message
        assert "int8 on node 0 (worker(s) 0)" in outcome.message
        assert "bf16 on node 1 (worker(s) 1)" in outcome.message
        assert "set it alike on all nodes" in outcome.message


@pytest.mark.parametrize("compression", ["bf16", "int8"])
def test_memory_for_rounding_errors_counts(job, monkeypatch, compression):
    """A gradient of 4 MB, a partial of half of it from the other node, and with int8 4 MB of rounding errors."""
    small_memory = job.directory / "small"
    small_memory.mkdir()
    (small_memory / "sitecustomize.py").write_text(
        "from coarse.proxy.memory import HostMemory\nHostMemory.available_bytes = lambda self: 8_000_000\n"
    )
    paths = [str(small_memory), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))  # for the memory devices

    def worker(me):
        with me.join(node=f"n{me.rank}", node_compression=compression) as session:
            if compression == "bf16":
                session.register("model", means(1_000_000), are_gradients=True)
                return
            with pytest.raises(OutOfDeviceMemoryError, match=r"need 9\.5 MiB of device memory"):
                session.register("model", means(1_000_000), are_gradients=True)
            session.barrier()

    job.run(2, worker)


def test_a_connection_that_breaks_changes_no_bits(job, capfd):
    """Frames that are sent again are not compressed again: the rounding errors would be added twice."""
    if shutil.which("iptables") is None:
        pytest.skip("`iptables` is missing; install iptables")

    def steps(session, name, rank):
        group = session.register(name, means(500_000), are_gradients=True)
        seen = hashlib.sha256()
        for step in range(100):
            numbers = np.random.default_rng((rank, step))
            seen.update(average(group, numbers.standard_normal(500_000).astype(np.float32)).tobytes())
        return seen.hexdigest()

    with namespaces() as names:

        def worker(me):
            enter_namespace(names[me.rank])
            os.environ["MASTER_ADDR"] = "10.77.0.1"
            with me.join(node=f"n{me.rank}", node_compression="int8") as session:
                undisturbed = steps(session, "undisturbed", me.rank)
                session.barrier()
                me.tell()
                return undisturbed, steps(session, "disturbed", me.rank)

        workers = job.start(2, worker)
        for running in workers:
            running.hear()
        block(names[0], "-i", "cable", "-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset")
        time.sleep(0.3)
        allow_all(names[0])
        outcomes = [running.finish() for running in workers]
    assert [outcome.details for outcome in outcomes] == [""] * 2
    assert len({each for outcome in outcomes for each in outcome.value}) == 1
    assert "the connection broke: Connection reset by peer" in capfd.readouterr().err
