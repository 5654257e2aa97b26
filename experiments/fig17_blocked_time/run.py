"""Figure 17: blocked communication time of a BERT training step, COARSE against the best AllReduce on the same links.

Real runs on emulated links. The computation is a recorded one, scaled to the machine's processor (`coarse bench
replay`). Blocked time is the step's time minus that of its computation. AllReduce runs twice: by a ring that uses one
direction of each link, and by the algorithm that is measured as the fastest for each size on these links. The
comparison uses the faster one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure

from coarse.bench.replay.driver import ReplayPlan, ReplayResult, run_replay
from coarse.bench.replay.trace import load_trace
from coarse.machine.partition_table import PartitionTable
from coarse.profiler.figures import COLOURS, HATCHES
from coarse.profiler.profile import EMULATED
from experiments.common import Experiment, Finding, Options, Outcome, main
from experiments.expectation import Expectation, Measured, NumberCheck

MODEL = "bert-large"
COARSE, RING, FASTEST = "coarse", "allreduce", "workers"
LABELS = {
    RING: "AllReduce, one-way ring",
    FASTEST: "AllReduce, fastest on these links",
    COARSE: "COARSE",
}
PEERS = (RING, FASTEST)
TIME_DILATION = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A machine of the paper's evaluation.

    Args:
        tflops: Assumed sustained speed of its GPU: half of its peak in float32.
        change: The paper's change of blocked time against AllReduce.
    """

    tflops: float
    change: Expectation


def _change(low: float, high: float, panel: str) -> Expectation:
    """A range in per cent; negative is less. Tolerance: BERT-large alone is run here, at one ratio of devices."""
    return Expectation(
        what="change of blocked time", low=low, high=high, tolerance=5, unit="%", source=f"V-E, {panel}"
    )


CASES = {
    "aws-g4dn": Case(tflops=4.05, change=_change(18, 20, "Fig 17b")),
    "aws-p3": Case(tflops=7.85, change=_change(-42, -20, "Fig 17d")),
    "sdsc-p100": Case(tflops=4.65, change=_change(-28, -28, "Fig 17c")),
}
"""Peaks from the data sheets: T4 8.1, V100 15.7, P100 9.3 TFLOPS."""


def replay(machine: str, options: Options) -> dict[str, ReplayResult]:
    """Replays all schemes on a machine.

    Raises:
        PaceError: If this host cannot emulate the machine's links in time.
    """
    case, table = CASES[machine], PartitionTable.load(machine)
    trace = load_trace("bert-base" if options.is_quick else MODEL).on_processor(
        case.tflops, f"{case.tflops:g} TFLOPS sustained, assumed"
    )
    plan = ReplayPlan(
        schemes=(COARSE, *PEERS),
        trace=trace,
        machine=machine,
        num_workers=table.num_workers,
        memory_devices=table.num_devices,
        time_dilation=TIME_DILATION,
        steps=1 if options.is_quick else 3,
    )
    return {result.scheme: result for result in run_replay(plan, options.progress)}


def blocked_ms(result: ReplayResult) -> Measured:
    """The blocked time of the steps, in milliseconds."""
    compute_us = result.step.p50_us - result.blocked_us
    value, low, high = (
        (step_us - compute_us) / 1e3
        for step_us in (result.step.p50_us, result.step.min_us, result.step.p99_us)
    )
    return Measured(value=value, low=low, high=high)


def compare(machine: str, blocked: Mapping[str, Measured], *, model: str = MODEL, ways: str = "") -> Finding:
    """COARSE's blocked time (ms) against that of the AllReduce that blocks least; also gives the ring's.

    Args:
        machine: Name of the machine.
        blocked: Milliseconds by scheme.
        model: Name of the model.
        ways: The fastest AllReduce's algorithms by size, in words.
    """
    ours, best = blocked[COARSE], min((blocked[peer] for peer in PEERS), key=lambda peer: peer.value)
    change = Measured(
        value=100 * (ours.value / best.value - 1),
        low=100 * (ours.low / best.high - 1),
        high=100 * (ours.high / best.low - 1),
    )
    return Finding(
        ran=f"blocked time of COARSE against the best AllReduce on the same links, {model}, {machine}",
        checks=(NumberCheck(expectation=CASES[machine].change, measured=change),),
        note=f"{ours.value:.3g} against {best.value:.3g} ms (a one-way ring: {blocked[RING].value:.3g} ms)"
        + (f"; AllReduce by {ways}" if ways else ""),
        kind=EMULATED,
    )


def run(options: Options) -> Outcome:
    """Replays every machine that the paper evaluates."""
    machines = [machine for machine in options.machines if machine in CASES]
    results = {}
    for machine in machines:
        options.progress(machine)
        results[machine] = replay(machine, options)
    blocked = {
        machine: {scheme: blocked_ms(result) for scheme, result in of_machine.items()}
        for machine, of_machine in results.items()
    }
    return Outcome(
        findings=[
            compare(
                machine,
                blocked[machine],
                model=results[machine][COARSE].plan.trace.model,
                ways=results[machine][FASTEST].ways,
            )
            for machine in machines
        ],
        data=[
            {"kind": EMULATED, **result.as_json()}
            for of_machine in results.values()
            for result in of_machine.values()
        ],
        pictures={"blocked": draw(blocked)},
    )


def draw(blocked: Mapping[str, Mapping[str, Measured]]) -> Figure:
    """A bar chart of all schemes on every machine, relative to the best AllReduce (1), with milliseconds."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    best_ms = [min(of_machine[peer].value for peer in PEERS) for of_machine in blocked.values()]
    for number, scheme in enumerate(LABELS):
        positions = [i + 0.27 * (number - 1) for i in range(len(blocked))]
        of_scheme = [of_machine[scheme].value for of_machine in blocked.values()]
        bars = axes.bar(
            positions,
            [each / best for each, best in zip(of_scheme, best_ms, strict=True)],
            0.25,
            label=LABELS[scheme],
            color=COLOURS[number],
            hatch=HATCHES[number],
            ec="white",
        )
        axes.bar_label(bars, [f"{each:.3g} ms" for each in of_scheme], fontsize=7)
    axes.set_xticks(range(len(blocked)), list(blocked))
    axes.set_ylabel("blocked time, best AllReduce = 1")
    axes.legend(fontsize="x-small", loc="upper center", ncols=3)
    axes.margins(y=0.25)
    figure.suptitle(f"Blocked communication time of a step, {MODEL} ({EMULATED})", fontsize=11)
    return figure


EXPERIMENT = Experiment(name="fig17_blocked_time", figure="Fig 17", run=run)

if __name__ == "__main__":
    raise SystemExit(main(EXPERIMENT))
