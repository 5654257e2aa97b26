"""The paper's training runs on a rented machine: ResNet-50 and BERT, COARSE against AllReduce (section V, Fig 16).

    python -m experiments.aws.run --instance p3.16xlarge --results results

Runs every model under every installed system, one after the other, prints a table, and appends the figures to
RESULTS/runs.jsonl. `--instance cpu` does the same with small models on any machine. With several instances
(Figure 16f), run the same command on each one with its own node rank:

    python -m experiments.aws.run --instance p3.16xlarge --nnodes 2 --node-rank 0 --master-addr 10.0.0.1
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from coarse.bench.harness.launchers import find_program
from coarse.bench.provenance import Provenance, append_records
from coarse.kernels import _native
from coarse.machine.gpu_topology import is_nvlink_disabled
from coarse.machine.partition_table import PartitionTable
from experiments.aws.instances import INSTANCES, Instance

TRAIN = Path(__file__).with_name("train.py")
ROOT = Path(__file__).resolve().parents[2]
SYSTEMS = ("none", "ddp", "horovod", "coarse", "coarse-offload")
"""The systems of experiments.aws.train, in running order."""

_LARGEST_DIFFERENCE = 0.1  # as a share of the parameters' total change: systems round sums differently
_LIMIT_S = 3600


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
        words = (self.model, self.system, self.ratio.replace(":", "to"), self.memory)
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


class RunError(Exception):
    """A run failed, or its results differ from the others'."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the selected models and systems; returns 1 if a run failed or its results differ."""
    arguments = _parse(argv)
    instance: Instance = arguments.found
    nodes: Nodes = arguments.nodes
    provenance = Provenance.here()
    done: list[tuple[Run, dict[str, Any]]] = []
    failures = []
    for number, run in enumerate(
        plan(instance, arguments.models, arguments.systems or installed_systems(nodes))
    ):
        print(f"{run} ...", flush=True)
        try:
            flags = nodes.flags(number)
            log = arguments.results / "logs" / run.log_name
            result = execute(run, instance, flags, warm_up=arguments.warm_up, steps=arguments.steps, log=log)
            if nodes.rank > 0:
                continue  # only worker 0 has the results, on the first instance
            is_checked = check(run, result, done)
        except RunError as error:
            failures.append(f"{run}: {error}")
            print(failures[-1], file=sys.stderr, flush=True)
            continue
        done.append((run, result))
        record = {
            "bench": "aws",
            "instance": arguments.instance,
            "nodes": nodes.number,
            "is_nvlink_disabled": is_nvlink_disabled(),
            **_as_json(run, result),
        }
        append_records(arguments.results / "runs.jsonl", [record | {"is_checked": is_checked}], provenance)
        if is_checked is False:
            print(f"{run}: there is no run of ddp to compare it with", file=sys.stderr)
    if nodes.rank == 0:
        print(table(done))
    for failure in failures:
        print(f"FAILED: {failure.splitlines()[0]}", file=sys.stderr)
    return 1 if failures else 0


def plan(instance: Instance, models: Sequence[str] = (), systems: Sequence[str] = ()) -> Iterator[Run]:
    """All runs of an instance: each model without communication first, then under each installed system.

    Args:
        instance: Where they run.
        models, systems: Only these; all if empty.
    """
    for model, batch in instance.batches.items():
        if models and model not in models:
            continue
        for system in systems or installed_systems():
            for memory, ratio in _placements(system, instance):
                yield Run(system=system, ratio=ratio, memory=memory, model=model, batch=batch)


def _placements(system: str, instance: Instance) -> Iterator[tuple[str, str]]:
    """Pairs of memory kind and ratio for a system's runs."""
    if not system.startswith("coarse"):
        yield "", ""
        return
    yield from (("host", ratio) for ratio in instance.devices)
    yield from (("cuda", ratio) for ratio in instance.tables)


def installed_systems(nodes: Nodes = Nodes()) -> tuple[str, ...]:
    """Systems that can run here. Horovod only if installed, and on one instance: more would need SSH."""
    is_installed = importlib.util.find_spec("horovod") is not None and find_program("horovodrun") is not None
    has_horovod = is_installed and nodes.number == 1
    return tuple(system for system in SYSTEMS if system != "horovod" or has_horovod)


def execute(
    run: Run, instance: Instance, flags: Sequence[str], *, warm_up: int, steps: int, log: Path
) -> dict[str, Any]:
    """Trains and returns the results of worker 0, if it runs on this instance.

    Args:
        run, instance, flags, warm_up, steps: As for command_of().
        log: File for all output of the run.

    Raises:
        RunError: If the run failed.
    """
    with tempfile.TemporaryDirectory(prefix="coarse-aws-") as folder:
        result = Path(folder) / "result.json"
        command = command_of(run, instance, flags, warm_up=warm_up, steps=steps, result=result)
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("w") as output:
                done = subprocess.run(
                    command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=_LIMIT_S
                )
        except subprocess.TimeoutExpired:
            raise RunError(f"not done after {_LIMIT_S} s") from None
        except OSError as error:
            raise RunError(f"could not be started: {error}") from None
        if done.returncode == 0 and not result.exists() and flags:
            return {}
        if done.returncode != 0 or not result.exists():
            last = "\n".join(log.read_text(errors="replace").strip().splitlines()[-20:])
            raise RunError(f"ended with exit code {done.returncode}, see {log}:\n{last}")
        found: dict[str, Any] = json.loads(result.read_text())
        return found


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
    devices: list[str] = []
    if run.memory == "cuda":
        devices = ["--partition-table", str(instance.tables[run.ratio])]
    elif run.memory == "host":
        devices = ["--memory-devices", str(instance.devices[run.ratio])]
    return [sys.executable, "-m", "coarse", "run", *flags, "-n", workers, *devices, *script]


