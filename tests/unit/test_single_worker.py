"""A job of one worker: the same calls, no process, no shared memory; every result is its own contribution."""

from __future__ import annotations

import numpy as np
import pytest

from coarse.client.single_worker import SingleWorkerClient
from coarse.errors import SessionClosedError
from coarse.schema import TensorSpec


@pytest.fixture
def group():
    specs = [TensorSpec(name=name, dtype="float32", num_elements=4, op="mean") for name in "ab"]
    return SingleWorkerClient().register("tensors", specs)


def values(group, index):
    return np.frombuffer(group.buffer(index), dtype=np.float32)


def test_what_was_pushed_is_pulled(group):
    values(group, 1)[:] = range(4)
    group.push(1)
    group.flush()
    assert group.pull(1) == 1
    assert values(group, 1).tolist() == [0, 1, 2, 3]
    assert group.pull_all() == [0, 1]


def test_sources_and_destinations_are_copied(group):
    source, destination = np.arange(4, dtype=np.float32), np.zeros(4, dtype=np.float32)
    group.push(0, source=source.ctypes.data)
    assert group.pull(0, destination=destination.ctypes.data) == 1
    assert destination.tolist() == values(group, 0).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("flags", [{"present": False}, {"joined": True}])
def test_without_a_contribution_the_buffer_stays(group, flags):
    values(group, 0)[:] = 5
    group.push(0, **flags)
    assert group.pull(0) == 0
    assert (values(group, 0) == 5).all()


def test_a_closed_group_is_refused_and_its_memory_stays(group):
    kept = values(group, 0)
    kept[:] = 5
    group.close()
    group.close()
    for use in (lambda: group.push(0), lambda: group.pull(0), group.pull_all, lambda: group.buffer(0)):
        with pytest.raises(SessionClosedError, match="'tensors' is closed"):
            use()
    assert (kept == 5).all()
