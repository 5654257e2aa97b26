"""Detects whether this process ends because of an error."""

from __future__ import annotations

import sys


def is_failing() -> bool:
    """Whether an exception is propagating through the script or has ended it."""
    return sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None
