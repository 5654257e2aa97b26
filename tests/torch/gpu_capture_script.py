"""Runs a step while the computing stream is captured, which is refused, and continues; run by `coarse run`.

The model is on the CPU with the driver of gpu_stand_in.py, which must be on LD_LIBRARY_PATH.
"""

from __future__ import annotations

import ctypes

import fast_torch  # noqa: F401, before the next one
import gpu_stand_in
import torch
import torch.distributed as dist
from torch import nn

import coarse.torch
from coarse.kernels import _native


def main() -> None:
    gpu = gpu_stand_in.install()
    capture = ctypes.CDLL("libcuda.so.1").standInCapture
    stream = ctypes.c_void_p(gpu.stream.handle)
    dist.init_process_group("gloo")
    module = nn.Linear(64, 8)
    model = coarse.torch.DistributedDataParallel(module)

    def backward() -> None:
        model(torch.ones(16, 64)).square().mean().backward()

    backward()
    capture(stream, True)
    try:
        backward()
    except _native.CudaError as error:
        print(f"refused: {error}", flush=True)
    capture(stream, False)
    model.zero_grad()
    with model.no_sync():
        backward()
    model.zero_grad()
    backward()
    assert module.weight.grad is not None
    print("goes on", flush=True)


if __name__ == "__main__":
    main()
