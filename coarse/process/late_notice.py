"""Says that a wait takes long while it goes on, long before it ends with an error."""

from __future__ import annotations

import time
from collections.abc import Callable


class LateNotice:
    """Tells of one wait after some time, and again whenever that time has doubled. For one thread.

    Args:
        after_s: When to tell first; 0 for never.
        tell: Called with the seconds waited so far.
    """

    def __init__(self, after_s: float, tell: Callable[[float], None]) -> None:
        self._began_s = time.monotonic()
        self._next_s = after_s
        self._tell = tell

    @property
    def waited_s(self) -> float:
        """Since this was made."""
        return time.monotonic() - self._began_s

    def look(self) -> None:
        """To be called a few times a second during the wait."""
        if 0 < self._next_s <= (waited_s := self.waited_s):
            self._next_s *= 2
            self._tell(waited_s)
