"""Training steps of the paper's machines (Figures 16 and 17): real synchronisation on emulated links.

The paper gives no computing times. A worker's speed is therefore assumed, as a share of its GPU's peak in float32,
and every figure is given over a range of shares. A process runs each replay once, and measures the fastest way of an
all-reduce once for each machine and size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from matplotlib.axes import Axes

from coarse.bench.replay.driver import BLOCKED, SCHEMES, STEP, ReplayPlan, ReplayResult, run_replay
from coarse.bench.replay.trace import PEAK_TFLOPS, ComputeTrace, load_trace
from coarse.machine.catalogue import load_machine
from coarse.machine.partition_table import PartitionTable
from coarse.profiler.figures import COLOURS, HATCHES
from experiments.expectation import Measured
from experiments.quiet import MOST_BUSY, measure_in_quiet

COARSE, ALL_REDUCE, RING, DENSE, LEAST_DENSE = "coarse", "workers", "allreduce", "dense", "dense-least"
"""Schemes of `coarse bench replay`. ALL_REDUCE takes the algorithm that is measured as the fastest for each size on
the same links, of rings in one and both directions, double binary trees, all-gather and all-to-all. RING is one."""

LABELS = {COARSE: "COARSE", ALL_REDUCE: "AllReduce", RING: "AllReduce, one-way ring", DENSE: "DENSE"}
SHARES = (0.3, 0.5, 0.7)
"""Assumed sustained shares of the peak: the middle one gives the figures' values, the others their ranges."""

VARIED = (("bert-large", 2), ("resnet50", 64))
"""The paper's models and batches (V-D)."""

TIME_DILATION = 10.0
STEP_TIME_DILATION = 5.0
"""For steps that hardly block: their links are mostly idle."""

TIME_DILATION_OF_NODES = 40.0
"""Several nodes have more workers and memory devices, and sockets between them."""

DENSE_TIME_DILATION = 1.0
"""DENSE's links are so slow that the host keeps up without dilation."""

_DILATIONS = {BLOCKED: TIME_DILATION, STEP: STEP_TIME_DILATION}

_done: dict[tuple[str, Case, float], ReplayResult] = {}
_fastest_ways: dict[
    tuple[str, tuple[int, ...], int, int], dict[int, str]
] = {}  # by machine, its workers' GPUs, workers and nodes


@dataclass(frozen=True, slots=True)
class Case:
    """A training job of the paper.

    Args:
        machine: Name of a machine profile.
        model: Name of a compute trace.
        batch: Samples of one worker.
        partition_table: Roles of the GPUs; by default the machine's own.
        measures: STEP if the backward pass hides nearly all synchronisation.
        nodes: Number of such machines.
    """

    machine: str
    model: str
    batch: int
    partition_table: str = ""
    measures: str = BLOCKED
    nodes: int = 1

    @property
    def table(self) -> PartitionTable:
        return PartitionTable.load(self.partition_table or self.machine)

    @property
    def num_workers(self) -> int:
        """Workers of all nodes."""
        return self.nodes * self.table.num_workers

    @property
    def samples(self) -> int:
        """Samples in a step of all workers."""
        return self.batch * self.num_workers

    @property
    def gpu(self) -> str:
        """Model of the machine's GPUs."""
        return load_machine(self.machine).topology.gpu

    def shares(self, *, is_quick: bool) -> tuple[float, ...]:
        """Shares of the peak at which the case runs: all for VARIED at 1:1 on one node, otherwise the middle one."""
        is_varied = (self.model, self.batch) in VARIED and not self.partition_table and self.nodes == 1
        return SHARES if is_varied and not is_quick else SHARES[1:2]

    def under(self, scheme: str) -> Case:
        """The same job, without its table where the scheme uses no memory device of it: other tables share it."""
        own = replace(self, partition_table="")
        return own if scheme != COARSE and own.table.worker_gpus == self.table.worker_gpus else self

    def trace(self, share: float) -> ComputeTrace:
        """The computation at this share of the GPU's peak."""
        tflops = share * PEAK_TFLOPS[self.gpu]
        trace = load_trace(self.model).with_batch(self.batch)
        return trace.on_processor(tflops, f"assumed: {share:.0%} of the peak of a {self.gpu}")

    def __str__(self) -> str:
        table = self.table
        ratio = f", {table.num_workers}:{table.num_devices}" if table.num_workers > table.num_devices else ""
        nodes = f", {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.model}, batch {self.batch}, {self.machine}{ratio}{nodes}"


