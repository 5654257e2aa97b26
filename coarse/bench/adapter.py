"""A system under measurement: its workers' job descriptions, and the methods for the driver."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """The job description that a worker gets from the driver.

    Args:
        rank: This worker's rank, or -1 if the system's own launcher assigns it.
        num_workers: Workers of this system.
        directory: Private directory of this system, for rendezvous files.
        options: Settings of the system, such as COARSE's algorithm.
    """

    rank: int
    num_workers: int
    directory: Path
    options: dict[str, Any]

    def to_json(self) -> str:
        """JSON text for the command line."""
        return json.dumps({**asdict(self), "directory": os.fspath(self.directory)})

    @classmethod
    def from_json(cls, text: str) -> WorkerJob:
        """Reads the result of to_json()."""
        fields = json.loads(text)
        return cls(**{**fields, "directory": Path(fields["directory"])})


class Adapter(Protocol):
    """One system under measurement, in a worker process. All methods are called from one thread."""

    commands: frozenset[str]
    """Names of the methods that the driver may call; arguments and results are JSON values."""

    def setup(self) -> int:
        """Joins the other workers and returns this worker's rank."""

    def close(self) -> None:
        """Leaves the system; collective if the system's own shutdown is."""
