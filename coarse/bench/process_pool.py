"""Worker processes of an experiment or a benchmark: real workers in separate processes, in real sessions."""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from coarse.env import WorkerIdentity, forget_settings
from coarse.session import Session
from coarse.settings import Settings
from coarse.store import DirectoryStore

LIMIT_S = 120.0
"""Time limit for a message to the driver."""


class ProcessPoolError(Exception):
    """A worker failed; the message ends with its traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A worker's end: its identity, the rendezvous folder, and a pipe to the driver."""

    rank: int
    num_workers: int
    folder: Path
    pipe: Connection

    def join(self, store: str, **settings: Any) -> Session:
        """Joins the session that the other workers join under the same name; by default without a profile."""
        folder = self.folder / store
        folder.mkdir(mode=0o700, exist_ok=True)
        identity = WorkerIdentity(
            rank=self.rank,
            world_size=self.num_workers,
            local_rank=self.rank,
            local_world_size=self.num_workers,
        )
        return Session.join(
            identity=identity,
            store=DirectoryStore(folder),
            settings=Settings(**{"profile": "off", **settings}),
        )

    def tell(self, value: Any) -> None:
        """Sends a value to the driver."""
        self.pipe.send(("value", value))

    def hear(self) -> Any:
        """Waits for the driver's next value.

        Raises:
            EOFError: If the driver is gone.
        """
        return self.pipe.recv()


class ProcessPool:
    """Worker processes that each run one function. Context manager; no process remains at its end.

    Args:
        num_workers: Number of workers.
        work: Function of each worker; importable, with a Seat as its only argument.
    """

    def __init__(self, num_workers: int, work: Callable[[Seat], None]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="coarse-crew-"))
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(num_workers)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(target=_work, args=(work, rank, num_workers, self._folder, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(self._processes, pairs, strict=True):
            process.start()
            theirs.close()

    def tell(self, value: Any) -> None:
        """Sends a value to every worker."""
        for pipe in self._pipes:
            pipe.send(value)

    def hear(self, limit_s: float = LIMIT_S) -> list[Any]:
        """Waits for the next value of every worker; returns them by rank.

        Raises:
            ProcessPoolError: If a worker failed or ended.
            TimeoutError: If a worker sends nothing for `limit_s`.
        """
        return [self._hear(rank, pipe, limit_s) for rank, pipe in enumerate(self._pipes)]

    def ask(self, value: Any, limit_s: float = LIMIT_S) -> list[Any]:
        """Sends a value to every worker and returns their answers, by rank."""
        self.tell(value)
        return self.hear(limit_s)

    def close(self) -> None:
        """Ends all workers: listening ones end by themselves, the others are killed. Idempotent."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hear(self, rank: int, pipe: Connection, limit_s: float) -> Any:
        if not pipe.poll(limit_s):
            raise TimeoutError(f"worker {rank} has said nothing for {limit_s} s")
        try:
            what, value = pipe.recv()
        except EOFError:
            raise ProcessPoolError(f"worker {rank} has ended without a word") from None
        if what == "error":
            raise ProcessPoolError(f"worker {rank} failed:\n{value}")
        return value


def _work(work: Callable[[Seat], None], rank: int, num_workers: int, folder: Path, pipe: Connection) -> None:
    forget_settings()  # an experiment does not inherit settings
    try:
        work(Seat(rank=rank, num_workers=num_workers, folder=folder, pipe=pipe))
    except (EOFError, KeyboardInterrupt):
        pass  # the driver is gone or was interrupted
    except BaseException:
        with contextlib.suppress(OSError):  # the driver may be gone, too
            pipe.send(("error", traceback.format_exc()))
