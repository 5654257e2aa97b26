"""Failures that `.ci/run` may retry: exceeded times on a busy machine, but no crash and no wrong result."""

from __future__ import annotations

import os
import re
import signal
import traceback
from pathlib import Path

_TESTS = Path(__file__).parent
_CRASHES = ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT")
_CRASH_CODES = "|".join(str(int(getattr(signal, name))) for name in _CRASHES)
_CRASHED = re.compile(
    rf"\b({'|'.join(_CRASHES)})\b|Fatal Python error|Segmentation fault|Bus error|Illegal instruction"
    rf"|terminate called|core dumped|assert .*(?<![\w.])-({_CRASH_CODES})(?![\w.])|exit_code=-({_CRASH_CODES})\b"
)
_SANITIZED = re.compile(r"\b\w*Sanitizer\b|: runtime error: ")
_UNEQUAL = re.compile(r"Arrays are not|Not equal to tolerance|approx\(|Tensor-likes are not")
_COMPARES_RESULTS = re.compile(
    r"\b(digests?|weights?|parameters?|gradients?|loss(es)?|bits|bitwise|state_dicts?|array_equal|equal)\b",
    re.IGNORECASE,
)


def may_try_again(error: BaseException | None) -> bool:
    """Whether a test that failed with `error` counts as passed if a second run passes.

    Not if a process crashed, a sanitizer reported an error, or compared results differ: these are faults even if
    they are rare.
    """
    if error is None:
        return True
    text = "".join(traceback.format_exception_only(error))
    if _CRASHED.search(text) or _SANITIZED.search(text) or _UNEQUAL.search(text):
        return False
    return not (isinstance(error, AssertionError) and _COMPARES_RESULTS.search(_failed_statement(error)))


def name_exit(code: int) -> str:
    """An exit code as text for messages: "ended with 3", "crashed with SIGSEGV"."""
    if code >= 0:
        return f"ended with {code}"
    name = signal.Signals(-code).name
    return f"crashed with {name}" if name in _CRASHES else f"was ended by {name}"


def _failed_statement(error: BaseException) -> str:
    """The test statement that raised `error`; "" if no statement in this folder did."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if _TESTS in Path(os.path.abspath(frame.filename)).parents
    ]
    return (frames[-1].line or "") if frames else ""
