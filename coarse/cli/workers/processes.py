"""Keeps the processes of a job together: whichever process is killed, no process of the job remains.

    terminal ── front ── supervisor ── workers ── their children
                  └───────────┴─ child subreapers: they adopt orphans instead of init

With --preload, workers are forked from a further child of the supervisor, which then adopts them.

The supervisor runs the job. The front stays in the terminal's process group and forwards signals. If the front is
killed, the kernel sends the supervisor SIGTERM. If the supervisor is killed, the kernel kills the workers, and the
front kills their children. At Ctrl-Z, the front and all processes below the supervisor stop; the supervisor
continues, so that it can still end them. Linux only. The calling process must be single-threaded, because a child's
death signal is tied to the thread that forked it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path

from coarse.cli.workers.failure import signal_name

FORWARDED_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""Signals to the launcher that end a job."""

NOTIFYING_SIGNALS = frozenset({signal.SIGUSR1, signal.SIGUSR2})
"""Signals that the launcher forwards to the workers, without ending the job."""

_TERMINAL_STOP = signal.SIGTSTP
"""The terminal's signal for Ctrl-Z."""

FRONT_PATIENCE_S = 4.0
"""Additional time for the supervisor to end a job, beyond its time-out, before the front does it."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SWEEP_LIMIT_S = 2.0
_SWEEP_POLL_S = 0.005
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, death_signal: signal.Signals) -> None:
    """Makes the kernel send `death_signal` to this process when the thread that forked it ends.

    Args:
        parent: Process id of the parent at the time of the fork; if it is gone already, the signal is sent now.
    """
    _prctl(_PR_SET_PDEATHSIG, int(death_signal))
    if os.getppid() != parent:
        os.kill(os.getpid(), death_signal)


def become_subreaper() -> None:
    """Makes this process adopt descendants that lose their parent."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def descendants(root: int, *, spared: Collection[int] = ()) -> list[int]:
    """Returns the processes below `root`, nearest first, without `spared` and their descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        pid, parent = int(stat.parent.name), _parent_of(stat)
        if pid not in spared:
            children.setdefault(parent, []).append(pid)
    found = list(children.get(root, ()))
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def _parent_of(stat: Path) -> int:
    try:
        fields = stat.read_bytes().rpartition(b")")[2].split()
    except OSError:
        return -1
    return int(fields[1])


def signal_all(pids: Collection[int], number: signal.Signals) -> None:
    """Sends a signal to each live process in `pids`."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def sweep(*, spared: Collection[int] = (), reap: Callable[[], int] | None = None) -> None:
    """Kills and reaps all descendants of this process except `spared`; gives up after 2 s if some do not die.

    Args:
        spared: Processes that survive, with their descendants.
        reap: Reaps ended children and returns their number, for callers that need their exit codes; by default,
            sweep() reaps them.
    """
    deadline = time.monotonic() + _SWEEP_LIMIT_S
    while (left := descendants(os.getpid(), spared=spared)) and time.monotonic() < deadline:
        signal_all(left, signal.SIGKILL)
        if (reap() if reap is not None else sum(map(_reap, left))) == 0:
            time.sleep(_SWEEP_POLL_S)


def _reap(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False


def run_guarded(supervise: Callable[[], int], *, shutdown_timeout_s: float) -> int:
    """Runs `supervise` in a child process and returns its exit code; afterwards no descendant remains.

    `supervise` starts in a new session, as a subreaper, with this process's signal mask. After a signal it has
    `shutdown_timeout_s` to end; after a second one it must end at once. A terminal's Ctrl-Z stops this process and
    the children of `supervise`, until this process is continued.
    """
    spared = descendants(os.getpid())
    become_subreaper()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    handled = {*FORWARDED_SIGNALS, *NOTIFYING_SIGNALS, _TERMINAL_STOP}
    handled = {number for number in handled if signal.getsignal(number) is not signal.SIG_IGN}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, handled | {signal.SIGCHLD})
    sys.stdout.flush()
    sys.stderr.flush()
    front = os.getpid()
    supervisor = os.fork()
    if supervisor == 0:
        _be_supervisor(front, mask, supervise)
    try:
        return _attend(supervisor, handled, shutdown_timeout_s)
    finally:
        sweep(spared=spared)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _be_supervisor(front: int, mask: Collection[int], supervise: Callable[[], int]) -> None:
    code = 1
    try:
        os.setsid()
        become_subreaper()
        _hold_signals()
        die_with_parent(front, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = supervise()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _hold_signals() -> None:
    """Makes signals end the supervisor with a shell's exit code until `supervise` installs its handlers."""
    for number in FORWARDED_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: os._exit(128 + number))
    for number in NOTIFYING_SIGNALS:  # there are no workers yet
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)


def _attend(supervisor: int, handled: Collection[signal.Signals], shutdown_timeout_s: float) -> int:
    deadline: float | None = None
    patience_s = shutdown_timeout_s + FRONT_PATIENCE_S
    while (status := _status_of(supervisor)) is None:
        number = _next_signal(handled, deadline)
        if number == _TERMINAL_STOP:
            _pause(supervisor)
        elif number in NOTIFYING_SIGNALS:
            os.kill(supervisor, number)
        elif number is not None:
            os.kill(supervisor, number)
            deadline = time.monotonic() + patience_s
            patience_s = FRONT_PATIENCE_S
        elif deadline is not None and time.monotonic() >= deadline:
            os.kill(supervisor, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(status)
    if code < 0 and deadline is None:
        print(
            f"coarse run: its supervisor (pid {supervisor}) was killed by {signal_name(-code)}, as the kernel does "
            "when memory runs out; the job ends with it",
            file=sys.stderr,
        )
    return code if code >= 0 else 128 - code


def _status_of(child: int) -> int | None:
    pid, status = os.waitpid(child, os.WNOHANG)
    return status if pid else None


def _pause(supervisor: int) -> None:
    """Stops with all that the supervisor has started; returns when this process, and so they, are to go on."""
    stopped: list[int] = []
    # They may start further processes meanwhile.
    while new := [pid for pid in descendants(supervisor) if pid not in stopped]:
        signal_all(new, signal.SIGSTOP)
        stopped += new
    os.kill(os.getpid(), signal.SIGSTOP)
    signal_all(stopped, signal.SIGCONT)


def _next_signal(handled: Collection[signal.Signals], deadline: float | None) -> int | None:
    """Waits for one of the handled signals; returns None when a child changed its state or `deadline` passed."""
    waited_for = {*handled, signal.SIGCHLD}
    if deadline is None:
        number = signal.sigwaitinfo(waited_for).si_signo
    else:
        info = signal.sigtimedwait(waited_for, max(_SWEEP_POLL_S, deadline - time.monotonic()))
        number = info.si_signo if info else signal.SIGCHLD
    return None if number == signal.SIGCHLD else number
