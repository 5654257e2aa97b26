"""Arrays of PyTorch and CuPy on a GPU: copied to the host, and back on the way out."""

from __future__ import annotations

import pytest

from coarse.arrays import HostValues


def test_a_tensor_is_read_after_the_work_that_computes_it_and_written_before_later_work(cuda):
    import torch

    tensor = torch.zeros(1 << 24, device="cuda")
    for _ in range(100):
        tensor += 1
    with HostValues(tensor, "test", writes=True) as values:
        assert (values == 100).all()
        values += 1
    assert bool((tensor == 101).all())


def test_a_cupy_array(cuda):
    cupy = pytest.importorskip("cupy")
    array = cupy.arange(5, dtype="float32")
    with HostValues(array, "test", writes=True) as values:
        values *= 2
    assert array.tolist() == [0, 2, 4, 6, 8]
