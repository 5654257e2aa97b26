"""A campaign: which runs an instance makes, in which order, with which commands."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from coarse.bench.harness.launchers import find_program
from coarse.machine.memory_name import MemoryName
from coarse.machine.partition_table import PartitionTable
from experiments.aws.estimates import COSTS, memory_bytes
from experiments.aws.instances import Instance

TRAIN = Path(__file__).with_name("train.py")
SYSTEMS = ("none", "ddp", "fsdp", "horovod", "coarse", "coarse-offload")
"""The systems of experiments.aws.train, in running order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run.

    Args:
        system: As in experiments.aws.train.
        ratio: Ratio of workers to memory devices; "" for systems without memory devices.
        memory: The memory devices' kind of memory, "host" or "cuda"; "" for systems without memory devices.
        model: One of coarse.bench.models.
        batch: Samples per worker.
    """

    system: str
    ratio: str
    memory: str
    model: str
    batch: int

    def __str__(self) -> str:
        devices = f" {self.ratio} on {self.memory}" if self.ratio else ""
        return f"{self.model}, batch {self.batch}, {self.system}{devices}"

    @property
    def log_name(self) -> str:
        """Name of the file with the run's output."""
        words = (self.model, str(self.batch), self.system, self.ratio.replace(":", "to"), self.memory)
        return "-".join(filter(None, words)) + ".log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The instances that train together.

    Args:
        number: Number of instances.
        rank: This instance's number, from 0.
        master_addr: Address of the first instance; "" for a single instance.
        master_port: The first of a range of ports, one for each run: no run meets the previous one.
    """

    number: int = 1
    rank: int = 0
    master_addr: str = ""
    master_port: int = 29500

    def flags(self, run: int) -> list[str]:
        """Flags of `coarse run` for the run with that number."""
        if self.number == 1:
            return []
        return [
            *("--nnodes", str(self.number), "--node-rank", str(self.rank)),
            *("--master-addr", self.master_addr, "--master-port", str(self.master_port + run)),
        ]


def select(instance: Instance, *, workers: int, models: Sequence[str], batches: Sequence[int]) -> Instance:
    """The instance with other numbers than its own.

    Args:
        instance: The instance.
        workers: Number of workers; 0 for the instance's own.
        models: Only these; all if empty.
        batches: Samples per worker of each model; the instance's own if empty.

    Raises:
        ValueError: If the instance has too few GPUs, or does not train a model.
    """
    if unknown := sorted(set(models) - set(instance.batches)):
        raise ValueError(f"--model {unknown[0]}: it trains {', '.join(instance.batches)}")
    chosen = {
        model: tuple(batches) or own
        for model, own in instance.batches.items()
        if not models or model in models
    }
    if workers in (0, instance.num_workers):
        return replace(instance, batches=chosen)
    if instance.gpu and 2 * workers > instance.num_gpus:
        raise ValueError(
            f"--workers {workers}: it has {instance.num_gpus} GPUs; {workers} workers with a memory device each need "
            f"{2 * workers}. Take --workers {instance.num_gpus // 2} or fewer, or another instance"
        )
    return replace(instance, batches=chosen, num_workers=workers, tables={})


def plan(instance: Instance, systems: Sequence[str]) -> Iterator[Run]:
    """All runs of an instance: each batch of each model, without communication first, then under each system."""
    for model, batches in instance.batches.items():
        for batch in batches:
            for system in systems:
                for memory, ratio in _placements(system, instance):
                    yield Run(system=system, ratio=ratio, memory=memory, model=model, batch=batch)


def _placements(system: str, instance: Instance) -> Iterator[tuple[str, str]]:
    """Pairs of memory kind and ratio for a system's runs."""
    if not system.startswith("coarse"):
        yield "", ""
        return
    for memory in ("host", "cuda") if instance.gpu else ("host",):
        yield from ((memory, ratio) for ratio in instance.ratios)


