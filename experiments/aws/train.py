"""One worker of a training run of the paper (section V): a model on synthetic data under one system.

experiments.aws.run starts it through a launcher, `coarse run` or `horovodrun`, and describes the comparison. All
systems train the same model on the same batches from the same parameters. Worker 0 writes the results as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from coarse.bench.models import MODELS, Workload, build_workload

LEARNING_RATE = 1e-4
SYSTEMS = ("coarse", "coarse-offload", "ddp", "fsdp", "horovod", "none")
"""COARSE; COARSE with the optimizer in the memory devices; three AllReduce systems; no communication."""

_SAMPLED_PARAMETERS = 16
_SAMPLES_PER_PARAMETER = 8


def main() -> None:
    """Trains, and writes the times and results."""
    arguments = _parse()
    rank, local_rank, world_size = _place(arguments.system)
    device = _device(arguments.device, arguments.gpus, local_rank)
    if device.type == "cpu":
        torch.set_num_threads(1)
    workload = _build(arguments, rank, device)
    model, optimizer = _join(arguments.system, workload.module, device)
    torch.manual_seed(
        1000 + rank
    )  # dropout draws the same numbers in every system, even if its wrapper drew some before
    before = _sample(workload.module)
    result = train(model, optimizer, workload, device, warm_up=arguments.warm_up, steps=arguments.steps)
    result |= {"workers": world_size, "before": before, "parameters": _sample(workload.module)}
    result |= {"decisions": _decisions(model), "versions": _versions(device)}
    if rank == 0:
        arguments.result.write_text(json.dumps(result))
    if arguments.system.startswith("coarse"):
        model.close()
    del model, optimizer  # before the process group: what is averaged for may not be the last to hold it
    if dist.is_initialized():
        dist.destroy_process_group()


def train(
    model: Any, optimizer: Any, workload: Workload, device: torch.device, *, warm_up: int, steps: int
) -> dict[str, Any]:
    """Runs `warm_up` steps and then `steps` timed ones. A step's time ends when the device has finished.

    Returns:
        Losses of all steps; milliseconds of the timed steps; the device's peak memory in bytes, 0 on a CPU.
    """
    losses, step_ms = [], []
    for step in range(warm_up + steps):
        batch = workload.batches[step % len(workload.batches)]
        begin_s = _now_s(device)
        loss = workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end_s = _now_s(device)
        losses.append(float(loss.detach()))
        if step >= warm_up:
            step_ms.append(1e3 * (end_s - begin_s))
    peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {"losses": losses, "step_ms": step_ms, "peak_device_bytes": peak_bytes}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One worker of a training run.")
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    parser.add_argument("--batch", type=int, required=True, help="samples of each worker")
    parser.add_argument("--sequence", type=int, default=384, help="tokens of a sample, for models of text")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument(
        "--gpus", default="", help="of the workers, by local rank: 0,2,4,6; default: in order"
    )
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--result", type=Path, required=True, help="written by worker 0")
    return parser.parse_args()


def _place(system: str) -> tuple[int, int, int]:
    """Rank, local rank and number of workers, from the system's launcher."""
    if system == "horovod":
        hvd = importlib.import_module("horovod.torch")
        hvd.init()
        return hvd.rank(), hvd.local_rank(), hvd.size()
    return tuple(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def _device(kind: str, gpus: str, local_rank: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    numbers = [int(number) for number in gpus.split(",")] if gpus else range(torch.cuda.device_count())
    if local_rank >= len(numbers):
        raise SystemExit(f"worker {local_rank} has no GPU: there are {len(numbers)} for workers")
    device = torch.device("cuda", numbers[local_rank])
    torch.cuda.set_device(device)
    return device


def _build(arguments: argparse.Namespace, rank: int, device: torch.device) -> Workload:
    """The model and this worker's batches on its device. Wrapping replaces the parameters with worker 0's."""
    built = build_workload(arguments.model, batch=arguments.batch, sequence=arguments.sequence, rank=rank)
    batches = tuple({name: value.to(device) for name, value in batch.items()} for batch in built.batches)
    return Workload(module=built.module.to(device), batches=batches, loss=built.loss)


def _join(system: str, module: Any, device: torch.device) -> tuple[Any, Any]:
    """The module and its optimizer under a system."""
    model = _WRAPPERS[system](module, device)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    if system == "horovod":
        hvd = importlib.import_module("horovod.torch")
        hvd.broadcast_parameters(module.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=module.named_parameters())
    elif system == "coarse-offload":
        optimizer = importlib.import_module("coarse.torch").DistributedOptimizer(optimizer, model)
        if not optimizer.runs_in_memory_devices:
            raise SystemExit("the optimizer stays on the workers, which the warning above explains")
    return model, optimizer


def _wrap_coarse(module: Any, device: torch.device) -> Any:
    del device
    dist.init_process_group("gloo")
    return importlib.import_module("coarse.torch").DistributedDataParallel(module)


def _wrap_ddp(module: Any, device: torch.device) -> Any:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    devices = [device] if device.type == "cuda" else None
    return torch.nn.parallel.DistributedDataParallel(module, device_ids=devices, gradient_as_bucket_view=True)


def _wrap_fsdp(module: Any, device: torch.device) -> Any:
    """FSDP2 as in its documentation: divides the layers of a transformer one by one, then the rest."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    _broadcast(module)
    lists = [each for each in module.modules() if isinstance(each, torch.nn.ModuleList)]
    for layers in reversed(lists):  # inner ones first
        for layer in layers:
            fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def _broadcast(module: Any) -> None:
    """Gives every worker worker 0's parameters and buffers, as the other wrappers do."""
    for value in (*module.parameters(), *module.buffers()):
        dist.broadcast(value.detach(), src=0)


_WRAPPERS: dict[str, Callable[[Any, torch.device], Any]] = {
    "coarse": _wrap_coarse,
    "coarse-offload": _wrap_coarse,
    "ddp": _wrap_ddp,
    "fsdp": _wrap_fsdp,
    "horovod": lambda module, device: module,
    "none": lambda module, device: module,
}


def _decisions(model: Any) -> list[str]:
    """COARSE's choices from its measurements: algorithms, routes, and the share of the direct all-reduce."""
    session = getattr(model, "session", None)  # other systems have no session
    return [] if session is None else list(session.decisions())


def _versions(device: torch.device) -> dict[str, str]:
    """Versions of other software that affects a step's time."""
    versions = {"torch": torch.__version__}
    if device.type == "cuda":
        versions |= {
            "gpu": torch.cuda.get_device_name(device),
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": Path("/proc/driver/nvidia/version").read_text().partition("\n")[0],
        }
    return versions


def _now_s(device: torch.device) -> float:
    """The time when the device has finished all work so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _sample(module: Any) -> list[float]:
    """Evenly spaced elements of some parameters: equal in all systems that average, except for rounding.

    Every worker must call it, because FSDP's parameters are divided among them.
    """
    parameters = [parameter.detach() for parameter in module.parameters()]
    chosen = [
        _whole(each).reshape(-1) for each in parameters[:: max(1, len(parameters) // _SAMPLED_PARAMETERS)]
    ]
    return [
        value for flat in chosen for value in flat[:: max(1, flat.numel() // _SAMPLES_PER_PARAMETER)].tolist()
    ]


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


if __name__ == "__main__":
    main()
