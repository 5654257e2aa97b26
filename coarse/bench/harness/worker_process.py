"""A worker process: joins the other workers of its system and executes the driver's commands.

    python -m coarse.bench.harness.worker_process --commands MODULE:NAME --socket /private/socket --job '{...}'

The driver sends `{"do": "run", "with": {"iterations": 10}}` and receives `{"result": ...}` or
`{"error": "..."}`; the first message is the worker's own `{"rank": 0}`, sent when its system is set up.
Between commands, a worker blocks in a queue, never in its communication library, so that idle systems use no cores
while another one is measured.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import socket
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from coarse.bench.harness import mpi_segments
from coarse.bench.harness.commands import Commands, WorkerJob, find_commands, receive, send
from coarse.security import local_sockets

Inbox: TypeAlias = "queue.SimpleQueue[dict[str, Any]]"
"""Pending commands of the driver."""


def serve(connection: Connection, inbox: Inbox, commands: Commands) -> None:
    """Executes commands until "close" has been answered. Reports errors to the driver, which handles them."""
    while True:
        message = inbox.get()
        try:
            send(connection, {"result": _execute(commands, message["do"], message["with"])})
        except Exception as error:
            _report(connection, error)
        if message["do"] == "close":
            return


def _execute(commands: Commands, name: str, arguments: dict[str, Any]) -> Any:
    command = getattr(commands, name, None)
    if name.startswith("_") or not callable(command):
        raise ValueError(f"{type(commands).__name__} has no command {name!r}")
    return command(**arguments)


def _report(connection: Connection, error: Exception) -> None:
    traceback.print_exc()
    send(connection, {"error": f"{type(error).__name__}: {error}"})


def _receive_all(connection: Connection, inbox: Inbox, job: WorkerJob) -> None:
    """Moves messages to `inbox`; when the driver is gone, cleans up in its place and ends the process.

    The main thread may be in setup(), or blocked in a collective that never ends after the driver's death.
    """
    try:
        while True:
            inbox.put(receive(connection))
    except EOFError:
        mpi_segments.remove(mpi_segments.mapped_by([os.getpid()]))
        shutil.rmtree(job.directory, ignore_errors=True)
        os._exit(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of a worker process; returns its exit code."""
    parser = argparse.ArgumentParser(prog="coarse.bench.harness.worker_process", description=__doc__)
    parser.add_argument("--commands", required=True, help="importable name of the class of its commands")
    parser.add_argument("--socket", required=True, help="Unix socket where the driver listens")
    parser.add_argument("--job", required=True, type=WorkerJob.from_json, help="a WorkerJob as JSON")
    parsed = parser.parse_args(arguments)
    connection = Connection(local_sockets.connect(parsed.socket, socket.SOCK_STREAM).detach())
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_receive_all, args=(connection, inbox, parsed.job), daemon=True).start()
    try:
        commands = find_commands(parsed.commands)(parsed.job)
        send(connection, {"rank": commands.setup()})
    except Exception as error:
        _report(connection, error)
        return 1
    serve(connection, inbox, commands)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
