"""Figure 2: the share of communication in training on T4, for 1 to 4 GPUs (a), and by operation (b).

AllReduce without memory devices, as the paper measures it (II-B): the fastest way on the emulated links of aws-g4dn.
The computation is recorded and scaled to an assumed speed. The text names none of the eight models; these are
published ones, from few parameters for their computation to many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.figure import Figure

from coarse.bench.pace import Pacing
from coarse.bench.replay.driver import STEP, ReplayPlan
from coarse.bench.replay.trace import PEAK_TFLOPS, load_trace
from coarse.profiler.figures import COLOURS
from coarse.profiler.profile import EMULATED, SIMULATED
from experiments.common import Experiment, Finding, Options, Outcome, main
from experiments.expectation import CategoryCheck, Expectation, Measured, NumberCheck
from experiments.replays import ALL_REDUCE, SHARES, run_tuned

MACHINE, GPU = "aws-g4dn", "T4"
GPU_COUNTS = (2, 3, 4)
"""With one GPU nothing is communicated."""

TIME_DILATION = 10.0
_IMAGE_BYTES, _TOKEN_BYTES = 4 * 3 * 224 * 224, 8
_HOST_GBYTES_PER_S = 12.0  # PCIe 3.0 x16, as one direction of the machine file's lanes

BATCHES: Mapping[str, int] = {
    "alexnet": 64,
    "vgg16": 32,
    "resnet50": 64,
    "resnet152": 32,
    "bert-small": 2,
    "bert-base": 2,
    "bert-large": 2,
    "gpt2-medium": 2,
}
"""Samples of one worker, by model."""

MOST = Expectation(
    what="largest share with 4 GPUs", low=76, high=76, tolerance=5, unit="%", source="II-B, Fig 2a"
)
GROWS = "grows with the number of GPUs"
DOMINATES = "AllReduce"

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Communication of one model.

    Args:
        gpus: Number of GPUs.
        step_ms: The step.
        compute_ms: Its computation.
        all_reduce_ms: AllReduce alone, without computation beside it.
        pacing: Of both runs.
    """

    model: str
    gpus: int
    step_ms: float
    compute_ms: float
    all_reduce_ms: float
    pacing: Pacing

    @property
    def waiting_percent(self) -> float:
        """Share of the step in which the computation waits."""
        return 100 * max(0.0, 1 - self.compute_ms / self.step_ms)

    @property
    def busy_percent(self) -> float:
        """Duration of AllReduce as a share of the step, hidden or not: the sum of operations that nvprof gives."""
        return min(100.0, 100 * self.all_reduce_ms / self.step_ms)


def measure_share(
    model: str, gpus: int, *, speed: float = SHARES[1], is_quick: bool, progress: Progress
) -> Share:
    """Replays a model on this number of GPUs, whose speed is this share of their peak.

    Of the repeats alone the fastest counts: delays of this host only add to the links' time.
    """
    progress(f"{model}, {gpus} GPUs at {speed:.0%} of their peak")
    trace = load_trace(model).with_batch(BATCHES[model])
    result = run_tuned(
        ReplayPlan(
            schemes=(ALL_REDUCE,),
            trace=trace.on_processor(
                speed * PEAK_TFLOPS[GPU], f"assumed: {speed:.0%} of the peak of a {GPU}"
            ),
            machine=MACHINE,
            num_workers=gpus,
            memory_devices=1,
            time_dilation=TIME_DILATION,
            steps=1,
            measures=STEP,
            alone_steps=3,
        ),
        is_quick=is_quick,
    )
    assert result.alone is not None
    return Share(
        model=model,
        gpus=gpus,
        step_ms=result.step.p50_us / 1e3,
        compute_ms=1e3 * result.plan.compute_s,
        all_reduce_ms=result.alone.min_us / 1e3,
        pacing=result.pacing,
    )


def input_copy_ms(model: str) -> float:
    """Time to copy a worker's batch from host memory to its GPU over a link of its own (simulated)."""
    sequence = load_trace(model).sequence
    nbytes = BATCHES[model] * (sequence * _TOKEN_BYTES if sequence else _IMAGE_BYTES)
    return nbytes / _HOST_GBYTES_PER_S / 1e6


def compare_growth(shares: Sequence[Share], at_other_speeds: Sequence[Share] = ()) -> Finding:
    """Whether the share of each model grows with the number of GPUs, and the largest share of all.

    Args:
        shares: Of every model and number of GPUs.
        at_other_speeds: Of the model with the largest share, on the most GPUs.
    """
    models = dict.fromkeys(share.model for share in shares)
    growth = tuple(
        GROWS
        if _is_rising([each.busy_percent for each in shares if each.model == model])
        else f"{model} does not"
        for model in models
    )
    most = largest(shares)
    percents = [each.busy_percent for each in (most, *at_other_speeds)]
    measured = Measured(value=most.busy_percent, low=min(percents), high=max(percents))
    return Finding(
        ran=f"share of communication, {len(models)} models, AllReduce, {MACHINE}",
        checks=(
            NumberCheck(expectation=MOST, measured=measured),
            CategoryCheck(category=GROWS, categories=growth, source="II-B, Fig 2a"),
        ),
        note=f"the largest is {most.model}'s; {most.waiting_percent:.3g}% of its step blocks",
        kind=EMULATED,
    )


