"""The torch backend "coarse" against gloo: all_reduce by size, and a training step of a small BERT under FSDP2.

    python benchmarks/torch_backend.py [--workers 2] [--report results.jsonl]

Both backends run in turns in processes of their own, each result is verified before it is timed, and figures are
*measured*. The ratio to gloo holds better than the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BACKENDS = ("gloo", "coarse")
ALL_REDUCE_BYTES = (4, 4 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20)
LIMIT_S = 600
_TIMED_S = 2.0
_WARM_UP = 5


def measure(call: Callable[[], None], prepare: Callable[[], None]) -> list[float]:
    """Milliseconds of `call`, each after `prepare`; as many times on all ranks, for about two seconds."""
    import torch
    import torch.distributed as dist

    def once() -> float:
        prepare()
        dist.barrier()
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e3

    first = statistics.median(once() for _ in range(_WARM_UP))
    count = torch.tensor([min(2000, max(10, int(_TIMED_S * 1e3 / first)))])
    dist.broadcast(count, 0)
    return [once() for _ in range(int(count))]


def all_reduces() -> dict[str, list[float]]:
    """Times of an all_reduce of float32, by size."""
    import torch
    import torch.distributed as dist

    times = {}
    expected = sum(2.0**rank for rank in range(dist.get_world_size()))
    for num_bytes in ALL_REDUCE_BYTES:
        tensor = torch.empty(num_bytes // 4)
        fill = lambda tensor=tensor: tensor.fill_(2.0 ** dist.get_rank())  # noqa: E731
        reduce = lambda tensor=tensor: dist.all_reduce(tensor)  # noqa: E731
        fill()
        reduce()
        assert bool((tensor == expected).all()), "wrong sum"
        times[f"all_reduce {num_bytes} B"] = measure(reduce, fill)
    return times


def fsdp_steps() -> dict[str, list[float]]:
    """Times of a training step of BERT-small, sharded by FSDP2."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048)
    model = BertForSequenceClassification(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.bert.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, config.vocab_size, (2, 32))

    def step() -> None:
        model(input_ids=tokens, labels=torch.zeros(2, dtype=torch.long)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"FSDP2 step of BERT-small": measure(step, lambda: None)}


def run_rank(backend: str, result: Path) -> None:
    """One rank: everything is measured, and rank 0 writes it down."""
    import torch
    import torch.distributed as dist

    from coarse import torch_entry

    torch_entry.register()  # where COARSE is not installed
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{result}.store", rank=_rank(), world_size=_workers()
    )
    times = {**all_reduces(), **fsdp_steps()}
    if dist.get_rank() == 0:
        result.write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def _rank() -> int:
    return int(os.environ["RANK"])


def _workers() -> int:
    return int(os.environ["WORLD_SIZE"])


def run_backend(backend: str, workers: int) -> dict[str, list[float]]:
    """Times of one backend, in milliseconds."""
    with tempfile.TemporaryDirectory(prefix="coarse-bench-") as folder:
        result = Path(folder, "times.json")
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank-of", backend, "--result", str(result)],
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(workers), "OMP_NUM_THREADS": "1"},
            )
            for rank in range(workers)
        ]
        try:
            if sum(rank.wait(LIMIT_S) != 0 for rank in ranks):
                raise SystemExit(f"a rank of {backend} failed")
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        times: dict[str, list[float]] = json.loads(result.read_text())
        return times


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
    parser.add_argument("--rank-of", choices=BACKENDS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        run_rank(arguments.rank_of, arguments.result)
        return
    found = {backend: run_backend(backend, arguments.workers) for backend in BACKENDS}
    print(f"{'measured, ms':28} {'gloo p50':>10} {'coarse min':>11} {'p50':>9} {'p99':>9} {'to gloo':>8}")
    for name in found["gloo"]:
        gloo, coarse = (summary(found[backend][name]) for backend in BACKENDS)
        ratio = gloo["p50"] / coarse["p50"]
        figures = f"{coarse['min']:11.3f} {coarse['p50']:9.3f} {coarse['p99']:9.3f}"
        print(f"{name:28} {gloo['p50']:10.3f} {figures} {ratio:7.2f}x")
        if arguments.report:
            _append(
                arguments.report, {"name": name, "workers": arguments.workers, "gloo": gloo, "coarse": coarse}
            )


def _append(report: Path, record: dict[str, Any]) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    with report.open("a") as lines:
        lines.write(json.dumps({**record, "kind": "measured", "commit": commit, "machine": machine}) + "\n")


if __name__ == "__main__":
    main()
