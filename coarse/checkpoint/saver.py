"""Saves in the background: one at a time; training continues even if saves fail."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from coarse.checkpoint.catalogue import read_back, remove, superseded
from coarse.checkpoint.folder import Folder
from coarse.checkpoint.names import CheckpointName
from coarse.checkpoint.progress import SaveProgress
from coarse.checkpoint.reader import open_checkpoint
from coarse.checkpoint.source import CheckpointSource
from coarse.checkpoint.writer import (
    Progress,
    SaveDetails,
    WriteOptions,
    write_checkpoint,
    write_hint,
    write_worker_state,
)
from coarse.errors import CheckpointError, CoarseError
from coarse.metrics.writer import MetricsWriter
from coarse.process.scheduling import lower_priority
from coarse.timeline.recorder import span

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCounts:
    """Outcomes of the saves of one process.

    Args:
        num_saved: Checkpoints that are on disk and were read back.
        num_skipped: Saves that did not begin, because another one was in progress until the next one was due.
        num_failed: Saves that failed because of the disk or another worker.
        num_failed_in_row: Failed saves since the last success.
        last_error: Error of the last failed save; "" if none failed.
        last_save_s: Seconds until the last successful save was on disk.
        last_bytes: Bytes that it wrote.
    """

    num_saved: int = 0
    num_skipped: int = 0
    num_failed: int = 0
    num_failed_in_row: int = 0
    last_error: str = ""
    last_save_s: float = 0.0
    last_bytes: int = 0


class Writing(Protocol):
    """A checkpoint that is about to be written, by this process or by a memory device."""

    @property
    def step(self) -> int:
        """Number of updates that its state includes."""

    def write(self, progress: Progress) -> CheckpointName:
        """Writes it like write_checkpoint(), with the same errors. Called once, from a thread of the saver."""

    def verify(self, name: CheckpointName) -> None:
        """Reads the checkpoint of write() back from disk and compares it. Called once, after write().

        Raises:
            CheckpointError, OSError: If it differs from the written data, or cannot be read.
        """

    def close(self) -> None:
        """Releases it without writing or reading back. Idempotent."""


class SourceWriting:
    """A checkpoint that this process writes.

    Args:
        parent: Folder of all checkpoints; the caller closes it.
        source: The state.
        details: Contents besides tensors.
        options: Options for writing.
    """

    def __init__(
        self,
        parent: Folder,
        source: CheckpointSource,
        details: SaveDetails,
        options: WriteOptions | None = None,
    ) -> None:
        self.step = source.step
        self._parent = parent
        self._source = source
        self._details = details
        self._options = options

    def write(self, progress: Progress) -> CheckpointName:
        return write_checkpoint(
            self._parent, self._source, self._details, options=self._options, progress=progress
        )

    def verify(self, name: CheckpointName) -> None:
        read_back(self._parent, name)

    def close(self) -> None:
        self._source.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """A worker's own state, which it writes itself for a save.

    Args:
        step: Step of the checkpoint.
        save_number: Number of the save.
        rank: Rank of the worker.
        state: In the form of to_json().
    """

    step: int
    save_number: int
    rank: int
    state: Any


class Saver:
    """Writes checkpoints in its own thread, at most one at a time.

    A failed save is logged and counted, and training continues; check() raises when too many have failed in a row.
    The process does not exit before a save in progress has ended. Use it from one thread.

    Args:
        parent: Folder of all checkpoints; the saver takes ownership.
        keep: Number of newest checkpoints to keep, besides pinned ones.
        most_failures: Number of failures in a row that counts as an error.
        metrics: Gives the writer that counts saves, when one has ended.

    Raises:
        ValueError: If `keep` or `most_failures` is below 1.
    """

    def __init__(
        self,
        parent: Folder,
        *,
        keep: int = 3,
        most_failures: int = 3,
        metrics: Callable[[], MetricsWriter] = MetricsWriter,
    ) -> None:
        if keep < 1 or most_failures < 1:
            raise ValueError(f"keep={keep} and most_failures={most_failures} must be at least 1")
        self._parent = parent
        self._keep = keep
        self._most_failures = most_failures
        self._metrics = metrics
        # A running executor starts a save without waiting for a thread.
        self._executor = ThreadPoolExecutor(1, "coarse-checkpoint", lower_priority)
        self._under_way: Future[None] | None = None
        self._torn: set[str] = set()  # begun but unfinished saves; used by the saver's thread
        self._lock = threading.Lock()  # guards _counts
        self._counts: dict[str, Any] = {}

    @property
    def folder(self) -> Folder:
        """Folder of all checkpoints."""
        return self._parent

    @property
    def counts(self) -> SaveCounts:
        """Outcomes of the saves so far."""
        with self._lock:
            return SaveCounts(**self._counts)

    @property
    def is_busy(self) -> bool:
        """Whether a save is in progress."""
        return self._under_way is not None and not self._under_way.done()

    def start(self, writing: Writing, own_state: WorkerState | None = None) -> bool:
        """Starts a save; returns at once. If one is in progress, closes `writing`, counts a skip, and returns False.

        Args:
            writing: The checkpoint.
            own_state: This worker's state, if workers have state.
        """
        if self.is_busy:
            writing.close()
            self.count_skipped(1)
            logger.warning("[step %d] no checkpoint: the previous one is still being written", writing.step)
            return False
        self._run(lambda: self._save(writing, own_state))
        return True

    def start_worker_state(self, own_state: WorkerState) -> None:
        """Starts to write a worker's own state, for a save that another worker writes."""
        self.wait()
        self._run(lambda: self._write_state(own_state))

    def count_skipped(self, number: int) -> None:
        """Counts saves that did not begin."""
        self._count(num_skipped=self.counts.num_skipped + number)
        self._metrics().add("coarse_checkpoint_saves_total", number, label="skipped")

    @property
    def has_given_up(self) -> bool:
        """Whether too many saves in a row have failed."""
        return self.counts.num_failed_in_row >= self._most_failures

    def check(self) -> None:
        """Raises:
        CheckpointError: If too many saves in a row have failed; gives the reason of the last failure.
        """
        counts = self.counts
        if self.has_given_up:
            raise CheckpointError(
                f"{counts.num_failed_in_row} saves in a row to {self._parent.path} have failed; the last one: "
                f"{counts.last_error}. The next fault would lose the training; free disk space, or choose "
                "another folder."
            )

    def wait(self) -> None:
        """Returns when no save is in progress."""
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def close(self) -> None:
        """Waits for a save in progress; closes the folder. Idempotent."""
        self.wait()
        self._executor.shutdown()
        self._remove_torn()
        self._parent.close()

    def _run(self, work: Callable[[], None]) -> None:
        self._under_way = self._executor.submit(self._guarded, work)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Counts and logs a failed save."""
        counts = self.counts
        text = f"{type(error).__name__}: {error}"
        if not self._parent.is_in_place:
            text += " (the folder has been removed or renamed since training began)"
        self._count(
            num_failed=counts.num_failed + 1,
            num_failed_in_row=counts.num_failed_in_row + 1,
            last_error=text,
        )
        self._metrics().add("coarse_checkpoint_saves_total", label="failed")
        # Log traces only for unexpected errors; a full disk is expected.
        expected = isinstance(error, (OSError, CoarseError))
        logger.warning(
            "a checkpoint could not be saved to %s; training goes on. %s",
            self._parent.path,
            text,
            exc_info=not expected,
        )

    def _save(self, writing: Writing, own_state: WorkerState | None) -> None:
        began_s = time.monotonic()
        temporary = CheckpointName(writing.step).temporary
        with contextlib.closing(writing), SaveProgress(f"step {writing.step}") as progress:
            self._torn.discard(temporary)  # other workers may already have written their state to it
            self._remove_torn()
            self._torn.add(temporary)
            if own_state is not None:
                self._write_state(own_state)
            with span("write checkpoint"):
                name = writing.write(progress)
            self._torn.discard(temporary)
            save_s = time.monotonic() - began_s
            write_hint(self._parent, name)
            # Before removing older ones: verify that the new checkpoint is really on disk.
            with span("verify checkpoint"):
                writing.verify(name)
        with open_checkpoint(self._parent, name) as checkpoint:
            num_bytes = checkpoint.manifest.num_bytes
        self._count(
            num_saved=self.counts.num_saved + 1, num_failed_in_row=0, last_save_s=save_s, last_bytes=num_bytes
        )
        self._measure(save_s, num_bytes)
        logger.info("[step %d] saved %s: %.1f MiB in %.2f s", name.step, name, num_bytes / 2**20, save_s)
        self._remove_superseded(name)

    def _measure(self, save_s: float, num_bytes: int) -> None:
        metrics = self._metrics()
        metrics.add("coarse_checkpoint_saves_total", label="saved")
        metrics.add("coarse_checkpoint_written_bytes_total", num_bytes)
        metrics.observe("coarse_checkpoint_save_seconds", save_s)

    def _remove_torn(self) -> None:
        """Removes files of failed saves, including those of workers that were late with their own state."""
        for name in self._torn:
            with contextlib.suppress(OSError, CoarseError):  # they may fail for the same reason
                self._parent.remove(name)

    def _remove_superseded(self, saved: CheckpointName) -> None:
        for name in superseded(self._parent, keep=self._keep):
            if name != saved:
                remove(self._parent, name)

    def _write_state(self, own: WorkerState) -> None:
        write_worker_state(
            self._parent, step=own.step, save_number=own.save_number, rank=own.rank, state=own.state
        )

    def _count(self, **changed: Any) -> None:
        with self._lock:
            self._counts.update(changed)
