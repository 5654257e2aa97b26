"""A pull returns the reduction of the pushed tensors, for every dtype, op, algorithm and shape of the job.

Workers contribute `2**rank`, so a sum identifies its contributors.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from coarse.errors import CoarseError, SchemaMismatchError
from coarse.schema import ITEM_BYTES, OPS, TensorSpec

INTEGERS = ("int32", "int64", "uint8")
LENGTHS = (1, 63, 4097, 30_011)
SMALL_SHARDS = {"shard_bytes": 16 << 10, "gather_bytes": 1024}
EVERY_KIND = [
    TensorSpec(name=f"{dtype} {op} {length}", dtype=dtype, num_elements=length, op=op)
    for dtype in ITEM_BYTES
    for op in OPS
    if not (op == "mean" and dtype in INTEGERS)
    for length in LENGTHS
]

SHAPES = [  # workers, memory devices, sync cores
    (2, 1, 1),
    pytest.param(2, 2, 1, marks=pytest.mark.slow),
    (2, 2, 2),
    pytest.param(2, 3, 1, marks=pytest.mark.slow),
    pytest.param(3, 1, 2, marks=pytest.mark.slow),
    pytest.param(3, 2, 1, marks=pytest.mark.slow),
    (3, 4, 1),
    (4, 2, 1),
    pytest.param(4, 4, 2, marks=pytest.mark.slow),
]
ALGORITHMS = ("auto", "gather", "direct", "ring", "exchange")


def floats(names, num_elements=1000, op="sum"):
    return [TensorSpec(name=name, dtype="float32", num_elements=num_elements, op=op) for name in names]


def encode(values, dtype):
    """`values` in `dtype`; bfloat16, which numpy lacks, as the upper halves of float32 values."""
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def slot(group, index):
    """A registered tensor as an array that shares its memory."""
    dtype = group.specs[index].dtype
    return np.frombuffer(group.buffer(index), dtype="uint16" if dtype == "bfloat16" else dtype)


def texture(length):
    """Aperiodic ones and twos, which reveal misplaced shards; their sums are exact in 8 bits."""
    return 1 + (np.arange(length, dtype=np.uint64) * 2654435761 >> 13) % 2


def contribution(spec, rank, world_size):
    return encode(texture(spec.num_elements) * world_size * 2**rank, spec.dtype)


def expected(spec, world_size):
    everyone = 2**world_size - 1
    scale = {"sum": world_size * everyone, "mean": everyone, "max": world_size * 2 ** (world_size - 1)}
    return encode(texture(spec.num_elements) * scale[spec.op], spec.dtype)


def sync(group, order, values):
    """Pushes tensors in `order`, pulls them all; returns the number of contributors of each."""
    for index in order:
        slot(group, index)[:] = values(group.specs[index])
        group.push(index)
    return group.pull_all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("world_size", "memory_devices", "sync_cores"), SHAPES)
def test_every_dtype_op_and_length(job, algorithm, world_size, memory_devices, sync_cores):
    def worker(me):
        layout = {"memory_devices": memory_devices, "sync_cores": sync_cores, "algorithm": algorithm}
        with me.join(**layout, **SMALL_SHARDS) as session:
            group = session.register("every kind", EVERY_KIND)
            for step in range(3):
                order = random.Random(f"{me.rank} {step}").sample(range(len(EVERY_KIND)), len(EVERY_KIND))
                counts = sync(group, order, lambda spec: contribution(spec, me.rank, world_size))
                assert counts == [world_size] * len(EVERY_KIND)
                for index, spec in enumerate(EVERY_KIND):
                    assert np.array_equal(slot(group, index), expected(spec, world_size)), (step, spec)

    job.run(world_size, worker)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_results_are_bitwise_equal_on_all_workers_and_in_every_run(job, algorithm):
    def worker(me, run):
        specs = floats(["small", "large"], 100_003, op="mean")
        noise = np.random.default_rng(me.rank)
        with me.join(f"run {run}", memory_devices=2, algorithm=algorithm, **SMALL_SHARDS) as session:
            group = session.register("noise", specs)
            digest = hashlib.sha256()
            for _ in range(3):
                sync(group, (0, 1), lambda spec: noise.standard_normal(spec.num_elements, dtype=np.float32))
                digest.update(group.buffer(0))
                digest.update(group.buffer(1))
        return digest.hexdigest()

    digests = {digest for run in range(2) for digest in job.run(3, lambda me, run=run: worker(me, run))}
    assert len(digests) == 1


@pytest.mark.parametrize("memory_devices", [1, 3])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_no_order_of_pushes_deadlocks(job, seed, memory_devices):
    num_tensors, num_rounds = 100, 20

    def worker(me):
        shuffle = random.Random(f"{seed} {me.rank}")
        specs = [
            TensorSpec(name=str(i), dtype="float32", num_elements=1 + 97 * i, op="sum")
            for i in range(num_tensors)
        ]
        with me.join(memory_devices=memory_devices, **SMALL_SHARDS) as session:
            group = session.register("many", specs)
            for _ in range(num_rounds):
                for index in shuffle.sample(range(num_tensors), num_tensors):
                    slot(group, index)[:] = 2**me.rank
                    group.push(index)
                for index in shuffle.sample(range(num_tensors), num_tensors):
                    assert group.pull(index) == 3
                    assert (slot(group, index) == 7).all()

    job.run(3, worker)


@pytest.mark.parametrize(("scheduling", "deadlocks"), [("fcfs", True), ("queues", False)])
def test_opposite_orders_deadlock_first_come_first_serve_but_not_queues(job, scheduling, deadlocks):
    """COARSE paper, Fig 10: each memory device waits for the tensor that the other one delays."""

    def worker(me):
        order = (0, 1) if me.rank == 0 else (1, 0)
        with me.join(memory_devices=2, scheduling=scheduling, timeout_s=3.0) as session:
            group = session.register("figure 10", floats("AB"))
            for index in order:
                group.push(index)
            try:
                group.pull(order[0])
            finally:
                leave_together(me)

    outcomes = together(job, 2, worker)
    if deadlocks:
        assert [outcome.error for outcome in outcomes] == ["SyncTimeoutError"] * 2
        assert "'A' of figure 10 (not pushed by worker(s) 1)" in outcomes[0].message
        assert "'B' of figure 10 (not pushed by worker(s) 0)" in outcomes[1].message
    else:
        assert [outcome.error for outcome in outcomes] == ["", ""], outcomes


def leave_together(me):
    me.tell("done")
    me.hear()


def together(job, world_size, function):
    """Outcomes of workers that leave_together(), so that no departure disturbs another worker."""
    workers = job.start(world_size, function)
    for worker in workers:
        assert worker.hear() == "done"
    for worker in workers:
        worker.tell()
    return [worker.finish() for worker in workers]


# ---- absent contributions ----


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_absent_contribution_counts_as_zeros(job, algorithm):
    def worker(me):
        with me.join(memory_devices=2, algorithm=algorithm, **SMALL_SHARDS) as session:
            for op, result in (("sum", 1 + 4), ("mean", (1 + 4) / 3), ("max", 4)):
                group = session.register(op, floats(["small", "large"], 10_000, op=op))
                for index in range(2):
                    slot(group, index)[:] = 2**me.rank
                    group.push(index, present=me.rank != 1)
                assert group.pull_all() == [2, 2]
                for index in range(2):
                    assert (slot(group, index) == np.float32(result)).all(), op

    job.run(3, worker)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_worker_that_has_run_out_of_inputs_does_not_count_in_a_mean(job, algorithm):
    def worker(me):
        with me.join(memory_devices=3, algorithm=algorithm, **SMALL_SHARDS) as session:
            group = session.register("joined", floats(["gradient"], 10_000, op="mean"))
            for num_joined, result in ((1, (1 + 2) / 2), (2, 1.0)):
                slot(group, 0)[:] = 2**me.rank
                group.push(0, joined=me.rank >= 3 - num_joined)
                assert group.pull(0) == 3 - num_joined
                assert (slot(group, 0) == result).all()

    job.run(3, worker)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_without_any_contribution_slots_stay_as_they_are(job, algorithm):
    def worker(me):
        with me.join(memory_devices=2, algorithm=algorithm, **SMALL_SHARDS) as session:
            group = session.register("nobody", floats(["gradient"], 10_000, op="mean"))
            for flags in ({"present": False}, {"joined": True}):
                slot(group, 0)[:] = 2**me.rank
                group.push(0, **flags)
                assert group.pull(0) == 0
                assert (slot(group, 0) == 2**me.rank).all(), flags

    job.run(2, worker)


# ---- buffers that are not registered ----


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_reduce_and_broadcast_of_unregistered_arrays(job, world_size):
    def worker(me):
        with me.join() as session:
            for num_elements in (0, 1, 1_001, (10 << 20) // 4):
                position = np.arange(num_elements) % 1000
                for dtype in ("float32", "int64"):
                    array = (position * 2**me.rank).astype(dtype)
                    session.all_reduce(array)
                    assert np.array_equal(array, position * (2**world_size - 1))
                array = (position * 2.0**me.rank).astype(np.float64)
                session.all_reduce(array, op="max")
                assert np.array_equal(array, position * 2 ** (world_size - 1))
                for root in range(world_size):
                    array = (position * 2**me.rank).astype(np.int32)
                    session.broadcast(array, root=root)
                    assert np.array_equal(array, position * 2**root)

    job.run(world_size, worker)


def test_all_reduce_takes_every_dtype_and_shape(job):
    def worker(me):
        with me.join() as session:
            for dtype in ("float32", "float64", "float16", "int32", "int64", "uint8"):
                spec = TensorSpec(name="array", dtype=dtype, num_elements=3003, op="sum")
                array = contribution(spec, me.rank, 2).reshape(3, 7, 143)
                session.all_reduce(array)
                assert np.array_equal(array.ravel(), expected(spec, 2)), dtype

    job.run(2, worker)


def test_broadcast_takes_any_plain_dtype(job):
    def worker(me):
        found = []
        with me.join() as session:
            for dtype in ("bool", "complex64", "datetime64[s]", "S3", ">f4"):
                array = np.zeros(100, dtype=dtype)
                if me.rank == 1:
                    array[::3] = np.ones(34).astype(dtype)
                session.broadcast(array, root=1)
                found.append(array.tobytes().hex())
        return found

    of_root, of_other = job.run(2, worker)
    assert of_root == of_other
    assert all(int(each, 16) for each in of_root)


def test_workers_that_disagree_on_an_unregistered_array_are_told(job):
    def worker(me):
        with me.join() as session:
            try:
                session.all_reduce(np.ones(10 + me.rank, dtype=np.float32))
            finally:
                leave_together(me)

    for outcome in together(job, 2, worker):
        assert outcome.error == SchemaMismatchError.__name__
        assert "11 elements" in outcome.message
        assert "10 elements" in outcome.message


# ---- several groups or sessions ----


def test_groups_are_independent_of_each_other(job):
    def worker(me):
        with me.join(memory_devices=2, **SMALL_SHARDS) as session:
            groups = [session.register(f"group {i}", floats("xyz", 3000 + i)) for i in range(3)]
            for index in range(3):
                for group in groups:
                    slot(group, index)[:] = 2**me.rank * (1 + index)
                    group.push(index)
            for index in (2, 0, 1):
                for group in reversed(groups):
                    assert group.pull(index) == 2
                    assert (slot(group, index) == 3 * (1 + index)).all()
            groups[1].close()
            groups[1].close()
            groups.append(session.register("a later one", floats("x")))
            for group in (groups[0], groups[2], groups[3]):
                slot(group, 0)[:] = 2**me.rank
                group.push(0)
                assert group.pull_all()[0] == 2
                assert (slot(group, 0) == 3).all()

    job.run(2, worker)


def test_groups_of_more_shards_than_devices_can_tell_each_other_of_are_refused(job):
    def worker(me):
        settings = {"memory_devices": 2, "algorithm": "ring", "shard_bytes": 64, "gather_bytes": 0}
        many = floats([str(number) for number in range(9000)], 16)  # whole tensors do not grow
        with me.join(**settings) as session:
            first = session.register("first", many)
            with pytest.raises(CoarseError, match=r"its 9000 shards and 9000 of other registrations") as told:
                session.register("second", many)
            assert "COARSE_SHARD_BYTES" in str(told.value)
            first.close()
            again = session.register("second", many)
            slot(again, 0)[:] = 2**me.rank
            again.push(0)
            assert again.pull(0) == 2
            assert (slot(again, 0) == 3).all()

    job.run(2, worker)


def test_two_sessions_live_in_one_process(job):
    def worker(me):
        with me.join("one", memory_devices=1) as one, me.join("two", algorithm="ring") as two:
            groups = [one.register("tensors", floats("x")), two.register("tensors", floats("x"))]
            for group, scale in zip(groups, (1, 10), strict=True):
                slot(group, 0)[:] = scale * 2**me.rank
                group.push(0)
            for group, scale in zip(groups, (1, 10), strict=True):
                assert group.pull(0) == 2
                assert (slot(group, 0) == 3 * scale).all()
            one.close()
            array = np.full(5, 2**me.rank)
            two.all_reduce(array)
            assert array.tolist() == [3] * 5

    job.run(2, worker)


# ---- queues ----


def test_more_shards_than_a_queue_holds(job):
    """A queue holds 4096 descriptors; worker 1 starts to push after worker 0 has pushed everything."""
    num_elements = 10_000 * 16

    def worker(me):
        with me.join(memory_devices=2, shard_bytes=64, gather_bytes=0) as session:
            group = session.register("long", floats(["x"], num_elements))
            slot(group, 0)[:] = 2**me.rank * texture(num_elements)
            if me.rank == 1:
                me.hear()
            group.push(0)
            me.tell("pushed")
            assert group.pull(0) == 2
            assert np.array_equal(slot(group, 0), 3 * texture(num_elements))

    workers = job.start(2, worker)
    assert workers[0].hear() == "pushed"
    workers[1].tell()
    assert [worker.finish().details for worker in workers] == ["", ""]


def test_more_tensors_than_a_queue_holds(job):
    def worker(me):
        specs = floats([str(i) for i in range(5000)], 3)
        with me.join() as session:
            group = session.register("many", specs)
            assert sync(group, range(5000), lambda spec: 2**me.rank) == [2] * 5000
            assert all((slot(group, index) == 3).all() for index in range(5000))

    job.run(2, worker)


def test_a_push_is_not_held_back_for_ever_without_a_flush(job):
    def worker(me):
        with me.join() as session:
            group = session.register("tensors", floats("x"))
            slot(group, 0)[:] = 2**me.rank
            group.push(0)
            if me.rank == 0:
                me.tell("pushed")
                me.hear()
            group.pull(0)
            return float(slot(group, 0)[0])

    workers = job.start(2, worker)
    assert workers[0].hear() == "pushed"
    assert workers[1].finish().value == 3
    workers[0].tell()
    assert workers[0].finish().value == 3


def test_flush_may_be_called_at_any_time(job):
    def worker(me):
        with me.join() as session:
            group = session.register("tensors", floats("x"))
            group.flush()
            slot(group, 0)[:] = 2**me.rank
            group.push(0)
            group.flush()
            group.flush()
            assert group.pull(0) == 2

    job.run(2, worker)


# ---- sources and destinations ----


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_push_and_pull_copy_from_and_to_other_memory(job, algorithm):
    num_elements = 50_001

    def worker(me):
        with me.join(memory_devices=2, algorithm=algorithm, **SMALL_SHARDS) as session:
            group = session.register("copied", floats("xy", num_elements))
            source = (2.0**me.rank * texture(num_elements)).astype(np.float32)
            destination = np.zeros(num_elements + 2, dtype=np.float32)
            for index in (1, 0):
                group.push(index, source=source.ctypes.data)
                assert group.pull(index, destination=destination[1:].ctypes.data) == 2
                assert np.array_equal(destination[1:-1], 3 * texture(num_elements))
                assert destination[0] == destination[-1] == 0
                assert np.array_equal(slot(group, index), destination[1:-1])
            assert np.array_equal(source, 2**me.rank * texture(num_elements))

    job.run(2, worker)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nan_and_infinity_pass_through(job, algorithm):
    def worker(me):
        specs = [
            TensorSpec(name=dtype, dtype=dtype, num_elements=5000, op="mean")
            for dtype in ("float32", "float16", "float64")
        ]
        with me.join(memory_devices=2, algorithm=algorithm, **SMALL_SHARDS) as session:
            group = session.register("not finite", specs)
            for index, spec in enumerate(specs):
                values = slot(group, index)
                values[:] = 2**me.rank
                if me.rank == 1:
                    values[[0, 4998]] = np.nan, np.inf
                    values[4999] = -np.inf
                group.push(index)
                group.pull(index)
                assert np.isnan(values[0]), spec
                assert values[4998] == np.inf, spec
                assert values[4999] == -np.inf, spec
                assert (values[1:4998] == 1.5).all(), spec

    job.run(2, worker)


def test_a_broadcast_of_different_lengths_is_refused(job):
    def worker(me):
        with me.join(memory_devices=2) as session:
            array = np.ones(5 * (1 + me.rank))
            with pytest.raises(SchemaMismatchError, match="workers disagree on a buffer"):
                session.broadcast(array)

    job.run(2, worker)
