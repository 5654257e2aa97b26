"""A training step over two nodes on a slow network, with gradients of 32 and of 16 bits: COARSE and DDP.

    sudo python benchmarks/slow_network.py [--rate 1gbit] [--workers N] [--layers N] [--steps N] [--json FILE]

The nodes are network namespaces of this machine. The kernel limits the rate of the cable between them (tc's token
bucket; both tools are in Debian's iproute2). Each system trains the same layers on the same inputs, alone. Parameters
are compared before times are reported. *Limit* is the time that one node's gradients need to cross the cable, in each
direction.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import coarse.torch
from coarse.bench.harness.commands import WorkerJob
from coarse.bench.harness.worker_pool import WorkerPool, time_for
from coarse.bench.provenance import EMULATED, Provenance, append_records

NUM_NODES = 2
WIDTH = 1024
BATCH = 32
NUM_WARM_UPS = 3
PORT = 29555
BITS_PER_S = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The averaging system and its gradients' type on the network; `tolerance` of the final parameters, absolute."""

    name: str
    is_coarse: bool
    hook: Any = None
    num_bytes: int = 4
    tolerance: float = 1e-6


SYSTEMS = (
    System(name="torch DDP (gloo)", is_coarse=False),
    System(name="COARSE", is_coarse=True),
    System(
        name="torch DDP, float16",
        is_coarse=False,
        hook=default_hooks.fp16_compress_hook,
        num_bytes=2,
        tolerance=1e-4,
    ),
    System(
        name="COARSE, float16",
        is_coarse=True,
        hook=default_hooks.fp16_compress_hook,
        num_bytes=2,
        tolerance=1e-4,
    ),
    System(
        name="COARSE, bfloat16",
        is_coarse=True,
        hook=default_hooks.bf16_compress_hook,
        num_bytes=2,
        tolerance=1e-3,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`layers` of WIDTH x WIDTH, which `workers` on each node train for `steps`."""

    workers: int
    layers: int
    steps: int

    @property
    def num_gradients(self) -> int:
        """Number of gradient elements of all layers, with biases."""
        return self.layers * WIDTH * (WIDTH + 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="1gbit", help="of the cable, as tc takes it (1gbit)")
    parser.add_argument("--workers", type=int, default=1, help="on each node (1)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the records to FILE")
    arguments = parser.parse_args()
    plan = Plan(workers=arguments.workers, layers=arguments.layers, steps=arguments.steps)
    with cable(arguments.rate) as namespaces:
        results = {system.name: run(system, plan, namespaces) for system in SYSTEMS}
    check({name: parameters for name, (_, parameters) in results.items()})
    records = [
        {
            "bench": "slow network",
            "system": system.name,
            "rate": arguments.rate,
            **asdict(plan),
            "step_ms": statistics.median(results[system.name][0]) * 1e3,
            "step_min_ms": min(results[system.name][0]) * 1e3,
            "limit_ms": plan.num_gradients * system.num_bytes * 8 / bits_per_s(arguments.rate) * 1e3,
        }
        for system in SYSTEMS
    ]
    report(records, plan, arguments.rate)
    if arguments.json is not None:
        append_records(arguments.json, records, Provenance.here(), kind=EMULATED)
    return 0


def bits_per_s(rate: str) -> float:
    """Bits per second of a rate in tc's notation."""
    number = rate.rstrip("abcdefghijklmnopqrstuvwxyz")
    return float(number) * BITS_PER_S[rate[len(number) :]]


@contextlib.contextmanager
def cable(rate: str) -> Iterator[list[str]]:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2, connected at `rate`."""
    names = [f"coarse-{os.getpid()}-{node}" for node in range(NUM_NODES)]
    commands = [f"ip netns add {name}" for name in names]
    commands.append(f"ip -n {names[0]} link add cable type veth peer name cable netns {names[1]}")
    for node, name in enumerate(names):
        commands += [
            f"ip -n {name} addr add {address_of(node)}/24 dev cable",
            f"ip -n {name} link set cable up",
            f"ip -n {name} link set lo up",
            f"tc -n {name} qdisc add dev cable root tbf rate {rate} burst 1mb latency 50ms",
        ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def address_of(node: int) -> str:
    """Address at which other nodes reach a node."""
    return f"10.77.0.{node + 1}"


def run(system: System, plan: Plan, namespaces: list[str]) -> tuple[list[float], np.ndarray]:
    """Step times of the first worker, in seconds, and its parameters at the end."""
    options = {"plan": asdict(plan), "namespaces": namespaces}
    with WorkerPool(system.name, SlowNetworkCommands, NUM_NODES * plan.workers, options) as pool:
        times, parameters = pool.ask("train", time_for(plan.steps))[0]
        return times, np.load(parameters)


class SlowNetworkCommands:
    """The commands of a worker under one system."""

    def __init__(self, job: WorkerJob) -> None:
        self._job = job
        self._plan = Plan(**job.options["plan"])
        (self._system,) = (system for system in SYSTEMS if system.name == job.system)

    def setup(self) -> int:
        node, local_rank = divmod(self._job.rank, self._plan.workers)
        enter_namespace(self._job.options["namespaces"][node])
        os.environ.update(
            RANK=str(self._job.rank),
            WORLD_SIZE=str(self._job.num_workers),
            LOCAL_RANK=str(local_rank),
            LOCAL_WORLD_SIZE=str(self._plan.workers),
            MASTER_ADDR=address_of(0),
            MASTER_PORT=str(PORT),
            GLOO_SOCKET_IFNAME="cable",
            COARSE_NODE=str(node),
            COARSE_NODE_ADDRESS=address_of(node),
        )
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return self._job.rank

    def close(self) -> None:
        dist.destroy_process_group()

    def train(self) -> tuple[list[float], str]:
        """Seconds of each step, and the file with the parameters."""
        model = self._model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(self._job.rank)
        inputs = torch.randn(BATCH, WIDTH, generator=generator)
        times = []
        for _ in range(NUM_WARM_UPS + self._plan.steps):
            dist.barrier()
            begin_s = time.perf_counter()
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            times.append(time.perf_counter() - begin_s)
        path = str(self._job.directory / f"parameters-{self._job.rank}.npy")
        np.save(path, torch.cat([each.detach().flatten() for each in model.parameters()]).numpy())
        return times[NUM_WARM_UPS:], path

    def _model(self) -> Any:
        torch.manual_seed(0)
        module = torch.nn.Sequential(
            *(
                torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.LayerNorm(WIDTH))
                for _ in range(self._plan.layers)
            )
        )
        wrap = (
            coarse.torch.DistributedDataParallel
            if self._system.is_coarse
            else torch.nn.parallel.DistributedDataParallel
        )
        model = wrap(module, gradient_as_bucket_view=True)
        if self._system.hook is not None:
            model.register_comm_hook(None, self._system.hook)
        return model


def enter_namespace(name: str) -> None:
    """Moves this process into a network namespace."""
    clone_new_net = 0x40000000
    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), clone_new_net) != 0:
            raise OSError(ctypes.get_errno(), f"entering the network namespace {name}")


def check(parameters: dict[str, np.ndarray]) -> None:
    """Checks that all systems trained to the same parameters, within the tolerance of their types."""
    expected = parameters[SYSTEMS[0].name]
    for system in SYSTEMS:
        np.testing.assert_allclose(
            parameters[system.name], expected, rtol=0, atol=system.tolerance, err_msg=system.name
        )


def report(records: list[dict[str, Any]], plan: Plan, rate: str) -> None:
    """Prints a table."""
    table = Table(
        title=f"{NUM_NODES} nodes x {plan.workers}, {plan.num_gradients * 4 / 2**20:.0f} MiB of gradients, a cable "
        f"of {rate}; emulated on {Provenance.here().machine}"
    )
    for column in ("system", "step p50, ms", "min", "limit, ms", "of the limit"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for record in records:
        figures = [f"{record[name]:.0f}" for name in ("step_ms", "step_min_ms", "limit_ms")]
        table.add_row(record["system"], *figures, f"{record['limit_ms'] / record['step_ms']:.0%}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
