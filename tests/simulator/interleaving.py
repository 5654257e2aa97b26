"""Actors that take steps in an order which a test chooses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MOST_STEPS = 20_000


def interleave(actors: Sequence[Iterator], choices: Sequence[int], *, between=lambda choice: None) -> None:
    """Runs generators to their ends, a step at a time, in the order of `choices`, over and over.

    `between` is called with the choice before each step.
    """
    running = list(actors)
    for number in range(MOST_STEPS):
        if not running:
            return
        # A round of all of them after each round of choices: every actor goes on, whatever was chosen.
        cycle = number % (len(choices) + len(running))
        choice = choices[cycle] if cycle < len(choices) else cycle
        between(choice)
        actor = running[choice % len(running)]
        if next(actor, None) is None:
            running.remove(actor)
    raise AssertionError(f"{len(running)} actors wait without end")
