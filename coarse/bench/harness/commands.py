"""Shared by the driver and its worker processes: a worker's job, its commands, their messages and errors."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from coarse.errors import CoarseError


class BenchError(CoarseError):
    """A benchmark failed: an error of a worker, a wrong result, or too little memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """The job description that a worker gets from the driver.

    Args:
        system: Name of the system under measurement.
        rank: This worker's rank, or -1 if the system's own launcher assigns it.
        num_workers: Workers of this system.
        directory: Private directory of this system, for rendezvous files.
        options: Settings of the system, such as COARSE's algorithm; JSON values.
    """

    system: str
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


class Commands(Protocol):
    """The commands of a worker: its public methods, whose arguments and results are JSON values.

    All methods are called from one thread.
    """

    def setup(self) -> int:
        """Joins the other workers and returns this worker's rank."""

    def close(self) -> None:
        """Leaves the system; collective if the system's own shutdown is."""


MakeCommands: TypeAlias = Callable[[WorkerJob], Commands]
"""A class or function of a module; only setup() imports the system's framework."""


def commands_of(job: WorkerJob, systems: Mapping[str, MakeCommands]) -> Commands:
    """The commands of the job's system.

    Raises:
        ValueError: If `systems` lacks it; names those that it has.
    """
    if job.system not in systems:
        raise ValueError(f"unknown system {job.system!r}; known are {', '.join(systems)}")
    return systems[job.system](job)


def name_of(make_commands: MakeCommands) -> str:
    """The importable name of a class or function, also of the script that runs as __main__."""
    module = make_commands.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        module = main.__spec__.name if main.__spec__ else Path(str(main.__file__)).stem
    return f"{module}:{make_commands.__qualname__}"


def find_commands(name: str) -> MakeCommands:
    """Imports the result of name_of()."""
    module, _, attribute = name.partition(":")
    found: MakeCommands = getattr(importlib.import_module(module), attribute)
    return found


def send(connection: Connection, message: dict[str, Any]) -> None:
    """Sends one message.

    Raises:
        OSError: If the other end is gone.
    """
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """Waits for one message.

    Raises:
        EOFError: If the other end is gone.
    """
    try:
        message: dict[str, Any] = json.loads(connection.recv_bytes())
    except OSError as error:
        raise EOFError(str(error)) from None
    return message
