"""A session's life cycle: join, wrong use, close, fork; nothing is left behind."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from foreign_arrays import DlpackAlone
from harness import open_descriptors

from coarse.errors import CoarseError, ForkedSessionError, SessionClosedError
from coarse.profiler.routing import RoutingTable
from coarse.schema import TensorSpec


def floats(*lengths):
    return [TensorSpec(name=str(i), dtype="float32", num_elements=n, op="sum") for i, n in enumerate(lengths)]


def test_close_is_idempotent_and_final(job):
    def worker(me):
        session = me.join()
        group = session.register("tensors", floats(10, 20))
        values = np.frombuffer(group.buffer(1), dtype=np.float32)
        values[:] = 2**me.rank
        group.push(1)
        group.pull(1)
        session.close()
        session.close()
        for use in (
            lambda: session.register("more", floats(1)),
            lambda: session.all_reduce(np.ones(1)),
            lambda: session.broadcast(np.ones(1)),
            session.barrier,
            lambda: group.push(0),
            lambda: group.pull(0),
            group.pull_all,
            lambda: group.buffer(0),
        ):
            with pytest.raises(SessionClosedError, match=f"worker {me.rank}: the session is closed"):
                use()
        group.close()
        assert (values == 3).all(), "what refers to a slot keeps its memory"

    job.run(2, worker)


def test_a_closed_group_is_told_from_a_closed_session(job):
    def worker(me):
        with me.join() as session:
            group = session.register("weights", floats(10))
            values = np.frombuffer(group.buffer(0), dtype=np.float32)
            values[:] = 2**me.rank
            group.close()
            group.close()
            for use in (
                lambda: group.push(0),
                lambda: group.pull(0),
                group.pull_all,
                lambda: group.buffer(0),
            ):
                with pytest.raises(SessionClosedError, match="tensor group 'weights' is closed"):
                    use()
            assert (values == 2**me.rank).all()
            session.barrier()

    job.run(2, worker)


@pytest.mark.parametrize("world_size", [1, 2])
def test_wrong_calls_are_refused_and_change_nothing(job, world_size):
    """Also in a job of one worker, which has no memory devices."""

    def worker(me):
        frozen = np.ones(3)
        frozen.flags.writeable = False
        with me.join() as session:
            for wrong, match in (
                (lambda: session.register("none", []), "none: no tensor to register"),
                (
                    lambda: session.register("twins", [*floats(1), *floats(1)]),
                    "twins: two tensors share a name",
                ),
                (lambda: session.all_reduce(np.ones(3, dtype="complex64")), "an array of complex64"),
                (lambda: session.all_reduce(np.ones(3, dtype=">f4")), "an array of >f4"),
                (lambda: session.all_reduce(np.ones((4, 4))[:, 1]), "C-contiguous"),
                (lambda: session.all_reduce(frozen), "writable"),
                (
                    lambda: session.all_reduce(np.ones(3, dtype="int32"), op="mean"),
                    "mean of int32 is not exact",
                ),
                (lambda: session.all_reduce(np.ones(3), op="product"), "must be one of sum, mean, max"),
                (lambda: session.broadcast(np.ones((4, 4))[:, 1]), "C-contiguous"),
                (lambda: session.broadcast(frozen), "writable"),
                (lambda: session.broadcast(np.ones(3), root=world_size), f"root={world_size} is not a rank"),
                (lambda: session.broadcast(np.ones(3), root=-1), "root=-1 is not a rank"),
            ):
                with pytest.raises(ValueError, match=match):
                    wrong()
            array = np.full(3, 2.0**me.rank)
            session.all_reduce(array)
            assert array.tolist() == [2**world_size - 1] * 3

    job.run(world_size, worker)


def test_a_tensor_is_pulled_before_it_is_pushed_again(job):
    def worker(me):
        with me.join() as session:
            group = session.register("tensors", floats(10))
            group.push(0)
            with pytest.raises(RuntimeError, match="pushed again before its last result was pulled"):
                group.push(0)
            with pytest.raises(ValueError, match="tensor 1 of a group of 1"):
                group.push(1)
            assert group.pull(0) == 2
            group.push(0)
            assert group.pull(0) == 2

    job.run(2, worker)


def test_arrays_of_any_library_are_reduced_where_they_are(job):
    def worker(me):
        torch = pytest.importorskip("torch")
        with me.join() as session:
            group = session.register("tensors", floats(4))
            for library in (np.asarray, torch.from_numpy, DlpackAlone):
                values = np.full(4, 2.0**me.rank, dtype=np.float32)
                array = library(values)
                group.push(0, source=array)
                session.all_reduce(array)
                assert values.tolist() == [3] * 4
                values[:] = 0
                assert group.pull(0, destination=array) == 2
                assert values.tolist() == [3] * 4
                values[:] = me.rank
                session.broadcast(array, root=1)
                assert values.tolist() == [1] * 4
                if me.rank == 0:
                    session.store(library.__name__, array)
                session.barrier()
                stored = session.load(library.__name__)
                assert np.frombuffer(stored.value, np.float32).tolist() == [1] * 4

    job.run(2, worker)


def test_several_arrays_are_stored_as_one_value(job):
    def worker(me):
        with me.join() as session:
            if me.rank == 0:
                session.store("both", np.arange(3, dtype=np.float32), np.full((2, 2), 7, dtype=np.uint8))
            session.barrier()
            stored = session.load("both").value
            assert np.frombuffer(stored[:12], np.float32).tolist() == [0, 1, 2]
            assert stored[12:].tolist() == [7] * 4
            with pytest.raises(ValueError, match="stored tensor 'both': needs a non-empty array"):
                session.store("both", np.zeros(1), np.zeros(0))

    job.run(2, worker)


def test_a_job_of_one_worker_needs_nobody(job):
    def worker(me):
        with me.join() as session:
            assert session.device_pids == ()
            group = session.register("tensors", floats(3, 4))
            source, destination = np.arange(4, dtype=np.float32), np.zeros(4, dtype=np.float32)
            group.push(1, source=source.ctypes.data)
            assert group.pull(1, destination=destination.ctypes.data) == 1
            assert (
                destination.tolist()
                == np.frombuffer(group.buffer(1), dtype=np.float32).tolist()
                == [0, 1, 2, 3]
            )
            group.push(0, present=False)
            assert group.pull(0) == 0
            array = np.arange(3.0)
            session.all_reduce(array, op="mean")
            session.broadcast(array)
            session.barrier()
            assert array.tolist() == [0, 1, 2]
        assert not any(me.directory.joinpath("tmp").iterdir())
        return len(os.listdir(me.directory / "store"))

    assert job.run(1, worker) == [0]


def test_tensors_pushed_and_never_pulled_do_no_harm(job):
    """As after an exception in a backward pass."""

    def worker(me):
        with me.join(memory_devices=2, shard_bytes=64) as session:
            for _ in range(20):
                group = session.register("abandoned", floats(100, 1000))
                group.push(0)
                group.push(1)
                group.close()
            session.barrier()

    job.run(2, worker)


def test_long_and_foreign_names_are_allowed(job):
    def worker(me):
        name = "größe/\N{SNOWMAN}\ud800 " + "x" * 5000
        with me.join() as session:
            group = session.register(name, [TensorSpec(name=name, dtype="int32", num_elements=1, op="sum")])
            group.push(0)
            assert group.pull(0) == 2

    job.run(2, worker)


def test_registrations_of_many_frames(job):
    """Names of 4 MiB in total: far more than a control frame or a socket buffer holds."""

    def worker(me):
        specs = [
            TensorSpec(name=f"{i} " + "x" * 1000, dtype="float32", num_elements=1, op="sum")
            for i in range(4000)
        ]
        with me.join() as session:
            group = session.register("long names", specs)
            for index in range(len(specs)):
                group.push(index)
            assert group.pull_all() == [2] * len(specs)

    job.run(2, worker)


# ---- forks ----


def test_slots_in_the_hosts_memory_have_no_routes(job):
    def worker(me):
        with me.join() as session:
            client, (spec,) = session._client.linked(), floats(10)
            for routes, reason in (
                (
                    (RoutingTable(lat_proxy=0, bw_proxy=7),) * 2,
                    "routes to memory devices up to md7, but this node has 2 workers",
                ),
                ((RoutingTable(lat_proxy=0, bw_proxy=0),), "trial: 1 workers have routes"),
                (
                    (RoutingTable(lat_proxy=0, bw_proxy=1),) * 2,
                    "routes need slots in GPU memory",
                ),
            ):
                with pytest.raises(CoarseError, match=reason):
                    client.register_trial("trial", spec, "direct", "", routes)
            session.barrier()

    job.run(2, worker)


def test_a_fork_may_not_use_the_session_and_does_not_disturb_it(job):
    def uses_of(session, group):
        return (
            lambda: group.push(0),
            lambda: group.pull(0),
            group.pull_all,
            lambda: session.register("more", floats(1)),
            lambda: session.all_reduce(np.ones(1)),
            session.barrier,
        )

    def worker(me):
        with me.join() as session:
            group = session.register("tensors", floats(10))
            group.push(0)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    for use in uses_of(session, group):
                        with pytest.raises(
                            ForkedSessionError, match=f"{os.getppid()} but is used in its fork"
                        ):
                            use()
                    group.close()
                    session.close()
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0) == (child, 0)
            assert group.pull(0) == 2
            session.barrier()

    job.run(2, worker)


def test_a_fork_that_outlives_its_worker_holds_nobody_up(job):
    """For example, data-loading processes keep the worker's sockets open."""

    def worker(me):
        session = me.join()
        if me.rank == 1:
            child = os.fork()
            if child == 0:
                signal.pause()
            me.tell(child)
            os._exit(0)
        session.barrier()

    workers = job.start(2, worker)
    child = workers[1].hear()
    try:
        outcome = workers[0].finish()
        assert outcome.error == "WorkerLostError"
        assert f"worker 1 (pid {workers[1].pid})" in outcome.message
    finally:
        os.kill(child, signal.SIGKILL)


