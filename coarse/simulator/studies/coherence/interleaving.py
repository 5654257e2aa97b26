"""Runs programs under a protocol, message by message, in an order drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coarse.simulator.studies.coherence.operations import CoherenceProtocol, Operation, Waiting


@dataclass(frozen=True, slots=True)
class Access:
    """One operation of a program; `value` is written, None reads."""

    line: int
    value: int | None = None


Program = Sequence[Access]


def run(protocol: CoherenceProtocol, programs: Sequence[Program], chance: random.Random) -> list[list[int]]:
    """Runs one program on each CU, one operation of a CU at a time; returns each operation's value.

    Any operation in progress may do its next step: messages of different operations overtake each other.

    Raises:
        RuntimeError: If all that is left waits.
    """
    results: list[list[int]] = [[] for _ in programs]
    running: dict[Operation, int] = {}

    def begin(cu: int) -> None:
        done = len(results[cu])
        if done < len(programs[cu]):
            access = programs[cu][done]
            operation = (
                protocol.read(cu, access.line)
                if access.value is None
                else protocol.write(cu, access.line, access.value)
            )
            running[operation] = cu
            ready.append(operation)

    ready: list[Operation] = []
    for cu in range(len(programs)):
        begin(cu)
    while ready:
        operation = ready.pop(chance.randrange(len(ready)))
        try:
            step = next(operation)
        except StopIteration as done:
            cu = running.pop(operation)
            results[cu].append(done.value)
            begin(cu)
        else:
            (step if isinstance(step, Waiting) else ready).append(operation)
        while protocol.released:
            ready.extend(protocol.released.pop())
    if running:
        raise RuntimeError(f"deadlock: {len(running)} operations wait for each other")
    return results


def random_programs(
    chance: random.Random, *, num_cus: int = 2, length: int = 5, lines: Sequence[int] = (0, 1)
) -> list[list[Access]]:
    """Reads and writes in equal parts; each write has a value of its own."""
    values = iter(range(1, num_cus * length + 1))
    return [
        [Access(chance.choice(lines), next(values) if chance.random() < 0.5 else None) for _ in range(length)]
        for _ in range(num_cus)
    ]


def is_sequentially_consistent(programs: Sequence[Program], results: Sequence[Sequence[int]]) -> bool:
    """Whether one order of all operations, which keeps each program's own, explains every value read."""
    seen: set[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]] = set()
    stack: list[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]] = [((0,) * len(programs), ())]
    while stack:
        state = stack.pop()
        if state in seen:
            continue
        seen.add(state)
        places, held = state
        if all(place == len(program) for place, program in zip(places, programs, strict=True)):
            return True
        memory = dict(held)
        for cu, place in enumerate(places):
            if place == len(programs[cu]):
                continue
            access = programs[cu][place]
            after = (*places[:cu], place + 1, *places[cu + 1 :])
            if access.value is not None:
                stack.append((after, tuple(sorted({**memory, access.line: access.value}.items()))))
            elif memory.get(access.line, 0) == results[cu][place]:
                stack.append((after, held))
    return False


def count_violations(
    make: Callable[[], CoherenceProtocol],
    num_programs: int,
    *,
    length: int = 5,
    lines: Sequence[int] = (0, 1),
    seed: int = 0,
) -> int:
    """Runs of random programs that no sequential order explains."""
    chance = random.Random(seed)
    found = 0
    for _ in range(num_programs):
        protocol = make()
        programs = random_programs(chance, num_cus=protocol.shape.num_cus, length=length, lines=lines)
        found += not is_sequentially_consistent(programs, run(protocol, programs, chance))
    return found
