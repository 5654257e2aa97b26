"""How a memory device joins the others' communicator of NCCL."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from coarse.kernels import _native
from coarse.kernels.nccl import find_nccl
from coarse.wire.device_job import NCCL_ID_BYTES, DeviceJob
from coarse.wire.segments import Segment

if TYPE_CHECKING:  # it is imported where there are GPUs
    from coarse.proxy.memory.cuda import CudaMemory


def write_nccl_id(segment: Segment) -> None:
    """Names a new communicator, in memory that all devices are going to see; on the home device.

    Raises:
        NcclError: If there is no NCCL, or it finds no network interface for the devices to meet over.
    """
    os.pwrite(segment.fd, find_nccl().unique_id(), 0)


class NcclJoin:
    """Joins, in a thread of its own: only the end of the process ends the wait for devices that do not come.

    Args:
        job: The device's place in the session.
        memory: Its GPU.
        segment: Where the communicator's name is.
        on_end: Called in the thread when the device has joined, or could not.
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
        memory.tensor_memory()  # compiles kernels, here where nobody else does
        threading.Thread(target=self._join, name="coarse-nccl", daemon=True).start()

    def result(self) -> _native.NcclRunner | None:
        """What reduces with the other devices; None while some are missing.

        Raises:
            NcclError: If NCCL refuses or fails; CudaError if the GPU has no room for it.
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
        except Exception as error:  # it is for the control thread
            self._error = error
        self._on_end()
