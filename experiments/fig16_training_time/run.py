"""Figure 16 (a-e): training time of DENSE, AllReduce and COARSE, as speed-ups over DENSE, or over AllReduce in (e).

Real synchronisation on emulated links; the computation is recorded and scaled to an assumed speed of the GPU, which
is varied. DENSE's blocked time is measured at the middle speed and added to the computation of the others: it is 10
to 100 times that of the others, and hardly hidden behind the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

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
    name_cases,
    over_shares,
    replay,
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
    Panel(letter="b", case=Case("aws-g4dn", "bert-large", 2), low=11.3, high=13.3),
    Panel(letter="c", case=Case("sdsc-p100", "bert-large", 2), low=3.4, high=3.4),
    Panel(letter="d", case=Case("aws-p3", "bert-large", 2), low=10.8, high=13.8),
    Panel(letter="d", case=Case("aws-p3", "bert-large", 2, "aws-p3-2to1"), low=10.8, high=13.8),
)
"""The text does not say which of panels (a) and (b) has which model. ResNet-50 is left out: see README."""

SMALL, LARGE = Case("aws-p3", "bert-large", 2), Case("aws-p3", "bert-large", 4)
ONE_NODE = Expectation(
    what="samples/s", low=48.3, high=48.3, tolerance=5, unit="% more", source="V-D, Fig 16e"
)
"""COARSE with a batch of 4 against AllReduce, which has memory for 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Steps of one case at one share of the GPU's peak, in milliseconds, by scheme."""

    share: float
    by_scheme: Mapping[str, float]

    def speedup(self, scheme: str, over: str) -> float:
        """How many times as fast one scheme is as another."""
        return self.by_scheme[over] / self.by_scheme[scheme]


def run_case(
    case: Case,
    *,
    shares: Sequence[float],
    is_quick: bool,
    progress: Progress,
    dense: Sequence[str] = (DENSE, LEAST_DENSE),
) -> list[Steps]:
    """The steps of COARSE, AllReduce and the schemes of DENSE, over the assumed shares of the peak."""
    dense_us = {scheme: replay(case, scheme, SHARES[1], progress=progress).blocked_us for scheme in dense}
    found = []
    for share in shares:
        steps = 1 if is_quick or share != SHARES[1] else 3
        coarse = replay(case, COARSE, share, steps=steps, progress=progress)
        peer = replay(case, ALL_REDUCE, share, steps=steps, progress=progress)
        step_us = {COARSE: coarse.step.p50_us, ALL_REDUCE: peer.step.p50_us}
        step_us |= {scheme: blocked + 1e6 * coarse.plan.compute_s for scheme, blocked in dense_us.items()}
        found.append(Steps(share=share, by_scheme={name: us / 1e3 for name, us in step_us.items()}))
    return found


def compare(panel: Panel, steps: Sequence[Steps]) -> Finding:
    """COARSE's speed-up over DENSE; its range is that over the shares, and over DENSE's two slow-downs."""
    middle = steps[len(steps) // 2]
    values = [each.speedup(COARSE, dense) for each in steps for dense in (DENSE, LEAST_DENSE)]
    speedup = Measured(value=middle.speedup(COARSE, DENSE), low=min(values), high=max(values))
    against = over_shares([100 * (each.speedup(COARSE, ALL_REDUCE) - 1) for each in steps])
    milliseconds = ", ".join(
        f"{LABELS[name]} {middle.by_scheme[name]:.4g}" for name in (COARSE, ALL_REDUCE, DENSE)
    )
    return Finding(
        ran=f"step of {panel.case}",
        checks=(NumberCheck(expectation=panel.expectation, measured=speedup),),
        note=f"{against}% faster than the best AllReduce; ms: {milliseconds}",
        kind=EMULATED,
    )


def compare_one_node(small: Sequence[Steps], large: Sequence[Steps]) -> Finding:
    """COARSE's samples per second with a batch of 4 against the best AllReduce's with one of 2."""
    by_share = {each.share: each.by_scheme[ALL_REDUCE] for each in small}
    gains = [
        100 * (LARGE.batch / many.by_scheme[COARSE] / (SMALL.batch / by_share[many.share]) - 1)
        for many in large
    ]
    return Finding(
        ran=f"COARSE with a batch of {LARGE.batch}, AllReduce with one of {SMALL.batch}: {SMALL.model}, "
        f"{SMALL.machine}",
        checks=(NumberCheck(expectation=ONE_NODE, measured=over_shares(gains)),),
        kind=EMULATED,
    )


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
        steps[LARGE] = run_case(
            LARGE,
            shares=LARGE.shares(is_quick=options.is_quick),
            is_quick=options.is_quick,
            progress=options.progress,
            dense=(),
        )
        findings.append(compare_one_node(steps[SMALL], steps[LARGE]))
    data = [
        {"kind": EMULATED, "case": str(case), "share_of_peak": each.share, "step_ms": dict(each.by_scheme)}
        for case, of_case in steps.items()
        for each in of_case
    ]
    pictures = {"training-time": draw({str(panel.case): steps[panel.case] for panel in panels})}
    return Outcome(findings=findings, data=data, pictures=pictures)


def draw(steps: Mapping[str, Sequence[Steps]]) -> Figure:
    """Speed-ups over DENSE of each case, as the paper's panels (a) to (d); lines span the assumed speeds."""
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.add_subplot()
    for number, scheme in enumerate((DENSE, ALL_REDUCE, COARSE)):
        for position, of_case in enumerate(steps.values()):
            speedup = over_shares([each.speedup(scheme, DENSE) for each in of_case])
            draw_bar(axes, number, position, scheme, speedup, f"{speedup.value:.1f}")
    name_cases(axes, list(steps))
    axes.set_ylabel("speed-up over DENSE")
    axes.legend(fontsize="x-small")
    figure.suptitle(f"Training time of a step ({EMULATED})", fontsize=11)
    return figure


EXPERIMENT = Experiment(name="fig16_training_time", figure="Fig 16", run=run)

if __name__ == "__main__":
    raise SystemExit(main(EXPERIMENT))
