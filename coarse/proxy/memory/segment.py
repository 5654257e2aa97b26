"""A piece of device memory and how other processes get to see it."""

from __future__ import annotations

import os
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
    """A piece of device memory that can be given to other processes as a file descriptor.

    Its size is fixed and its pages are there when it is made. Closing it gives up this process's descriptor; the
    memory is free again when the last process that maps it or has a descriptor of it has let go.

    Args:
        fd: Opens it; belongs to the segment from now on.
        num_bytes: Its size.
        extent: Where it lies in what `fd` opens; None where that is sealed memory, and the segment all of it.
    """

    def __init__(self, fd: int, num_bytes: int, extent: Extent | None = None) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        self.extent = extent

    @classmethod
    def received(cls, fd: int, extent: Any = None) -> Segment:
        """A segment that another process has sent.

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

    @property
    def gpu(self) -> str:
        """The GPU whose memory it is, by its UUID; "" where processors map it."""
        return "" if self.extent is None else self.extent.gpu

    @property
    def region(self) -> _native.Region:
        """What native code maps; for as long as the segment is open."""
        if self.extent is None:
            return _native.Region(self.fd)
        return _native.Region(self.fd, self.extent.offset, self.extent.num_bytes)

    def duplicate(self) -> Segment:
        """The same memory, to be closed apart from this segment."""
        return Segment(os.dup(self.fd), self.num_bytes, self.extent)

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
        """Gives the descriptor up. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
