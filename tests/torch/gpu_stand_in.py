"""A stand-in GPU for tests: tests/native/cuda_stand_in.cpp is its driver, host memory is its memory.

Streams are threads that run their work later and concurrently, like a GPU's. The CPU computes gradients. Averages
are visible after the computing stream has joined; this module waits for that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from coarse.client.gpu.gpu_transfers import GpuTransfers
from coarse.client.memory.tensor_bytes import GpuBytes, TensorBytes
from coarse.kernels import _native
from coarse.torch.gradients import layout, registered_gradients
from coarse.torch.gradients.paths import gpu_gradients
from coarse.torch.optimizer import remote_optimizers


class StandInGpu(gpu_gradients.Gpu):
    """A GPU with parameters in the host's memory, and one computing stream.

    Args:
        ordinal: Number of the stand-in's device.
    """

    def __init__(self, ordinal: int) -> None:
        self.device = torch.device("cpu")
        self.context = _native.CudaContext(ordinal)
        self.stream = _native.CudaStream(self.context)

    def current_stream(self) -> int:
        return self.stream.handle


def install(ordinal: int = 0) -> StandInGpu:
    """Makes this process use its CPU as a GPU, through the driver that tests/conftest.py builds; returns the GPU."""
    if show_memory := getattr(ctypes.CDLL("libcuda.so.1"), "standInShowMemory", None):
        show_memory()
    gpu = StandInGpu(ordinal)
    join = GpuTransfers.join

    def join_and_wait(transfers: GpuTransfers, stream: int) -> None:
        join(transfers, stream)
        gpu.stream.synchronize()

    def find_gpu(_: Sequence[torch.Tensor]) -> gpu_gradients.Gpu:
        return gpu

    def flat_tensor(memory: TensorBytes) -> torch.Tensor:
        if isinstance(memory, GpuBytes):
            array = (ctypes.c_char * memory.nbytes).from_address(memory.address)
            array.memory = memory  # stays mapped
            return torch.frombuffer(array, dtype=torch.uint8)
        return torch.frombuffer(memory, dtype=torch.uint8)

    layout._flat_tensor = flat_tensor
    registered_gradients.common_gpu = remote_optimizers.common_gpu = lambda _: _native.cuda_device_uuid(
        ordinal
    )
    gpu_gradients.find_gpu = find_gpu
    GpuTransfers.join = join_and_wait  # type: ignore[method-assign]
    return gpu
