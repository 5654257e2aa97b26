"""The paper's training runs on a rented machine: ResNet-50 and BERT, COARSE against AllReduce (section V, Fig 16).

    python -m experiments.aws.run --instance g5.12xlarge --plan
    python -m experiments.aws.run --instance g5.12xlarge --results results

Runs every model and batch under every installed system, one after the other, prints a table, and appends the figures
to RESULTS/runs.jsonl. `--plan` prints all of that, with its expected hours, before anything is rented. `--instance
cpu` does the same with small models on any machine. With several instances (Figure 16f), run the same command on each
one with its own node rank:

    python -m experiments.aws.run --instance g5.12xlarge --nnodes 2 --node-rank 0 --master-addr 10.0.0.1
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from coarse.bench.provenance import Provenance, append_records
from coarse.kernels import _native
from coarse.machine.gpu_topology import is_nvlink_disabled
from experiments.aws.campaign import SYSTEMS, Nodes, Run, command_of, fitting, installed_systems, select
from experiments.aws.instances import INSTANCES, Instance
from experiments.aws.plan import Campaign, render

ROOT = Path(__file__).resolve().parents[2]

_LARGEST_DIFFERENCE = 0.1  # as a share of the parameters' total change: systems round sums differently
_LIMIT_S = 3600
_REFERENCES = ("ddp", "fsdp")
"""Systems whose parameters the others' must equal: the first that has run."""


class RunError(Exception):
    """A run failed, or its results differ from the others'."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the selected models and systems, or prints the plan; returns 1 if a run failed or its results differ."""
    arguments = _parse(argv)
    if arguments.plan:
        described = arguments.campaign.describe()
        print(json.dumps(described, indent=1) if arguments.json else render(described))
        return 0
    return _run_all(arguments)


def _run_all(arguments: argparse.Namespace) -> int:
    nodes: Nodes = arguments.nodes
    provenance = Provenance.here()
    done: list[tuple[Run, dict[str, Any]]] = []
    failures = []
    for run, reason in arguments.misfits.items():
        print(f"{run}: left out, {reason}", file=sys.stderr)
    for number, run in enumerate(arguments.runs):
        print(f"{run} ...", flush=True)
        try:
            result = execute(
                run,
                arguments.found,
                nodes.flags(number),
                warm_up=arguments.warm_up,
                steps=arguments.steps,
                log=arguments.results / "logs" / run.log_name,
            )
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
            print(f"{run}: there is no run of ddp or fsdp to compare it with", file=sys.stderr)
    if nodes.rank == 0:
        (arguments.results / "table.md").write_text(table(done) + "\n")
        print(table(done))
    for failure in failures:
        print(f"FAILED: {failure.splitlines()[0]}", file=sys.stderr)
    return 1 if failures else 0


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


def check(run: Run, result: dict[str, Any], done: Sequence[tuple[Run, dict[str, Any]]]) -> bool | None:
    """Compares the parameters with DDP's, or with FSDP's where DDP has not run.

    Training without communication is not compared: its parameters differ.

    Args:
        run, result: The run to check, and its result.
        done: All earlier runs.

    Returns:
        Whether there was a result to compare with; None for runs that are not compared.

    Raises:
        RunError: If the parameters differ.
    """
    if run.system in ("none", "ddp"):
        return None
    of_batch = {
        other.system: each for other, each in done if (other.model, other.batch) == (run.model, run.batch)
    }
    reference = next((of_batch[system] for system in _REFERENCES if system in of_batch), None)
    if reference is None:
        return False
    moved = _distance(reference["before"], reference["parameters"])
    apart = _distance(result["parameters"], reference["parameters"])
    if not apart <= _LARGEST_DIFFERENCE * moved:  # also true for NaN
        raise RunError(
            f"parameters are {apart:.3g} from AllReduce's, which training has moved by {moved:.3g}"
        )
    return True