def check(run: Run, result: dict[str, Any], done: Sequence[tuple[Run, dict[str, Any]]]) -> bool | None:
    """Compares the parameters with DDP's. Training without communication is not compared: its parameters differ.

    Args:
        run, result: The run to check, and its result.
        done: All earlier runs.

    Returns:
        Whether DDP's result was available; None for runs that are not compared.

    Raises:
        RunError: If the parameters differ.
    """
    if run.system in ("none", "ddp"):
        return None
    ddp = next((each for other, each in done if (other.system, other.model) == ("ddp", run.model)), None)
    if ddp is None:
        return False
    moved = _distance(ddp["before"], ddp["parameters"])
    apart = _distance(result["parameters"], ddp["parameters"])
    if not apart <= _LARGEST_DIFFERENCE * moved:  # also true for NaN
        raise RunError(f"parameters are {apart:.3g} from DDP's, which training has moved by {moved:.3g}")
    return True


def _distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return fmean(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def table(done: Sequence[tuple[Run, dict[str, Any]]]) -> str:
    """The results in Markdown. Blocked time is the step's time minus that of the same step without communication."""
    lines = [
        "| model | batch | system | workers : devices | memory | step p50, ms | blocked, ms "
        "| of AllReduce's | to AllReduce |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    steps = {run: median(result["step_ms"]) for run, result in done}
    peers = {(run.model, run.system): step for run, step in steps.items() if not run.ratio}
    for run, step in steps.items():
        bare, ddp = peers.get((run.model, "none")), peers.get((run.model, "ddp"))
        blocked = None if bare is None or run.system == "none" else step - bare
        ddp_blocked = None if bare is None or ddp is None else ddp - bare
        share = blocked / ddp_blocked if blocked is not None and ddp_blocked and ddp_blocked > 0 else None
        cells = [
            run.model,
            str(run.batch),
            run.system,
            run.ratio,
            run.memory,
            f"{step:.1f}",
            "" if blocked is None else f"{blocked:.1f}",
            "" if share is None else f"{100 * share:.0f} %",
            "" if ddp is None else f"{ddp / step:.2f}x",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


_RECORDED = ("workers", "step_ms", "losses", "peak_device_bytes", "decisions", "versions")


def _as_json(run: Run, result: dict[str, Any]) -> dict[str, Any]:
    return {
        "system": run.system,
        "ratio": run.ratio,
        "memory": run.memory,
        "model": run.model,
        "batch": run.batch,
        **{name: result[name] for name in _RECORDED},
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = "; ".join(f"{name}: {instance.note}" for name, instance in INSTANCES.items())
    parser = argparse.ArgumentParser(
        prog="python -m experiments.aws.run", description=f"Runs the paper's training. Instances: {names}."
    )
    parser.add_argument("--instance", choices=sorted(INSTANCES), required=True)
    parser.add_argument("--results", type=Path, default=Path("runs/aws"), metavar="FOLDER")
    parser.add_argument(
        "--model", action="append", dest="models", default=[], help="only this one; repeatable"
    )
    parser.add_argument(
        "--system",
        action="append",
        dest="systems",
        default=[],
        choices=SYSTEMS,
        help="only this one; repeatable",
    )
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="instances that train together")
    parser.add_argument("--node-rank", type=int, default=0, metavar="R", help="which of them this is, from 0")
    parser.add_argument("--master-addr", default="", metavar="HOST", help="address of the first one")
    parser.add_argument(
        "--master-port", type=int, default=29500, metavar="PORT", help="the first of a port for each run"
    )
    parser.add_argument("--warm-up", type=int, default=5, help="steps that are not timed")
    parser.add_argument("--steps", type=int, default=50, help="steps that are")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1 or arguments.warm_up < 0:
        parser.error("there is nothing to time without --steps of 1 or more, and --warm-up of 0 or more")
    arguments.nodes = _nodes(parser, arguments)
    arguments.found = INSTANCES[arguments.instance]
    if problem := _missing_gpus(arguments.found):
        parser.error(f"--instance {arguments.instance} {problem}")
    known = arguments.found.batches
    if unknown := sorted(set(arguments.models) - set(known)):
        parser.error(f"--model {unknown[0]}: {arguments.instance} trains {', '.join(known)}")
    try:
        arguments.results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--results {arguments.results}: {error.strerror}")
    return arguments


def _nodes(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Nodes:
    number, rank = arguments.nnodes, arguments.node_rank
    if not 0 <= rank < number:
        parser.error(f"--node-rank {rank} must be from 0 to {number - 1}, for --nnodes {number}")
    if number > 1 and not arguments.master_addr:
        parser.error(f"--nnodes {number} needs --master-addr, the address of the instance of --node-rank 0")
    if number > 1 and "horovod" in arguments.systems:
        parser.error("--system horovod runs on one instance: its launcher needs SSH between several")
    return Nodes(
        number=number,
        rank=rank,
        master_addr=arguments.master_addr,
        master_port=arguments.master_port,
    )


def _missing_gpus(instance: Instance) -> str:
    """The GPUs that this machine lacks for the instance; "" if none."""
    if not instance.gpus:
        return ""
    tables = map(PartitionTable.load, instance.tables.values())
    memories = {int(device.memory.place) for table in tables for device in table.devices}
    needed = 1 + max(memories | set(instance.gpus))
    if reason := _native.cuda_unavailable_reason():
        return f"needs {needed} GPUs: {reason}"
    found = _native.cuda_num_devices()
    return f"needs {needed} GPUs, and CUDA finds {found}" if found < needed else ""


if __name__ == "__main__":
    sys.exit(main())
