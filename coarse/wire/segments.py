"""A piece of device memory and how other processes get to see it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from coarse.errors import ProtocolError
from coarse.kernels import _native


class Extent(NamedTuple):
    """Where a segment lies whose descriptor opens more than that segment.

    `offset` and `num_bytes`, which is what has to be mapped, are multiples of what the memory is aligned to. `gpu` is
    the UUID of the GPU whose memory it is; "" where processors map it.
    """

    offset: int
    num_bytes: int
    gpu: str = ""


class Segment:
    """A piece of device memory that can be given to other processes as file descriptors: one, but for GPUs.

    Its size is fixed and its pages are there when it is made. Closing it gives up this process's descriptors; the
    memory is free again when the last process that maps it or has a descriptor of it has let go.

    Args:
        fd: Opens it; belongs to the segment from now on.
        num_bytes: Its size.
        extent: Where it lies in what `fd` opens; None where that is sealed memory, and the segment all of it.
        rest: What lies behind that, in memory of other GPUs; belongs to the segment from now on.
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
        """A segment in one piece that another process has sent.

        Args:
            fd: Came with the message; belongs to the segment from now on.
            extent: As `extent` was in the other process, read from JSON.

        Raises:
            ValueError: If there is no extent and `fd` is no sealed memory.
            ProtocolError: If the extent is none.
        """
        if extent is None:
            return cls(fd, _native.sealed_bytes(fd))
        if not isinstance(extent, list) or [type(each) for each in extent] != [int, int, str]:
            raise ProtocolError(f"{extent!r} does not say where memory lies")
        return cls(fd, extent[1], Extent(*extent))

    @classmethod
    def joined(cls, pieces: Sequence[Segment]) -> Segment:
        """Pieces that lie one behind the other; they belong to the segment from now on.

        Raises:
            ValueError: If one that is not the last takes more memory than it has bytes: what follows would not lie
                right behind it.
        """
        for piece in pieces[:-1]:
            if piece.extent is None or piece.extent.num_bytes != piece.num_bytes:
                raise ValueError(
                    f"a piece of {piece.num_bytes} bytes is no whole number of pages, and not the last"
                )
        first, *rest = pieces
        return cls(first.fd, sum(each.num_bytes for each in pieces), first.extent, rest)

    @property
    def pieces(self) -> tuple[tuple[int, Extent | None], ...]:
        """The descriptor of each piece, and where it lies in what that opens."""
        return (self.fd, self.extent), *((each.fd, each.extent) for each in self.rest)

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPU of each piece, by its UUID; () where processors map it."""
        return tuple(extent.gpu for _, extent in self.pieces if extent is not None and extent.gpu)

    @property
    def gpu(self) -> str:
        """The GPU where it begins, by its UUID; "" where processors map it."""
        return "" if self.extent is None else self.extent.gpu

    @property
    def region(self) -> _native.Region:
        """What native code maps; for as long as the segment is open."""
        if self.extent is None:
            return _native.Region(self.fd)
        rest = [each.region for each in self.rest]
        return _native.Region(self.fd, *self.extent, rest)

    def duplicate(self) -> Segment:
        """The same memory, to be closed apart from this segment."""
        rest = [each.duplicate() for each in self.rest]
        return Segment(os.dup(self.fd), self.num_bytes, self.extent, rest)

    def to_read(self) -> Segment:
        """The same memory for others to read, to be closed apart from this segment.

        Sealed memory can only be read through it. That of a device file could still be written: what keeps such a
        segment from being used again is that its own descriptor is open somewhere.
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

    def close(self) -> None:
        """Gives the descriptors up. Idempotent."""
        for each in self.rest:
            each.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def pack(segments: Iterable[Segment]) -> tuple[list[Any], list[int]]:
    """What a message says of segments that go with it, as JSON, and their descriptors; these stay the segments'."""
    extents: list[Any] = []
    fds: list[int] = []
    for segment in segments:
        extents.append([each for _, each in segment.pieces] if segment.rest else segment.extent)
        fds += [fd for fd, _ in segment.pieces]
    return extents, fds


def unpack(extents: Sequence[Any], fds: Sequence[int]) -> list[Segment]:
    """The segments of a message that another process has made by pack().

    Args:
        extents: Of the message.
        fds: Came with it; belong to the segments from now on, and are closed if there are none.

    Raises:
        ValueError, ProtocolError: As Segment.received(); or if there are more descriptors than pieces, or fewer.
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
