"""The torch backend "coarse" against gloo: all_reduce by size, and a training step of a small BERT under FSDP2.

    python benchmarks/torch_backend.py [--workers 2] [--nodes 1] [--no-training] [--report results.jsonl]

Both backends use the same processes, which alternate between them call by call. So other load on the machine affects
both equally. Each result is verified before it is timed. All figures are *measured*.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from coarse.bench.harness.commands import WorkerJob
from coarse.bench.harness.rendezvous import join_process_group
from coarse.bench.harness.worker_pool import WorkerPool
from coarse.bench.provenance import Provenance, append_records

BACKENDS = ("gloo", "coarse")
ALL_REDUCE_BYTES = (4, 4 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20)
_TIMED_S = 4.0
_WARM_UP = 5

Times = dict[str, list[float]]  # by backend
Calls = dict[str, Callable[[], Any]]
Groups = dict[str, Any]


def measure(calls: Calls, groups: Groups, prepare: Callable[[], None] = lambda: None) -> Times:
    """Milliseconds of each backend's calls, each after `prepare`; equally many on all ranks, `_TIMED_S` in total."""
    import torch
    import torch.distributed as dist

    def once(backend: str) -> float:
        prepare()
        dist.barrier(group=groups[backend])
        started = time.perf_counter()
        calls[backend]()
        return (time.perf_counter() - started) * 1e3

    first = sum(statistics.median(once(backend) for _ in range(_WARM_UP)) for backend in BACKENDS)
    count = torch.tensor([min(2000, max(10, int(_TIMED_S * 1e3 / first)))])
    dist.broadcast(count, 0)
    times: Times = {backend: [] for backend in BACKENDS}
    for _ in range(int(count)):
        for backend in BACKENDS:
            times[backend].append(once(backend))
    return times


def all_reduces(groups: Groups) -> dict[str, Times]:
    """Times of an all_reduce of float32, by size."""
    import torch
    import torch.distributed as dist

    times = {}
    expected = sum(2.0**rank for rank in range(dist.get_world_size()))
    for num_bytes in ALL_REDUCE_BYTES:
        tensor = torch.empty(num_bytes // 4)
        calls = {backend: partial(dist.all_reduce, tensor, group=groups[backend]) for backend in BACKENDS}
        fill = partial(tensor.fill_, 2.0 ** dist.get_rank())
        for backend in BACKENDS:
            fill()
            calls[backend]()
            assert bool((tensor == expected).all()), f"wrong sum of {backend}"
        times[f"all_reduce {num_bytes} B"] = measure(calls, groups, fill)
    return times


def fsdp_steps(groups: Groups) -> dict[str, Times]:
    """Times of a training step of BERT-small, sharded by FSDP2."""
    import torch

    steps = {backend: _fsdp_step(groups[backend]) for backend in BACKENDS}
    losses = {backend: [steps[backend]() for _ in range(2)] for backend in BACKENDS}
    assert torch.allclose(*map(torch.tensor, losses.values()), rtol=1e-5), losses
    return {"FSDP2 step of BERT-small": measure(steps, groups)}


def _fsdp_step(group: Any) -> Callable[[], float]:
    """A training step on `group`; the step returns its loss."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=2048,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.bert.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, config.vocab_size, (2, 32))

    def step() -> float:
        loss = model(input_ids=tokens, labels=torch.zeros(2, dtype=torch.long)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


class BackendCommands:
    """The commands of a rank."""

    def __init__(self, job: WorkerJob) -> None:
        self._job = job
        self._groups: Groups = {}

    def setup(self) -> int:
        import torch
        import torch.distributed as dist

        from coarse import torch_entry

        job, nodes = self._job, self._job.options["nodes"]
        os.environ.update(RANK=str(job.rank), WORLD_SIZE=str(job.num_workers))
        if nodes > 1:
            os.environ["COARSE_NODE"] = str(job.rank * nodes // job.num_workers)
        torch_entry.register()  # needed if COARSE is not installed
        torch.set_num_threads(1)
        join_process_group(job, "coarse")
        self._groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
        return job.rank

    def close(self) -> None:
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()

    def all_reduces(self) -> dict[str, Times]:
        return all_reduces(self._groups)

    def fsdp_steps(self) -> dict[str, Times]:
        return fsdp_steps(self._groups)


def run(workers: int, nodes: int, *, has_training: bool) -> dict[str, Times]:
    """Times of both backends in milliseconds; all `nodes` nodes run on this machine."""
    with WorkerPool("torch backend", BackendCommands, workers, {"nodes": nodes}) as pool:
        times: dict[str, Times] = pool.ask("all_reduces")[0]
        return times | (pool.ask("fsdp_steps")[0] if has_training else {})


def summary(times: list[float]) -> dict[str, float]:
    """min, p50 and p99 in milliseconds."""
    ordered = sorted(times)
    return {
        "min": ordered[0],
        "p50": statistics.median(ordered),
        "p99": ordered[int(0.99 * (len(ordered) - 1))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--report", type=Path, help="a file to which JSON lines are appended")
    parser.add_argument("--nodes", type=int, default=1, help="nodes that this machine plays, over loopback")
    parser.add_argument("--no-training", dest="training", action="store_false", help="all_reduce alone")
    arguments = parser.parse_args()
    found = run(arguments.workers, arguments.nodes, has_training=arguments.training)
    print(f"{'measured, ms':28} {'gloo p50':>10} {'coarse min':>11} {'p50':>9} {'p99':>9} {'to gloo':>8}")
    for name, times in found.items():
        gloo, coarse = (summary(times[backend]) for backend in BACKENDS)
        ratio = gloo["p50"] / coarse["p50"]
        figures = f"{coarse['min']:11.3f} {coarse['p50']:9.3f} {coarse['p99']:9.3f}"
        print(f"{name:28} {gloo['p50']:10.3f} {figures} {ratio:7.2f}x")
        if arguments.report:
            where = {"workers": arguments.workers, "nodes": arguments.nodes}
            _append(arguments.report, {"name": name, **where, "gloo": gloo, "coarse": coarse})


def _append(report: Path, record: dict[str, Any]) -> None:
    append_records(report, [record], Provenance.here())


if __name__ == "__main__":
    main()
