"""Timelines of simulated steps as trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing.

One process for each scheme. Its rows are the computation, each link and the sync cores of each memory device; a link
that several transfers cross at once has a row for each of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from coarse.simulator.events.engine import Outcome
from coarse.simulator.schemes.step import Step
from coarse.simulator.setup import Setup
from coarse.simulator.training_step import SIMULATED, StepResult

MOST_LINKS = 100
"""Links of a scheme that a timeline shows: the busiest, by the time that their transfers take."""

_US_PER_S = 1e6
_COMPUTATION = "computation"


class Span(NamedTuple):
    """A named stretch of time on a row, in seconds, with the bytes that crossed the link."""

    start_s: float
    end_s: float
    name: str
    nbytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The rows of a simulated step.

    Args:
        result: The step's figures.
        rows: Spans by the row's name, in the order of display; none of a row overlap.
        num_links: All links and sync cores that were used, shown or not.
    """

    result: StepResult
    rows: Mapping[str, Sequence[Span]]
    num_links: int


def timeline(setup: Setup, result: StepResult, step: Step, outcome: Outcome) -> Timeline:
    """The rows of a step."""
    links = _links(step, outcome)
    busiest = sorted(links, key=lambda name: (-sum(end - start for start, end, *_ in links[name]), name))
    shown = sorted(busiest[:MOST_LINKS], key=_natural)
    rows = dict(_computation(setup, step, outcome))
    for link in shown:
        for lane, spans in enumerate(_lanes(links[link]), 1):
            rows[_row_name(link, step.network.orbit_sizes.get(link, 1), lane)] = spans
    return Timeline(result=result, rows=rows, num_links=len(links))


def trace_document(timelines: Iterable[Timeline]) -> dict[str, Any]:
    """The JSON object of several steps in the Trace Event Format; times in microseconds."""
    return {
        "traceEvents": [
            event for process, each in enumerate(timelines, 1) for event in _process(process, each)
        ],
        "displayTimeUnit": "ms",
        "otherData": {"kind": SIMULATED},
    }


def _computation(setup: Setup, step: Step, outcome: Outcome) -> Iterator[tuple[str, list[Span]]]:
    """Forward and backward pass, of an undisturbed worker and of each slow one, or as the scheme interrupts them."""
    own = [
        Span(times.served_s, times.first_byte_s, task.name)
        for task in step.tasks
        for times in [outcome.times[task.name]]
        if not task.usage and times.first_byte_s > times.served_s
    ]
    if own:
        yield _COMPUTATION, sorted(own)
        return
    yield _COMPUTATION, _passes(setup, 1.0)
    for worker, factor in setup.disturbances.slow_workers.items():
        yield f"{_COMPUTATION} of worker {worker}", _passes(setup, factor)


def _passes(setup: Setup, factor: float) -> list[Span]:
    middle_s = setup.trace.forward_s * factor
    return [
        Span(0.0, middle_s, "forward"),
        Span(middle_s, middle_s + setup.trace.backward_s * factor, "backward"),
    ]


def _links(step: Step, outcome: Outcome) -> Mapping[str, list[Span]]:
    """The transfers of each link, and the reductions of each memory device's sync cores."""
    links: dict[str, list[Span]] = defaultdict(list)
    for task in step.tasks:
        times = outcome.times[task.name]
        if task.nbytes and times.last_byte_s > times.first_byte_s:
            for bucket, weight in task.usage:
                if weight > 0:
                    span = Span(times.first_byte_s, times.last_byte_s, task.name, task.nbytes * weight)
                    links[bucket].append(span)
    return links


def _lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """The spans in as few rows as possible, none of which has an overlap."""
    lanes: list[list[Span]] = []
    for span in sorted(spans):
        lane = next((each for each in lanes if each[-1].end_s <= span.start_s), None)
        if lane is None:
            lanes.append([span])
        else:
            lane.append(span)
    return lanes


def _row_name(link: str, copies: int, lane: int) -> str:
    return link + (f" (one of {copies})" if copies > 1 else "") + (f", {lane}" if lane > 1 else "")


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Orders "worker 10" after "worker 9"."""
    return tuple((int(word), "") if word.isdigit() else (-1, word) for word in name.split())


def _process(process: int, shown: Timeline) -> Iterator[dict[str, Any]]:
    result = shown.result
    label = f"{result.scheme}: {result.model} on {result.machine}, {result.num_workers} workers ({SIMULATED})"
    yield _name("process_name", process, 0, label)
    for row, (name, spans) in enumerate(shown.rows.items()):
        yield _name("thread_name", process, row, name)
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": process,
            "tid": row,
            "args": {"sort_index": row},
        }
        yield from (_event(process, row, span) for span in spans)


def _name(what: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": row, "args": {"name": name}}


def _event(process: int, row: int, span: Span) -> dict[str, Any]:
    """A complete event. Its end is rounded like its start, so that neighbours do not overlap."""
    start_us, end_us = round(span.start_s * _US_PER_S, 3), round(span.end_s * _US_PER_S, 3)
    return {
        "ph": "X",
        "name": span.name,
        "cat": SIMULATED,
        "pid": process,
        "tid": row,
        "ts": start_us,
        "dur": round(end_us - start_us, 3),
        "args": {"bytes": span.nbytes} if span.nbytes else {},
    }
