"""Arrays on GPUs, which the host sees by copies alone, with the stand-in for CUDA's driver."""

from __future__ import annotations

import sys

import pytest
from foreign_arrays import CudaInterfaceAlone, GpuArray

from coarse.arrays import HostValues
from coarse.client.single_worker import SingleWorkerClient
from coarse.schema import TensorSpec


def copies() -> None:
    array = GpuArray(1, [1, 2, 3])
    with HostValues(array, "test") as values:
        assert values.tolist() == [1, 2, 3]
        values[:] = 0
    assert array.tolist() == [1, 2, 3]
    with HostValues(array, "test", writes=True) as values:
        values *= 2
    assert array.tolist() == [2, 4, 6]
    with HostValues(array, "test", reads=False, writes=True) as values:
        values[:] = 7
    assert array.tolist() == [7, 7, 7]
    with pytest.raises(ZeroDivisionError), HostValues(array, "test", writes=True) as values:
        values[:] = 1 / 0
    assert array.tolist() == [7, 7, 7]
    with HostValues(GpuArray(0, []), "test", writes=True) as values:
        assert values.size == 0

    group = SingleWorkerClient().register("group", [TensorSpec(name="t", dtype="float32", num_elements=3)])
    group.push(0, source=array)
    result = GpuArray(0, [0, 0, 0])
    group.pull(0, destination=result)
    assert result.tolist() == [7, 7, 7]


def refusals() -> None:
    with pytest.raises(
        ValueError, match=r"test: this .*Alone does not say on which GPU it lies; .*cupy\.asarray"
    ):
        HostValues(CudaInterfaceAlone(4096, (3,)), "test")
    array = GpuArray(0, [1, 2, 3, 4])
    layout = array.__cuda_array_interface__
    for strides in (None, (8, 4)):
        array.__cuda_array_interface__ = layout | {"shape": (2, 2), "strides": strides}
        with HostValues(array, "test") as values:
            assert values.tolist() == [[1, 2], [3, 4]]
    array.__cuda_array_interface__ = layout | {"shape": (2, 2), "strides": (4, 8)}
    with pytest.raises(ValueError, match="test needs a C-contiguous array"):
        HostValues(array, "test")
    array.__cuda_array_interface__ = layout | {"data": (layout["data"][0], True)}
    with pytest.raises(ValueError, match="not writable"):
        HostValues(array, "test", writes=True)


{"copies": copies, "refusals": refusals}[sys.argv[1]]()
