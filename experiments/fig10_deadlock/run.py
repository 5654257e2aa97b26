"""Figure 10: random orders of pushes, with first-come-first-serve and with a queue for each client.

Two workers push the same tensors, each in its own order to its own memory device, and then wait for all of them.
Real runs: a run counts as a deadlock if a tensor does not arrive within the time limit, which begins when all workers
have joined and registered their tensors.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coarse.bench.harness.rendezvous import SessionCommands
from coarse.bench.harness.worker_pool import COMMAND_TIMEOUT_S, WorkerPool
from coarse.errors import SyncTimeoutError
from coarse.profiler.figures import LOCAL_STYLE, REMOTE_STYLE
from coarse.profiler.profile import MEASURED
from coarse.schema import TensorSpec
from coarse.session import AnyTensorGroup
from experiments.common import Experiment, Finding, Options, Outcome, main
from experiments.expectation import Check, Expectation, judge_number

NUM_WORKERS = NUM_DEVICES = 2
FCFS, QUEUES = "fcfs", "queues"
LABELS = {FCFS: "first-come-first-serve", QUEUES: "a queue for each client"}
TENSOR_ELEMENTS = 16384  # 64 KiB of float32
LIMIT_S = 3.0
"""A wait of this duration counts as a deadlock; other runs take about a thousandth of it."""

LIMIT_TO_QUEUES = 100.0
"""Least limit as a multiple of the median run with queues, which is longer on a busy machine."""

SECOND_LIMIT = 10.0
"""A deadlock that should not be is run again with a limit longer by this factor: a busy machine is slow, too."""

NUM_POOLS = 3  # run at the same time with first-come-first-serve: most of them only wait for the limit

Order = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One pair of orders with one scheduling.

    Args:
        num_tensors: Number of tensors that each worker pushed.
        seconds: Until all tensors had arrived at the slower worker; the limit or more for a deadlock.
        limit_s: Longest wait for a tensor.
        is_deadlock: Whether the limit ended the run.
        orders_differ: Whether the workers pushed in different orders. Then first-come-first-serve must deadlock:
            at the first difference each memory device waits with a tensor that the other one lacks.
    """

    num_tensors: int
    seconds: float
    limit_s: float
    is_deadlock: bool
    orders_differ: bool


def random_orders(num_tensors: int, seed: int) -> tuple[Order, Order]:
    """An order of pushes for each worker; the same for the same seed."""
    shuffle = random.Random(f"{num_tensors} {seed}")
    first, second = (tuple(shuffle.sample(range(num_tensors), num_tensors)) for _ in range(NUM_WORKERS))
    return first, second


def expected_share(num_tensors: int) -> float:
    """The share of random pairs of orders that differ: 1 - 1/n!."""
    return 1 - 1 / math.factorial(num_tensors)


def run_orders(scheduling: str, cases: Sequence[tuple[Order, Order]], limit_s: float = LIMIT_S) -> list[Run]:
    """Runs pairs of orders, each on memory devices without an earlier deadlock.

    A deadlock that should not be counts only if it is one again with a longer limit.
    """
    runs: list[Run] = []
    while len(runs) < len(cases):
        with _pool(scheduling) as pool:
            for orders in cases[len(runs) :]:
                runs.append(_run(pool, orders, limit_s))
                if runs[-1].is_deadlock:
                    break
    return [_confirm(scheduling, orders, run) for orders, run in zip(cases, runs, strict=True)]


def longest_wait_s(queues: Sequence[Run]) -> float:
    """The limit of runs that may deadlock, from runs of the same size with queues on the same machine."""
    return max(LIMIT_S, LIMIT_TO_QUEUES * statistics.median(run.seconds for run in queues))


def _confirm(scheduling: str, orders: tuple[Order, Order], run: Run) -> Run:
    if not run.is_deadlock or (scheduling == FCFS and run.orders_differ):
        return run
    with _pool(scheduling) as pool:
        return _run(pool, orders, SECOND_LIMIT * run.limit_s)


