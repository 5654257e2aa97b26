"""Figure 16 (b-f): training time of DENSE, AllReduce and COARSE, as speed-ups over DENSE, in (e, f) over AllReduce.

Real synchronisation on emulated links; the computation is recorded and scaled to an assumed speed of the GPU, which
is varied. DENSE's blocked time is measured at the middle speed and added to the computation of the others: it is 10
to 100 times that of the others, and hardly hidden behind the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from matplotlib.figure import Figure

from coarse.bench.replay.driver import STEP, ReplayResult
from coarse.profiler.profile import EMULATED
from experiments.common import Experiment, Finding, Options, Outcome, main
from experiments.expectation import Expectation, Measured, NumberCheck
from experiments.replays import (
    ALL_REDUCE,
    COARSE,
    DENSE,
    LABELS,
    LEAST_DENSE,
    SHARES,
    Case,
    draw_bar,
    draw_paper,
    name_cases,
    over_shares,
    replay,
    step_ms,
)

_TOLERANCE = 0.1  # relative: the paper gives two or three digits

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel of Figure 16: a job, and the paper's speed-up of COARSE over DENSE.

    Args:
        letter: Of the panel.
        low, high: The paper's speed-up.
    """

    letter: str
    case: Case
    low: float
    high: float

    @property
    def expectation(self) -> Expectation:
        return Expectation(
            what="COARSE over DENSE",
            low=self.low,
            high=self.high,
            tolerance=_TOLERANCE * self.high,
            unit="x",
            source=f"V-D, Fig 16{self.letter}",
        )


PANELS = (
    Panel(letter="a", case=Case("aws-g4dn", "resnet50", 64, measures=STEP), low=3.3, high=4.3),
    Panel(letter="b", case=Case("aws-g4dn", "bert-large", 2), low=11.3, high=13.3),
    Panel(letter="c", case=Case("sdsc-p100", "bert-large", 2), low=3.4, high=3.4),
    Panel(letter="d", case=Case("aws-p3", "bert-large", 2), low=10.8, high=13.8),
    Panel(letter="d", case=Case("aws-p3", "bert-large", 2, "aws-p3-2to1"), low=10.8, high=13.8),
)
"""The text names BERT for Figure 17 (b), so that (a) is ResNet-50."""

