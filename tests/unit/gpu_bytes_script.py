"""Memory on a second GPU that the first one uses, as frameworks see it, with the stand-in for CUDA's driver."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

from coarse.client.memory.tensor_bytes import GpuBytes, gpu_uuid, map_tensors, reach
from coarse.errors import GpuUnavailableError
from coarse.kernels import _native
from coarse.proxy.memory.cuda import CudaMemory
from coarse.wire.segments import Segment


class DLManagedTensor(ctypes.Structure):
    """As dlpack.h has it, before version 1."""


Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(DLManagedTensor))
DLManagedTensor._fields_ = [
    ("data", ctypes.c_void_p),
    ("device_type", ctypes.c_int32),
    ("device_id", ctypes.c_int32),
    ("ndim", ctypes.c_int32),
    ("code", ctypes.c_uint8),
    ("bits", ctypes.c_uint8),
    ("lanes", ctypes.c_uint16),
    ("shape", ctypes.POINTER(ctypes.c_int64)),
    ("strides", ctypes.POINTER(ctypes.c_int64)),
    ("byte_offset", ctypes.c_uint64),
    ("manager_ctx", ctypes.c_void_p),
    ("deleter", Deleter),
]

python = ctypes.pythonapi
python.PyCapsule_GetPointer.restype = ctypes.POINTER(DLManagedTensor)
python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
python.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
USED = b"used_dltensor"


def count_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("device memory 1")


def mapped(segment: Segment) -> GpuBytes:
    tensors, gpu = map_tensors(segment, gpu_uuid(0))
    assert gpu == gpu_uuid(0)
    assert isinstance(tensors, GpuBytes)
    return tensors


def main() -> None:
    other = CudaMemory(1)
    segment = Segment.joined([other.allocate("test", other.page_bytes()) for _ in range(2)])
    before = count_mapped()
    whole = mapped(segment)
    part = whole[100:1100]
    assert (len(part), part.address) == (1000, whole.address + 100)
    assert len(whole[part.nbytes : 0]) == 0
    assert part.__dlpack_device__() == (2, 0)  # kDLCUDA, and the GPU that works on it

    capsule = part.__dlpack__(stream=1, max_version=(1, 0))
    tensor = python.PyCapsule_GetPointer(capsule, b"dltensor").contents
    assert (tensor.data, tensor.device_type, tensor.device_id) == (part.address, 2, 0)
    assert (tensor.ndim, tensor.shape[0], bool(tensor.strides), tensor.byte_offset) == (1, 1000, False, 0)
    assert (tensor.code, tensor.bits, tensor.lanes) == (1, 8, 1)

    del whole, part
    ctypes.memset(tensor.data, 1, 1000)  # the capsule keeps it mapped
    assert count_mapped() > before
    del capsule
    assert count_mapped() > before  # dropping it does not wait for the GPU
    _native.cuda_unmap_unused()
    assert count_mapped() == before

    capsule = mapped(segment).__dlpack__()
    taken = python.PyCapsule_GetPointer(capsule, b"dltensor")
    python.PyCapsule_SetName(capsule, USED)
    del capsule  # its tensor is somebody's now
    assert count_mapped() > before
    taken.contents.deleter(taken)
    _native.cuda_unmap_unused()
    assert count_mapped() == before


def reach_what_is_not_seen() -> None:
    """Copies that get lost on their way to a GPU that this process does not see are found out, and told."""
    lost, kept = (CudaMemory(device).allocate("test", 1) for device in (1, 2))
    os.environ |= {"CUDA_VISIBLE_DEVICES": "0", "STAND_IN_LOSES": "0:1"}
    assert reach(kept, gpu_uuid(0), is_own=True) is not None
    why = f"does not see; let CUDA_VISIBLE_DEVICES have it.*copies from cuda:0 to {lost.gpu} and back arrive wrong"
    with pytest.raises(GpuUnavailableError, match=why):
        reach(lost, gpu_uuid(0), is_own=True)


{"map": main, "reach": reach_what_is_not_seen}[sys.argv[1]]()
