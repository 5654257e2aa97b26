"""Maps a worker's slots, wherever they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coarse.client.memory.tensor_bytes import (
    TensorBytes,
    gpu_bytes,
    host_view,
    import_memory,
    reach,
    try_to_reach,
)
from coarse.kernels import _native
from coarse.wire.registration import CONTROL, SLOTS
from coarse.wire.segments import Segment


@dataclass(frozen=True, slots=True)
class DistantSlots:
    """A worker's slots on another GPU than its tensors.

    Args:
        memory: All slots.
        gpu: UUID of the GPU for which they are mapped.
        is_reached: Whether that GPU is the worker's own.
    """

    memory: _native.CudaMemory
    gpu: str
    is_reached: bool


class SlotOpener:
    """Opens the slots of one group and adds them to this worker's data path.

    Args:
        native: The data path.
        plan: The group's plan.
        client: This worker's client number.
        shared: The group's segments that memory devices have sent; the caller closes them.
        routes: The memory device of each shard.
    """

    def __init__(
        self,
        native: _native.Client,
        plan: _native.GroupPlan,
        client: int,
        shared: Mapping[str, Segment],
        routes: Sequence[int],
    ) -> None:
        self._native = native
        self._plan = plan
        self._client = client
        self._control_fd = shared[CONTROL].fd
        self._slots = shared[SLOTS]
        self._routes = routes

    def open(self, gpu: str, *, is_for_gpu: bool) -> tuple[TensorBytes, DistantSlots | None]:
        """This worker's slots as it sees them, and those that a GPU copies to if they lie on another GPU.

        Args:
            gpu: UUID of the GPU that holds this worker's tensors; "" for no GPU.
            is_for_gpu: Whether the slots are for that GPU alone, if it reaches them.

        Raises:
            GpuUnavailableError, _native.CudaError: As for import_memory().
        """
        if not self._slots.gpus:
            arguments = (self._plan, self._client, self._control_fd, self._slots.region, self._routes)
            return memoryview(self._native.add_group(*arguments)), None  # type: ignore[arg-type,unused-ignore]
        if set(self._slots.gpus) == {gpu}:
            self._add(None, None)
            return gpu_bytes(self._slots), None
        if is_for_gpu:
            self._add(None, None)
            reached = try_to_reach(self._slots, gpu, is_own=True) if gpu else None
            return memoryview(b""), None if reached is None else DistantSlots(reached, gpu, is_reached=True)
        slots = self._map_for(gpu)
        view = host_view(self._plan.client_bytes)
        self._add(view, _native.CudaSlotCopies(slots.memory, view))
        return memoryview(view), slots  # type: ignore[arg-type,unused-ignore]

    def _map_for(self, gpu: str) -> DistantSlots:
        reached = reach(self._slots, gpu, is_own=True) if gpu else None
        if reached is not None:
            return DistantSlots(reached, gpu, is_reached=True)
        return DistantSlots(import_memory(self._slots), self._slots.gpu, is_reached=False)

    def _add(self, view: _native.Mapping | None, copies: _native.SlotCopies | None) -> None:
        self._native.add_group_elsewhere(
            self._plan, self._client, self._control_fd, view, copies, self._routes
        )
