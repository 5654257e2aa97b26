"""The kernel's information about other processes."""

from __future__ import annotations

from pathlib import Path

_STATES = {
    "T": "it is stopped (SIGSTOP or Ctrl-Z); kill -CONT {pid} continues it",
    "t": "a debugger has stopped it",
    "D": "it waits for a disk or another device, in the kernel's {place}",
    "R": "it computes in native code that holds Python's GIL, or gets no processor",
    "S": "it waits in native code that holds Python's GIL, in the kernel's {place}",
}
_ENDED = ("", "Z", "X")
_STOPPED = ("T", "t")


def describe_process(pid: int) -> str:
    """Why a process may not answer, as the kernel sees it; "" if it has ended."""
    state = _state_of(pid)
    if state in _ENDED:
        return ""
    return _STATES.get(state, "its state is {state}").format(pid=pid, state=state, place=_kernel_place(pid))


def _kernel_place(pid: int) -> str:
    try:
        place = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        place = ""
    return place if place not in ("", "0") else "code"


def peak_memory_bytes(pid: int) -> int:
    """The largest resident memory that a process has had, shared memory included; 0 if it has ended."""
    return _memory_of(pid).get("VmHWM", 0)


def private_memory_bytes(pid: int) -> int:
    """The resident memory that is a process's own, without shared memory and files; 0 if it has ended."""
    return _memory_of(pid).get("RssAnon", 0)


def _memory_of(pid: int) -> dict[str, int]:
    """The sizes in /proc/PID/status, in bytes; {} if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith(" kB")}


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process."""
    return _state_of(pid) in _STOPPED


def _state_of(pid: int) -> str:
    """The letter of proc(5); "" if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
