"""Arrays of any library: host memory is used where it is, GPU memory is copied, all else is refused with a reason."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from foreign_arrays import CudaInterfaceAlone, DlpackAlone

from coarse.arrays import HostValues
from coarse.client.single_worker import SingleWorkerClient
from coarse.errors import GpuUnavailableError
from coarse.kernels import _native
from coarse.schema import TensorSpec

without_cuda = pytest.mark.skipif(
    not _native.cuda_unavailable_reason(), reason="this machine has a CUDA device"
)


def torch_tensor(values):
    return pytest.importorskip("torch").from_numpy(values)


@pytest.mark.parametrize("library", [lambda values: values, DlpackAlone, torch_tensor])
def test_host_arrays_are_used_where_they_are(library):
    values = np.arange(6.0).reshape(2, 3)
    with HostValues(library(values), "test", writes=True) as seen:
        assert seen.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert seen.ctypes.data == values.ctypes.data
        seen += 1
    assert values.tolist() == [[1, 2, 3], [4, 5, 6]]


def read_only():
    values = np.ones(3)
    values.flags.writeable = False
    return values


@pytest.mark.parametrize(
    "make",
    [
        read_only,
        lambda: DlpackAlone(read_only()),
        lambda: DlpackAlone(np.ones(3), is_versioned=False),
    ],
)
def test_read_only_arrays_are_read_and_not_written(make):
    with HostValues(make(), "test") as seen:
        assert seen.tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="test writes its result to the array, which is not writable"):
        HostValues(make(), "test", writes=True)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: [1.0],
            TypeError,
            "test takes an array with __dlpack__ or .*, not a builtins.list; pass a numpy",
        ),
        (
            lambda: DlpackAlone(np.ones((3, 3)).T),
            ValueError,
            "test needs a C-contiguous array; pass a contiguous",
        ),
        (
            lambda: DlpackAlone(np.ones(3), (8, 0)),
            ValueError,
            "lies on a device of DLPack's type 8; pass a copy",
        ),
        (lambda: DlpackAlone(np.ones(3), (2, 0)), ValueError, "on a GPU and has no __cuda_array_interface__"),
    ],
)
def test_what_cannot_be_taken_is_named_with_what_to_pass(make, error, message):
    with pytest.raises(error, match=message):
        HostValues(make(), "test")


def test_tensors_that_numpy_cannot_take_are_refused_with_a_way_out():
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"torch\.Tensor by DLPack \(.*dtype.*\); .*ml_dtypes\.bfloat16"):
        HostValues(torch.ones(3, dtype=torch.bfloat16), "test")
    with pytest.raises(ValueError, match=r"use tensor\.detach\(\)"):
        HostValues(torch.ones(3, requires_grad=True), "test")


@without_cuda
def test_a_gpu_array_without_a_gpu_says_why_it_cannot_be_used():
    reason = re.escape(_native.cuda_unavailable_reason())
    with pytest.raises(
        GpuUnavailableError, match=f"CudaInterfaceAlone lies on a GPU .* cannot use: {reason}"
    ):
        HostValues(CudaInterfaceAlone(4096, (3,)), "test")


@pytest.mark.parametrize("what", ["copies", "refusals"])
def test_gpu_arrays(cuda_stand_ins, what):
    environment = {
        "LD_LIBRARY_PATH": str(cuda_stand_ins),
        "STAND_IN_GPUS": "2",
        "STAND_IN_HIDES_MEMORY": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    script = Path(__file__).with_name("gpu_arrays_script.py")
    subprocess.run([sys.executable, script, what], env=os.environ | environment, check=True, timeout=60)


@pytest.fixture
def group():
    specs = [TensorSpec(name=dtype, dtype=dtype, num_elements=4) for dtype in ("float32", "bfloat16")]
    return SingleWorkerClient().register("tensors", specs)


@pytest.mark.parametrize("library", [lambda values: values, DlpackAlone, torch_tensor])
def test_arrays_are_pushed_and_pulled(group, library):
    result = np.zeros((2, 2), dtype=np.float32)
    group.push(0, source=library(np.arange(4, dtype=np.float32)))
    assert group.pull(0, destination=library(result)) == 1
    assert result.tolist() == [[0, 1], [2, 3]]


def test_bytes_stand_for_any_dtype(group):
    result = np.zeros(8, dtype=np.uint8)
    group.push(1, source=np.arange(8, dtype=np.uint8))
    group.pull(1, destination=result)
    assert result.tolist() == [*range(8)]


@pytest.mark.parametrize("array", [np.zeros(4), np.zeros(5, dtype=np.float32), np.zeros(4, dtype=np.int32)])
def test_an_array_of_another_dtype_or_length_is_refused(group, array):
    message = f"tensor 'float32' of tensors: has 4 x float32, but the array {array.size} x {array.dtype}"
    for use in (lambda: group.push(0, source=array), lambda: group.pull(0, destination=array)):
        with pytest.raises(ValueError, match=message):
            use()