def replay(
    case: Case,
    scheme: str,
    share: float,
    *,
    steps: int = 3,
    is_quick: bool = False,
    progress: Callable[[str], None],
) -> ReplayResult:
    """A replay of a case under a scheme of `coarse bench replay`, at an assumed share of the GPU's peak.

    Raises:
        BusyMachineError: If other work took this host's processors in each attempt, unless it is a quick run.
        CoarseError: If it fails.
    """
    case = case.under(scheme)
    key = (scheme, case, share)
    if key not in _done:
        progress(f"{case}: {scheme} at {share:.0%} of the peak")
        _done[key] = run_tuned(plan_of(case, scheme, share, steps=steps), is_quick=is_quick)
    return _done[key]


def plan_of(case: Case, scheme: str, share: float, *, steps: int) -> ReplayPlan:
    """The replay of a case under a scheme; DENSE makes one step."""
    return ReplayPlan(
        schemes=(scheme,),
        trace=case.trace(share),
        machine=case.machine,
        num_workers=case.num_workers,
        num_nodes=case.nodes,
        partition_table=case.partition_table or case.machine,
        time_dilation=_time_dilation(case, scheme),
        measures=case.measures,
        steps=1 if scheme in (DENSE, LEAST_DENSE) else steps,
    )


def _time_dilation(case: Case, scheme: str) -> float:
    if scheme in (DENSE, LEAST_DENSE):
        return DENSE_TIME_DILATION
    return TIME_DILATION_OF_NODES if case.nodes > 1 else _DILATIONS[case.measures]


def run_tuned(plan: ReplayPlan, *, is_quick: bool) -> ReplayResult:
    """Replays one scheme with the ways of an all-reduce that this process has measured on the same links.

    Raises:
        BusyMachineError: If other work took this host's processors in each attempt, unless it is a quick run.
        CoarseError: If it fails.
    """
    workers = PartitionTable.load(plan.partition_table).worker_gpus if plan.partition_table else ()
    known = _fastest_ways.setdefault((plan.machine, workers, plan.num_workers, plan.num_nodes), {})
    what = f"{plan.schemes[0]} on {plan.machine}"
    (result,) = measure_in_quiet(
        what,
        lambda: run_replay(replace(plan, known_ways=dict(known))),
        most_busy=math.inf if is_quick else MOST_BUSY,
    )
    if len(SCHEMES[result.scheme].ways) > 1:
        known |= result.ways_by_size
    return result


def step_ms(result: ReplayResult) -> Measured:
    """Duration of a step in milliseconds, with the spread of the steps and the average delay of arrivals."""
    late_us, step = result.pacing.lateness_us, result.step
    return Measured(
        value=step.p50_us / 1e3, low=(step.min_us - late_us) / 1e3, high=(step.p99_us + late_us) / 1e3
    )


def blocked_ms(result: ReplayResult) -> Measured:
    """Time in which a step waits for its gradients, in milliseconds, at least 0.001; spread as in step_ms()."""
    step, compute_ms = step_ms(result), (result.step.p50_us - result.blocked_us) / 1e3
    value, low, high = (max(1e-3, each - compute_ms) for each in (step.value, step.low, step.high))
    return Measured(value=value, low=low, high=high)


def over_shares(values: Sequence[Measured]) -> Measured:
    """The value at the middle share, and the range over all of SHARES."""
    return Measured.spanning(values[len(values) // 2], values)


def draw_bar(axes: Axes, number: int, position: int, scheme: str, measured: Measured, text: str) -> None:
    """Draws the bar of one of three schemes at a case's position, with a line over its range and a text above it."""
    bars = axes.bar(
        position + 0.27 * (number - 1),
        measured.value,
        0.25,
        yerr=[[measured.value - measured.low], [measured.high - measured.value]],
        label=LABELS[scheme] if position == 0 else None,
        color=COLOURS[number],
        hatch=HATCHES[number],
        ec="white",
    )
    axes.bar_label(bars, [text], fontsize=7, padding=2)


def draw_paper(axes: Axes, number: int, position: int, low: float, high: float) -> None:
    """Marks the paper's range over the bar of one of three schemes at a case's position."""
    middle = position + 0.27 * (number - 1)
    for index, value in enumerate(dict.fromkeys((low, high))):
        label = "the paper's COARSE" if position == index == 0 else None
        axes.plot([middle - 0.15, middle + 0.15], [value, value], color="black", lw=1.5, label=label)


def name_cases(axes: Axes, names: Sequence[str]) -> None:
    """Writes the cases' names below their bars."""
    axes.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names], fontsize=7)
