"""Figure 9: timeline of a worker's pushes and pulls, whole tensors in FIFO order against a pipeline of shards.

Real runs on emulated links. Worker 0 records three times of each shard: its own contribution reaches the memory
device, all workers' contributions have arrived, and the result is back. The session records times per tensor.
Therefore every shard is registered as its own tensor, cut as the client cuts tensors.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from coarse.bench.harness.rendezvous import SessionCommands
from coarse.bench.harness.worker_pool import WorkerPool
from coarse.bench.pace import Paced, Pacing, keep_pace
from coarse.client.tensor_group import TensorGroup
from coarse.profiler.figures import Transfer, busy_fraction, draw_timeline, format_size
from coarse.profiler.partition import count_shards
from coarse.profiler.profile import EMULATED
from coarse.profiler.routing import RoutingTable
from coarse.profiler.shard_size import plan_shard_size
from coarse.schema import TensorSpec
from experiments.common import Experiment, Finding, Options, Outcome, main
from experiments.expectation import Expectation, Measured, NumberCheck
from experiments.profiles import get_profile, measure_lateness, plan_tables

MACHINE = "aws-p3"
TENSOR_BYTES = tuple(size << 20 for size in (8, 4, 16, 6, 4, 12))
"""Unequal sizes: whole tensors of equal size would themselves form a pipeline of shards."""

TIME_DILATION = 200.0  # a shard takes 50 ms on the host: delayed polling is a small part of it
LOOK_INTERVAL_S = 0.001
LEAST_SPREAD_PERCENT = 2.0
"""Least spread of a share of the time, in points."""

WHOLE_TENSORS = 1 << 32
FIFO, SHARDED = "first in first out, whole tensors", "shards, pipelined"
AT_ONCE = "shards, all pushed at once"
PUSH, PULL = "push", "pull"

FIFO_OVERLAP = Expectation(
    what="whole tensors: both directions busy",
    low=0,
    high=0,
    tolerance=5,
    unit="% of the time",
    source="Fig 9",
)
"""A tensor's push waits for the pull of the one before. Tolerance: worker 0 sees events late."""

SHARDS_OVERLAP = Expectation(
    what="shards: both directions busy",
    low=100,
    high=100,
    tolerance=15,
    unit="% of the time",
    source="III-E, Fig 9",
)
"""The pipeline is filled without idle time. Tolerance: its ends, 2 to 3 of 25 shards, have one direction each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A piece of a tensor, pushed as one unit."""

    tensor: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The work of each worker.

    Args:
        shards: In the order of pushing.
        most_pushing: Largest number of shards on their way to a memory device at once.
        most_pending: Largest number of shards pushed and not yet pulled.
        tables: The routing table of each worker.
    """

    shards: tuple[Shard, ...]
    most_pushing: int
    most_pending: int
    tables: tuple[RoutingTable, ...]


@dataclass(slots=True, kw_only=True)
class Times:
    """Times of a shard's events, in seconds of the host; infinite for events that have not happened yet."""

    posted: float = math.inf
    arrived: float = math.inf
    complete: float = math.inf
    pulled: float = math.inf


