"""Names of the sockets on which the processes of a job answer.

    coarse-status/<user>/<job>/<role>/<number>/<pid>/<random>

They are abstract (unix(7)): a name ends with its process, however that ends, and leaves nothing in the file system.
Another user may take such a name; both ends therefore check whose process the other one is.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

WORKER, MEMORY_DEVICE, LAUNCHER = "worker", "md", "launcher"
"""Roles of processes. A launcher answers other questions than the rest (coarse.cli.workers.join_requests)."""

_NAME = re.compile(
    r"coarse-status/(?P<user>\d+)/(?P<job>[0-9a-f]{8})/(?P<role>worker|md|launcher)/(?P<number>\d+)/(?P<pid>\d+)"
    r"/(?P<mark>[0-9a-f]{8})"
)
_LISTENS = 0x10000  # __SO_ACCEPTCON, in /proc/net/unix
_SOCKETS = Path("/proc/net/unix")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where one process of a job answers.

    Args:
        user: The process's user.
        job: Id of the job.
        role: WORKER, MEMORY_DEVICE or LAUNCHER.
        number: Rank of a worker, or number of a memory device on its node; 0 of a launcher.
        pid: Process id.
        mark: Random part, so that nobody can take the name in advance.
    """

    user: int
    job: str
    role: str
    number: int
    pid: int
    mark: str

    @classmethod
    def of_this_process(cls, job: str, role: str, number: int) -> Address:
        """A new address; `job` is an id of job_id()."""
        mark = secrets.token_hex(4)
        return cls(user=os.geteuid(), job=job, role=role, number=number, pid=os.getpid(), mark=mark)

    @property
    def name(self) -> str:
        """The socket's address, for bind() and connect()."""
        return f"\0coarse-status/{self.user}/{self.job}/{self.role}/{self.number}/{self.pid}/{self.mark}"

    @property
    def process(self) -> str:
        """The process in words, as logs name it."""
        if self.role == LAUNCHER:
            return f"the launcher of job {self.job}"
        return f"worker {self.number}" if self.role == WORKER else f"{self.role}{self.number}"

    @property
    def process_with_pid(self) -> str:
        """The process in words, with its process id."""
        return f"{self.process} (pid {self.pid})"


def job_id(job: str) -> str:
    """The id by which `coarse status` names the job of an Attempt."""
    return hashlib.sha256(job.encode()).hexdigest()[:8]


def find_addresses(job: str = "") -> list[Address]:
    """The addresses of workers and memory devices of this user on this node, by job, role and number.

    Args:
        job: The beginning of a job's id; "" for all jobs.

    Raises:
        OSError: If the system does not list its sockets.
    """
    return [each for each in _find(job) if each.role != LAUNCHER]


def find_launchers(job: str = "") -> list[Address]:
    """The addresses of launchers of this user on this node that take new workers, by job.

    Args, Raises: As for find_addresses().
    """
    return [each for each in _find(job) if each.role == LAUNCHER]


def _find(job: str) -> list[Address]:
    found = {each for line in _SOCKETS.read_text(errors="replace").splitlines() if (each := _parse(line))}
    own = [each for each in found if each.user == os.geteuid() and each.job.startswith(job)]
    return sorted(own, key=lambda each: (each.job, each.role != WORKER, each.number, each.pid, each.mark))


def _parse(line: str) -> Address | None:
    """The address in a line of /proc/net/unix: number, count, protocol, flags, type, state, inode, @name."""
    fields = line.split(maxsplit=7)
    if len(fields) < 8 or not re.fullmatch(r"[0-9A-F]{8}", fields[3]) or not int(fields[3], 16) & _LISTENS:
        return None
    match = _NAME.fullmatch(fields[7].removeprefix("@"))
    if match is None:
        return None
    user, number, pid = (int(match[name]) for name in ("user", "number", "pid"))
    return Address(
        user=user, job=match["job"], role=match["role"], number=number, pid=pid, mark=match["mark"]
    )
