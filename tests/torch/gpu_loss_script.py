"""Trains until the workers detect that worker 0 killed a memory device; prints the error of each worker.

Run by `coarse run`. Arguments: the device of the model, where "stand-in" is the CPU with the driver of
gpu_stand_in.py, which must be on LD_LIBRARY_PATH; "offload" runs the optimizer in the memory devices, and "overlap"
runs it during backward; "alone": a memory device dies by itself; "each": a separate GPU for each worker; "worker":
worker 1 is killed instead of a memory device; "saves": a state dict after each step, and the memory device is killed
while the GPU waits for it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time

import fast_torch  # noqa: F401, before the next one
import torch
import torch.distributed as dist

import coarse.torch
from coarse.errors import CoarseError
from coarse.torch.session import session_of_group

KILLED_AT_STEP = 6  # when dual synchronisation is planned
LIMIT_S = 20.0


def main() -> None:
    device, *options = sys.argv[1:]
    rank = int(os.environ["RANK"])
    synchronize = torch.cuda.synchronize
    if device == "stand-in":
        import gpu_stand_in

        synchronize = gpu_stand_in.install(rank if "each" in options else 0).stream.synchronize
        device = "cpu"
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))).to(device)
    model = coarse.torch.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if "offload" in options:
        optimizer = coarse.torch.DistributedOptimizer(optimizer, model, overlap="overlap" in options)
        assert optimizer.runs_in_memory_devices
    session = session_of_group(model.process_group).session
    devices = session.device_pids
    began_s = time.monotonic()
    for step in range(1_000_000):
        if step == KILLED_AT_STEP and "alone" not in options:
            began_s = time.monotonic()
            print(*session.decisions(), sep="\n", flush=True)
            dist.barrier()  # otherwise the other worker might detect it one step earlier
            if "worker" in options:
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            elif rank == 0 and "saves" in options:
                kill_when_a_gpu_waits(devices[-1])
            elif rank == 0:
                os.kill(devices[-1], signal.SIGKILL)
        try:
            optimizer.zero_grad()
            model(torch.randn(4, 256, device=device)).square().mean().backward()
            optimizer.step()
            if "saves" in options:
                module.state_dict()
                print(f"saved after {step + 1} steps", flush=True)
        except CoarseError as error:
            print(f"raised {type(error).__name__} after {step} steps: {error}", flush=True)
            synchronize()
            print(f"parameters are {fingerprint(module)}", flush=True)
            break
        assert time.monotonic() < began_s + LIMIT_S, "nobody misses who was killed"
    synchronize()  # the GPU's pending work must end, too
    print("all streams have ended", flush=True)


def kill_when_a_gpu_waits(device: int) -> None:
    """Stops a memory device, so that it accepts no more gradients, and kills it a second later."""
    os.kill(device, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (device, signal.SIGKILL)).start()


def fingerprint(module: torch.nn.Module) -> str:
    """Hash of all parameters."""
    every = torch.cat([parameter.detach().cpu().flatten() for parameter in module.parameters()])
    return hashlib.sha256(every.numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main()
