"""A job over several nodes: here, workers of one machine that COARSE_NODE tells apart, over loopback connections."""

from __future__ import annotations

import random

import numpy as np
import pytest
from test_sync import EVERY_KIND, SMALL_SHARDS, contribution, expected, floats, slot, sync

SHAPES = [  # workers of each node, memory devices of each, sync cores
    ((2, 2), 2, 1),
    ((2, 2), 1, 2),
    ((1, 1, 1), 1, 1),
    ((1, 1, 1), 2, 1),
    ((1, 3), 0, 1),
]


def node_of(rank, shape):
    """The name of a worker's node; `shape` is how many workers each has."""
    return next(f"n{node}" for node in range(len(shape)) if rank < sum(shape[: node + 1]))


@pytest.mark.parametrize("algorithm", ["auto", "gather", "direct"])
@pytest.mark.parametrize(("shape", "memory_devices", "sync_cores"), SHAPES)
def test_every_dtype_op_and_length(job, algorithm, shape, memory_devices, sync_cores):
    world_size = sum(shape)

    def worker(me):
        layout = {"memory_devices": memory_devices, "sync_cores": sync_cores, "algorithm": algorithm}
        with me.join(node=node_of(me.rank, shape), **layout, **SMALL_SHARDS) as session:
            group = session.register("every kind", EVERY_KIND)
            for step in range(3):
                order = random.Random(f"{me.rank} {step}").sample(range(len(EVERY_KIND)), len(EVERY_KIND))
                counts = sync(group, order, lambda spec: contribution(spec, me.rank, world_size))
                assert counts == [world_size] * len(EVERY_KIND)
                for index, spec in enumerate(EVERY_KIND):
                    assert np.array_equal(slot(group, index), expected(spec, world_size)), (step, spec)

    job.run(world_size, worker)


# ---- contributions that are not there, buffers that are not registered ----


@pytest.mark.parametrize("shape", [(2, 2), (1, 1, 1)])
@pytest.mark.parametrize(("op", "result"), [("sum", 1 + 4), ("mean", (1 + 4) / 3), ("max", 4)])
def test_absent_and_joined_contributions(job, shape, op, result):
    def worker(me):
        with me.join(node=node_of(me.rank, shape), **SMALL_SHARDS) as session:
            group = session.register("absent", floats(["small", "large"], 10_000, op=op))
            for index in range(2):
                slot(group, index)[:] = 2**me.rank
                group.push(index, present=me.rank != 1, joined=me.rank == 3)
            assert group.pull_all() == [2, 2]
            for index in range(2):
                assert (slot(group, index) == np.float32(result)).all()
                group.push(index, present=False)
            assert group.pull_all() == [0, 0]
            assert (slot(group, 0) == np.float32(result)).all()

    job.run(sum(shape), worker)


@pytest.mark.parametrize("shape", [(2, 2), (1, 1, 1)])
def test_all_reduce_broadcast_and_barrier_of_arrays(job, shape):
    world_size = sum(shape)

    def worker(me):
        with me.join(node=node_of(me.rank, shape)) as session:
            for num_elements in (1, 1_001, (5 << 20) // 4):
                position = np.arange(num_elements) % 1000
                array = (position * 2**me.rank).astype(np.int64)
                session.all_reduce(array)
                assert np.array_equal(array, position * (2**world_size - 1))
                for root in range(world_size):
                    array = (position * 2.0**me.rank).astype(np.float32)
                    session.broadcast(array, root=root)
                    assert np.array_equal(array, position * 2.0**root)
                session.barrier()

    job.run(world_size, worker)