def _pool(scheduling: str) -> WorkerPool:
    settings = {"scheduling": scheduling, "memory_devices": NUM_DEVICES}
    return WorkerPool("fig10", OrderCommands, NUM_WORKERS, settings)


def _run(pool: WorkerPool, orders: tuple[Order, Order], limit_s: float) -> Run:
    timeout_s = COMMAND_TIMEOUT_S + len(orders[0]) * limit_s
    answers = pool.ask("push", timeout_s, orders=orders, limit_s=limit_s)
    return Run(
        num_tensors=len(orders[0]),
        seconds=max(seconds for _, seconds in answers),
        limit_s=limit_s,
        is_deadlock=any(is_deadlock for is_deadlock, _ in answers),
        orders_differ=orders[0] != orders[1],
    )


class OrderCommands(SessionCommands):
    """The commands of a worker, which pushes tensors in its order."""

    def push(self, orders: Sequence[Sequence[int]], limit_s: float) -> tuple[bool, float]:
        """Returns whether the workers' orders have deadlocked, and this worker's seconds."""
        order = orders[self.rank]
        specs = [
            TensorSpec(name=f"tensor {i}", dtype="float32", num_elements=TENSOR_ELEMENTS, op="sum")
            for i in range(len(order))
        ]
        group = self.session.register("figure 10", specs)
        self.session.barrier()
        self.session.limit_waits(limit_s)  # joining, registering and meeting do not count
        is_deadlock, seconds = _push_and_pull(group, order, self.rank)
        self.session.limit_waits(self.session.settings.timeout_s)
        if not is_deadlock:  # otherwise close() comes next: leaving first would be an error for the other
            group.close()
        return is_deadlock, seconds


def _push_and_pull(group: AnyTensorGroup, order: Sequence[int], rank: int) -> tuple[bool, float]:
    begin = time.perf_counter()
    for index in order:
        np.frombuffer(group.buffer(index), np.float32)[:] = 2**rank
        group.push(index)
    try:
        for index in order:
            group.pull(index)
    except SyncTimeoutError:
        return True, time.perf_counter() - begin
    seconds = time.perf_counter() - begin
    for index in order:
        if not (np.frombuffer(group.buffer(index), np.float32) == 2**NUM_WORKERS - 1).all():
            raise AssertionError(f"tensor {index} is not the sum of both workers'")
    return False, seconds


# ---- the experiment ----


def run(options: Options) -> Outcome:
    """Runs the same orders with both schedulings."""
    counts, num_orders = ((2, 3), 3) if options.is_quick else ((2, 3, 4, 5), 10)
    runs: dict[str, list[Run]] = {QUEUES: [], FCFS: []}
    for num_tensors in counts:
        cases = [random_orders(num_tensors, seed) for seed in range(num_orders)]
        of_queues = run_orders(QUEUES, cases)
        limit_s = longest_wait_s(of_queues)
        runs[QUEUES] += of_queues
        options.progress(f"{num_tensors} tensors, {num_orders} orders: queues done")
        with ThreadPoolExecutor(NUM_POOLS) as pool:
            parts = [cases[i::NUM_POOLS] for i in range(NUM_POOLS)]
            for part in pool.map(partial(run_orders, FCFS, limit_s=limit_s), parts):
                runs[FCFS] += part
        options.progress(f"{num_tensors} tensors, {num_orders} orders: first-come-first-serve done")
    return Outcome(
        findings=findings(runs),
        data=[
            {
                "kind": MEASURED,
                "scheduling": scheduling,
                "runs": [asdict(each) for each in some],
            }
            for scheduling, some in runs.items()
        ],
        pictures={"deadlock": draw(runs)},
    )