# ---- signals ----


def test_a_storm_of_signals_changes_nothing(job):
    def worker(me):
        hits = [0]

        def count(*_):
            hits[0] += 1

        signal.signal(signal.SIGALRM, count)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        with me.join(memory_devices=2) as session:
            group = session.register("tensors", floats(10, 300_000))
            for _ in range(20):
                for index in (0, 1):
                    np.frombuffer(group.buffer(index), dtype=np.float32)[:] = 2**me.rank
                    group.push(index)
                assert group.pull_all() == [2, 2]
                assert (np.frombuffer(group.buffer(1), dtype=np.float32) == 3).all()
            array = np.full(1_000_000, 2**me.rank)
            session.all_reduce(array)
            assert (array == 3).all()
            if me.rank == 1:
                me.hear()
            session.barrier()
        signal.setitimer(signal.ITIMER_REAL, 0)
        return hits[0]

    workers = job.start(2, worker)
    workers[1].tell()
    assert all(worker.finish().value > 10 for worker in workers)


def test_a_handler_that_raises_ends_a_wait(job):
    """As Ctrl-C does."""

    def worker(me):
        with me.join() as session:
            group = session.register("tensors", floats(10))
            session.barrier()
            if me.rank == 0:
                group.push(0)
                try:
                    me.tell("waiting")
                    group.pull(0)
                except KeyboardInterrupt:
                    me.tell("interrupted")
                me.hear()
            else:
                me.hear()

    workers = job.start(2, worker)
    assert workers[0].hear() == "waiting"
    workers[0].signal(signal.SIGINT)
    assert workers[0].hear() == "interrupted"
    for one in workers:
        one.tell()
    assert [one.finish().details for one in workers] == ["", ""]


