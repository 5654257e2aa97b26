"""Figure 17 (a-f): how long communication blocks a training step of BERT, COARSE against the best AllReduce.

Real synchronisation on emulated links; the computation is recorded and scaled to an assumed speed of the GPU, which
is varied (experiments/replays.py). Blocked time is the step's time minus that of its computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    RING,
    SHARES,
    Case,
    blocked_ms,
    draw_bar,
    draw_paper,
    name_cases,
    over_shares,
    replay,
    step_ms,
)

SHOWN = (RING, ALL_REDUCE, COARSE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel of Figure 17: a job, and the paper's change of blocked time in per cent; negative is less.

    Args:
        letter: Of the panel.
        low, high: The paper's change against AllReduce.
    """

    letter: str
    case: Case
    low: float
    high: float

    @property
    def change(self) -> Expectation:
        """Tolerance: the text gives ranges over jobs, of which one is run here."""
        return Expectation(
            what="change of blocked time",
            low=self.low,
            high=self.high,
            tolerance=5,
            unit="%",
            source=f"V-E, Fig 17{self.letter}",
        )


PANELS = (
    Panel(letter="b", case=Case("aws-g4dn", "bert-large", 2), low=18, high=20),
    Panel(letter="c", case=Case("sdsc-p100", "bert-large", 2), low=-28, high=-28),
    Panel(letter="d", case=Case("aws-p3", "bert-large", 2), low=-42, high=-20),
    Panel(letter="d", case=Case("aws-p3", "bert-large", 2, "aws-p3-2to1"), low=-42, high=-20),
    Panel(letter="e", case=Case("aws-p3", "bert-large", 4), low=-46, high=-23),
    Panel(letter="f", case=Case("aws-p3", "bert-large", 2, nodes=2), low=-46, high=-23),
)

HIDDEN = Case("aws-g4dn", "resnet50", 64, measures=STEP)
"""Panel (a): the backward pass hides nearly all synchronisation, so that the rest is told without a ratio."""

