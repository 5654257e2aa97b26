"""Decides which saves are due, and which must wait for a save in progress."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class DueSaves:
    """The schedule of a training's saves: one is written at a time, and one may wait.

    A save that becomes due while another is being written waits, and then saves the step that training has reached.
    If the next save becomes due before that, the waiting one is skipped. Depends only on its arguments, so that all
    workers that make the same calls decide alike. Use it from one thread.

    Args:
        every: Steps between two saves; 0 saves only on request.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self.forget()

    def forget(self) -> None:
        """Resets the schedule: training continues from another step."""
        self._is_asked = False
        self._waiting: int | None = None  # the step at which the waiting save was due
        self._skipped: list[int] = []  # steps of skipped saves since the last start of a save
        self._last_began: int | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a due save has not begun."""
        return self._is_asked or self._waiting is not None

    def note(self, step: int, *, is_asked: bool) -> None:
        """Updates the schedule; call it after each step.

        Args:
            step: Number of steps taken.
            is_asked: Whether a save is requested.
        """
        self._is_asked |= is_asked
        if self._every > 0 and step % self._every == 0:
            if self._waiting is not None:
                self._skipped.append(self._waiting)
            self._waiting = step

    def begin(self, step: int) -> int:
        """Records that the waiting save begins with the state of `step`.

        Returns:
            Number of saves skipped since the last one began.
        """
        last_began, self._last_began = self._last_began, step
        skipped, self._skipped = self._skipped, []
        self._is_asked, self._waiting = False, None
        if skipped and last_began is not None:
            logger.warning(
                "[step %d] %s skipped: the save of step %d took %d steps, with every=%d. With every=%d or "
                "more, each save has the time to finish",
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
