"""Reductions of tensors by name: tensor groups are created and removed while other reductions run."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
from test_optimizer import ADAM_STATES, means
from test_sync import floats, leave_together, together

NAMES = ["small", "large"]
LENGTH = 10_000


def total(reducer, name, rank):
    """The sum of a tensor over two workers; each contributes 2**rank."""
    values = np.full(LENGTH, 2.0**rank, np.float32)
    reducer.reduce_all([(name, values.ctypes.data, values.ctypes.data, values.nbytes)])
    return set(values.tolist())


def device_mib(session):
    """MiB that memory devices share with workers."""
    kib = 0
    for pid in session.device_pids:
        with open(f"/proc/{pid}/status") as status:
            kib += sum(int(line.split()[1]) for line in status if line.startswith("RssShmem"))
    return kib / 1024


def test_names_are_free_when_each_worker_has_released_them_in_an_order_of_its_own(job):
    def worker(me):
        with me.join() as session, contextlib.closing(session.open_async_reducer()) as reducer:
            for _ in range(3):
                groups = [reducer.register(name, floats(NAMES, LENGTH)) for name in ("a", "b")]
                optimizer = reducer.register_parameters(
                    "o", means(LENGTH), ADAM_STATES, writes=me.rank == 0, most_workers=2
                )
                assert total(reducer, "a/large", me.rank) == {3.0}
                order = [*groups, optimizer]
                for group in order if me.rank == 0 else reversed(order):
                    assert reducer.release(group)
                    assert reducer.release(group)
            leave_together(me)

    assert [outcome.details for outcome in together(job, 2, worker)] == [""] * 2


def test_a_group_is_released_when_nothing_of_it_is_under_way(job):
    def worker(me):
        with me.join() as session, contextlib.closing(session.open_async_reducer()) as reducer:
            group = reducer.register("a", floats(NAMES, LENGTH))
            reducer.register("b", floats(NAMES, LENGTH))
            found = []
            asking = threading.Thread(target=lambda: found.append(total(reducer, "a/small", me.rank)))
            if me.rank == 0:
                asking.start()
                while not session._client.linked()._native.is_late(group.id, 0):  # until the tensor is pushed
                    time.sleep(0.001)
                assert not reducer.release(group)
            assert total(reducer, "b/large", me.rank) == {3.0}
            if me.rank == 1:
                asking.start()
            asking.join()
            assert found == [{3.0}]
            assert reducer.release(group)
            leave_together(me)

    assert [outcome.details for outcome in together(job, 2, worker)] == [""] * 2


def test_memory_devices_free_what_all_workers_have_released(job):
    def worker(me):
        with me.join() as session, contextlib.closing(session.open_async_reducer()) as reducer:
            seen = []
            for i in range(4):
                group = reducer.register(f"group {i}", floats(["large"], 4 << 20))
                values = np.ones(4 << 20, np.float32)
                reducer.reduce_all(
                    [(f"group {i}/large", values.ctypes.data, values.ctypes.data, values.nbytes)]
                )
                seen.append(device_mib(session))
                assert reducer.release(group)
            leave_together(me)
            assert max(seen) < 1.5 * seen[0] + 1, seen

    assert [outcome.details for outcome in together(job, 2, worker)] == [""] * 2