def findings(runs: dict[str, list[Run]]) -> list[Finding]:
    """The runs compared with the paper's Figure 10."""
    fcfs, queues = runs[FCFS], runs[QUEUES]
    counts = f"{fcfs[0].num_tensors} to {fcfs[-1].num_tensors} tensors"
    slowest_ms = max((each.seconds for each in queues if not each.is_deadlock), default=math.nan) * 1e3
    return [
        Finding(
            ran=f"{LABELS[FCFS]}, {len(fcfs)} random orders of {counts}",
            checks=(
                _deadlocks("where the orders differ", fcfs, orders_differ=True, must_deadlock=True),
                _deadlocks("where they are alike", fcfs, orders_differ=False, must_deadlock=False),
            ),
            kind=MEASURED,
        ),
        Finding(
            ran=f"{LABELS[QUEUES]}, {len(queues)} random orders of {counts}",
            checks=(
                _deadlocks("where the orders differ", queues, orders_differ=True, must_deadlock=False),
                _deadlocks("where they are alike", queues, orders_differ=False, must_deadlock=False),
            ),
            note=f"the slowest took {slowest_ms:.2g} ms",
            kind=MEASURED,
        ),
    ]


def _deadlocks(where: str, runs: Sequence[Run], *, orders_differ: bool, must_deadlock: bool) -> Check:
    """The number of deadlocks among the runs whose orders differ, or are alike."""
    chosen = [each.is_deadlock for each in runs if each.orders_differ == orders_differ]
    expected = len(chosen) if must_deadlock else 0
    what, unit = f"{where} ({len(chosen)} runs):", " deadlocks"
    expectation = Expectation(what=what, low=expected, high=expected, unit=unit, source="III-F, Fig 10")
    return judge_number(expectation, sum(chosen))


def draw(runs: dict[str, list[Run]]) -> Figure:
    """Share of deadlocks, and the time of every run, by the number of tensors."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    shares, times = figure.subplots(1, 2)
    counts = sorted({each.num_tensors for each in runs[FCFS]})
    for scheduling, style in ((FCFS, REMOTE_STYLE), (QUEUES, LOCAL_STYLE)):
        by_count = [[each for each in runs[scheduling] if each.num_tensors == count] for count in counts]
        stuck = [statistics.mean(each.is_deadlock for each in some) for some in by_count]
        shares.plot(counts, stuck, label=LABELS[scheduling], **style)
        _draw_times(times, runs[scheduling], scheduling, style)
    shares.plot(
        counts, [expected_share(count) for count in counts], "k:", label="orders that differ: 1 - 1/n!"
    )
    times.axhline(LIMIT_S * 1e3, color="black", linestyle=":", label="time limit: deadlocks")
    for axes in (shares, times):
        axes.set_xticks(counts)
        axes.set_xlabel("tensors")
        axes.grid(color="0.9")
        axes.legend(fontsize="small", loc="center right")
    shares.set_ylabel("share of orders that deadlock")
    shares.set_ylim(-0.05, 1.05)
    times.set_ylabel("time of each run, ms")
    times.set_yscale("log")
    title = f"Random orders of pushes, {NUM_WORKERS} workers, {NUM_DEVICES} memory devices ({MEASURED})"
    figure.suptitle(title, fontsize=11)
    return figure


def _draw_times(axes: Axes, runs: Sequence[Run], scheduling: str, style: Mapping[str, Any]) -> None:
    """A mark for each run, grouped by scheduling."""
    shift = 0.1 if scheduling == FCFS else -0.2
    positions = [each.num_tensors + shift + 0.01 * (i % 10) for i, each in enumerate(runs)]
    marks = {**style, "linestyle": "none", "markersize": 4, "alpha": 0.7}
    axes.plot(positions, [each.seconds * 1e3 for each in runs], label=LABELS[scheduling], **marks)


EXPERIMENT = Experiment(
    name="fig10_deadlock",
    figure="Fig 10",
    machines=("host",),
    assumption="nothing: deadlocks are counted",
    minutes=1,
    run=run,
)

if __name__ == "__main__":
    raise SystemExit(main(EXPERIMENT))
