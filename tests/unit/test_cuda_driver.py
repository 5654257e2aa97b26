"""The CUDA driver: found at run time; if it is missing, every use raises an error with the reason."""

from __future__ import annotations

import os
import re
import subprocess
import sys

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
        lambda: _native.cuda_device_bus_id(0),
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


ASKS_FOR_A_PEER = """
from coarse.kernels import _native
print(_native.cuda_reaches_peer(0, 1), _native.cuda_take_peer_warnings(), _native.cuda_take_peer_warnings())
"""


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        # The second memory that is taken is the peer's.
        (
            "cuMemCreate:2:800",
            r"True \['.*cuda:0 to cuda:1 and back could not be tried.*cuMemCreate.*'\] \[\]",
        ),
        ("cuMemCreate:2:2", r"True \[\] \[\]"),  # there is no room
    ],
)
def test_a_peer_that_cannot_be_tried_is_what_the_driver_says(cuda_stand_ins, refusal, told):
    variables = {"LD_LIBRARY_PATH": str(cuda_stand_ins), "STAND_IN_GPUS": "2", "STAND_IN_REFUSES": refusal}
    asked = [sys.executable, "-c", ASKS_FOR_A_PEER]
    printed = subprocess.run(
        asked, env=os.environ | variables, check=True, capture_output=True, text=True
    ).stdout
    assert re.fullmatch(told, printed.strip()), printed


def test_running_out_of_device_memory_is_an_error_of_cuda():
    assert issubclass(_native.CudaOutOfMemoryError, _native.CudaError)
    assert issubclass(_native.CudaError, RuntimeError)