SHARE_OF_DENSE = Expectation(what="of DENSE's", low=0, high=10, unit="%", source="V-E, Fig 17")
"""AllReduce and COARSE reduce communication to less than 10% of DENSE's, which has one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """Blocked times of a case in milliseconds.

    Args:
        by_share: By scheme, for each of the assumed speeds; RING and DENSE are given for the middle one alone, DENSE
            for one node.
        ways: AllReduce's algorithms by size, in words.
    """

    by_share: Sequence[Mapping[str, Measured]]
    ways: str = ""

    @property
    def middle(self) -> Mapping[str, Measured]:
        """Blocked times at the middle speed."""
        return self.by_share[len(self.by_share) // 2]


def run_case(case: Case, shares: Sequence[float], options: Options) -> tuple[Blocked, list[ReplayResult]]:
    """Replays a case at every speed."""
    results: list[ReplayResult] = []
    by_share = []
    for share in shares:
        is_middle = share == SHARES[1]
        others = (RING,) if case.nodes > 1 else (RING, DENSE)
        schemes = (COARSE, ALL_REDUCE, *(others if is_middle else ()))
        steps = 3 if is_middle and not options.is_quick else 1
        replayed = [
            replay(case, each, share, steps=steps, is_quick=options.is_quick, progress=options.progress)
            for each in schemes
        ]
        by_share.append({each: blocked_ms(result) for each, result in zip(schemes, replayed, strict=True)})
        results += replayed
    ways = next(result.ways for result in results if result.scheme == ALL_REDUCE)
    return Blocked(by_share=by_share, ways=ways), results


def compare(panel: Panel, blocked: Blocked) -> Finding:
    """COARSE's blocked time against that of the AllReduce that blocks least.

    The change's range is that over the assumed speeds, and over the steps of each.
    """
    middle = blocked.middle
    ours, best = middle[COARSE], _best(middle)
    change = Measured.spanning(_change(middle), [_change(each) for each in blocked.by_share])
    checks = [NumberCheck(expectation=panel.change, measured=change)]
    if DENSE in middle:
        share = ours.over(middle[DENSE]).times(100)
        checks.append(NumberCheck(expectation=SHARE_OF_DENSE, measured=share))
    return Finding(
        ran=f"blocked time, {panel.case}",
        checks=tuple(checks),
        note=f"{ours.value:.3g} against {best.value:.3g} ms (a one-way ring: {middle[RING].value:.3g} ms)"
        + (f"; AllReduce by {blocked.ways}" if blocked.ways else ""),
        kind=EMULATED,
    )


def tell_hidden(results: Mapping[str, ReplayResult]) -> Finding:
    """Blocked times of HIDDEN, which are as long as the delays of the emulation."""
    words = ", ".join(f"{LABELS[scheme]} {blocked_ms(result)}" for scheme, result in results.items())
    step = step_ms(results[COARSE]).value
    return Finding(
        ran=f"blocked time, {HIDDEN}", note=f"{words} ms of a step of {step:.3g} ms", kind=EMULATED
    )


def _change(blocked: Mapping[str, Measured]) -> Measured:
    """COARSE's blocked time against the best AllReduce's, in per cent; negative is less."""
    return blocked[COARSE].over(_best(blocked)).percent_more()


def _best(blocked: Mapping[str, Measured]) -> Measured:
    """Of the AllReduce that blocks least."""
    return min((blocked[each] for each in (ALL_REDUCE, RING) if each in blocked), key=lambda each: each.value)


def run(options: Options) -> Outcome:
    """Replays the panels of the machines asked for."""
    panels = [panel for panel in PANELS if panel.case.machine in options.machines]
    ran = {
        panel.case: run_case(panel.case, panel.case.shares(is_quick=options.is_quick), options)
        for panel in panels
    }
    blocked = {case: of_case for case, (of_case, _) in ran.items()}
    hidden = {
        scheme: replay(HIDDEN, scheme, SHARES[1], is_quick=options.is_quick, progress=options.progress)
        for scheme in (COARSE, ALL_REDUCE, DENSE)
        if HIDDEN.machine in options.machines
    }
    return Outcome(
        findings=[
            *([tell_hidden(hidden)] if hidden else []),
            *(compare(panel, blocked[panel.case]) for panel in panels),
        ],
        data=[
            {"kind": EMULATED, "case": str(case), **result.as_json()}
            for case, results in [
                (HIDDEN, hidden.values()),
                *((case, each) for case, (_, each) in ran.items()),
            ]
            for result in results
        ],
        pictures={"blocked": draw(panels, blocked)},
    )


def draw(panels: Sequence[Panel], blocked: Mapping[Case, Blocked]) -> Figure:
    """Blocked times of each case, the best AllReduce = 1; lines span the assumed speeds."""
    figure = Figure(figsize=(7.6, 3.8), layout="constrained")
    axes = figure.add_subplot()
    for number, scheme in enumerate(SHOWN):
        for position, panel in enumerate(panels):
            of_case = blocked[panel.case]
            ratios = [each[scheme].over(_best(each)) for each in of_case.by_share if scheme in each]
            text = f"{of_case.middle[scheme].value:.3g} ms"
            draw_bar(axes, number, position, scheme, over_shares(ratios), text)
            if scheme == COARSE:
                draw_paper(axes, number, position, 1 + panel.low / 100, 1 + panel.high / 100)
    name_cases(axes, [f"({panel.letter}) {panel.case}" for panel in panels])
    axes.set_ylabel("blocked time, best AllReduce = 1")
    axes.legend(fontsize="x-small", loc="upper center", ncols=3)
    axes.margins(y=0.25)
    figure.suptitle(f"Blocked communication time of a step ({EMULATED})", fontsize=11)
    return figure


EXPERIMENT = Experiment(
    name="fig17_blocked_time",
    figure="Fig 17",
    machines=("aws-g4dn", "sdsc-p100", "aws-p3"),
    assumption="computing time (half of each GPU's peak; the range is for 30 to 70%)",
    minutes=1,
    run=run,
)

if __name__ == "__main__":
    raise SystemExit(main(EXPERIMENT))
