"""What an optimizer in the memory devices keeps for all workers of a node, as one worker sees it."""

from __future__ import annotations

from collections.abc import Mapping

from coarse.client.tensor_bytes import TensorBytes, map_tensors
from coarse.kernels import _native
from coarse.proxy.memory import Segment
from coarse.proxy.registration import PARAMETERS, SETTINGS, SNAPSHOT_CONTROL, SNAPSHOT_REQUEST, STATES


class OptimizerMemory:
    """Parameters, mapped as long as this or a view of them lives, and float32 arrays beside them, mapped on request.

    Args:
        plan: Of the group.
        shared: Segments by name; stay the caller's.
    """

    def __init__(self, plan: _native.GroupPlan, shared: Mapping[str, Segment]) -> None:
        self.settings = shared[SETTINGS].map()
        """SETTINGS_DTYPE of coarse.client.update_settings, of every tensor; this worker's own."""
        self._parameters = map_tensors(shared[PARAMETERS])
        self._parameter_offsets = plan.parameter_offsets()
        self._kept_arrays = plan.kept_arrays()
        request_fd, control_fd = shared[SNAPSHOT_REQUEST].fd, shared[SNAPSHOT_CONTROL].fd
        self.snapshots = _native.SnapshotTrigger(request_fd, control_fd)
        self._states = shared[STATES].duplicate() if STATES in shared else None

    def parameter(self, tensor: int, num_bytes: int) -> TensorBytes:
        """The parameter of a tensor."""
        start = self._parameter_offsets[tensor]
        return self._parameters[start : start + num_bytes]

    def kept_array(self, tensor: int, number: int) -> TensorBytes:
        """The `number`-th float32 array kept for a tensor, mapped anew: its states, then its master weights.

        Raises:
            ValueError: If there are not so many.
        """
        start, array_bytes, num_arrays = self._kept_arrays[tensor]
        if self._states is None or number >= num_arrays:
            raise ValueError(
                f"this optimizer keeps no state of number {number} for tensor {tensor}, only {num_arrays}"
            )
        start += number * array_bytes
        return map_tensors(self._states)[start : start + array_bytes]

    def __del__(self) -> None:
        if (states := getattr(self, "_states", None)) is not None:
            states.close()
