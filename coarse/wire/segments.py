"""Pieces of device memory, and how other processes map them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from coarse.errors import ProtocolError
from coarse.kernels import _native


class Extent(NamedTuple):
    """The place of a segment whose descriptor opens more memory than that segment.

    `offset` and `num_bytes`, the size to map, are multiples of the memory's alignment. `gpu` is the UUID of the GPU
    that owns the memory; "" if processors map it.
    """

    offset: int
    num_bytes: int
    gpu: str = ""


class Segment:
    """A piece of device memory, passed to other processes as file descriptors: one, or several for GPU memory.

    Its size is fixed and its pages exist from its creation. close() closes this process's descriptors; the memory is
    freed when no process maps it or has a descriptor of it.

    Args:
        fd: Opens the memory; the segment takes ownership.
        num_bytes: Size of the segment.
        extent: Its place in the memory that `fd` opens; None if that is sealed memory and the segment covers it all.
        rest: The following pieces, in memory of other GPUs; the segment takes ownership.
    """

    def __init__(
        self, fd: int, num_bytes: int, extent: Extent | None = None, rest: Sequence[Segment] = ()
    ) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        self.extent = extent
        self.rest = tuple(rest)

    @classmethod
    def received(cls, fd: int, extent: Any = None) -> Segment:
        """A segment of one piece that another process has sent.

        Args:
            fd: Descriptor from the message; the segment takes ownership.
            extent: The `extent` of the other process, read from JSON.

        Raises:
            ValueError: If `extent` is None and `fd` is not sealed memory.
            ProtocolError: If the extent is invalid.
        """
        if extent is None:
            return cls(fd, _native.sealed_bytes(fd))
        if not isinstance(extent, list) or [type(each) for each in extent] != [int, int, str]:
            raise ProtocolError(f"{extent!r} does not say where memory lies")
        return cls(fd, extent[1], Extent(*extent))

    @classmethod
    def joined(cls, pieces: Sequence[Segment]) -> Segment:
        """A segment of consecutive pieces; it takes ownership of them.

        Raises:
            ValueError: If a piece other than the last occupies more memory than its bytes: the next piece would not
                follow directly.
        """
        for piece in pieces[:-1]:
            if piece.extent is None or piece.extent.num_bytes != piece.num_bytes:
                raise ValueError(
                    f"a piece of {piece.num_bytes} bytes is not a whole number of pages, and it is not the last piece"
                )
        first, *rest = pieces
        return cls(first.fd, sum(each.num_bytes for each in pieces), first.extent, rest)

    @property
    def pieces(self) -> tuple[tuple[int, Extent | None], ...]:
        """The descriptor of each piece, and the piece's place in the memory that it opens."""
        return (self.fd, self.extent), *((each.fd, each.extent) for each in self.rest)

    @property
    def gpus(self) -> tuple[str, ...]:
        """The UUID of each piece's GPU; () if processors map the segment."""
        return tuple(extent.gpu for _, extent in self.pieces if extent is not None and extent.gpu)

    @property
    def gpu(self) -> str:
        """The UUID of the GPU where the segment begins; "" if processors map it."""
        return "" if self.extent is None else self.extent.gpu

    @property
    def region(self) -> _native.Region:
        """The region for native code to map; valid as long as the segment is open."""
        if self.extent is None:
            return _native.Region(self.fd)
        rest = [each.region for each in self.rest]
        return _native.Region(self.fd, *self.extent, rest)

    def duplicate(self) -> Segment:
        """The same memory in a new segment, which must be closed separately."""
        rest = [each.duplicate() for each in self.rest]
        return Segment(os.dup(self.fd), self.num_bytes, self.extent, rest)

    def to_read(self) -> Segment:
        """The same memory for others to read, in a new segment, which must be closed separately.

        It makes sealed memory read-only. The memory of a device file stays writable; its segment is not reused as
        long as the segment's own descriptor is open anywhere.
        """
        if self.extent is not None:
            return self.duplicate()
        return Segment(_native.reopen_read_only(self.fd), self.num_bytes)

    def map(self, *, read_only: bool = False) -> memoryview[Any]:
        """The segment's bytes, mapped as long as a view of them lives.

        Raises:
            OSError: If it cannot be mapped.
        """
        mapping = _native.Mapping(self.region, self.num_bytes, read_only=read_only)
        return memoryview(mapping)  # type: ignore[arg-type,unused-ignore]

    def write(self, pieces: Iterable[memoryview[Any]]) -> None:
        """Writes bytes from the segment's beginning on, one piece after the other; no GPU owns the memory.

        Raises:
            OSError: If it cannot be written.
        """
        if self.extent is None:
            self._write_file(pieces)
            return
        end = 0
        with self.map() as target:
            for piece in pieces:
                begin, end = end, end + piece.nbytes
                target[begin:end] = piece

    def _write_file(self, pieces: Iterable[memoryview[Any]]) -> None:
        """As write(), in half of the time: the pages need not be mapped."""
        offset = 0
        for piece in pieces:
            while piece:
                written = os.pwrite(self.fd, piece, offset)
                piece, offset = piece[written:], offset + written

    def close(self) -> None:
        """Closes the descriptors. Idempotent."""
        for each in self.rest:
            each.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def pack(segments: Iterable[Segment]) -> tuple[list[Any], list[int]]:
    """A message's JSON description of its segments, and their descriptors, which the segments keep."""
    extents: list[Any] = []
    fds: list[int] = []
    for segment in segments:
        extents.append([each for _, each in segment.pieces] if segment.rest else segment.extent)
        fds += [fd for fd, _ in segment.pieces]
    return extents, fds


def unpack(extents: Sequence[Any], fds: Sequence[int]) -> list[Segment]:
    """The segments of a message that another process has built with pack().

    Args:
        extents: The message's description of the segments.
        fds: Descriptors of the message. The segments take ownership; on an error they are closed.

    Raises:
        ValueError, ProtocolError: As for Segment.received(), or if the numbers of descriptors and pieces differ.
    """
    try:
        pieces = [_pieces_of(extent) for extent in extents]
        if (needed := sum(map(len, pieces))) != len(fds):
            raise ProtocolError(f"memory in {needed} pieces came with {len(fds)} descriptors")
        given = iter(fds)
        return [Segment.joined([Segment.received(next(given), each) for each in one]) for one in pieces]
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _pieces_of(extent: Any) -> list[Any]:
    is_joined = isinstance(extent, list) and bool(extent) and isinstance(extent[0], list)
    return list(extent) if is_joined else [extent]
