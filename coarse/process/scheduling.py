"""Priority of threads that work in parallel with training."""

from __future__ import annotations

import contextlib
import os
import threading

_NICENESS = 19


def lower_priority() -> None:
    """Lowers this thread's priority: it mostly runs while a processor would be idle."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
