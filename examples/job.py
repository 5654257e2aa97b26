"""Shared by all examples: this process's place in the job, and progress messages."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

SECONDS_BETWEEN_LINES = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One worker's view of the job, whose workers train one model together."""

    rank: int
    world_size: int

    def say(self, text: str) -> None:
        """Prints `text`, on worker 0 only."""
        if self.rank == 0:
            print(text, flush=True)


@contextmanager
def join_job() -> Iterator[Job]:
    """Joins the workers that a launcher started (torchrun, `coarse run`; with COARSE imported, also mpirun and srun).

    A script started by hand is a job of one worker. The end of the block destroys the process group, also after
    an error.
    """
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Job(rank=dist.get_rank(), world_size=dist.get_world_size())
    finally:
        dist.destroy_process_group()


def broadcast_text(text: str) -> str:
    """Returns worker 0's `text` on every worker; collective. Sends bytes, because pickles can run code."""
    payload = torch.tensor(list(text.encode()), dtype=torch.uint8)
    length = torch.tensor([len(payload)])
    dist.broadcast(length, src=0)
    if dist.get_rank() != 0:
        payload = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(payload, src=0)
    return bytes(payload.tolist()).decode()


class Progress:
    """Training progress, shown by worker 0: a bar on a terminal, otherwise a line each second.

    Args:
        job: The job; workers other than 0 print nothing.
        steps: Expected number of this worker's `advance` calls, including those of earlier attempts.
        done: Number of calls in earlier attempts.
    """

    def __init__(self, job: Job, *, steps: int, done: int = 0) -> None:
        self._speaks = job.rank == 0
        self._steps = steps
        self._done = done
        self._next_line_at = time.monotonic()
        self._bar: RichProgress | None = None

    def __enter__(self) -> Progress:
        console = Console()
        if self._speaks and console.is_terminal:
            self._bar = RichProgress(
                TextColumn("training"),
                BarColumn(),
                TaskProgressColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("loss {task.fields[loss]}"),
                console=console,
            )
            self._task = self._bar.add_task("training", total=self._steps, completed=self._done, loss="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, loss: float) -> None:
        """Counts one step and shows its loss."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, advance=1, loss=f"{loss:.4f}")
        elif self._speaks and self._line_is_due():
            print(f"step {self._done}/{self._steps} loss {loss:.4f}", flush=True)

    def _line_is_due(self) -> bool:
        now = time.monotonic()
        if now < self._next_line_at and self._done < self._steps:
            return False
        self._next_line_at = now + SECONDS_BETWEEN_LINES
        return True
