"""Communication inside a kernel: the last block that arrives puts the boundary, and flags alternate (section 5.8.1).

Each block waits for the neighbour's flag, computes, and adds one to a counter. The block that finds all others there
resets the counter, puts the boundary and then the flag. Odd and even iterations have flags and boundaries of their
own, for a neighbour may be one iteration ahead.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Gpu:
    """One of two neighbours. Each step of a generator that it returns is atomic."""

    num_blocks: int
    counter: int = 0
    flags: dict[int, int] = field(default_factory=dict)
    boundaries: dict[int, int] = field(default_factory=dict)
    """The neighbour's iteration whose boundary arrived last, by place."""
    computed: list[int] = field(default_factory=list)
    """The iteration of each block that has computed."""
    puts: list[int] = field(default_factory=list)
    """The iterations whose boundaries were put."""

    def block(self, iteration: int, neighbour: Gpu) -> Generator[str, None, None]:
        """One thread-block of one iteration's kernel."""
        while iteration and not self.flags.get(place(iteration), 0):
            yield "polls the flag"
        if iteration:
            seen = self.boundaries.get(place(iteration))
            assert seen == iteration - 1, f"iteration {iteration} computes with the boundary of {seen}"
        self.computed.append(iteration)
        yield "computes"
        before = yield from self.arrive()
        if before == self.num_blocks - 1:
            yield from self.send(iteration, neighbour)

    def arrive(self) -> Generator[str, None, int]:
        """Adds one to the counter, atomically; returns its old value."""
        before, self.counter = self.counter, self.counter + 1
        yield "arrives"
        return before

    def send(self, iteration: int, neighbour: Gpu) -> Generator[str, None, None]:
        """By the last block: boundary, then flag; and the own flag is free again."""
        assert self.computed.count(iteration) == self.num_blocks, "the boundary is not complete"
        self.counter = 0
        self.flags[place(iteration)] = 0
        yield "resets counter and flag"
        neighbour.boundaries[place(iteration + 1)] = iteration
        yield "puts the boundary"
        neighbour.flags[place(iteration + 1)] = 1
        self.puts.append(iteration)
        yield "puts the flag"


def place(iteration: int) -> int:
    """Of flags and boundaries that an iteration waits for."""
    return iteration % 2
