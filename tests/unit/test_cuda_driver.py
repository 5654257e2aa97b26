"""The CUDA driver: found at run time, and where it is missing every use says why."""

from __future__ import annotations

import pytest

from coarse.kernels import _native
from coarse.kernels.cuda_kernels import CudaKernels

REASON = _native.cuda_unavailable_reason()
without_cuda = pytest.mark.skipif(not REASON, reason="this machine has a CUDA device")


@without_cuda
@pytest.mark.parametrize(
    "use",
    [
        _native.cuda_num_devices,
        lambda: _native.cuda_device_name(0),
        lambda: _native.cuda_device_uuid(0),
        lambda: _native.cuda_device_attribute(0, 75),
        lambda: _native.cuda_can_access_peer(0, 1),
        lambda: _native.cuda_reaches_peer(0, 1),
        lambda: _native.CudaContext(0),
        lambda: CudaKernels(0),
        _native.cuda_driver_version,
    ],
)
def test_every_use_says_why_there_is_no_cuda(use):
    with pytest.raises(_native.CudaError) as caught:
        use()
    assert str(caught.value) == REASON


def test_running_out_of_device_memory_is_an_error_of_cuda():
    assert issubclass(_native.CudaOutOfMemoryError, _native.CudaError)
    assert issubclass(_native.CudaError, RuntimeError)
