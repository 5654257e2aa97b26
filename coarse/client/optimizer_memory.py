"""What an optimizer in the memory devices keeps for all workers of a node, as one worker sees it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import Any

from coarse.kernels import _native
from coarse.proxy.registration import PARAMETERS, STATES


class OptimizerMemory:
    """Parameters, which are mapped as long as this or a view of them lives, and states, which are mapped on request.

    Args:
        plan: Of the group.
        fds: Descriptors by name; stay the caller's.
    """

    def __init__(self, plan: _native.GroupPlan, fds: Mapping[str, int]) -> None:
        self.settings_offset = plan.settings_offset
        self.parameters = memoryview(mmap.mmap(fds[PARAMETERS], plan.slot_bytes))
        self._state_bytes = plan.settings_offset  # of one state of all parameters
        self._states_fd = os.dup(fds[STATES]) if STATES in fds else -1

    def state(self, number: int) -> memoryview[Any]:
        """The `number`-th state of all parameters, mapped anew."""
        if self._states_fd < 0:
            raise ValueError("this optimizer keeps no state")
        length = self._state_bytes
        return memoryview(mmap.mmap(self._states_fd, length * (number + 1)))[number * length :]

    def __del__(self) -> None:
        fd, self._states_fd = getattr(self, "_states_fd", -1), -1
        if fd >= 0:
            os.close(fd)
