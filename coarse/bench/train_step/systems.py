"""The systems of `coarse bench train-step`: one training loop with each method of synchronising gradients."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from coarse.bench.harness.commands import Commands, MakeCommands, WorkerJob, commands_of
from coarse.bench.harness.job_memory import require_memory
from coarse.bench.harness.rendezvous import join_process_group
from coarse.bench.models import MODELS, NUM_PARAMETERS, Workload, build_workload
from coarse.bench.timing import no_garbage_collection
from coarse.errors import CoarseError

LEARNING_RATE = 1e-4
PHASES = ("forward", "backward", "optimizer", "step")
OPTIMIZERS = ("adamw", "sgd")
CPU = "cpu"
_SAMPLES_PER_PARAMETER = 64
_ONE_BUCKET_MB = 1 << 20
_BYTES_PER_ELEMENT = 4
_PROCESS_BYTES = 300 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """A model and how it is trained, the same under all systems of a run.

    Args:
        systems: Names, in the order of their turns.
        batch: Samples of each worker.
        sequence: Tokens in a sample; ignored by image models.
        threads: Threads of each worker.
        rounds: Turns of each system.
        device: Device of the models: "cpu"; "cuda": each worker uses the GPU of its rank; "cuda:N": all use this GPU.

    Raises:
        ValueError: If a value is out of range.
    """

    systems: tuple[str, ...]
    model: str
    batch: int
    sequence: int
    num_workers: int
    threads: int
    optimizer: str
    rounds: int = 1
    device: str = CPU

    def __post_init__(self) -> None:
        check_device(self.device)
        if self.model not in MODELS:
            raise ValueError(f"model {self.model!r} is none of {', '.join(MODELS)}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer {self.optimizer!r} is none of {', '.join(OPTIMIZERS)}")
        if min(self.batch, self.sequence, self.num_workers, self.threads, self.rounds) < 1:
            raise ValueError("batch, sequence, workers, threads and rounds all start at 1")
        if not self.systems:
            raise ValueError("need at least one system")

    def as_json(self) -> dict[str, Any]:
        """Fields for TrainCommands, and for records."""
        names = ("model", "batch", "sequence", "threads", "optimizer", "device")
        return {name: getattr(self, name) for name in names}

    def require_memory(self, elements_per_parameter: int, verb: str) -> None:
        """Refuses models that cannot fit; memory of activations depends on the batch and is not included.

        Raises:
            BenchError: If memory does not suffice.
        """
        state_bytes = NUM_PARAMETERS[self.model] * elements_per_parameter * _BYTES_PER_ELEMENT
        require_memory(
            (state_bytes + _PROCESS_BYTES) * self.num_workers,
            f"{self.num_workers} workers that {verb} {self.model} need at least",
            "Choose a smaller --model or fewer --workers.",
        )


class TrainCommands:
    """The commands of `coarse bench train-step` for one system.

    On a GPU, a step ends when the GPU has completed it; its phases end when the processor has submitted them.

    Args:
        job: Its options are those of TrainingJob.as_json().
        wrap: Joins the other workers' process group if the system has one, and returns the function that wraps the
            module.
        offload: Moves an optimizer of the wrapped module to the system's place for it.
    """

    def __init__(
        self,
        job: WorkerJob,
        wrap: Callable[[WorkerJob], Callable[[Any], Any]],
        offload: Callable[[Any, Any], Any] = lambda optimizer, _: optimizer,
    ) -> None:
        self._job = job
        self._wrap = wrap
        self._offload = offload
        self._torch: Any = None
        self._workload: Workload | None = None
        self._model: Any = None
        self._optimizer: Any = None
        self._num_steps = 0
        self._synchronise: Callable[[], object] = lambda: None

    def setup(self) -> int:
        options, rank = self._job.options, self._job.rank
        self._torch = importlib.import_module("torch")
        self._torch.set_num_threads(options["threads"])
        device = self._open_device()
        wrap = self._wrap(self._job)
        self._workload = build_workload(
            options["model"], batch=options["batch"], sequence=options["sequence"], rank=rank
        )
        batches = (
            {name: value.to(device) for name, value in each.items()} for each in self._workload.batches
        )
        self._workload = replace(
            self._workload, module=self._workload.module.to(device), batches=tuple(batches)
        )
        self._model = wrap(self._workload.module)
        optimizer = _make_optimizer(self._torch, options["optimizer"], self._model.parameters())
        self._optimizer = self._offload(optimizer, self._model)
        # Dropout must draw the same numbers in every system, also if the wrapper has drawn some.
        self._torch.manual_seed(1000 + rank)
        return rank

    def first_step(self) -> dict[str, Any]:
        """Takes one step; returns the hash and a sample of the parameters, their size and the loss."""
        loss = self._step([])
        return {
            "loss": loss,
            "hash": self._parameter_hash(),
            "sample": self._parameter_sample(),
            "parameter_bytes": sum(each.nbytes for each in self._parameters()),
            "gpu": self._gpu_name(),
            "backend": self._torch.distributed.get_backend()
            if self._torch.distributed.is_initialized()
            else "",
        }

    def run(self, steps: int) -> dict[str, list[float]]:
        """Takes `steps` steps after one uncounted step; returns the seconds of each step's phases."""
        marks: list[list[float]] = [[] for _ in range(steps)]
        with no_garbage_collection():
            self._step([])
            for times in marks:
                self._step(times)
        return {
            "forward": [times[1] - times[0] for times in marks],
            "backward": [times[2] - times[1] for times in marks],
            "optimizer": [times[3] - times[2] for times in marks],
            "step": [times[4] - times[0] for times in marks],
        }

    def gpu_memory(self) -> dict[str, int]:
        """Memory of this worker's GPU: torch's peak, and the current use by all processes.

        Only the latter includes memory devices, contexts and torch's cached memory.
        """
        if not self._gpu_name():
            return {"device": 0, "peak_bytes": 0, "used_bytes": 0}
        cuda = self._torch.cuda
        free_bytes, total_bytes = cuda.mem_get_info()
        return {
            "device": cuda.current_device(),
            "peak_bytes": cuda.max_memory_allocated(),
            "used_bytes": total_bytes - free_bytes,
        }

    def close(self) -> None:
        # A wrapper may offer close(); a module does not.
        close = getattr(self._model, "close", None)
        if callable(close):
            close()
        self._model = self._optimizer = self._workload = None
        if self._torch.distributed.is_initialized():
            self._torch.distributed.destroy_process_group()

    def _step(self, times: list[float]) -> float:
        """One step as in user code; appends the time before it, after each of its three phases, and at its end."""
        assert self._workload is not None
        batch = self._workload.batches[self._num_steps % len(self._workload.batches)]
        self._num_steps += 1
        self._synchronise()
        times.append(time.perf_counter())
        loss = self._workload.loss(self._model, batch)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        self._optimizer.step()
        self._optimizer.zero_grad()
        times.append(time.perf_counter())
        self._synchronise()
        times.append(time.perf_counter())
        return float(loss.detach())

    def _open_device(self) -> Any:
        """The device of this worker's model.

        Raises:
            CoarseError: If torch does not find it.
        """
        asked = self._job.options["device"]
        if asked == CPU:
            return self._torch.device(CPU)
        num_gpus = self._torch.cuda.device_count()
        number = gpu_of_worker(asked, rank=self._job.rank, num_gpus=num_gpus)
        if number >= num_gpus:
            raise CoarseError(
                f"--device {asked}: torch {self._torch.__version__} sees {num_gpus} CUDA devices in this process; "
                "look at nvidia-smi, CUDA_VISIBLE_DEVICES and whether this torch is one for CUDA"
            )
        self._torch.cuda.set_device(number)
        self._synchronise = self._torch.cuda.synchronize
        return self._torch.device("cuda", number)

    def _gpu_name(self) -> str:
        """Name of the GPU that holds the model; "" without a GPU."""
        device = self._parameters()[0].device
        return str(self._torch.cuda.get_device_name(device)) if device.type == "cuda" else ""

    def _parameters(self) -> list[Any]:
        assert self._workload is not None
        return [parameter.detach() for parameter in self._workload.module.parameters()]

    def _parameter_hash(self) -> str:
        digest = hashlib.sha256()
        for parameter in self._parameters():
            digest.update(parameter.cpu().contiguous().numpy().data)
        return digest.hexdigest()[:16]

    def _parameter_sample(self) -> list[float]:
        """Up to 64 elements of each parameter, evenly spaced."""
        sample: list[float] = []
        for parameter in self._parameters():
            flat = parameter.reshape(-1)
            sample += flat[:: max(1, flat.numel() // _SAMPLES_PER_PARAMETER)].tolist()
        return sample


def check_device(device: str) -> None:
    """Raises ValueError unless it is "cpu", "cuda" (each worker uses the GPU of its rank) or such as "cuda:0"."""
    if device not in (CPU, "cuda") and not device.removeprefix("cuda:").isdecimal():
        raise ValueError(f"device {device!r} is neither cpu nor cuda nor one such as cuda:0")


def missing_gpu(device: str) -> str:
    """The reason why a device that passes check_device() is missing; "" if it exists."""
    if device == CPU:
        return ""
    import torch

    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        return f"--device {device}: PyTorch {torch.__version__} finds no GPU here; see `coarse doctor`"
    number = gpu_of_worker(device, rank=0, num_gpus=num_gpus)
    return "" if number < num_gpus else f"--device {device}: there are {num_gpus} GPUs, numbered from 0"


def gpu_of_worker(device: str, *, rank: int, num_gpus: int) -> int:
    """Number of a worker's GPU: N for "cuda:N"; for "cuda", GPUs are distributed by rank."""
    return int(device.removeprefix("cuda:")) if ":" in device else rank % max(1, num_gpus)


def _make_optimizer(torch: Any, name: str, parameters: Any) -> Any:
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9, fused=True)
    raise ValueError(f"optimizer {name!r} is none of {', '.join(OPTIMIZERS)}")


def wrap_coarse(job: WorkerJob) -> Callable[[Any], Any]:
    join_process_group(job)
    wrap = importlib.import_module("coarse.torch").DistributedDataParallel
    return lambda module: wrap(module, broadcast_buffers=_broadcasts_buffers(job))


def wrap_ddp(job: WorkerJob) -> Callable[[Any], Any]:
    """DDP with gradients as views of its buckets, which saves a copy and memory."""
    wrap = join_process_group(job, _backend_of_peers(job)).nn.parallel.DistributedDataParallel
    return lambda module: wrap(
        module, gradient_as_bucket_view=True, broadcast_buffers=_broadcasts_buffers(job)
    )


def _broadcasts_buffers(job: WorkerJob) -> bool:
    """DDP's default on the CPU; False on a GPU, where each broadcast makes the processor wait without benefit."""
    return bool(job.options["device"] == CPU)


def _backend_of_peers(job: WorkerJob) -> str:
    """NCCL if each worker has a separate GPU, as is usual; NCCL does not support two workers on one GPU."""
    device, cuda = job.options["device"], importlib.import_module("torch").cuda
    return "nccl" if device == "cuda" and cuda.device_count() >= job.num_workers else "gloo"


def _wrap_ddp_default(job: WorkerJob) -> Callable[[Any], Any]:
    wrap: Callable[[Any], Any] = join_process_group(
        job, _backend_of_peers(job)
    ).nn.parallel.DistributedDataParallel
    return wrap


def wrap_ddp_tuned(job: WorkerJob) -> Callable[[Any], Any]:
    """DDP with one reduction per step: a single bucket, a static graph, no broadcast of buffers."""
    wrap = join_process_group(job, _backend_of_peers(job)).nn.parallel.DistributedDataParallel
    return lambda module: wrap(
        module,
        bucket_cap_mb=_ONE_BUCKET_MB,
        static_graph=True,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )


def _wrap_fsdp(job: WorkerJob) -> Callable[[Any], Any]:
    """FSDP2 as in its documentation: wraps the layers of a transformer one by one, then the rest."""
    torch = join_process_group(job)
    fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (job.num_workers,))

    def wrap(module: Any) -> Any:
        for layers in [each for each in module.modules() if isinstance(each, torch.nn.ModuleList)]:
            for layer in layers:
                fully_shard(layer, mesh=mesh)
        return fully_shard(module, mesh=mesh)

    return wrap


