"""`experiments.aws.run --plan`: a campaign before anything is rented. Needs no GPU and no account."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.aws import estimates
from experiments.aws.campaign import Nodes, Run, command_of, fitting, known_systems, table_of
from experiments.aws.instances import SOURCES, Instance

COMPARED = {
    "ddp": "AllReduce: torch DDP over NCCL",
    "fsdp": "AllReduce in two halves: FSDP2 over NCCL, parameters and state divided among the workers",
    "horovod": "AllReduce: Horovod, on one instance",
    "coarse": "COARSE, optimizer on the workers",
    "coarse-offload": "COARSE, optimizer in the memory devices",
    "none": "no communication: the baseline of blocked time",
}
"""What each system is, for readers of a plan."""

ROOT = Path(__file__).resolve().parents[2]
_STACK = "experiments/aws/campaign.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """What is planned.

    Args:
        name: The instance's name.
        instance: With the numbers that were selected.
        systems: Only these; all that can run there if empty.
        num_nodes: Instances that train together.
        warm_up, steps: Steps of each run.
        results: Folder of the results.

    Raises:
        ValueError: If a model fits under no system.
    """

    name: str
    instance: Instance
    systems: Sequence[str]
    num_nodes: int
    warm_up: int
    steps: int
    results: Path

    def describe(self) -> dict[str, Any]:
        """The plan as a JSON value; seconds and hours are estimates."""
        systems = self.systems or known_systems(self.num_nodes, has_horovod=bool(self.instance.gpu))
        runs, misfits = fitting(self.instance, systems, self.num_nodes)
        return {
            "instance": {"name": self.name, "number": self.num_nodes, **_facts(self.instance)},
            "commands": self._commands(),
            "placement": _placements(self.instance),
            "compared": {system: COMPARED[system] for system in systems},
            "runs": [self._run(run, number) for number, run in enumerate(runs)],
            "left_out": [{"run": str(run), "reason": reason} for run, reason in misfits.items()],
            **self._estimates(runs, systems),
            "results": [
                f"{self.results}/runs.jsonl: a line for each run",
                f"{self.results}/table.md: the figures side by side",
                f"{self.results}/logs/: output of each run",
            ],
            "sources": dict(SOURCES),
        }

    def _commands(self) -> list[str]:
        if self.instance.gpu is None:
            return ["experiments/aws/setup.sh --cpu", self._by_hand()]
        if not self.instance.is_offered:
            return ["experiments/aws/setup.sh --horovod", self._by_hand()]
        stack = "coarse-" + self.name.replace(".", "-")
        return [
            "git archive --prefix=coarse/ --output=coarse.tar.gz HEAD",
            "aws s3 cp coarse.tar.gz s3://$BUCKET/coarse.tar.gz",
            f"aws cloudformation deploy --stack-name {stack} --template-file {_STACK} --capabilities CAPABILITY_IAM "
            f"--parameter-overrides InstanceType={self.name} NumInstances={self.num_nodes} Bucket=$BUCKET "
            f"Vpc=$VPC Subnet=$SUBNET CommitId=$(git describe --always --dirty --tags)",
            f"aws s3 sync s3://$BUCKET/{stack} {self.results}   # when the instances are gone",
            f"aws cloudformation delete-stack --stack-name {stack}",
        ]

    def _by_hand(self) -> str:
        return f".venv/bin/python -m experiments.aws.run --instance {self.name} --results {self.results}"

    def _run(self, run: Run, number: int) -> dict[str, Any]:
        nodes = Nodes(number=self.num_nodes, master_addr="$FIRST")
        command = command_of(
            run,
            self.instance,
            nodes.flags(number),
            warm_up=self.warm_up,
            steps=self.steps,
            result=Path("result.json"),
        )
        told: dict[str, Any] = {**asdict(run), "command": shlex.join(map(_as_on_instance, command))}
        if self.instance.gpu is not None:
            workers = self.num_nodes * self.instance.num_workers
            step_s = estimates.step_s(run.model, run.batch, run.system, self.instance, self.num_nodes)
            told["memory_gib"] = estimates.memory_bytes(run.model, run.batch, run.system, workers) / 2**30
            told["step_s"] = step_s
            told["run_s"] = estimates.START_S + (self.warm_up + self.steps) * step_s
        return told

    def _estimates(self, runs: Sequence[Run], systems: Sequence[str]) -> dict[str, Any]:
        """Hours and price of all instances; {} without GPUs, whose speed nobody assumes."""
        if self.instance.gpu is None:
            return {}
        training_s = sum(self._run(run, number)["run_s"] for number, run in enumerate(runs))
        setup_s = estimates.SETUP_S + (estimates.HOROVOD_S if "horovod" in systems else 0)
        hours = (setup_s + training_s) / 3600
        price = self.instance.usd_per_hour
        return {
            "hours": hours,
            "usd": None if price is None else hours * price * self.num_nodes,
            "assumptions": {
                "share_of_peak": estimates.SUSTAINED,
                "start_s": estimates.START_S,
                "setup_s": setup_s,
                "warm_up": self.warm_up,
                "steps": self.steps,
                "communication": "a ring all-reduce of float32 gradients over the assumed link, not overlapped",
            },
        }


def _as_on_instance(word: str) -> str:
    """A word of a command as it is in the checkout of an instance, not of this machine."""
    if word == sys.executable:
        return ".venv/bin/python"
    return word.removeprefix(f"{ROOT}/")


def _facts(instance: Instance) -> dict[str, Any]:
    names = (
        "num_gpus",
        "memory_gib",
        "network_gbits_per_s",
        "usd_per_hour",
        "is_offered",
        "num_workers",
        "note",
    )
    return {name: getattr(instance, name) for name in names} | {
        "gpu": None if instance.gpu is None else asdict(instance.gpu),
        "batches": {model: list(batches) for model, batches in instance.batches.items()},
    }


def _placements(instance: Instance) -> list[dict[str, Any]]:
    """Where workers and memory devices are, for each kind of memory and ratio."""
    host = [
        {
            "ratio": ratio,
            "memory": "host",
            "workers": _worker_places(instance),
            "devices": instance.num_devices(ratio),
        }
        for ratio in instance.ratios
    ]
    if instance.gpu is None:
        return host
    return host + [
        {
            "ratio": ratio,
            "memory": "cuda",
            "workers": _worker_places(instance),
            "devices": [
                {"memory": str(device.memory), "workers": list(device.workers)}
                for device in table_of(instance, ratio).devices
            ],
        }
        for ratio in instance.ratios
    ]


def _worker_places(instance: Instance) -> list[str]:
    return [f"cuda:{gpu}" for gpu in instance.gpus] or ["cpu"] * instance.num_workers


def render(plan: dict[str, Any]) -> str:
    """A plan of Campaign.describe() as text."""
    lines = [_headline(plan["instance"]), "", "Commands:", *(f"  {command}" for command in plan["commands"])]
    lines += ["", "Placement:", *(f"  {_placed(each)}" for each in plan["placement"])]
    lines += ["", "Compared:", *(f"  {name:15}{text}" for name, text in plan["compared"].items())]
    lines += [
        "",
        f"Runs, one after the other ({len(plan['runs'])}):",
        *(f"  {_told(run)}" for run in plan["runs"]),
    ]
    lines += [f"  left out: {each['run']} {each['reason']}" for each in plan["left_out"]]
    if "hours" in plan:
        price = "" if plan["usd"] is None else f", {plan['usd']:.2f} USD"
        lines += ["", f"Expected: {plan['hours']:.1f} hours{price} (estimated), assuming:"]
        lines += [f"  {name}: {value}" for name, value in plan["assumptions"].items()]
    lines += ["", "Results:", *(f"  {line}" for line in plan["results"])]
    lines += [
        "",
        "Sources of the instance's figures:",
        *(f"  {name}: {text}" for name, text in plan["sources"].items()),
    ]
    return "\n".join(lines)


def _headline(facts: dict[str, Any]) -> str:
    gpu, note = facts["gpu"], f"; {facts['note']}" if facts["note"] else ""
    if gpu is None:
        return f"{facts['number']} x {facts['name']}: {facts['num_workers']} workers{note}"
    tf32 = f", {gpu['tf32_tflops']} in TF32" if gpu["tf32_tflops"] else ""
    offered = "" if facts["is_offered"] else "; NO LONGER OFFERED"
    memory_gib = gpu["memory_bytes"] / 2**30
    return (
        f"{facts['number']} x {facts['name']}: {facts['num_gpus']} {gpu['name']} of {memory_gib:.1f} GiB on "
        f"{gpu['link']}, {gpu['float32_tflops']} TFLOPS in float32{tf32}, {facts['network_gbits_per_s']} Gbit/s"
        f"{offered}{note}"
    )


def _placed(placement: dict[str, Any]) -> str:
    devices = placement["devices"]
    if not isinstance(devices, int):
        devices = ", ".join(f"{each['memory']} (workers {each['workers']})" for each in devices)
    workers = ", ".join(placement["workers"])
    return f"{placement['ratio']} on {placement['memory']}: workers on {workers}; memory devices {devices}"


def _told(run: dict[str, Any]) -> str:
    devices = f" {run['ratio']} on {run['memory']}" if run["ratio"] else ""
    text = f"{run['model']}, batch {run['batch']}, {run['system']}{devices}"
    if "run_s" not in run:
        return text
    return f"{text}: {run['memory_gib']:.1f} GiB, {1e3 * run['step_s']:.0f} ms a step, {run['run_s']:.0f} s"