SMALL, LARGE = Case("aws-p3", "bert-large", 2), Case("aws-p3", "bert-large", 4)
SMALL_OF_TWO, LARGE_OF_TWO = replace(SMALL, nodes=2), replace(LARGE, nodes=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPanel:
    """A bar of panels (e) and (f): COARSE with a batch of 4 against AllReduce, which has memory for 2.

    Args:
        letter: Of the panel.
        ours, theirs: The job of COARSE, and that of AllReduce.
        percent: By how much COARSE processes more samples a second in the paper.
    """

    letter: str
    ours: Case
    theirs: Case
    percent: float

    @property
    def expectation(self) -> Expectation:
        return Expectation(
            what="samples/s",
            low=self.percent,
            high=self.percent,
            tolerance=5,
            unit="% more",
            source=f"V-D, Fig 16{self.letter}",
        )


BATCH_PANELS = (
    BatchPanel(letter="e", ours=LARGE, theirs=SMALL, percent=48.3),
    BatchPanel(letter="f", ours=LARGE_OF_TWO, theirs=SMALL_OF_TWO, percent=42.7),
    BatchPanel(letter="f", ours=LARGE, theirs=SMALL_OF_TWO, percent=38.6),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Steps of one case at one share of the GPU's peak, in milliseconds, by scheme."""

    share: float
    by_scheme: Mapping[str, Measured]

    def speedup(self, scheme: str, over: str) -> Measured:
        """How many times as fast one scheme is as another."""
        return self.by_scheme[over].over(self.by_scheme[scheme])


def run_case(
    case: Case,
    *,
    shares: Sequence[float],
    is_quick: bool,
    progress: Progress,
    dense: Sequence[str] = (DENSE, LEAST_DENSE),
) -> list[Steps]:
    """The steps of COARSE, AllReduce and the schemes of DENSE, over the assumed shares of the peak."""
    slow = {scheme: replay(case, scheme, SHARES[1], is_quick=is_quick, progress=progress) for scheme in dense}
    found = []
    for share in shares:
        steps = 1 if is_quick or share != SHARES[1] else 3
        coarse = replay(case, COARSE, share, steps=steps, is_quick=is_quick, progress=progress)
        peer = replay(case, ALL_REDUCE, share, steps=steps, is_quick=is_quick, progress=progress)
        by_scheme = {COARSE: step_ms(coarse), ALL_REDUCE: step_ms(peer)}
        by_scheme |= {scheme: _computing(each, coarse.plan.compute_s) for scheme, each in slow.items()}
        found.append(Steps(share=share, by_scheme=by_scheme))
    return found


def _computing(result: ReplayResult, compute_s: float) -> Measured:
    """The step of a replay with another computing time, in milliseconds."""
    return step_ms(result).shifted(1e3 * (compute_s - result.plan.compute_s))


def compare(panel: Panel, steps: Sequence[Steps]) -> Finding:
    """COARSE's speed-up over DENSE; its range is that over the shares, and over DENSE's two slow-downs."""
    middle = steps[len(steps) // 2]
    values = [each.speedup(COARSE, dense) for each in steps for dense in (DENSE, LEAST_DENSE)]
    speedup = Measured.spanning(middle.speedup(COARSE, DENSE), values)
    against = over_shares([each.speedup(COARSE, ALL_REDUCE).percent_more() for each in steps])
    milliseconds = ", ".join(
        f"{LABELS[name]} {middle.by_scheme[name].value:.4g}" for name in (COARSE, ALL_REDUCE, DENSE)
    )
    return Finding(
        ran=f"step of {panel.case}",
        checks=(NumberCheck(expectation=panel.expectation, measured=speedup),),
        note=f"{against}% faster than the best AllReduce; ms: {milliseconds}",
        kind=EMULATED,
    )


def compare_batches(panel: BatchPanel, ours: Sequence[Steps], theirs: Sequence[Steps]) -> Finding:
    """COARSE's samples per second against those of the best AllReduce, at the speeds that both have."""
    by_share = {each.share: each.by_scheme[ALL_REDUCE] for each in theirs}
    middle = ours[len(ours) // 2]
    times = panel.ours.samples / panel.theirs.samples
    gains = [by_share[each.share].over(each.by_scheme[COARSE]).times(times).percent_more() for each in ours]
    return Finding(
        ran=f"COARSE with {_words(panel.ours)}, AllReduce with {_words(panel.theirs)}: {SMALL.model}, "
        f"{SMALL.machine}",
        checks=(NumberCheck(expectation=panel.expectation, measured=over_shares(gains)),),
        note=f"ms: COARSE {middle.by_scheme[COARSE].value:.4g}, AllReduce {by_share[middle.share].value:.4g}",
        kind=EMULATED,
    )


def _words(case: Case) -> str:
    return f"a batch of {case.batch} on {'one node' if case.nodes == 1 else f'{case.nodes} nodes'}"


def run(options: Options) -> Outcome:
    """Replays the panels of the machines asked for."""
    panels = [panel for panel in PANELS if panel.case.machine in options.machines]
    steps = {
        panel.case: run_case(
            panel.case,
            shares=panel.case.shares(is_quick=options.is_quick),
            is_quick=options.is_quick,
            progress=options.progress,
        )
        for panel in panels
    }
    findings = [compare(panel, steps[panel.case]) for panel in panels]
    if SMALL.machine in options.machines:
        for case in (LARGE, SMALL_OF_TWO, LARGE_OF_TWO):
            steps[case] = run_case(
                case,
                shares=case.shares(is_quick=options.is_quick),
                is_quick=options.is_quick,
                progress=options.progress,
                dense=(),
            )
        findings += [compare_batches(panel, steps[panel.ours], steps[panel.theirs]) for panel in BATCH_PANELS]
    data = [
        {
            "kind": EMULATED,
            "case": str(case),
            "share_of_peak": each.share,
            "step_ms": {scheme: asdict(ms) for scheme, ms in each.by_scheme.items()},
        }
        for case, of_case in steps.items()
        for each in of_case
    ]
    pictures = {"training-time": draw(panels, steps)}
    return Outcome(findings=findings, data=data, pictures=pictures)


def draw(panels: Sequence[Panel], steps: Mapping[Case, Sequence[Steps]]) -> Figure:
    """Speed-ups over DENSE, as the paper's panels (a) to (d); lines span the assumed speeds."""
    figure = Figure(figsize=(8.4, 3.8), layout="constrained")
    axes = figure.add_subplot()
    for number, scheme in enumerate((DENSE, ALL_REDUCE, COARSE)):
        for position, panel in enumerate(panels):
            speedup = over_shares([each.speedup(scheme, DENSE) for each in steps[panel.case]])
            draw_bar(axes, number, position, scheme, speedup, f"{speedup.value:.1f}")
            if scheme == COARSE:
                draw_paper(axes, number, position, panel.low, panel.high)
    name_cases(axes, [f"({panel.letter}) {panel.case}" for panel in panels])
    axes.set_ylabel("speed-up over DENSE")
    axes.legend(fontsize="x-small")
    figure.suptitle(f"Training time of a step ({EMULATED})", fontsize=11)
    return figure


EXPERIMENT = Experiment(
    name="fig16_training_time",
    figure="Fig 16",
    machines=("aws-g4dn", "sdsc-p100", "aws-p3"),
    assumption="computing time (half of each GPU's peak; the range is for 30 to 70%); DENSE costs its links alone",
    minutes=7.5,
    run=run,
)

if __name__ == "__main__":
    raise SystemExit(main(EXPERIMENT))
