"""What the records of `nodes.py` mean: limits, verdicts, and the table in docs/benchmarks.md. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from node_network import NETEM, NONE, PROCESS, bits_per_s
from node_systems import COMPUTATION, GLOO, MPICH, STEP, SYSTEMS
from tables import DOCUMENT, between_marks, markdown, provenance

from coarse.bench.sync.driver import format_bytes

MARK = "nodes"
LIMIT_AIM = 1.10
"""A step takes at most so many times the larger of limit and computation, from LARGE_BYTES on."""

LARGE_BYTES = 25 << 20
ALL_REDUCE_AIM = 1.10
"""An all-reduce takes at most so many times the better of gloo and MPICH."""

INT8_AIM, INT8_RATE = 3.0, "1gbit"
"""A step in int8 is at least so many times as fast as gloo in float32, at this rate."""

LEAST_NOISE = 0.02

Record = Mapping[str, Any]
"""A line of the results."""

_MEANS = {NONE: "", NETEM: ", netem", PROCESS: ", process"}


def time_ms(record: Record, system: str) -> float:
    """Median of a system's rounds."""
    return float(statistics.median(record["rounds_ms"][system]))


def best(record: Record, names: Iterable[str]) -> str | None:
    """The fastest of some systems; None if none of them was measured without failing."""
    measured = [name for name in names if record["rounds_ms"].get(name)]
    return min(measured, key=lambda name: time_ms(record, name), default=None)


def _has_failed(record: Record, names: Iterable[str]) -> bool:
    return any(name in record["failures"] for name in names)


def limit_ms(record: Record) -> float:
    """The time of a cable for what a node must send, and receive, in any all-reduce of the gradients in float32.

    With M nodes that is 2 (M - 1) / M of the gradients' bytes.
    """
    num_nodes = record["nodes"]
    bits = 8 * record["bytes"] * 2 * (num_nodes - 1) / num_nodes
    return float(bits / record["link_bits_per_s"] * 1e3)


def noise(record: Record, *names: str) -> float:
    """The largest spread of rounds among some systems, in parts of their medians; LEAST_NOISE at least."""
    rounds = [record["rounds_ms"][name] for name in names]
    return max(LEAST_NOISE, *((max(each) - min(each)) / statistics.median(each) for each in rounds))


def verdict(record: Record) -> str:
    """`ok` if COARSE is within the aims of the operation, otherwise by how much it is not; "" without COARSE."""
    if failed := [name for name in record["failures"] if name.startswith("coarse")]:
        return f"{', '.join(failed)} failed"
    if not record["rounds_ms"].get("coarse"):
        return ""
    judge = _judge_step if record["operation"] == STEP else _judge_all_reduce
    return "; ".join(judge(record)) or "ok"


def _judge_step(record: Record) -> Iterator[str]:
    gloo, coarse_ms = best(record, GLOO), time_ms(record, "coarse")
    if gloo is None and _has_failed(record, GLOO):
        yield "gloo failed"
    if gloo is not None:
        excess = coarse_ms / time_ms(record, gloo) - 1
        if excess > noise(record, "coarse", gloo):
            yield f"{excess:.0%} slower than gloo"
    if record["bytes"] >= LARGE_BYTES:
        excess = coarse_ms / _bound_ms(record) - 1
        if excess > LIMIT_AIM - 1:
            yield f"{excess:.0%} above limit and computation"
    if gloo is not None and best(record, ["coarse-int8"]) and record["rate"] == INT8_RATE:
        speed = time_ms(record, gloo) / time_ms(record, "coarse-int8")
        if speed < INT8_AIM:
            yield f"int8 {speed:.2f}x as fast as gloo"


def _bound_ms(record: Record) -> float:
    """The larger of limit and computation."""
    has_computation = best(record, [COMPUTATION]) is not None
    return max(limit_ms(record), time_ms(record, COMPUTATION) if has_computation else 0.0)


def _judge_all_reduce(record: Record) -> Iterator[str]:
    peer = best(record, ("gloo", *MPICH))
    if peer is None and _has_failed(record, ("gloo", *MPICH)):
        yield "gloo and MPICH failed"
    if peer is not None:
        ratio = time_ms(record, "coarse") / time_ms(record, peer)
        if ratio > ALL_REDUCE_AIM:
            yield f"{ratio:.2f}x the time of {SYSTEMS[peer].title}"


# ---- table ----


def times(record: Record) -> dict[str, str]:
    """Milliseconds of each column: the fastest of its systems, with the least and the largest round."""
    names: dict[str, list[str]] = {}
    for name, system in SYSTEMS.items():
        names.setdefault(system.title, []).append(name)
    return {title: _time(record, some) for title, some in names.items()}


def _time(record: Record, names: Sequence[str]) -> str:
    name = best(record, names)
    if name is None:
        return "failed" if _has_failed(record, names) else ""
    rounds_ms = record["rounds_ms"][name]
    extremes = f" ({_figure(min(rounds_ms))}-{_figure(max(rounds_ms))})" if len(rounds_ms) > 1 else ""
    return _figure(time_ms(record, name)) + extremes


def _figure(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def table(records: Sequence[Record]) -> Iterator[str]:
    """A line a record, in Markdown, by operation and cable; without columns of systems that were not measured."""
    records = sorted(records, key=_place)
    cells = [times(record) for record in records]
    titles = [title for title in times(records[0]) if any(each[title] for each in cells)]
    head = ["cable", "round trip, ms", "loss", "nodes x workers", "", "size"]
    head += [f"{title}, ms" for title in titles]
    head += ["speed, to gloo", "limit, ms", "of the limit", "verdict"]
    rows = (
        [*_conditions(record), *(each[title] for title in titles), *_ratios(record), verdict(record)]
        for record, each in zip(records, cells, strict=True)
    )
    yield from markdown(head, rows)


def _place(record: Record) -> tuple[Any, ...]:
    names = ("delay_ms", "loss_percent", "nodes", "workers", "bytes")
    return (record["operation"] != STEP, bits_per_s(record["rate"]), *(record[name] for name in names))


def _conditions(record: Record) -> list[str]:
    means = _MEANS[record["delay_by"]]
    return [
        f"{record['rate']}, {record['link_bits_per_s'] / 1e9:.2f} Gbit/s",
        f"{record['delay_ms']:g}, {record['round_trip_ms']:.3g}{means}",
        f"{record['loss_percent']:g}%",
        f"{record['nodes']} x {record['workers']}",
        "DDP step" if record["operation"] == STEP else "all_reduce",
        format_bytes(record["bytes"]),
    ]


def _ratios(record: Record) -> list[str]:
    """COARSE's speed in multiples of gloo's; the limit; the limit's part of COARSE's time."""
    limit, gloo = limit_ms(record), best(record, GLOO)
    if not record["rounds_ms"].get("coarse"):
        return ["", _figure(limit), ""]
    coarse_ms = time_ms(record, "coarse")
    to_gloo = f"{time_ms(record, gloo) / coarse_ms:.2f}x" if gloo else ""
    return [to_gloo, _figure(limit), f"{limit / coarse_ms:.0%}"]


def write_document(records: Sequence[Record]) -> None:
    """Puts the table between its marks in docs/benchmarks.md.

    Raises:
        ValueError: If the marks are missing, or records are of several commits or machines.
    """
    lines = [provenance(records, word="Emulated"), "", *table(records)]
    DOCUMENT.write_text(between_marks(DOCUMENT.read_text(encoding="utf-8"), MARK, lines), encoding="utf-8")
