"""Host memory of a tensor group whose pages workers reserve on demand, not at registration."""

from __future__ import annotations

from collections.abc import Mapping

from coarse.wire.host_memory import reserve
from coarse.wire.segments import Segment


class Reservations:
    """The sparsely allocated segments of a group; all other segments have their pages already.

    Args:
        group: Name of the group.
        segments: By their names in coarse.wire.registration; the caller closes them.
    """

    def __init__(self, group: str, segments: Mapping[str, Segment]) -> None:
        self._group = group
        self._segments = {name: segment.duplicate() for name, segment in segments.items()}

    def reserve(self, name: str) -> None:
        """Reserves all pages of a segment. Idempotent.

        Raises:
            OutOfDeviceMemoryError: If they are not available; the next call tries again.
        """
        if (segment := self._segments.get(name)) is None:
            return
        reserve(self._label(name), segment, 0, segment.num_bytes)
        del self._segments[name]
        segment.close()

    def reserve_part(self, name: str, begin: int, end: int) -> None:
        """Reserves the pages of the bytes from `begin` to `end`, like reserve()."""
        if (segment := self._segments.get(name)) is not None:
            reserve(self._label(name), segment, begin, min(end, segment.num_bytes))

    def close(self) -> None:
        """Closes descriptors; later calls reserve nothing. Idempotent."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    def _label(self, name: str) -> str:
        return f"{self._group}: memory for {name}"
