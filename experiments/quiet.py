"""Refuses to measure on a machine that does other work, whose figures would be wrong without a sign of it."""

from __future__ import annotations

import psutil

from coarse.bench.harness.commands import BenchError

MOST_BUSY = 0.1
"""Largest accepted share of the processors' time that other work takes."""

_SAMPLE_S = 1.0


class BusyMachineError(BenchError):
    """Other work takes the processors that the measurement needs; there are no figures."""


def require_quiet(what: str, *, most_busy: float = MOST_BUSY, sample_s: float = _SAMPLE_S) -> None:
    """Watches the processors while the caller runs nothing; takes `sample_s` seconds.

    Args:
        what: The measurement that comes next, for the error.
        most_busy: Largest accepted share of the processors' time.
        sample_s: Length of the watch in seconds.

    Raises:
        BusyMachineError: If other work takes more.
    """
    busy = psutil.cpu_percent(interval=sample_s) / 100
    if busy > most_busy:
        raise BusyMachineError(
            f"{what}: other work takes {busy:.0%} of this machine's processors; at most {most_busy:.0%} is accepted. "
            "End it, or run --quick, whose figures are not kept"
        )
