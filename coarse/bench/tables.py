"""Tables of a benchmark. Pure functions of its figures; a missing figure is a dash."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coarse.bench.checkpoint.driver import SaveResult
from coarse.bench.memory import REFERENCES, STEPS, StateMemory
from coarse.bench.provenance import MEASURED, BenchMachine
from coarse.bench.replay.driver import ALL_REDUCES, SCHEMES, ReplayResult
from coarse.bench.sync.driver import PEERS, SyncRecord, format_bytes
from coarse.bench.sync.systems import LIMIT
from coarse.bench.train_step.driver import Comparison, FirstStep, TrainResult
from coarse.bench.train_step.systems import CPU, TrainingJob

_LATENCY_BYTES = 64 << 10
_DASH = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table of text: the first column is a label, the others are figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def heading(machine: BenchMachine, what: str, *, kind: str = MEASURED) -> str:
    """One line with the measurement, the machine and the kind of the figures."""
    return f"{what}; {kind} on {machine}"


def bandwidth_table(records: Sequence[SyncRecord]) -> TextTable:
    """GB/s of each system by size, and COARSE compared with the best other system, by name, and with the limit.

    The second row of a size is COARSE with unregistered buffers, if measured.
    """
    peers = [peer for peer in PEERS if any(record.system == peer for record in records)]
    has_unregistered = any(record.system == "coarse-unregistered" for record in records)
    rows: list[tuple[str, ...]] = []
    for nbytes in dict.fromkeys(record.nbytes for record in records):
        speed = {record.system: record.algbw_gbytes_per_s for record in records if record.nbytes == nbytes}
        figures = tuple(_number(speed.get(system), 2) for system in (*peers, LIMIT))
        rows.append((format_bytes(nbytes), *figures, *_coarse_figures(speed, "coarse")))
        if has_unregistered:
            blanks = ("",) * len(figures)
            rows.append(("  unregistered", *blanks, *_coarse_figures(speed, "coarse-unregistered")))
    return TextTable(
        title="All-reduce, GB/s (tensor / median time)",
        columns=("size", *peers, LIMIT, "coarse", "best peer", "/ best peer", "of limit"),
        rows=tuple(rows),
    )


def latency_table(records: Sequence[SyncRecord]) -> TextTable:
    """Median and 99th percentile of each system up to 64 KiB, or at the smallest size measured."""
    sizes = sorted({record.nbytes for record in records})
    small = [nbytes for nbytes in sizes if nbytes <= _LATENCY_BYTES] or sizes[:1]
    timing = {(record.system, record.nbytes): record.timing for record in records}
    rows = []
    for system in dict.fromkeys(record.system for record in records):
        cells = [system]
        for nbytes in small:
            found = timing.get((system, nbytes))
            cells += [_DASH, _DASH] if found is None else [_number(found.p50_us, 1), _number(found.p99_us, 1)]
        rows.append(tuple(cells))
    return TextTable(
        title="Latency",
        columns=(
            "system",
            *(head for nbytes in small for head in (f"{format_bytes(nbytes)}: p50 us", "p99 us")),
        ),
        rows=tuple(rows),
    )


def replay_table(results: Sequence[ReplayResult]) -> TextTable:
    """Step, blocked communication and synchronisation bandwidth of each scheme, in the emulated machine's time.

    Blocked time is compared with that of the measured all-reduce with the shortest blocked time. The pacing error
    is the average delay of arrivals, as a share of the blocked time.
    """
    plan = results[0].plan
    compute = (
        f"computation {plan.compute_s * 1e3:.1f} ms, {plan.trace.source}"
        if plan.has_compute
        else "no computation"
    )
    workers = f"{plan.num_workers} workers" + (f" on {plan.num_nodes} nodes" if plan.num_nodes > 1 else "")
    peer_us = min((result.blocked_us for result in results if result.scheme in ALL_REDUCES), default=None)
    rows = [
        (
            f"{result.scheme} ({SCHEMES[result.scheme].what})",
            _number(result.step.p50_us / 1e3, 1),
            _number(result.blocked_us / 1e3, 1),
            _DASH if peer_us is None else f"{100 * result.blocked_us / peer_us:.0f} %",
            _number(result.sync_gbytes_per_s, 2),
            f"{result.pacing.time_dilation:g}",
            f"{result.pacing.error:.2%}",
        )
        for result in results
    ]
    return TextTable(
        title=f"{plan.trace.model}, batch {plan.trace.batch}, {workers}: {compute}",
        columns=(
            "scheme",
            "step p50 ms",
            "blocked ms",
            "of best all-reduce's",
            "sync GB/s",
            "dilation",
            "pacing error",
        ),
        rows=tuple(rows),
    )


def checkpoint_table(results: Sequence[SaveResult]) -> TextTable:
    """The cost of a save for the training loop under each system: time, the longest step, memory."""
    plan = results[0].plan
    rows = [
        (
            result.system,
            _with_error(result.added_s, result.added_error_s),
            f"{result.setup_s:.2f}",
            _milliseconds(result.step.p50_us),
            _number(result.longest_steps, 2),
            _number(result.longest_steps_without, 2),
            _milliseconds(result.stop.p50_us),
            _number(result.to_disk.p50_us / 1e6, 2),
            _mebibytes(result.extra_bytes),
            _mebibytes(result.saved_bytes),
            str(result.stop.iterations),
        )
        for result in results
    ]
    return TextTable(
        title=describe_train(plan),
        columns=(
            *("system", "added s a save", "setup s", "step p50 ms", "longest, of p50", "without a save"),
            *("save() ms", "to disk s"),
            *("extra MiB", "saved MiB", "saves"),
        ),
        rows=tuple(rows),
    )


def memory_table(results: Sequence[StateMemory]) -> TextTable:
    """Peak memory of each system, in copies of the parameters and compared with others, and its smallest limit."""
    peaks = {result.system: result.peak_bytes for result in results}
    rows = [
        (
            result.system,
            _gibibytes(result.peak_bytes) if result.peak_bytes else f"> {_gibibytes(result.available_bytes)}",
            _number(result.copies, 2),
            *(_percent(_share(result.peak_bytes, peaks.get(each))) for each in REFERENCES),
            _limit(result),
        )
        for result in results
    ]
    return TextTable(
        title=f"{describe_train(results[0].plan)}: control group of the whole job, start included, {STEPS} steps",
        columns=(
            *("system", "peak GiB", "x parameters", *(f"of {each}'s" for each in REFERENCES)),
            "trains within GiB",
        ),
        rows=tuple(rows),
    )


def _limit(result: StateMemory) -> str:
    if result.limit_bytes is None:
        return "-"
    return (
        f"{_gibibytes(result.limit_bytes)} (not {_gibibytes(result.limit_bytes - result.resolution_bytes)})"
    )


def _share(part: int | None, whole: int | None) -> float | None:
    return 100 * part / whole if part and whole else None


def _gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"


def train_table(comparison: Comparison) -> TextTable:
    """Step time of each system and its parts, blocked communication, speed-up over DDP, memory and GPU memory."""
    on_gpu = any(result.first_step.gpu for result in comparison.results)
    ddp = comparison.ddp
    over = f", DDP over {ddp.first_step.backend}" if on_gpu and ddp is not None else ""
    return TextTable(
        title=describe_train(comparison.results[0].plan) + over,
        columns=(
            *("system", "step p50 ms", "p99 ms", "forward", "backward", "optimizer"),
            *("blocked ms", "of best ddp's", "x best ddp", "job's peak MiB"),
            *(("torch's peak GPU MiB", "whole GPU MiB") if on_gpu else ()),
        ),
        rows=tuple(
            (
                *_train_row(comparison, result),
                *(_gpu_memory(result.first_step) if on_gpu else ()),
            )
            for result in comparison.results
        ),
    )


def _gpu_memory(first: FirstStep) -> tuple[str, str]:
    return _mebibytes(first.peak_gpu_bytes), _mebibytes(first.used_gpu_bytes)


def single_table(comparison: Comparison) -> TextTable:
    """Overhead of wrapping in a single process: step time of each system, and the increase over the bare step."""
    rows = [
        (
            result.system,
            _milliseconds(result.step.p50_us),
            _milliseconds(result.step.p99_us),
            _percent(comparison.overhead_percent(result), signed=True),
            _mebibytes(result.first_step.peak_bytes),
        )
        for result in comparison.results
    ]
    return TextTable(
        title=describe_train(comparison.results[0].plan),
        columns=("system", "step p50 ms", "p99 ms", "over bare", "job's peak MiB"),
        rows=tuple(rows),
    )


def describe_train(plan: TrainingJob) -> str:
    """The settings of a run, in one line."""
    sequence = f", sequence {plan.sequence}" if plan.model.startswith("bert") else ""
    workers = f"{plan.num_workers} worker" + ("s" if plan.num_workers > 1 else "")
    threads = f"{plan.threads} thread" + ("s" if plan.threads > 1 else "")
    device = f" on {plan.device}" if plan.device != CPU else ""
    return (
        f"{plan.model}, batch {plan.batch}{sequence}, {workers} of {threads}{device}, {plan.optimizer} fused"
    )


def _coarse_figures(speed: Mapping[str, float], system: str) -> tuple[str, str, str, str]:
    """Speed, the best other system, the ratio to its speed, and the share of the limit."""
    own = speed.get(system)
    if own is None:
        return (_DASH, _DASH, _DASH, _DASH)
    best = max((peer for peer in PEERS if peer in speed), key=lambda peer: speed[peer], default=None)
    limit = speed.get(LIMIT)
    ratio = _DASH if best is None else f"{own / speed[best]:.2f}x"
    return (_number(own, 2), best or _DASH, ratio, _percent(None if limit is None else 100 * own / limit))


def _train_row(comparison: Comparison, result: TrainResult) -> tuple[str, ...]:
    is_bare = result.system == "none"
    speedup = comparison.speedup_over_ddp(result)
    return (
        result.system,
        _milliseconds(result.step.p50_us),
        _milliseconds(result.step.p99_us),
        *(_milliseconds(result.phases[phase].p50_us) for phase in ("forward", "backward", "optimizer")),
        _DASH if is_bare else _milliseconds(comparison.blocked_us(result)),
        _DASH if is_bare else _percent(comparison.blocked_percent_of_ddp(result)),
        _DASH if speedup is None else f"{speedup:.2f}x",
        _mebibytes(result.first_step.peak_bytes),
    )


def _with_error(value: float, error: float) -> str:
    """Of a difference, which may be negative."""
    return f"{value:.2f}" if math.isnan(error) else f"{value:.2f} ± {error:.2f}"


def _number(value: float | None, digits: int) -> str:
    """A number with fixed digits; more digits if it would print as zero."""
    if value is None:
        return _DASH
    return f"{value:.{digits}f}" if value >= 10.0**-digits else f"{value:.2g}"


def _milliseconds(value_us: float | None) -> str:
    return _DASH if value_us is None else f"{value_us / 1e3:.2f}"


def _percent(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return _DASH
    return f"{value:+.1f}%" if signed else f"{value:.0f}%"


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f}"