def misfit(run: Run, instance: Instance, num_nodes: int = 1) -> str:
    """Why a run does not fit into GPU memory by the numbers; "" if it does, or without GPUs."""
    if instance.gpu is None:
        return ""
    needed = memory_bytes(run.model, run.batch, run.system, num_nodes * instance.num_workers)
    if needed <= instance.gpu.memory_bytes:
        return ""
    return f"needs {needed / 2**30:.1f} GiB of a {instance.gpu.name}'s {instance.gpu.memory_bytes / 2**30:.1f} GiB"


def fitting(
    instance: Instance, systems: Sequence[str], num_nodes: int = 1
) -> tuple[list[Run], dict[Run, str]]:
    """The runs that fit into GPU memory, and the others with the reasons.

    Raises:
        ValueError: If a model fits under no system at one of the batches.
    """
    runs = list(plan(instance, systems))
    misfits = {run: reason for run in runs if (reason := misfit(run, instance, num_nodes))}
    for model, batches in instance.batches.items():
        for batch in batches:
            of_batch = [run for run in runs if (run.model, run.batch) == (model, batch)]
            if of_batch and all(run in misfits for run in of_batch):
                run = of_batch[-1]
                raise ValueError(
                    f"{model} at batch {batch} fits under no system: {run.system} {misfits[run]} (activations "
                    f"{batch * COSTS[model].activation_bytes / 2**30:.1f} GiB). Take a smaller --batch"
                )
    return [run for run in runs if run not in misfits], misfits


def installed_systems(nodes: Nodes) -> tuple[str, ...]:
    """Systems that can run here. Horovod only if installed, and on one instance: more would need SSH."""
    is_installed = importlib.util.find_spec("horovod") is not None and find_program("horovodrun") is not None
    return known_systems(nodes.number, has_horovod=is_installed)


def known_systems(num_nodes: int, *, has_horovod: bool) -> tuple[str, ...]:
    """All systems, Horovod only on one instance."""
    return tuple(system for system in SYSTEMS if system != "horovod" or (has_horovod and num_nodes == 1))


def command_of(
    run: Run, instance: Instance, flags: Sequence[str] = (), *, warm_up: int, steps: int, result: Path
) -> list[str]:
    """The command that starts all workers of a run on this instance.

    Args:
        run, instance: The run and its instance.
        flags: Flags of `coarse run` for several instances.
        warm_up, steps, result: As in experiments.aws.train.
    """
    workers = str(instance.num_workers)
    script = [
        str(TRAIN),
        *("--system", run.system, "--model", run.model, "--batch", str(run.batch)),
        *("--device", "cuda" if instance.gpus else "cpu"),
        *(["--gpus", ",".join(map(str, instance.gpus))] if instance.gpus else []),
        *("--warm-up", str(warm_up), "--steps", str(steps), "--result", str(result)),
    ]
    if run.system == "horovod":
        return [find_program("horovodrun") or "horovodrun", "--gloo", "-np", workers, sys.executable, *script]
    devices = _devices_of(run, instance) if run.ratio else []
    return [sys.executable, "-m", "coarse", "run", *flags, "-n", workers, *devices, *script]


def _devices_of(run: Run, instance: Instance) -> list[str]:
    """Flags of `coarse run` for the memory devices of a run."""
    if run.memory == "host":
        return ["--memory-devices", str(instance.num_devices(run.ratio))]
    if run.ratio in instance.tables:
        return ["--partition-table", str(instance.tables[run.ratio])]
    return ["--memory-devices", ",".join(f"cuda:{gpu}" for gpu in instance.device_gpus(run.ratio))]


def table_of(instance: Instance, ratio: str) -> PartitionTable:
    """The workers of each memory device on GPUs at a ratio."""
    if ratio in instance.tables:
        return PartitionTable.load(instance.tables[ratio])
    return PartitionTable.even(
        num_workers=instance.num_workers,
        num_devices=instance.num_devices(ratio),
        memories=[MemoryName(kind="cuda", place=str(gpu)) for gpu in instance.device_gpus(ratio)],
    )
