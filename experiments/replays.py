"""Training steps of the paper's machines (Figures 16 and 17): real synchronisation on emulated links.

The paper gives no computing times. A worker's speed is therefore assumed, as a share of its GPU's peak in float32,
and every figure is given over a range of shares. A process runs each replay once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from coarse.bench.replay.driver import ReplayPlan, ReplayResult, run_replay
from coarse.bench.replay.trace import PEAK_TFLOPS, ComputeTrace, load_trace
from coarse.machine.catalogue import load_machine
from coarse.machine.partition_table import PartitionTable
from coarse.profiler.figures import COLOURS, HATCHES
from experiments.expectation import Measured

COARSE, ALL_REDUCE, RING, DENSE, LEAST_DENSE = "coarse", "workers", "allreduce", "dense", "dense-least"
"""Schemes of `coarse bench replay`. ALL_REDUCE takes the algorithm that is measured as the fastest for each size on
the same links, of rings in one and both directions, double binary trees, all-gather and all-to-all. RING is one."""

LABELS = {COARSE: "COARSE", ALL_REDUCE: "AllReduce", RING: "AllReduce, one-way ring", DENSE: "DENSE"}
SHARES = (0.3, 0.5, 0.7)
"""Assumed sustained shares of the peak: the middle one gives the figures' values, the others their ranges."""

TIME_DILATION = 10.0
DENSE_TIME_DILATION = 1.0
"""DENSE's links are so slow that the host keeps up without dilation."""

_done: dict[tuple[str, Case, float], ReplayResult] = {}


@dataclass(frozen=True, slots=True)
class Case:
    """A training job of the paper.

    Args:
        machine: Name of a machine profile.
        model: Name of a compute trace.
        batch: Samples of one worker.
        partition_table: Roles of the GPUs; by default the machine's own.
    """

    machine: str
    model: str
    batch: int
    partition_table: str = ""

    @property
    def table(self) -> PartitionTable:
        return PartitionTable.load(self.partition_table or self.machine)

    @property
    def gpu(self) -> str:
        """Model of the machine's GPUs."""
        return load_machine(self.machine).topology.gpu

    def shares(self, *, is_quick: bool) -> tuple[float, ...]:
        """Shares of the peak at which the case runs: all for BERT at 1:1, otherwise the middle one alone."""
        is_varied = self.model == "bert-large" and self.batch == 2 and not self.partition_table
        return SHARES if is_varied and not is_quick else SHARES[1:2]

    def trace(self, share: float) -> ComputeTrace:
        """The computation at this share of the GPU's peak."""
        tflops = share * PEAK_TFLOPS[self.gpu]
        trace = load_trace(self.model).with_batch(self.batch)
        return trace.on_processor(tflops, f"assumed: {share:.0%} of the peak of a {self.gpu}")

    def __str__(self) -> str:
        table = self.table
        ratio = f", {table.num_workers}:{table.num_devices}" if table.num_workers > table.num_devices else ""
        return f"{self.model}, batch {self.batch}, {self.machine}{ratio}"


def replay(
    case: Case, scheme: str, share: float, *, steps: int = 3, progress: Callable[[str], None]
) -> ReplayResult:
    """A replay of a case under a scheme of `coarse bench replay`, at an assumed share of the GPU's peak.

    Raises:
        CoarseError: If it fails.
    """
    key = (scheme, case, share)
    if key not in _done:
        is_dense = scheme in (DENSE, LEAST_DENSE)
        plan = ReplayPlan(
            schemes=(scheme,),
            trace=case.trace(share),
            machine=case.machine,
            num_workers=case.table.num_workers,
            partition_table=case.partition_table or case.machine,
            time_dilation=DENSE_TIME_DILATION if is_dense else TIME_DILATION,
            steps=1 if is_dense else steps,
        )
        progress(f"{case}: {scheme} at {share:.0%} of the peak")
        (_done[key],) = run_replay(plan)
    return _done[key]


def blocked_ms(result: ReplayResult) -> Measured:
    """Time in which a step waits for its gradients, in milliseconds, with the spread of the steps."""
    compute_us = result.step.p50_us - result.blocked_us
    value, low, high = (
        (step_us - compute_us) / 1e3
        for step_us in (result.step.p50_us, result.step.min_us, result.step.p99_us)
    )
    return Measured(value=value, low=low, high=high)


def over_shares(values: Sequence[float]) -> Measured:
    """The value at the middle share, and the range over all of SHARES."""
    return Measured(value=values[len(values) // 2], low=min(values), high=max(values))


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


def name_cases(axes: Axes, names: Sequence[str]) -> None:
    """Writes the cases' names below their bars."""
    axes.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names], fontsize=7)
