"""Host memory of a tensor group whose pages its workers take when they need them, not when it is registered."""

from __future__ import annotations

from collections.abc import Mapping

from coarse.wire.host_memory import reserve
from coarse.wire.segments import Segment


class Reservations:
    """Segments of a group that were allocated sparsely; what this has not, has its pages already.

    Args:
        group: Name of the group.
        segments: By their names in coarse.wire.registration; stay the caller's.
    """

    def __init__(self, group: str, segments: Mapping[str, Segment]) -> None:
        self._group = group
        self._segments = {name: segment.duplicate() for name, segment in segments.items()}

    def reserve(self, name: str) -> None:
        """Takes all pages of a segment. Later calls do nothing.

        Raises:
            OutOfDeviceMemoryError: If they are not to be had; the next call tries again.
        """
        if (segment := self._segments.get(name)) is None:
            return
        reserve(self._label(name), segment, 0, segment.num_bytes)
        del self._segments[name]
        segment.close()

    def reserve_part(self, name: str, begin: int, end: int) -> None:
        """The same of the bytes from `begin` to `end`."""
        if (segment := self._segments.get(name)) is not None:
            reserve(self._label(name), segment, begin, min(end, segment.num_bytes))

    def close(self) -> None:
        """Gives descriptors up; nothing is reserved any more. Idempotent."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    def _label(self, name: str) -> str:
        return f"{self._group}: memory for {name}"