def _distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return fmean(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def table(done: Sequence[tuple[Run, dict[str, Any]]]) -> str:
    """The results in Markdown. Blocked time is the step's time minus that of the same step without communication.

    The last column compares samples per second with AllReduce's at its best batch (Figure 16e).
    """
    lines = [
        "| model | batch | system | workers : devices | memory | step p50, ms | blocked, ms "
        "| of AllReduce's | to AllReduce | samples/s | to AllReduce's best batch |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    steps = {run: median(result["step_ms"]) for run, result in done}
    speeds = {run: 1e3 * result["workers"] * run.batch / steps[run] for run, result in done}
    peers = {(run.model, run.batch, run.system): step for run, step in steps.items() if not run.ratio}
    for run, step in steps.items():
        bare, ddp = (peers.get((run.model, run.batch, system)) for system in ("none", "ddp"))
        blocked = None if bare is None or run.system == "none" else step - bare
        ddp_blocked = None if bare is None or ddp is None else ddp - bare
        share = blocked / ddp_blocked if blocked is not None and ddp_blocked and ddp_blocked > 0 else None
        best = max(
            (speeds[each] for each in steps if (each.model, each.system) == (run.model, "ddp")), default=None
        )
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
            f"{speeds[run]:.1f}",
            "" if best is None else f"{speeds[run] / best:.2f}x",
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.aws.run",
        description=f"Runs the paper's training. Instances: {', '.join(INSTANCES)}.",
    )
    parser.add_argument("--instance", required=True, metavar="TYPE")
    parser.add_argument(
        "--plan", action="store_true", help="print the campaign with its expected hours; run nothing"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--results", type=Path, default=Path("runs/aws"), metavar="FOLDER")
    parser.add_argument(
        "--model", action="append", dest="models", default=[], help="only this one; repeatable"
    )
    parser.add_argument(
        "--batch",
        action="append",
        dest="batches",
        type=int,
        default=[],
        metavar="N",
        help="samples per worker; repeatable",
    )
    parser.add_argument(
        "--system",
        action="append",
        dest="systems",
        default=[],
        choices=SYSTEMS,
        help="only this one; repeatable",
    )
    parser.add_argument(
        "--workers", type=int, default=0, metavar="N", help="training processes; default: half of the GPUs"
    )
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="instances that train together")
    parser.add_argument("--node-rank", type=int, default=0, metavar="R", help="which of them this is, from 0")
    parser.add_argument("--master-addr", default="", metavar="HOST", help="address of the first one")
    parser.add_argument(
        "--master-port", type=int, default=29500, metavar="PORT", help="the first of a port for each run"
    )
    parser.add_argument("--warm-up", type=int, default=5, help="steps that are not timed")
    parser.add_argument("--steps", type=int, default=50, help="steps that are")
    return parser


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments = parser.parse_args(argv)
    _check_numbers(parser, arguments)
    arguments.nodes = _nodes(parser, arguments)
    try:
        arguments.found = select(
            INSTANCES[arguments.instance],
            workers=arguments.workers,
            models=arguments.models,
            batches=arguments.batches,
        )
        systems = arguments.systems or ([] if arguments.plan else installed_systems(arguments.nodes))
        arguments.campaign = _campaign(arguments)
        arguments.runs, arguments.misfits = fitting(arguments.found, systems or SYSTEMS, arguments.nnodes)
    except ValueError as error:
        parser.error(f"--instance {arguments.instance} {error}")
    if not arguments.plan:
        _check_machine(parser, arguments)
    return arguments


def _campaign(arguments: argparse.Namespace) -> Campaign:
    return Campaign(
        name=arguments.instance,
        instance=arguments.found,
        systems=arguments.systems,
        num_nodes=arguments.nnodes,
        warm_up=arguments.warm_up,
        steps=arguments.steps,
        results=arguments.results,
    )


def _check_numbers(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.instance not in INSTANCES:
        parser.error(f"--instance {arguments.instance} is none of {', '.join(INSTANCES)}")
    if arguments.steps < 1 or arguments.warm_up < 0:
        parser.error("there is nothing to time without --steps of 1 or more, and --warm-up of 0 or more")
    if arguments.workers < 0 or min(arguments.batches, default=1) < 1:
        parser.error("--workers and --batch must be 1 or more")
    if arguments.json and not arguments.plan:
        parser.error("--json prints the plan as JSON; add --plan")


def _check_machine(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends with an error if this machine lacks GPUs, or the results cannot be written."""
    if problem := _missing_gpus(arguments.found):
        parser.error(f"--instance {arguments.instance} {problem}")
    try:
        arguments.results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--results {arguments.results}: {error.strerror}")


def _nodes(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Nodes:
    number, rank = arguments.nnodes, arguments.node_rank
    if not 0 <= rank < number:
        parser.error(f"--node-rank {rank} must be from 0 to {number - 1}, for --nnodes {number}")
    if number > 1 and not arguments.master_addr and not arguments.plan:
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
    needed = 2 * instance.num_workers
    if reason := _native.cuda_unavailable_reason():
        return f"needs {needed} GPUs: {reason}"
    found = _native.cuda_num_devices()
    return f"needs {needed} GPUs, and CUDA finds {found}" if found < needed else ""


if __name__ == "__main__":
    sys.exit(main())
