"""Iterations that all use the same parameters equally often."""

from __future__ import annotations

from collections.abc import Sequence


class StaticGraph:
    """Number of arrivals of each gradient per iteration: counted in the first iteration, checked in later ones."""

    def __init__(self, num_parameters: int) -> None:
        self.is_counting = True
        self._expected = [0] * num_parameters
        self._left = [0] * num_parameters

    def start_iteration(self) -> None:
        if self.is_counting:
            self._expected = [0] * len(self._expected)
        self._left = list(self._expected)

    def finish_iteration(self) -> None:
        self.is_counting = False

    def is_unused(self, index: int) -> bool:
        return not self._expected[index]

    def is_last(self, index: int, names: Sequence[str]) -> bool:
        """Counts an arrival of a gradient; returns whether it was the last one of this iteration."""
        if self.is_counting:
            self._expected[index] += 1
            return False
        self._left[index] -= 1
        if self._left[index] < 0:
            raise RuntimeError(
                f"static_graph=True, but the graph has changed: parameter {names[index]!r} got a gradient "
                f"{self._expected[index]} times in the first iteration and more often in this one. "
                "Pass find_unused_parameters=True instead of static_graph=True."
            )
        return self._left[index] == 0
