"""A GPU for the tests of what surrounds one: tests/native/cuda_stand_in.cpp is its driver, host memory is its memory.

Streams are threads that do what they are given later and beside each other, as a GPU's; gradients are computed by the
processor. A test sees averages when the stream that computes has joined, for which it waits here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from coarse.client.gpu.gpu_transfers import GpuTransfers
from coarse.client.memory.tensor_bytes import GpuBytes, TensorBytes
from coarse.kernels import _native
from coarse.torch.gradients import gpu_gradients, layout, registered_gradients
from coarse.torch.optimizer import remote_optimizer


class StandInGpu(gpu_gradients.Gpu):
    """Has parameters that lie in the host's memory, and one stream that computes.

    Args:
        ordinal: Which of the stand-in's devices it is.
    """

    def __init__(self, ordinal: int) -> None:
        self.device = torch.device("cpu")
        self.context = _native.CudaContext(ordinal)
        self.stream = _native.CudaStream(self.context)

    def current_stream(self) -> int:
        return self.stream.handle


def install(ordinal: int = 0) -> StandInGpu:
    """Has this process take its processor for a GPU, by the driver that tests/conftest.py builds; returns that."""
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
    registered_gradients.common_gpu = remote_optimizer.common_gpu = lambda _: _native.cuda_device_uuid(
        ordinal
    )
    gpu_gradients.find_gpu = find_gpu
    GpuTransfers.join = join_and_wait  # type: ignore[method-assign]
    return gpu
