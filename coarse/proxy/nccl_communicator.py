"""Joins a memory device to the other devices' NCCL communicator."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from coarse.kernels import _native
from coarse.kernels.nccl import find_nccl
from coarse.wire.device_job import NCCL_ID_BYTES, DeviceJob
from coarse.wire.segments import Segment

if TYPE_CHECKING:  # only imported with GPUs
    from coarse.proxy.memory.cuda import CudaMemory


def write_nccl_id(segment: Segment) -> None:
    """Writes the unique id of a new communicator into memory that all devices will map; on the home device.

    Raises:
        NcclError: If NCCL is missing, or finds no network interface for the devices.
    """
    os.pwrite(segment.fd, find_nccl().unique_id(), 0)


class NcclCommunicator:
    """Joins in its own thread: only the end of the process ends the wait for missing devices.

    Args:
        job: The device's place in the session.
        memory: The memory of its GPU.
        segment: Memory with the communicator's name.
        on_end: Called in the thread when the device has joined or failed to join.
    """

    def __init__(
        self, job: DeviceJob, memory: CudaMemory, segment: Segment, on_end: Callable[[], None]
    ) -> None:
        self._job = job
        self._memory = memory
        self._unique_id = os.pread(segment.fd, NCCL_ID_BYTES, 0)
        self._on_end = on_end
        self._runner: _native.NcclRunner | None = None
        self._error: Exception | None = None
        memory.tensor_memory()  # compiles kernels, here while no other thread does
        threading.Thread(target=self._join, name="coarse-nccl", daemon=True).start()

    def result(self) -> _native.NcclRunner | None:
        """The runner that reduces with the other devices; None while devices are missing.

        Raises:
            NcclError: If NCCL refuses or fails; CudaError if the GPU has too little memory.
        """
        if self._error is not None:
            raise self._error
        return self._runner

    def _join(self) -> None:
        job = self._job
        try:
            runner = self._memory.join_nccl(
                find_nccl(), self._unique_id, job.device, job.num_devices, job.local_clients
            )
            runner.connect()
            self._runner = runner
        except Exception as error:  # passed to the control thread
            self._error = error
        self._on_end()
