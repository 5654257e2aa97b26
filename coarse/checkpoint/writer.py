"""Writes a checkpoint: files first, the manifest last, and only then the folder gets its name.

    step-N.tmp/   tensors, workers' state ──► fsync each ──► manifest.json, fsync ──► fsync folder
    step-N/       rename ──► fsync parent ──► `latest`

A process that is killed in between leaves a folder named step-N.tmp, which loaders ignore.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from coarse import __version__
from coarse.checkpoint.checksums import RunningChecksums
from coarse.checkpoint.folder import Folder, NewFile
from coarse.checkpoint.manifest import (
    LARGEST_CHUNK_BYTES,
    MANIFEST_NAME,
    SMALLEST_CHUNK_BYTES,
    FileEntry,
    Manifest,
    schema_hash,
)
from coarse.checkpoint.names import LATEST_NAME, STATE_FILE_PREFIX, CheckpointName, state_file_name
from coarse.checkpoint.source import CheckpointSource, SavedTensor
from coarse.checkpoint.tensor_file import header_of, plan_files
from coarse.errors import CheckpointError

_LONGEST_STATE_BYTES = 64 << 20
_POLL_INTERVAL_S = 0.005

Progress = Callable[[int, int], None]
"""Called after each piece with the bytes written so far and those of the whole checkpoint."""


class SaveCancelledError(CheckpointError):
    """A save was cancelled on request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Options for writing checkpoints.

    Args:
        file_bytes: Approximate largest size of a safetensors file.
        chunk_bytes: Number of bytes that each CRC32C covers.
        flush_bytes: How much data may wait in the page cache for the disk, if a file system requires the cache.
        state_timeout_s: How long other workers may take to write their own state.
        digests: Whether to compute the SHA-256 of each file, in addition to the CRC32C of its chunks. SHA-256 detects
            deliberate changes if a copy of the manifest is kept elsewhere. It takes 0.6 s of a processor for each GB.

    Raises:
        ValueError: If a number is out of range.
    """

    file_bytes: int = 512 << 20
    chunk_bytes: int = 4 << 20
    flush_bytes: int = 64 << 20
    state_timeout_s: float = 60.0
    digests: bool = False

    def __post_init__(self) -> None:
        if not SMALLEST_CHUNK_BYTES <= self.chunk_bytes <= LARGEST_CHUNK_BYTES:
            raise ValueError(
                f"chunk_bytes={self.chunk_bytes} must lie between {SMALLEST_CHUNK_BYTES} and {LARGEST_CHUNK_BYTES}"
            )
        if self.file_bytes < 1 or self.flush_bytes < 1 or self.state_timeout_s <= 0:
            raise ValueError("file_bytes, flush_bytes and state_timeout_s must all be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveDetails:
    """Contents of a checkpoint besides tensors.

    Args:
        world_size: Number of workers of the job.
        optimizer: The optimizer's settings, in the form of to_json(); None without an optimizer.
        save_number: Number of this save in the job, the same on every worker. It distinguishes the workers' state for
            this save from files of an earlier, failed save of the same step.
        has_worker_state: Whether each worker writes its own state, with write_worker_state().
    """

    world_size: int = 1
    optimizer: Any = None
    save_number: int = 0
    has_worker_state: bool = False


def write_checkpoint(
    parent: Folder,
    source: CheckpointSource,
    details: SaveDetails,
    *,
    options: WriteOptions | None = None,
    progress: Progress = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> CheckpointName:
    """Writes one checkpoint and returns its name; the checkpoint is then durable on disk and can be loaded.

    Needs a few pieces of memory, regardless of the size of the state. Closes the source. A failed save leaves no
    files unless the process is killed.

    Args:
        parent: Folder of all checkpoints of the job.
        source: The state.
        details: Contents besides tensors.
        options: Options for writing; the defaults if not given.
        progress: Receives the number of bytes written.
        should_stop: Called after each piece; True cancels.

    Raises:
        SaveCancelledError: If `should_stop` returns True.
        CheckpointError: If the source describes its tensors wrongly, or a worker's state does not arrive.
        OSError: If the disk write fails.
    """
    writer = _Writer(parent, source, details, options or WriteOptions(), progress, should_stop)
    with contextlib.closing(source):
        return writer.run()


def write_worker_state(parent: Folder, *, step: int, save_number: int, rank: int, state: Any) -> None:
    """Adds the state of one worker to a checkpoint that is being written.

    Args:
        parent: As for write_checkpoint(); on several nodes it must be the same file system.
        step: Step of the checkpoint.
        save_number: Number of the save.
        rank: Rank of the worker.
        state: In the form of to_json().

    Raises:
        CheckpointError: If it is longer than 64 MiB.
        OSError: If the disk write fails.
    """
    contents = json.dumps({"save_number": save_number, "state": state}, separators=(",", ":")).encode()
    if len(contents) > _LONGEST_STATE_BYTES:
        raise CheckpointError(
            f"worker {rank}: its own state takes {len(contents)} bytes, more than {_LONGEST_STATE_BYTES}; it "
            "is meant for random generators and data positions; tensors belong in the model"
        )
    with parent.enter(CheckpointName(step).temporary, create=True) as folder:
        folder.replace(state_file_name(rank), contents)


def read_worker_state(contents: bytes) -> tuple[int, Any]:
    """The save number and the state that write_worker_state() wrote.

    Raises:
        CheckpointError: If the contents are not from write_worker_state().
    """
    try:
        found = json.loads(contents)
        return int(found["save_number"]), found["state"]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"the state of a worker cannot be read: {error!r}") from None


class _Writer:
    """One save."""

    def __init__(
        self,
        parent: Folder,
        source: CheckpointSource,
        details: SaveDetails,
        options: WriteOptions,
        progress: Progress,
        should_stop: Callable[[], bool],
    ) -> None:
        self._parent = parent
        self._source = source
        self._details = details
        self._options = options
        self._progress = progress
        self._should_stop = should_stop
        self._name = CheckpointName(source.step)
        self._tensors = tuple(source.tensors)
        self._total_bytes = sum(tensor.nbytes for tensor in self._tensors)
        self._done_bytes = 0

    def run(self) -> CheckpointName:
        if len({tensor.name for tensor in self._tensors}) < len(self._tensors):
            raise CheckpointError("the state has two tensors of one name")
        try:
            with self._parent.enter(self._name.temporary, create=True) as folder:
                self._write(folder)
            return self._finish()
        except BaseException:
            # The cause of the failure may also prevent the cleanup; the next save starts with a cleanup.
            with contextlib.suppress(Exception):
                self._parent.remove(self._name.temporary)
            raise

    def _write(self, folder: Folder) -> None:
        state_files = self._state_files()
        for left in folder.names():  # left by a killed save; other workers may already be writing their state
            if not left.startswith(STATE_FILE_PREFIX):
                folder.remove(left)
        groups = plan_files(self._tensors, file_bytes=self._options.file_bytes)
        files = [
            self._write_tensors(folder, f"tensors-{number:05d}.safetensors", group)
            for number, group in enumerate(groups, 1)
        ]
        files += [self._await_state(folder, name) for name in state_files]
        for left in set(folder.names()) - {file.name for file in files}:
            folder.remove(left)
        manifest = Manifest(
            step=self._name.step,
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            coarse_version=__version__,
            world_size=self._details.world_size,
            num_tensors=len(self._tensors),
            schema_sha256=schema_hash(self._tensors),
            chunk_bytes=self._options.chunk_bytes,
            files=tuple(files),
            optimizer=self._details.optimizer,
            state_files=state_files,
        )
        with folder.writing(MANIFEST_NAME) as file:
            file.write(manifest.encode())
        folder.sync()

    def _finish(self) -> CheckpointName:
        name = self._name
        # After all existing attempts of this step: the name of a removed earlier one must not be reused.
        found = [CheckpointName.parse(each) for each in self._parent.names()]
        attempts = [each.attempt for each in found if each is not None and each.step == name.step]
        if attempts:
            name = CheckpointName(name.step, max(attempts) + 1)
        self._parent.rename(self._name.temporary, str(name))
        return name

    def _write_tensors(self, folder: Folder, name: str, tensors: Sequence[SavedTensor]) -> FileEntry:
        checksums = self._checksums()
        with folder.writing(name, past_cache=True) as file:
            waiting_bytes = self._write_piece(
                file, checksums, header_of(tensors, {"format": "pt", "step": str(self._name.step)})
            )
            for tensor in tensors:
                written = 0
                for piece in self._source.read(tensor, file.reserve):
                    written += len(piece)
                    waiting_bytes += self._write_piece(file, checksums, piece)
                    self._done_bytes += len(piece)
                    self._progress(self._done_bytes, self._total_bytes)
                    if waiting_bytes >= self._options.flush_bytes:
                        file.flush()
                        waiting_bytes = 0
                if written != tensor.nbytes:
                    raise CheckpointError(
                        f"{tensor.name}: its source gave {written} of {tensor.nbytes} bytes"
                    )
        return _entry(name, checksums)

    def _write_piece(self, file: NewFile, checksums: RunningChecksums, piece: bytes | memoryview) -> int:
        self._check_stop()
        # Before the write, which may evict the bytes from the processor's caches.
        checksums.add(piece)
        file.write(piece)
        return len(piece)

    def _checksums(self) -> RunningChecksums:
        return RunningChecksums(self._options.chunk_bytes, with_sha256=self._options.digests)

    def _state_files(self) -> tuple[str, ...]:
        return tuple(map(state_file_name, range(self._details.world_size * self._details.has_worker_state)))

    def _await_state(self, folder: Folder, name: str) -> FileEntry:
        """Waits until a worker has written its state for this save, and computes its checksums."""
        deadline = time.monotonic() + self._options.state_timeout_s
        while True:
            if folder.has(name):
                contents = folder.read(name, limit_bytes=2 * _LONGEST_STATE_BYTES)
                if read_worker_state(contents)[0] == self._details.save_number:
                    checksums = self._checksums()
                    checksums.add(contents)
                    return _entry(name, checksums)
            self._check_stop()
            if time.monotonic() >= deadline:
                raise CheckpointError(
                    f"{folder.path / name} did not appear within {self._options.state_timeout_s:.0f} s: either "
                    "that worker did not save at this step, or the folder is not on a file system that all "
                    "nodes share"
                )
            time.sleep(_POLL_INTERVAL_S)

    def _check_stop(self) -> None:
        if self._should_stop():
            raise SaveCancelledError(
                f"the save of step {self._name.step} was stopped with {self._done_bytes} of "
                f"{self._total_bytes} bytes written; no part of it is kept"
            )


def _entry(name: str, checksums: RunningChecksums) -> FileEntry:
    return FileEntry(
        name=name, num_bytes=checksums.num_bytes, sha256=checksums.sha256, crc32c=checksums.crc32c
    )


def write_hint(parent: Folder, name: CheckpointName) -> None:
    """Writes the hint to the latest checkpoint: for people and scripts; loaders do not trust it."""
    parent.replace(LATEST_NAME, f"{name}\n".encode())
