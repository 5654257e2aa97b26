"""What an optimizer in the memory devices keeps for all workers of a node, as one worker sees it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import Any

from coarse.kernels import _native
from coarse.proxy.registration import PARAMETERS, SNAPSHOT_CONTROL, SNAPSHOT_REQUEST, STATES


class OptimizerMemory:
    """Parameters, mapped as long as this or a view of them lives, and float32 arrays beside them, mapped on request.

    Args:
        plan: Of the group.
        fds: Descriptors by name; stay the caller's.
    """

    def __init__(self, plan: _native.GroupPlan, fds: Mapping[str, int]) -> None:
        self.settings_offset = plan.settings_offset
        self._parameters = memoryview(mmap.mmap(fds[PARAMETERS], plan.parameter_bytes))
        self._parameter_offsets = plan.parameter_offsets()
        self._kept_bytes = plan.kept_bytes
        self._kept_arrays = plan.kept_arrays()
        self.snapshots = _native.SnapshotTrigger(fds[SNAPSHOT_REQUEST], fds[SNAPSHOT_CONTROL])
        self._states_fd = os.dup(fds[STATES]) if STATES in fds else -1

    def parameter(self, tensor: int, num_bytes: int) -> memoryview[Any]:
        """The parameter of a tensor."""
        start = self._parameter_offsets[tensor]
        return self._parameters[start : start + num_bytes]

    def kept_array(self, tensor: int, number: int) -> memoryview[Any]:
        """The `number`-th float32 array kept for a tensor, mapped anew: its states, then its master weights.

        Raises:
            ValueError: If there are not so many.
        """
        start, array_bytes, num_arrays = self._kept_arrays[tensor]
        if number >= num_arrays:
            raise ValueError(
                f"this optimizer keeps no state of number {number} for tensor {tensor}, only {num_arrays}"
            )
        start += number * array_bytes
        return memoryview(mmap.mmap(self._states_fd, self._kept_bytes))[start : start + array_bytes]

    def __del__(self) -> None:
        fd, self._states_fd = getattr(self, "_states_fd", -1), -1
        if fd >= 0:
            os.close(fd)
