"""Where figures come from: commit, machine and kind, in every line of a benchmark's JSON records."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import coarse
from coarse.env import process_environment
from coarse.machine.host import count_granted_cores, read_memory

MEASURED = "measured"
"""Kind of a figure of this machine."""

EMULATED = "emulated"
"""Kind of a figure of the real runtime on the links of another machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchMachine:
    """The machine on which a figure was measured. Cores and memory are those that this process may use."""

    cpu: str
    cores: int
    memory_bytes: int

    @classmethod
    def here(cls) -> BenchMachine:
        """Describes this machine, or a container's share of it."""
        memory = read_memory()
        limit_bytes = memory.cgroup_limit_bytes
        return cls(
            cpu=_cpu_model(),
            cores=count_granted_cores(),
            memory_bytes=memory.total_bytes if limit_bytes is None else min(memory.total_bytes, limit_bytes),
        )

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} cores, {self.memory_bytes / 2**30:.1f} GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The origin of figures: the commit of COARSE and the machine."""

    commit: str
    machine: BenchMachine

    @classmethod
    def here(cls) -> Provenance:
        """The code and the machine of this process."""
        return cls(commit=_commit(), machine=BenchMachine.here())


def append_records(
    path: Path, records: Iterable[Mapping[str, Any]], provenance: Provenance, *, kind: str = MEASURED
) -> None:
    """Appends one JSON line per record to `path`, creating the file but no directory.

    Args:
        kind: Kind of all figures: MEASURED or EMULATED.

    Raises:
        OSError: If the file cannot be written.
    """
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps({**record, "kind": kind, **asdict(provenance)}) + "\n")


def _cpu_model() -> str:
    """Model name of the first CPU; the architecture if /proc/cpuinfo has no model name (aarch64)."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _commit() -> str:
    """The commit recorded in an image, `git describe` of this package's checkout, or the installed version."""
    if said := process_environment().get("COARSE_COMMIT"):
        return said
    package = Path(coarse.__file__).resolve().parent
    try:
        # An installed copy may be inside a checkout that does not contain its source.
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        return _git(package, "describe", "--always", "--dirty", "--tags")
    except (OSError, subprocess.SubprocessError):
        return f"coarse {coarse.__version__}"


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", os.fspath(directory), *arguments]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
    return result.stdout.strip()
