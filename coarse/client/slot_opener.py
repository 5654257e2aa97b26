"""How a worker gets to see its slots, wherever these lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coarse.client.tensor_bytes import (
    TensorBytes,
    gpu_bytes,
    host_view,
    import_memory,
    reach,
    try_to_reach,
)
from coarse.kernels import _native
from coarse.proxy.memory import Segment
from coarse.proxy.registration import CONTROL, SLOTS


class SlotOpener:
    """Opens the slots of one group, which the data path of this worker knows from then on.

    Args:
        native: The data path.
        plan: Of the group.
        client: This worker's number.
        shared: What memory devices have sent of the group; stays the caller's.
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

    def open(self, gpu: str, *, is_for_gpu: bool) -> tuple[TensorBytes, _native.CudaMemory | None]:
        """This worker's slots where it sees them; and as its GPU reaches them, if they lie on another one.

        Args:
            gpu: Where this worker has its tensors, by UUID; "" for no GPU.
            is_for_gpu: They are for that GPU alone, if it reaches them.

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
            return memoryview(b""), try_to_reach(self._slots, gpu) if gpu else None
        reached = reach(self._slots, gpu) if gpu else None
        view = host_view(self._plan.client_bytes)
        self._add(view, _native.CudaSlotCopies(reached or import_memory(self._slots), view))
        return memoryview(view), reached  # type: ignore[arg-type,unused-ignore]

    def _add(self, view: _native.Mapping | None, copies: _native.SlotCopies | None) -> None:
        self._native.add_group_elsewhere(
            self._plan, self._client, self._control_fd, view, copies, self._routes
        )