# ---- clean-up ----


def test_many_sessions_in_one_process_leave_nothing(job):
    def mappings():
        with open("/proc/self/maps") as maps:
            return sum("memfd:coarse" in line for line in maps)

    def worker(me):
        found = set()
        for run in range(8):
            with me.join(f"run {run}", memory_devices=1 + run % 2) as session:
                group = session.register("tensors", floats(10, 100_000))
                group.push(0)
                group.pull(0)
                session.all_reduce(np.ones(1000))
            del session, group
            found.add((open_descriptors(), mappings()))
        assert len(found) == 1, found
        assert found.pop()[1] == 0

    job.run(2, worker)


def test_groups_that_come_and_go_leave_nothing_in_memory_devices(job):
    def worker(me):
        with me.join(memory_devices=2) as session:
            counts = set()
            for _ in range(10):
                group = session.register("tensors", floats(10, 1000))
                group.push(1)
                group.pull(1)
                session.barrier()
                counts.add(tuple(open_descriptors(pid) for pid in session.device_pids))
                session.barrier()
                group.close()
            return len(counts)

    assert job.run(2, worker)[0] <= 2


def test_workers_learn_of_each_other_where_they_have_their_tensors(job):
    """Registration exchanges the place of each worker's tensors; for host memory this needs no GPU."""

    def worker(me):
        with me.join(dual_sync="off") as session:
            client = session._client.linked()
            first = client.register("first", floats(10), gpu="GPU-of-nobody" if me.rank else "")
            first.nccl.is_claimed = me.rank == 2
            second = client.register("second", floats(10))
            first.close()
            third = client.register("third", floats(10))
            return [[group.places.on_gpu, group.places.with_nccl] for group in (first, second, third)]

    assert job.run(3, worker) == [[[2, 0], [0, 1], [0, 0]]] * 3
