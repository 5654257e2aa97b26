"""A benchmark's worker process: joins the other workers of its system and executes the driver's commands.

    python -m coarse.bench.worker --system gloo --socket /private/socket --job '{...}'

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
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from coarse.bench import cleanup
from coarse.bench.adapter import Adapter, WorkerJob
from coarse.bench.channel import Channel

Inbox: TypeAlias = "queue.SimpleQueue[dict[str, Any]]"
"""Pending commands of the driver."""


def make_adapter(system: str, job: WorkerJob) -> Adapter:
    """Returns the adapter of a system; only setup() imports its framework.

    Raises:
        ValueError: If there is no adapter with this name.
    """
    from coarse.bench.collectives import SYNC_SYSTEMS
    from coarse.bench.replay import REPLAY_SYSTEMS
    from coarse.bench.saving import SAVE_SYSTEMS
    from coarse.bench.training import TRAIN_SYSTEMS

    factories: dict[str, Callable[[WorkerJob], Adapter]] = {
        **SYNC_SYSTEMS,
        **TRAIN_SYSTEMS,
        **REPLAY_SYSTEMS,
        **SAVE_SYSTEMS,
    }
    if system not in factories:
        raise ValueError(f"unknown system {system!r}; known are {', '.join(sorted(factories))}")
    return factories[system](job)


def serve(channel: Channel, inbox: Inbox, adapter: Adapter) -> None:
    """Executes commands until "close" has been answered. Reports errors to the driver, which handles them."""
    while True:
        message = inbox.get()
        try:
            channel.send({"result": _execute(adapter, message)})
        except Exception as error:
            traceback.print_exc()
            channel.send({"error": f"{type(error).__name__}: {error}"})
        if message["do"] == "close":
            return


def _execute(adapter: Adapter, message: dict[str, Any]) -> Any:
    command = message["do"]
    if command == "close":
        return adapter.close()
    if command not in adapter.commands:
        raise ValueError(f"unknown command {command!r}; known are {', '.join(sorted(adapter.commands))}")
    return getattr(adapter, command)(**message["with"])


def _receive_all(channel: Channel, inbox: Inbox, job: WorkerJob) -> None:
    """Moves messages to `inbox`; when the driver is gone, cleans up in its place and ends the process.

    The main thread may be in setup(), or blocked in a collective that never ends after the driver's death.
    """
    try:
        while True:
            inbox.put(channel.receive())
    except (EOFError, OSError):
        cleanup.remove(cleanup.mpi_segments([os.getpid()]))
        shutil.rmtree(job.directory, ignore_errors=True)
        os._exit(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of a worker process; returns its exit code."""
    parser = argparse.ArgumentParser(prog="coarse.bench.worker", description=__doc__)
    parser.add_argument("--system", required=True)
    parser.add_argument("--socket", required=True, help="Unix socket where the driver listens")
    parser.add_argument("--job", required=True, type=WorkerJob.from_json, help="a WorkerJob as JSON")
    parsed = parser.parse_args(arguments)
    channel = Channel.connect(parsed.socket)
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_receive_all, args=(channel, inbox, parsed.job), daemon=True).start()
    try:
        adapter = make_adapter(parsed.system, parsed.job)
        channel.send({"rank": adapter.setup()})
    except Exception as error:
        traceback.print_exc()
        channel.send({"error": f"{type(error).__name__}: {error}"})
        return 1
    serve(channel, inbox, adapter)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
