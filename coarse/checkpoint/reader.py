"""Reads untrusted, possibly damaged checkpoints: uses no data without checking it."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coarse.checkpoint.checksums import crc32c_function
from coarse.checkpoint.folder import Folder, go_through_cache, has_cache
from coarse.checkpoint.manifest import (
    LONGEST_MANIFEST_BYTES,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    schema_hash,
)
from coarse.checkpoint.names import CheckpointName
from coarse.checkpoint.source import Reserve, SavedTensor, any_memory
from coarse.checkpoint.tensor_file import TensorPlace, read_header
from coarse.checkpoint.writer import read_worker_state
from coarse.errors import CheckpointError

Progress = Callable[[int, int], None]

_PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Differences between a checkpoint's tensors and the wanted ones.

    Args:
        missing: Wanted tensors that the checkpoint lacks.
        extra: Unwanted tensors in the checkpoint.
        different: Tensors of another dtype or shape: (wanted, found).
    """

    missing: tuple[str, ...]
    extra: tuple[str, ...]
    different: tuple[tuple[SavedTensor, SavedTensor], ...]

    @classmethod
    def between(cls, wanted: Iterable[SavedTensor], found: Iterable[SavedTensor]) -> Mismatch:
        """Compares tensors by their names."""
        sought = {tensor.name: tensor for tensor in wanted}
        there = {tensor.name: tensor for tensor in found}
        return cls(
            missing=tuple(name for name in sought if name not in there),
            extra=tuple(name for name in there if name not in sought),
            different=tuple(
                (tensor, there[name])
                for name, tensor in sought.items()
                if name in there and there[name] != tensor
            ),
        )

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.different)

    def __str__(self) -> str:
        parts = [f"missing: {_shortened(self.missing)}"] if self.missing else []
        parts += [f"unexpected: {_shortened(self.extra)}"] if self.extra else []
        parts += [
            "different shape or dtype: "
            + _shortened([f"{w.name} is {_kind(f)}, expected {_kind(w)}" for w, f in self.different])
        ] * bool(self.different)
        return "; ".join(parts)


class Checkpoint:
    """One complete checkpoint, open for reading; itself a CheckpointSource.

    It checks every byte before returning it. One thread at a time. open_checkpoint() creates it; close it, or use it
    in a `with` block.
    """

    def __init__(
        self, folder: Folder, manifest: Manifest, places: Mapping[str, Sequence[TensorPlace]]
    ) -> None:
        self._folder = folder
        self._crc32c = crc32c_function()
        self._places = {
            place.tensor.name: (file, place) for file in manifest.tensor_files for place in places[file.name]
        }
        self._buffer = memoryview(mmap.mmap(-1, _whole_pages(manifest.chunk_bytes)))
        self._buffered: tuple[str, int] | None = None
        self.manifest = manifest
        self.path = folder.path

    @property
    def step(self) -> int:
        """Number of updates that the state includes."""
        return self.manifest.step

    @property
    def tensors(self) -> Sequence[SavedTensor]:
        """All tensors, in file order."""
        return tuple(place.tensor for _, place in self._places.values())

    def verify(
        self,
        progress: Progress = lambda done, total: None,
        *,
        digests: bool = False,
        past_cache: bool = False,
    ) -> None:
        """Reads everything and compares the CRC32C of every chunk, which detects accidental damage.

        Args:
            progress: Receives the read and the total number of bytes.
            digests: Whether to compare SHA-256 too, for files that have it: takes longer, and detects deliberate
                changes.
            past_cache: Whether to read from disk, without using the page cache.

        Raises:
            CheckpointError: If a byte differs; names the file and the chunk.
            OSError: If the disk read fails.
        """
        done = 0
        for file in self.manifest.files:
            digest = hashlib.sha256()
            for index in range(len(file.crc32c)):
                chunk = self._chunk(file, index, past_cache=past_cache)
                if digests:
                    digest.update(chunk)
                done += len(chunk)
                progress(done, self.manifest.num_bytes)
            if digests and file.sha256 and digest.hexdigest() != file.sha256:
                raise CheckpointError(f"{self.path / file.name} is damaged: its SHA-256 does not match")

    def read(self, tensor: SavedTensor, reserve: Reserve = any_memory) -> Iterator[memoryview]:
        """The bytes of a tensor, in pieces; each is valid until the next one is requested.

        Reading tensors in their order reads each chunk once.

        Raises:
            CheckpointError: If the tensor does not exist, or a chunk of it is damaged.
            OSError: If the disk read fails.
        """
        file, place = self._places.get(tensor.name, (None, None))
        if file is None or place is None or place.tensor != tensor:
            raise CheckpointError(
                f"{self.path} has no tensor {tensor.name!r} of {tensor.dtype} {list(tensor.shape)}"
            )
        chunk_bytes = self.manifest.chunk_bytes
        position = place.offset
        while position < place.end:
            index, skipped = divmod(position, chunk_bytes)
            piece = self._chunk(file, index)[skipped : skipped + place.end - position]
            position += len(piece)
            yield piece.toreadonly()

    def load(
        self, destinations: Mapping[SavedTensor, memoryview], progress: Progress = lambda done, total: None
    ) -> None:
        """Reads tensors into memory.

        Args:
            destinations: Memory for the `tensor.nbytes` bytes of each tensor.
            progress: Receives the number of bytes read so far and the number to read.

        Raises:
            CheckpointError: If a tensor does not exist, or a chunk is damaged; some destinations may have been
                overwritten.
            OSError: If the disk read fails.
        """
        done, total = 0, sum(tensor.nbytes for tensor in destinations)
        order = {tensor: position for position, tensor in enumerate(self.tensors)}
        for tensor in sorted(destinations, key=lambda tensor: order.get(tensor, -1)):
            memory = destinations[tensor].cast("B") if tensor.nbytes else memoryview(bytearray())
            filled = 0
            for piece in self.read(tensor):
                memory[filled : filled + len(piece)] = piece
                filled += len(piece)
                progress(done + filled, total)
            done += filled

    def worker_states(self) -> list[Any]:
        """Each worker's own state, in the form of to_json(), by rank; empty without such state.

        Raises:
            CheckpointError: If a state is damaged.
        """
        by_name = {file.name: file for file in self.manifest.files}
        states = []
        for name in self.manifest.state_files:
            file = by_name[name]
            contents = b"".join(bytes(self._chunk(file, index)) for index in range(len(file.crc32c)))
            states.append(read_worker_state(contents)[1])
        return states

    def close(self) -> None:
        """Closes the folder. Idempotent."""
        self._folder.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _chunk(self, file: FileEntry, index: int, *, past_cache: bool = False) -> memoryview:
        """One checked chunk of a file; valid until another one is requested."""
        start = index * self.manifest.chunk_bytes
        chunk = self._buffer[: min(self.manifest.chunk_bytes, file.num_bytes - start)]
        if self._buffered != (file.name, index):
            self._buffered = None
            past_cache &= start % _PAGE_BYTES == 0
            with self._folder.reading(file.name, past_cache=past_cache) as descriptor:
                length = _read_into(descriptor, self._buffer, start, len(chunk))
            if length < len(chunk) or self._crc32c(chunk, 0) != file.crc32c[index]:
                raise CheckpointError(
                    f"{self.path / file.name} is damaged between its bytes {start} and {start + len(chunk)}: their "
                    "CRC32C does not match"
                )
            self._buffered = (file.name, index)
        return chunk


