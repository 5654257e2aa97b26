"""Which saves are due, and which of them has to wait because another one is being written."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class DueSaves:
    """The turns of a training's saves: one is written at a time, one waits.

    A save that is due while another is being written waits, and then saves the step that training has reached. If
    the next one becomes due before that, the one that waits is skipped. Of numbers alone, so that all workers that
    call it alike decide alike. Use it from one thread.

    Args:
        every: How many steps lie between two saves; 0 for none but those that are asked for.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self.forget()

    def forget(self) -> None:
        """Begins anew: training goes on from another step."""
        self._is_asked = False
        self._waiting: int | None = None  # the step at which it was due
        self._skipped: list[int] = []  # since a save last began
        self._last_began: int | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a save is due that has not begun."""
        return self._is_asked or self._waiting is not None

    def note(self, step: int, *, is_asked: bool) -> None:
        """To be called after each step.

        Args:
            step: How many were taken.
            is_asked: Whether somebody asks for a save.
        """
        self._is_asked |= is_asked
        if self._every > 0 and step % self._every == 0:
            if self._waiting is not None:
                self._skipped.append(self._waiting)
            self._waiting = step

    def begin(self, step: int) -> int:
        """The state of `step` is being saved, which is what was waited for.

        Returns:
            How many saves were skipped since the last one began.
        """
        last_began, self._last_began = self._last_began, step
        skipped, self._skipped = self._skipped, []
        self._is_asked, self._waiting = False, None
        if skipped and last_began is not None:
            logger.warning(
                "[step %d] %s skipped: the save of step %d took %d steps, with every=%d. With every=%d or more each "
                "has the time to be written",
                step,
                _named(skipped),
                last_began,
                step - last_began,
                self._every,
                step - last_began,
            )
        return len(skipped)


def _named(steps: list[int]) -> str:
    if len(steps) == 1:
        return f"the save that was due at step {steps[0]} was"
    return f"{len(steps)} saves that were due from step {steps[0]} to {steps[-1]} were"
