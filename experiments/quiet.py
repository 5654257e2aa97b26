"""Refuses to measure on a machine that does other work, whose figures would be wrong without a sign of it."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import psutil

from coarse.bench.harness.commands import BenchError
from coarse.cli.workers.processes import become_subreaper

MOST_BUSY = 0.1
"""Largest accepted share of the processors' time that other work takes."""

T = TypeVar("T")

ATTEMPTS = 4
"""How often a measurement that other work has disturbed is made, before it is refused."""

_SAMPLE_S = 1.0
_ORPHANS_END_S = 5.0
"""How long the end of processes is waited for whose parent has ended."""


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
    _refuse(what, psutil.cpu_percent(interval=sample_s) / 100, most_busy)


@contextmanager
def quiet_throughout(what: str, *, most_busy: float = MOST_BUSY) -> Iterator[None]:
    """Refuses the measurement within the context if other work took the processors meanwhile.

    The measurement's own work is that of this process, and of its descendants that have ended in the context. Memory
    devices may end after the worker that has started them: this process adopts them, and waits for their end.

    Args:
        what: The measurement, for the error.
        most_busy: Largest accepted share of the processors' time; infinite to accept all.

    Raises:
        BusyMachineError: At the end, if other work took more.
    """
    become_subreaper()
    own_processes = _children()
    began_s, all_before_s, own_before_s = time.monotonic(), _busy_s(), _own_s()
    yield
    psutil.wait_procs(_children() - own_processes, timeout=_ORPHANS_END_S)
    others_s = (_busy_s() - all_before_s) - (_own_s() - own_before_s)
    available_s = (time.monotonic() - began_s) * (psutil.cpu_count() or 1)
    _refuse(what, others_s / available_s, most_busy)


def measure_in_quiet(
    what: str, measure: Callable[[], T], *, most_busy: float = MOST_BUSY, attempts: int = ATTEMPTS
) -> T:
    """Makes a measurement, and makes it again if other work took the processors meanwhile.

    Args:
        what: The measurement, for the error.
        measure: Makes it.
        most_busy: Largest accepted share of the processors' time; infinite to accept all.
        attempts: How often it is made at most.

    Raises:
        BusyMachineError: If other work took more each time.
    """
    for _ in range(attempts - 1):
        with suppress(BusyMachineError), quiet_throughout(what, most_busy=most_busy):
            return measure()
    with quiet_throughout(what, most_busy=most_busy):
        return measure()


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children())


def _busy_s() -> float:
    """Seconds that all processors together have worked since the start of the machine."""
    times = psutil.cpu_times()
    return float(
        sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
    )  # guests count as users


def _own_s() -> float:
    """Seconds that this process, and its child processes that have ended, have worked."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _refuse(what: str, busy: float, most_busy: float) -> None:
    if busy > most_busy:
        raise BusyMachineError(
            f"{what}: other work takes {busy:.0%} of this machine's processors; at most {most_busy:.0%} is accepted. "
            "End it, or run --quick, whose figures are not kept"
        )
