"""Device memory emulated in host memory."""

from __future__ import annotations

from coarse.errors import OutOfDeviceMemoryError
from coarse.kernels import _native
from coarse.wire.host_memory import available_bytes, memory_name, refused, shortage_of
from coarse.wire.segments import Segment


class HostMemory:
    """Sealed memfds, which have no name in any file system."""

    kind = "host"
    name = "host memory"
    is_mappable = True
    takes_pages_later = True
    num_places = 1
    message_bytes = _native.HOST_MESSAGE_BYTES

    def allocate(self, label: str, num_bytes: int) -> Segment:
        available = self.available_bytes()
        if num_bytes > available:
            raise OutOfDeviceMemoryError(shortage_of(label, num_bytes, available))
        try:
            return Segment(_native.create_sealed_memory(memory_name(label), num_bytes), num_bytes)
        except OSError as error:
            raise refused(error, label, num_bytes, shortage_of(label, num_bytes, available)) from error

    def allocate_host(self, label: str, num_bytes: int) -> Segment:
        return self.allocate(label, num_bytes)

    def allocate_sparse(self, label: str, num_bytes: int) -> Segment:
        try:
            return Segment(_native.create_sparse_sealed_memory(memory_name(label), num_bytes), num_bytes)
        except OSError as error:
            raise refused(
                error, label, num_bytes, shortage_of(label, num_bytes, self.available_bytes())
            ) from error

    def available_bytes(self) -> int:
        return available_bytes()

    def cores(self) -> tuple[int, ...]:
        return ()

    def tensor_memory(self) -> None:
        return None

    def snapshot_pool(self, plan: _native.GroupPlan) -> None:
        return None

    def close(self) -> None:
        """Does nothing: memory is freed with its segments."""
