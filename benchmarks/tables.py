#!/usr/bin/env python3
"""Runs COARSE's benchmarks one after the other and rewrites the tables of docs/benchmarks.md: `make benchmarks`.

All tables come from one commit and one machine. Records of finished benchmarks stay in runs/benchmarks, so an
interrupted run continues there; --again measures everything again. The machine should do nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "benchmarks.md"
RECORDS = ROOT / "runs" / "benchmarks"

Record = Mapping[str, Any]
"""A line of a benchmark's --json file."""

_SYNC_PEERS = {
    "gloo": "gloo",
    "horovod": "Horovod",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "impi": "Intel MPI",
    "ucc": "UCC",
}
_STEP_SYSTEMS = {
    "coarse": "COARSE, optimizer on the workers",
    "coarse-offload": "COARSE, optimizer in the memory devices, in step()",
    "coarse-overlap": "COARSE, optimizer in the memory devices, in backward",
    "ddp": "DDP, gradients as bucket views",
    "ddp-tuned": "DDP, also one bucket, a static graph, no buffers broadcast",
    "none": "no communication",
}
_MEMORY_SYSTEMS = {
    "coarse-overlap": "COARSE, optimizer in the memory devices, in backward",
    "coarse-offload": "COARSE, optimizer in the memory devices, in step()",
    "coarse": "COARSE, optimizer on the workers",
    "zero": "DDP with ZeroRedundancyOptimizer, parameters as bucket views",
    "ddp": "DDP, gradients as bucket views",
    "fsdp": "FSDP2 by blocks",
}
_SAVE_SYSTEMS = {
    "coarse": "COARSE, optimizer in the memory devices",
    "coarse-workers": "COARSE, optimizer on the workers",
    "torch": "`torch.save`",
    "dcp": "`torch.distributed.checkpoint.async_save`",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One run of `coarse bench`, and the table that shows its records.

    Args:
        name: Name of the table's marks in the document, and of the file with the records.
        arguments: Arguments of `coarse bench`.
        table: Makes the lines of the table.
    """

    name: str
    arguments: tuple[str, ...]
    table: Callable[[Sequence[Record]], Iterable[str]]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    """A table in Markdown."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def all_reduce_table(records: Sequence[Record]) -> Iterable[str]:
    """GB/s by size of every system, and COARSE's ratio to the fastest peer."""
    rates = {(each["bytes"], each["system"]): each["algbw_gbytes_per_s"] for each in records}
    peers = [peer for peer in _SYNC_PEERS if any(system == peer for _, system in rates)]
    head = ["size", *(_SYNC_PEERS[peer] for peer in peers), "limit", "COARSE", "to the best peer"]
    head += ["COARSE, not registered", "to the best peer"]

    def row(size: int) -> Iterable[str]:
        best = max(peers, key=lambda peer: rates[size, peer])
        yield _size(size)
        for peer in peers:
            yield _bold(_rate(rates[size, peer]), peer == best)
        yield _rate(rates[size, "limit"])
        for system in ("coarse", "coarse-unregistered"):
            yield _rate(rates[size, system])
            yield _ratio(rates[size, system] / rates[size, best])

    return markdown(head, (list(row(size)) for size in sorted({size for size, _ in rates})))


def latency_table(records: Sequence[Record]) -> Iterable[str]:
    """Median microseconds of small tensors."""
    times = {(each["bytes"], each["system"]): each["p50_us"] for each in records}
    names = {**_SYNC_PEERS, "coarse": "COARSE", "coarse-unregistered": "COARSE, not registered"}
    systems = [system for system in names if any(each == system for _, each in times)]
    rows = (
        [_size(size), *(f"{times[size, system]:.3g}" for system in systems)]
        for size in sorted({size for size, _ in times if size < 1 << 20})
    )
    return markdown(["median, us", *(names[system] for system in systems)], rows)


def step_table(records: Sequence[Record]) -> Iterable[str]:
    """Milliseconds of a step by system, and each one's speed as a multiple of the fastest DDP's."""
    step_us = {each["system"]: each["p50_us"] for each in records}
    fastest = min(step_us[system] for system in step_us if system.startswith("ddp"))
    named = {each["system"]: each for each in records}
    rows = (
        [
            name,
            f"{step_us[system] / 1e3:.0f}",
            _blocked(named[system]),
            _ratio(fastest / step_us[system]),
        ]
        for system, name in _STEP_SYSTEMS.items()
        if system in step_us
    )
    return markdown(["", "step p50, ms", "blocked, ms", "speed, to the fastest DDP"], rows)


def memory_table(records: Sequence[Record]) -> Iterable[str]:
    """Peak GiB of the whole job, and the smallest limit in which it trains, if measured."""
    found = {each["system"]: each for each in records}
    has_limits = any(each["smallest_limit_bytes"] for each in records)
    rows = (
        [name, *_peak(found[system])] + ([_gib(found[system]["smallest_limit_bytes"])] if has_limits else [])
        for system, name in _MEMORY_SYSTEMS.items()
        if system in found
    )
    head = ["", "peak, GiB", "of the parameters"] + (["trains in, GiB"] if has_limits else [])
    return markdown(head, rows)


def checkpoint_table(records: Sequence[Record]) -> Iterable[str]:
    """Cost of a save for the training loop, which continues meanwhile."""
    found = {each["system"]: each for each in records}
    rows = (
        [
            name,
            f"{found[system]['added_s_per_save']:.2f} ± {found[system]['added_error_s']:.2f}",
            f"{found[system]['setup_s']:.2f}",
            f"{found[system]['step']['p50_us'] / 1e6:.2f}",
            f"{found[system]['longest_step_s'] / (found[system]['step']['p50_us'] / 1e6):.2f}",
            f"{found[system]['longest_step_without_s'] / (found[system]['step']['p50_us'] / 1e6):.2f}",
            f"{found[system]['p50_us'] / 1e3:.0f}",
            f"{found[system]['to_disk']['p50_us'] / 1e6:.1f}",
            f"{found[system]['extra_bytes'] / 2**30:.2f}",
        ]
        for system, name in _SAVE_SYSTEMS.items()
        if system in found
    )
    head = ["", "added, s", "setup, s", "median step, s", "longest, of the median", "without a save"]
    return markdown([*head, "save(), ms", "on disk after, s", "more memory, GiB"], rows)


def _step(batch: int, tokens: int, *more: str) -> Benchmark:
    return Benchmark(
        name=f"step-{batch}x{tokens}",
        arguments=("train-step", "--offload-optimizer", f"--batch={batch}", f"--seq={tokens}", *more),
        table=step_table,
    )


def _memory(name: str, model: str, *more: str) -> Benchmark:
    return Benchmark(name=name, arguments=("memory", f"--model={model}", *more), table=memory_table)


BENCHMARKS = (
    Benchmark(name="all-reduce", arguments=("sync",), table=all_reduce_table),
    _step(1, 32, "--rounds=3"),
    _step(2, 128, "--rounds=2"),
    _step(8, 128, "--rounds=2", "--steps=3"),
    _memory("memory-bert-base", "bert-base", "--no-limits"),
    _memory("memory-bert-base-4-workers", "bert-base", "--workers=4", "--no-limits"),
    _memory("memory-gpt2-medium", "gpt2-medium", "--no-limits"),
    Benchmark(name="checkpoint", arguments=("checkpoint", "--saves=6", "--every=30"), table=checkpoint_table),
)
"""In running order."""

_TABLES_OF = {"latency": ("all-reduce", latency_table)}
"""Further tables: name, the benchmark whose records it shows, and the function that makes it."""


def run(benchmark: Benchmark, folder: Path) -> None:
    """Runs a benchmark that has no records yet; an interrupted run leaves no records."""
    path = folder / f"{benchmark.name}.jsonl"
    if path.exists():
        return
    print(f"coarse bench {' '.join(benchmark.arguments)}", flush=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    command = [sys.executable, "-m", "coarse", "bench", *benchmark.arguments, "--json", str(unfinished)]
    subprocess.run(command, check=True, cwd=ROOT)
    unfinished.rename(path)


def read(path: Path) -> list[Record]:
    """The records of a benchmark."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def provenance(records: Iterable[Record], *, word: str = "Measured") -> str:
    """The commit and the machine of all records, after `word`, the kind of their figures.

    Raises:
        ValueError: If the records have different ones.
    """
    found = sorted({(each["commit"], json.dumps(each["machine"])) for each in records})
    if len(found) != 1:
        names = ", ".join(commit for commit, _ in found)
        raise ValueError(f"the records are of several commits or machines ({names}); run with --again")
    commit, machine = found[0][0], json.loads(found[0][1])
    memory = f"{machine['memory_bytes'] / 2**30:.1f} GiB"
    return f"*{word}* at commit {commit} on {machine['cpu']}, {machine['cores']} cores, {memory}."


def between_marks(text: str, name: str, lines: Iterable[str]) -> str:
    """The document with new lines between the marks of a table.

    Raises:
        ValueError: If the marks are missing.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"docs/benchmarks.md has no place for {name}: {begin.strip()} and {end}")
    return before + begin + "".join(f"{line}\n" for line in lines) + end + after


def rewrite(text: str, records: Mapping[str, Sequence[Record]]) -> str:
    """The document with new tables of these records, given by benchmark name."""
    everything = [each for some in records.values() for each in some]
    text = between_marks(text, "provenance", [provenance(everything)])
    for benchmark in BENCHMARKS:
        text = between_marks(text, benchmark.name, benchmark.table(records[benchmark.name]))
    for name, (source, table) in _TABLES_OF.items():
        text = between_marks(text, name, table(records[source]))
    return text


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def _rate(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def _ratio(value: float) -> str:
    return f"{value:.2f}x"


def _bold(text: str, is_bold: bool) -> str:
    return f"**{text}**" if is_bold else text


def _gib(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**30:.2f}"


def _peak(record: Record) -> tuple[str, str]:
    if record["peak_bytes"] is None:
        return "no room", ""
    return _gib(record["peak_bytes"]), f"{record['copies_of_parameters']:.1f}"


def _blocked(record: Record) -> str:
    blocked_us = record["blocked_us"]
    if blocked_us is None or record["system"] == "none":
        return ""
    return "none" if blocked_us <= 0 else f"{blocked_us / 1e3:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--again", action="store_true", help="forget the records that are there")
    arguments = parser.parse_args()
    RECORDS.mkdir(parents=True, exist_ok=True)
    if arguments.again:
        for path in RECORDS.glob("*.jsonl"):
            path.unlink()
    for benchmark in BENCHMARKS:
        run(benchmark, RECORDS)
    records = {each.name: read(RECORDS / f"{each.name}.jsonl") for each in BENCHMARKS}
    DOCUMENT.write_text(rewrite(DOCUMENT.read_text(encoding="utf-8"), records), encoding="utf-8")
    print(f"wrote {DOCUMENT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