def largest(shares: Sequence[Share]) -> Share:
    """The largest share on the most GPUs."""
    gpus = max(each.gpus for each in shares)
    return max((each for each in shares if each.gpus == gpus), key=lambda each: each.busy_percent)


def _is_rising(percents: Sequence[float]) -> bool:
    """Whether the last is the largest, and none falls by more than a point."""
    falls = any(after < before - 1 for before, after in pairwise(percents))
    return not falls and percents[-1] > percents[0]


def compare_operations(shares: Sequence[Share]) -> Finding:
    """The operation that takes longest, for each model on the most GPUs."""
    longest = tuple(
        DOMINATES if each.all_reduce_ms > input_copy_ms(each.model) else f"input copies of {each.model}"
        for each in shares
        if each.gpus == GPU_COUNTS[-1]
    )
    return Finding(
        ran=f"the longest operation of communication, {len(longest)} models, {GPU_COUNTS[-1]} GPUs, {MACHINE}",
        checks=(CategoryCheck(category=DOMINATES, categories=longest, source="II-B, Fig 2b"),),
        note="copies of inputs are simulated",
        kind=EMULATED,
    )


def run(options: Options) -> Outcome:
    """Replays every model on every number of GPUs, and the one with the largest share at other speeds too."""
    models = tuple(BATCHES)[:2] if options.is_quick else tuple(BATCHES)
    counts = GPU_COUNTS[::2] if options.is_quick else GPU_COUNTS
    if MACHINE not in options.machines:
        return Outcome(findings=(), data=())
    shares = [
        measure_share(model, gpus, is_quick=options.is_quick, progress=options.progress)
        for model in models
        for gpus in counts
    ]
    most = largest(shares)
    at_other_speeds = [
        measure_share(
            most.model, most.gpus, speed=speed, is_quick=options.is_quick, progress=options.progress
        )
        for speed in (() if options.is_quick else (SHARES[0], SHARES[-1]))
    ]
    return Outcome(
        findings=[compare_growth(shares, at_other_speeds), compare_operations(shares)],
        data=[
            *({"kind": EMULATED, **_as_json(share)} for share in (*shares, *at_other_speeds)),
            *(
                {"kind": SIMULATED, "model": model, "input_copy_ms": round(input_copy_ms(model), 4)}
                for model in models
            ),
        ],
        pictures={"share": draw(shares)},
    )


def _as_json(share: Share) -> Mapping[str, object]:
    return {
        "model": share.model,
        "batch": BATCHES[share.model],
        "gpus": share.gpus,
        "step_ms": share.step_ms,
        "compute_ms": share.compute_ms,
        "all_reduce_ms": share.all_reduce_ms,
        **share.pacing.as_json(),
    }


def draw(shares: Sequence[Share]) -> Figure:
    """(a) the share of communication by number of GPUs; (b) AllReduce and input copies with the most GPUs."""
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    models = list(dict.fromkeys(share.model for share in shares))
    counts = sorted({share.gpus for share in shares})
    for number, gpus in enumerate(counts):
        percents = [share.busy_percent for share in shares if share.gpus == gpus]
        positions = [at + 0.27 * (number - 1) for at in range(len(models))]
        left.bar(positions, percents, 0.25, color=COLOURS[number], label=f"{gpus} GPUs")
    left.axhline(MOST.high, color="grey", lw=0.8, ls="--", label=f"the paper's largest, {MOST.high:g}%")
    left.set_ylabel("AllReduce, % of the step")
    most = [share for share in shares if share.gpus == counts[-1]]
    totals = [share.all_reduce_ms + input_copy_ms(share.model) for share in most]
    reduced = [100 * share.all_reduce_ms / total for share, total in zip(most, totals, strict=True)]
    right.bar(range(len(models)), reduced, color=COLOURS[0], label="AllReduce")
    right.bar(
        range(len(models)),
        [100 - percent for percent in reduced],
        bottom=reduced,
        color=COLOURS[1],
        label=f"copies of inputs ({SIMULATED})",
    )
    right.set_ylabel(f"% of communication, {counts[-1]} GPUs")
    left.set_ylim(0, 100)
    for axes in (left, right):
        axes.set_xticks(range(len(models)), models, rotation=30, ha="right", fontsize=7)
        axes.legend(fontsize="x-small", loc="upper right" if axes is left else "lower right")
    figure.suptitle(f"Communication in training on {MACHINE} ({EMULATED})", fontsize=11)
    return figure


EXPERIMENT = Experiment(
    name="fig02_communication_share",
    figure="Fig 2",
    machines=("aws-g4dn",),
    assumption="computing time (half of a T4's peak; the range is for 30 to 70%), and the choice of models",
    minutes=3,
    run=run,
)

if __name__ == "__main__":
    raise SystemExit(main(EXPERIMENT))
