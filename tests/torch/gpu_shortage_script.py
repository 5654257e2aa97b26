"""Wraps a model that is too large for the memory devices on its GPU, while a small one trains; run by `coarse run`.

    gpu_shortage_script.py DEVICE

DEVICE "stand-in" is the CPU with the driver of gpu_stand_in.py, which must be on LD_LIBRARY_PATH and has 1 GiB. On a
real GPU the script first allocates nearly all other memory. Prints each worker's error, and that the small model
trains as before.
"""

from __future__ import annotations

import sys

import fast_torch  # noqa: F401, before the next one
import torch
import torch.distributed as dist
from torch import nn

import coarse.torch
from coarse.errors import OutOfDeviceMemoryError

NUM_ELEMENTS = 160 << 20  # of float32: 640 MiB, of which nothing is ever written
LEFT_BYTES = 512 << 20


class Large(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(NUM_ELEMENTS, device=device))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> float:
    """Returns a parameter."""
    optimizer.zero_grad()
    model(torch.full((2, 8), 1.0 + dist.get_rank(), device=device)).square().mean().backward()
    optimizer.step()
    return next(model.parameters()).detach().flatten()[0].item()


def take_all_but(num_bytes: int, device: str) -> torch.Tensor | None:
    """Memory of the GPU, from one worker."""
    free_bytes = torch.cuda.mem_get_info(device)[0]
    if dist.get_rank() != 0 or free_bytes <= num_bytes:
        return None
    return torch.empty(free_bytes - num_bytes, dtype=torch.uint8, device=device)


def main() -> None:
    device = sys.argv[1]
    if is_stand_in := device == "stand-in":
        import gpu_stand_in

        gpu_stand_in.install()
        device = "cpu"
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    small = coarse.torch.DistributedDataParallel(nn.Linear(8, 4).to(device))
    optimizer = torch.optim.SGD(small.parameters(), lr=0.1)
    before = step(small, optimizer, device)  # memory devices have what they need of the GPU
    large = Large(device)
    dist.barrier()
    taken = None if is_stand_in else take_all_but(LEFT_BYTES, device)
    dist.barrier()
    try:
        coarse.torch.DistributedDataParallel(large)
    except OutOfDeviceMemoryError as error:
        print(f"raised {type(error).__name__}: {error}", flush=True)
    del taken
    assert step(small, optimizer, device) != before
    print("trains as before", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