def _wrap_none(job: WorkerJob) -> Callable[[Any], Any]:
    return lambda module: module


def offload_optimizer(*, overlap: bool) -> Callable[[Any, Any], Any]:
    """Runs the optimizer in the memory devices, which store one copy of every parameter and its state."""

    def offload(optimizer: Any, model: Any) -> Any:
        coarse_torch = importlib.import_module("coarse.torch")
        offloaded = coarse_torch.DistributedOptimizer(optimizer, model, overlap=overlap)
        if not offloaded.runs_in_memory_devices:
            raise CoarseError("the optimizer does not run in the memory devices; the warning above says why")
        return offloaded

    return offload


def _shard_state(optimizer: Any, model: Any) -> Any:
    """ZeRO's first stage: each worker holds the optimizer's state for its share of the parameters."""
    zero = importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer
    kind = type(optimizer)
    options = {
        name: optimizer.defaults[name]
        for name in inspect.signature(kind).parameters
        if name in optimizer.defaults
    }
    return zero(model.parameters(), optimizer_class=kind, parameters_as_bucket_view=True, **options)


_SYSTEMS: dict[str, MakeCommands] = {
    "coarse": partial(TrainCommands, wrap=wrap_coarse),
    "coarse-offload": partial(TrainCommands, wrap=wrap_coarse, offload=offload_optimizer(overlap=False)),
    "coarse-overlap": partial(TrainCommands, wrap=wrap_coarse, offload=offload_optimizer(overlap=True)),
    "ddp": partial(TrainCommands, wrap=wrap_ddp),
    "ddp-tuned": partial(TrainCommands, wrap=wrap_ddp_tuned),
    "ddp-default": partial(TrainCommands, wrap=_wrap_ddp_default),
    "zero": partial(TrainCommands, wrap=wrap_ddp, offload=_shard_state),
    "fsdp": partial(TrainCommands, wrap=_wrap_fsdp),
    "none": partial(TrainCommands, wrap=_wrap_none),
}
"""Commands of each system, by its name on the command line."""


def train_commands(job: WorkerJob) -> Commands:
    """The commands of one system, in its worker process."""
    return commands_of(job, _SYSTEMS)
