"""The document's worked example, Figure 4-2, step by step under the state machines of MGCC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coarse.simulator.studies.coherence.operations import Hop, Operation, Shape
from coarse.simulator.studies.coherence.protocols.mgcc import PRINTED, Level, Mgcc, Rules
from coarse.simulator.studies.study import StateTable

X, Y = 0, 1
FIGURE_RULES = replace(PRINTED, writes_follow_leases=True)
"""As printed, but for rule (a): the figure's wts of 8 and 11 need it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction of the example.

    Args:
        name: As in the document.
        cu, line: Who accesses what.
        value: The written value; None reads.
        read_lease: RdLease of this access; the document assumes another one for Y.
    """

    name: str
    cu: int
    line: int
    value: int | None = None
    read_lease: int = 10


STEPS = (
    Step("I0-1: CU 0 reads X", 0, X),
    Step("I1-1: CU 1 reads Y", 1, Y, read_lease=7),
    Step("I0-2: CU 0 writes Y = 1", 0, Y, 1),
    Step("I1-2: CU 1 writes X = 2", 1, X, 2),
    Step("I0-3: CU 0 reads X", 0, X),
    Step("I1-3: CU 1 reads Y", 1, Y),
)


@dataclass(frozen=True, slots=True)
class State:
    """The state after a step.

    Args:
        step: Its name.
        value: The value that it read or wrote.
        reached: The last level that it needed: "L1", "L2" or "memory".
        stamps: (wts, rts) of the line in the CU's L1 cache.
        clocks: cts of the two L1 caches.
    """

    step: str
    value: int
    reached: str
    stamps: tuple[int, int]
    clocks: tuple[int, int]


def states(*, num_gpus: int, rules: Rules = FIGURE_RULES) -> list[State]:
    """Runs the example: (a) with one GPU, (b) with two."""
    protocol = Mgcc(Shape(num_gpus=num_gpus, cus_per_gpu=2 // num_gpus), rules)
    return [_run(protocol, step) for step in STEPS]


def trace(*, rules: Rules = FIGURE_RULES) -> StateTable:
    """Figure 4-2 (a) and (b)."""
    rows = [
        _row(panel, state)
        for panel, num_gpus in (("a", 1), ("b", 2))
        for state in states(num_gpus=num_gpus, rules=rules)
    ]
    return StateTable(
        title="Figure 4-2: (a) two CUs of one GPU, (b) of two GPUs",
        columns=("panel", "step", "value", "served by", "wts", "rts", "cts of CU 0", "cts of CU 1"),
        rows=rows,
    )


def _run(protocol: Mgcc, step: Step) -> State:
    protocol.rules = protocol.memory.rules = replace(protocol.rules, read_lease=step.read_lease)
    operation = (
        protocol.read(step.cu, step.line)
        if step.value is None
        else protocol.write(step.cu, step.line, step.value)
    )
    value, hops = finish(operation)
    block = protocol.l1[step.cu].cache.find(step.line)
    assert block is not None
    return State(step.name, value, _reached(hops), (block.wts, block.rts), _clocks(protocol.l1))


def finish(operation: Operation) -> tuple[int, Sequence[Hop]]:
    """Runs one operation alone; returns its value and its messages."""
    hops: list[Hop] = []
    while True:
        try:
            step = next(operation)
        except StopIteration as done:
            return done.value, hops
        assert isinstance(step, Hop)
        hops.append(step)


def _reached(hops: Sequence[Hop]) -> str:
    parts = {hop.part[0] for hop in hops}
    if "memory up" in parts:
        return "memory"
    return "L2" if parts else "L1"


def _clocks(levels: Sequence[Level]) -> tuple[int, int]:
    first, second = levels
    return first.cts, second.cts


def _row(panel: str, state: State) -> tuple[str, ...]:
    figures = (*state.stamps, *state.clocks)
    return (panel, state.step, str(state.value), state.reached, *(str(figure) for figure in figures))