def cut(tensor_bytes: Sequence[int], shard_bytes: int) -> tuple[Shard, ...]:
    """Cuts tensors into equal shards of at least `shard_bytes`, as clients do."""
    return tuple(
        Shard(tensor=tensor, nbytes=nbytes // count_shards(nbytes, shard_bytes))
        for tensor, nbytes in enumerate(tensor_bytes)
        for _ in range(count_shards(nbytes, shard_bytes))
    )


def transfers_of(shards: Sequence[Shard], times: Sequence[Times], time_dilation: float) -> list[Transfer]:
    """The transfers on the link over time, in the machine's microseconds, from the worker's times.

    A link carries one transfer after the other. A push begins when it was posted, or when the previous push had
    arrived, whichever is later. A pull begins when the memory device had all workers' contributions, or when the
    previous result was back, whichever is later. Therefore pulls include the synchronisation between memory devices.
    """
    begin = times[0].posted
    pushes = _in_turn(PUSH, shards, [(each.posted, each.arrived) for each in times])
    pulls = _in_turn(PULL, shards, [(each.complete, each.pulled) for each in times])
    return [
        Transfer(
            link=link,
            tensor=shard.tensor,
            nbytes=shard.nbytes,
            start_us=(start - begin) / time_dilation * 1e6,
            end_us=(end - begin) / time_dilation * 1e6,
        )
        for link, shard, start, end in (*pushes, *pulls)
    ]


def _in_turn(
    link: str, shards: Sequence[Shard], spans: Sequence[tuple[float, float]]
) -> list[tuple[str, Shard, float, float]]:
    """Spans in the order of their ends; each begins when the previous one has ended, or later."""
    rows: list[tuple[str, Shard, float, float]] = []
    until = 0.0
    for shard, (start, end) in sorted(zip(shards, spans, strict=True), key=lambda row: row[1][1]):
        rows.append((link, shard, min(max(start, until), end), end))
        until = end
    return rows


# ---- workers ----


def watch(task: Task, time_dilation: float = TIME_DILATION) -> Paced[list[Transfer]]:
    """Runs a task and returns the transfers of worker 0; with more time dilation if links do not keep pace.

    The pacing error is the average delay until worker 0 sees an arrival, as a share of a transfer's average time: the
    arrival's own, and that until the next look.

    Raises:
        PaceError: If this host cannot emulate the machine's links in time.
    """
    return keep_pace(
        f"timeline on {MACHINE}", lambda dilation: _watch(task, dilation), time_dilation=time_dilation
    )


def _watch(task: Task, time_dilation: float) -> Paced[list[Transfer]]:
    settings = {"machine": MACHINE, "partition_table": MACHINE, "time_dilation": time_dilation}
    settings["shard_bytes"] = WHOLE_TENSORS
    with WorkerPool("fig09", TimelineCommands, len(task.tables), settings) as pool:
        times, late_us = pool.ask("watch", **asdict(task))[0]
    transfers = transfers_of(task.shards, [Times(**values) for values in times], time_dilation)
    transfer_us = statistics.mean(transfer.end_us - transfer.start_us for transfer in transfers)
    error = late_us / transfer_us
    return Paced(
        value=transfers, pacing=Pacing(lateness_us=late_us, error=error, time_dilation=time_dilation)
    )


class TimelineCommands(SessionCommands):
    """The commands of a worker; its arguments are the fields of a Task as JSON."""

    def watch(
        self,
        shards: Sequence[Mapping[str, int]],
        tables: Sequence[Mapping[str, Any]],
        most_pushing: int,
        most_pending: int,
    ) -> tuple[list[dict[str, float]], float]:
        """Pushes and pulls all shards; returns the fields of their Times, and the links' lateness (us)."""
        self.session.adopt_routing(RoutingTable(**tables[self.rank]))
        specs = [
            TensorSpec(name=f"shard {i}", dtype="float32", num_elements=shard["nbytes"] // 4, op="mean")
            for i, shard in enumerate(shards)
        ]
        group = self.session.register("figure 9", specs)
        for _ in range(2):  # the first pass only touches the memory
            for index in range(len(specs)):
                np.frombuffer(group.buffer(index), np.float32)[:] = 1 + self.rank
            self.session.barrier()
            (times, looks), late_us = measure_lateness(
                self.session, lambda: _push_and_pull(group, self.rank, most_pushing, most_pending)
            )
            late_us += 1e6 * mean_delay(looks) / self.session.settings.time_dilation
            for index in range(len(specs)):
                mean = (1 + self.num_workers) / 2
                if not (np.frombuffer(group.buffer(index), np.float32) == mean).all():
                    raise AssertionError(f"shard {index} is not the mean of all workers'")
        return [asdict(each) for each in times], late_us


def mean_delay(looks: Sequence[float]) -> float:
    """Average time from a random moment to the next look, from the moments of looks: long gaps have most moments."""
    gaps = np.diff(looks)
    return float(np.sum(gaps**2) / (2 * np.sum(gaps))) if gaps.size else 0.0


def _push_and_pull(
    group: TensorGroup, rank: int, most_pushing: int, most_pending: int
) -> tuple[list[Times], list[float]]:
    """The times of each shard, and the moments of looks."""
    looks = [time.monotonic()]
    times = [Times() for _ in group.specs]
    to_push, pushing, pending = list(reversed(range(len(times)))), set[int](), set[int]()
    while to_push or pending:
        while to_push and len(pushing) < most_pushing and len(pending) < most_pending:
            index = to_push.pop()
            times[index].posted = time.monotonic()
            group.push(index)
            group.flush()
            pushing.add(index)
            pending.add(index)
        for index in list(pending):
            _look(group, index, times[index], rank)
        pushing = {index for index in pushing if times[index].arrived == math.inf}
        pending = {index for index in pending if times[index].pulled == math.inf}
        looks.append(time.monotonic())
        time.sleep(LOOK_INTERVAL_S)
    group.pull_all()
    return times, looks


def _look(group: TensorGroup, index: int, times: Times, rank: int) -> None:
    """Records a shard's events since the previous call.

    Reads the counters behind the messages about late tensors; clients use them for nothing else.
    """
    missing, now = group._native.missing_clients(group.id, index), time.monotonic()
    if rank not in missing:
        times.arrived = min(times.arrived, now)
    if not missing:
        times.complete = min(times.complete, now)
    if not group._native.is_late(group.id, index):
        times.pulled = min(times.pulled, now)


# ---- the experiment ----


def run(options: Options) -> Outcome:
    """Runs both methods of pushing over the same routes."""
    profile = get_profile(MACHINE, is_quick=options.is_quick)
    tables = plan_tables(profile)
    shard_bytes = plan_shard_size(profile, tables).nbytes
    whole, shards = cut(TENSOR_BYTES, WHOLE_TENSORS), cut(TENSOR_BYTES, shard_bytes)
    tasks = {
        FIFO: Task(shards=whole, most_pushing=1, most_pending=1, tables=tables),
        SHARDED: Task(shards=shards, most_pushing=2, most_pending=len(shards), tables=tables),
        AT_ONCE: Task(shards=shards, most_pushing=len(shards), most_pending=len(shards), tables=tables),
    }
    runs = {}
    for name, task in tasks.items():
        runs[name] = watch(task)
        options.progress(f"{name}: {_end_us(runs[name].value) / 1e3:.3g} ms")
    timelines = {name: paced.value for name, paced in runs.items()}
    return Outcome(
        findings=[
            compare(runs[FIFO], runs[SHARDED], shard_bytes),
            compare_posting(timelines[SHARDED], timelines[AT_ONCE]),
        ],
        data=[
            {
                "kind": EMULATED,
                "machine": MACHINE,
                **paced.pacing.as_json(),
                "what": name,
                "transfers": [asdict(transfer) for transfer in paced.value],
            }
            for name, paced in runs.items()
        ],
        pictures={"timeline": draw_timeline(timelines, machine=f"{MACHINE}, worker 0", kind=EMULATED)},
    )


def compare(fifo: Paced[list[Transfer]], sharded: Paced[list[Transfer]], shard_bytes: int) -> Finding:
    """The share of the time that both directions of the link are busy, and the speedup of the pipeline."""
    speedup = _end_us(fifo.value) / _end_us(sharded.value)
    sizes = f"{format_size(sum(TENSOR_BYTES))} in whole tensors and in shards of {format_size(shard_bytes)}"
    return Finding(
        ran=f"{sizes}, {MACHINE}",
        checks=(
            NumberCheck(expectation=FIFO_OVERLAP, measured=_percent_busy(fifo)),
            NumberCheck(expectation=SHARDS_OVERLAP, measured=_percent_busy(sharded)),
        ),
        note=f"shards {speedup:.2f}x as fast; push and pull busy {_percent(busy_fraction(sharded.value))}, "
        f"with whole tensors {_percent(busy_fraction(fifo.value))}",
        kind=EMULATED,
    )


def overlap(transfers: Sequence[Transfer]) -> float:
    """The fraction of the time in which pushes and pulls are under way at once."""
    either = busy_fraction([replace(transfer, link="either") for transfer in transfers])
    return max(0.0, sum(busy_fraction(transfers).values()) - sum(either.values()))


def _percent_busy(paced: Paced[list[Transfer]]) -> Measured:
    """The overlap in per cent, and what it may be if both ends of every transfer are seen late."""
    percent = 100 * overlap(paced.value)
    spread = max(LEAST_SPREAD_PERCENT, 2 * 100 * paced.pacing.error)
    return Measured(value=percent, low=max(0.0, percent - spread), high=min(100.0, percent + spread))


def compare_posting(sharded: Sequence[Transfer], at_once: Sequence[Transfer]) -> Finding:
    """The effect on the total time if a client posts shards before the link is free."""
    return Finding(
        ran=f"two shards under way to the memory device, or all at once, {MACHINE}",
        note=f"{_end_us(sharded) / 1e3:.3g} and {_end_us(at_once) / 1e3:.3g} ms",
        kind=EMULATED,
    )


def _end_us(transfers: Sequence[Transfer]) -> float:
    return max(transfer.end_us for transfer in transfers)


def _percent(busy: Mapping[str, float]) -> str:
    return " and ".join(f"{busy[link]:.0%}" for link in (PUSH, PULL))


EXPERIMENT = Experiment(
    name="fig09_timeline",
    figure="Fig 9",
    machines=("aws-p3",),
    assumption="how tensors are cut: sizes of 4 to 12 MiB",
    minutes=0.5,
    run=run,
)

if __name__ == "__main__":
    raise SystemExit(main(EXPERIMENT))