def open_checkpoint(parent: Folder, name: CheckpointName) -> Checkpoint:
    """Opens a checkpoint if its manifest is intact and every file has the right size and a valid header.

    Raises:
        CheckpointError: If it is incomplete, of a newer version, or leads out of its folder; gives the reason.
        OSError: If the disk read fails.
    """
    folder = parent.enter(str(name))
    try:
        if not folder.has(MANIFEST_NAME):
            raise CheckpointError(f"{folder.path} has no {MANIFEST_NAME}: its save did not finish")
        try:
            manifest = Manifest.decode(folder.read(MANIFEST_NAME, limit_bytes=LONGEST_MANIFEST_BYTES))
        except CheckpointError as error:
            raise CheckpointError(f"{folder.path}: {error}") from None
        if manifest.step != name.step:
            raise CheckpointError(f"{folder.path} was renamed: its manifest belongs to step {manifest.step}")
        for file in manifest.files:
            found = folder.size_of(file.name)
            if found != file.num_bytes:
                raise CheckpointError(
                    f"{folder.path / file.name} has {found} bytes instead of {file.num_bytes}"
                )
        places = {file.name: _places_in(folder, file) for file in manifest.tensor_files}
        checkpoint = Checkpoint(folder, manifest, places)
        if (
            sum(map(len, places.values())) != manifest.num_tensors
            or schema_hash(checkpoint.tensors) != manifest.schema_sha256
        ):
            raise CheckpointError(f"{folder.path}: its tensors do not match its manifest")
        return checkpoint
    except BaseException:
        folder.close()
        raise


def _places_in(folder: Folder, file: FileEntry) -> Sequence[TensorPlace]:
    with folder.reading(file.name) as descriptor:

        def read(offset: int, length: int) -> bytes:
            return os.pread(descriptor, length, offset)

        try:
            return read_header(read, file.num_bytes)
        except CheckpointError as error:
            raise CheckpointError(f"{folder.path / file.name}: {error}") from None


def _read_into(descriptor: int, buffer: memoryview, offset: int, length: int) -> int:
    """Reads until `length` bytes or the end of the file; returns the number of bytes read."""
    done = 0
    while done < length:
        end = length if has_cache(descriptor) else _whole_pages(length)
        try:
            count = os.preadv(descriptor, [buffer[done:end]], offset + done)
        except OSError as error:
            if has_cache(descriptor) or error.errno != errno.EINVAL:
                raise
            go_through_cache(descriptor)  # a disk with larger blocks, or one that returned less than a page
            continue
        if not count:
            break
        done += count
    return min(done, length)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _kind(tensor: SavedTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _shortened(names: Sequence[str], limit: int = 20) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
