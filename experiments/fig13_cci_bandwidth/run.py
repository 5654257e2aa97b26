"""Figures 3 and 13: bandwidth of CCI memory by access method and size.

The picture shows the model (coarse/machine/cci.py), which holds what the paper's text gives. The findings check the
emulation that is built on it: a session that loads and stores, against one that copies directly, on the same links.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coarse.bench.pace import Paced, Pacing, keep_pace
from coarse.machine import cci
from coarse.profiler.figures import COLOURS, format_size
from coarse.profiler.profile import EMULATED, PULL, PUSH, SIMULATED, Profile
from coarse.tuning.measure import MeasurePlan
from experiments.common import Experiment, Finding, Options, Outcome, main
from experiments.expectation import Expectation, Measured, NumberCheck
from experiments.profiles import LIMIT_S, TIME_DILATION, curves_as_json, hurried, measure

MACHINE = "aws-p3"
SIZES = tuple(16 << 10 << power for power in range(0, 12))
PLAN = MeasurePlan(sizes=tuple(size for size in SIZES if size <= 8 << 20), budget_s=10.0)
NORMAL_BYTES = 512 << 20
"""The paper normalises to load/store at this size."""

RATIOS = {
    cci.READ: Expectation(
        what="reads", low=17, high=17, tolerance=0.5, unit=" times load/store", source="II-C, Fig 3"
    ),
    cci.WRITE: Expectation(
        what="writes", low=4, high=4, tolerance=0.1, unit=" times load/store", source="II-C, Fig 3"
    ),
}
"""GPU direct against load/store, at the largest size. Tolerance: a transfer's latency counts too."""

_KINDS = {cci.READ: PULL, cci.WRITE: PUSH}


def compare(direct: Paced[Profile], dense: Paced[Profile]) -> Finding:
    """Ratios of bandwidths at the largest common size; their range is that of the repeats and of delays."""
    checks = tuple(
        NumberCheck(expectation=expectation, measured=_ratio(direct, dense, _KINDS[direction]))
        for direction, expectation in RATIOS.items()
    )
    return Finding(
        ran=f"GPU direct against load/store, {format_size(_largest(direct.value))}, {MACHINE}",
        checks=checks,
        kind=EMULATED,
    )


def _ratio(direct: Paced[Profile], dense: Paced[Profile], kind: str) -> Measured:
    """How many times as long a transfer takes by load/store."""
    return _time_us(dense, kind).over(_time_us(direct, kind))


def _time_us(paced: Paced[Profile], kind: str) -> Measured:
    """The time of the largest transfer, with the uncertainty of its repeats and the average delay of arrivals."""
    largest = paced.value.curve(kind, 0, 0).points[-1]
    spread_us = largest.spread_us + paced.pacing.lateness_us
    return Measured(value=largest.time_us, low=largest.time_us - spread_us, high=largest.time_us + spread_us)


def _largest(profile: Profile) -> int:
    return profile.curve(PULL, 0, 0).points[-1].nbytes


def run(options: Options) -> Outcome:
    """Measures both sessions where MACHINE is asked for, and draws the model."""
    findings, data = [], [*_model_as_json()]
    if MACHINE in options.machines:
        options.progress(MACHINE)
        direct, dense = (_profile(slowed, options.is_quick) for slowed in ("", "17,4"))
        findings.append(compare(direct, dense))
        data += [
            {**curves_as_json(paced.value), **paced.pacing.as_json(), "access": name}
            for name, paced in (("direct", direct), ("load/store", dense))
        ]
    return Outcome(findings=findings, data=data, pictures={"by-size": draw()})


def _profile(slowed: str, is_quick: bool) -> Paced[Profile]:
    """A profile of the links as they are, or slowed to loads and stores.

    The pacing error is the average delay of arrivals as a share of the largest push, the shortest time compared.
    """
    settings = {"machine": MACHINE, "memory_devices": 1, "dual_sync": "off", "dense": slowed}

    def attempt(time_dilation: float) -> Paced[Profile]:
        stretched = {**settings, "time_dilation": time_dilation}
        limit_s = LIMIT_S * time_dilation / TIME_DILATION
        profile, late_us = measure(2, stretched, hurried(PLAN, is_quick), limit_s=limit_s)
        error = late_us / profile.curve(PUSH, 0, 0).points[-1].time_us
        return Paced(
            value=profile, pacing=Pacing(lateness_us=late_us, error=error, time_dilation=time_dilation)
        )

    return keep_pace(f"profile of {MACHINE}", attempt, time_dilation=TIME_DILATION)


def _model_as_json() -> Iterator[Mapping[str, object]]:
    for method in cci.METHODS:
        for direction in RATIOS:
            bands = {size: cci.share_of_bus(method, direction, size) for size in SIZES}
            shares = {size: (band.low, band.high) for size, band in bands.items() if band is not None}
            yield {"kind": SIMULATED, "method": method, "direction": direction, "share_of_bus": shares}


def draw() -> Figure:
    """Bandwidth by size, load/store at 512 MiB = 1, as in the paper; bands where its text gives limits only."""
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    for axes, direction in zip(figure.subplots(1, 2), RATIOS, strict=True):
        _draw_direction(axes, direction)
    figure.suptitle(f"CCI bandwidth by access method ({SIMULATED} from the paper's ratios)", fontsize=11)
    return figure


def _draw_direction(axes: Axes, direction: str) -> None:
    normal = cci.share_of_bus(cci.LOAD_STORE, direction, NORMAL_BYTES)
    assert normal is not None
    for number, method in enumerate(cci.METHODS[:-1]):  # DMA is GPU direct's curve
        bands = [cci.share_of_bus(method, direction, size) for size in SIZES]
        known = [(size, band) for size, band in zip(SIZES, bands, strict=True) if band is not None]
        if not known:
            continue
        sizes = [size for size, _ in known]
        low, high = ([getattr(band, end) / normal.low for _, band in known] for end in ("low", "high"))
        style = {"color": COLOURS[number], "label": method}
        if low == high:
            axes.plot(
                sizes, low, marker="os^"[number], markersize=4, linestyle=("-", "--", "-.")[number], **style
            )
        else:
            axes.fill_between(sizes, low, high, alpha=0.4, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(SIZES[::4], [format_size(size) for size in SIZES[::4]])
    axes.set_xlabel("size")
    axes.set_ylabel(f"{direction} bandwidth, load/store = 1")
    axes.legend(fontsize="x-small")


EXPERIMENT = Experiment(
    name="fig13_cci_bandwidth",
    figure="Fig 3, 13",
    machines=("aws-p3",),
    assumption="the paper's ratios, of which DENSE's links are made: the row checks the emulation",
    minutes=0.5,
    run=run,
)

if __name__ == "__main__":
    raise SystemExit(main(EXPERIMENT))
