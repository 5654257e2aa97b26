"""Explains why memory devices do not answer a worker."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable, Sequence

from coarse.client.control.connection import DeviceConnection, ExplainedLossError, SilentDeviceError
from coarse.env import notes_pipe
from coarse.errors import CoarseError, MemoryDeviceLostError, WorkerLostError
from coarse.kernels import _native
from coarse.status.launcher_notes import tell_launcher
from coarse.wire.failure_messages import after_a_failure, silence

_ABORT_MESSAGE_TIMEOUT_S = 2.0
_PATIENCE = 1.5

FateOfDevice = Callable[[int], str]
KillSilent = Callable[[int], None]


def heartbeat_limit_ms(heartbeat_s: float) -> int:
    """Milliseconds without progress before workers report a device as lost themselves.

    Longer than the limit of the other memory devices, so that all workers get the same report.
    """
    return round(_PATIENCE * heartbeat_s * 1000)


class FailureDetector:
    """Notices memory devices that make no progress, and explains why a session has ended.

    Args:
        rank: This worker's rank.
        connections: One to each memory device.
        doorbells_fd: Shared memory with the devices' progress counters; the caller closes it.
        heartbeat_s: Seconds without progress before a device counts as lost.
        fate_of_device: Describes how a memory device ended.
        kill_silent: Kills a memory device that no longer works, on the worker that started it.
        has_gpu_tensors: Whether tensors of this worker lie on a GPU, where a loss may leave them in no whole step.
        replicas: Extra copies of each memory device's contents.
    """

    def __init__(
        self,
        *,
        rank: int,
        connections: Sequence[DeviceConnection],
        doorbells_fd: int,
        heartbeat_s: float,
        fate_of_device: FateOfDevice,
        kill_silent: KillSilent,
        has_gpu_tensors: Callable[[], bool],
        replicas: int = 0,
    ) -> None:
        self._rank = rank
        self._connections = connections
        self._heartbeat_s = heartbeat_s
        self._fate_of_device = fate_of_device
        self._kill_silent = kill_silent
        self._has_gpu_tensors = has_gpu_tensors
        self._replicas = replicas
        self.known: CoarseError | None = None
        """The explanation of the session's end; None before it."""
        self._heartbeats = _native.HeartbeatWatch(
            doorbells_fd=doorbells_fd,
            num_devices=len(connections),
            limit_ms=heartbeat_limit_ms(heartbeat_s),
        )

    def check_heartbeats(self) -> None:
        """Checks the devices' progress; call it a few times a second during waits outside the native client.

        Raises:
            SilentDeviceError: If a device has made no progress for too long.
        """
        silent = self._heartbeats.look()
        if silent is not None:
            raise SilentDeviceError(silent)

    def explain(self, told: CoarseError | None = None) -> CoarseError:
        """Why the session has ended, according to the memory devices' reports and which devices are gone.

        The first explanation is final.

        Args:
            told: The error known so far.
        """
        if self.known is None:
            self.known = self._explain(told)
            tell_launcher(notes_pipe(), {"over": self._rank})  # which ends the job, if the others go on
        return self.known

    def _explain(self, told: CoarseError | None) -> CoarseError:
        deadline = time.monotonic() + _ABORT_MESSAGE_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            for connection in self._connections:
                selector.register(connection, selectors.EVENT_READ, connection)
            while told is None or type(told) is MemoryDeviceLostError:
                gone = [connection for connection in self._connections if connection.is_gone]
                if gone:
                    return self._ended(gone[0])
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    break
                for key, _ in ready:
                    complaint = _complaint(key.data)
                    if isinstance(complaint, SilentDeviceError):
                        # It will end next: the worker that started it kills it.
                        return self._silent(complaint.device)
                    told = complaint or told
        if isinstance(told, SilentDeviceError):
            return self._silent(told.device)
        if isinstance(told, WorkerLostError):
            return WorkerLostError(f"worker {self._rank}: {told}{self._on_gpu()}")
        if isinstance(told, ExplainedLossError):
            return MemoryDeviceLostError(f"worker {self._rank}: {told}{self._on_gpu()}")
        return told or MemoryDeviceLostError(f"worker {self._rank}: the memory devices ended the session")

    def _ended(self, connection: DeviceConnection) -> MemoryDeviceLostError:
        self._tell_others(connection.device, is_silent=False)
        return self._loss(connection, self._fate_of_device(connection.device))

    def _silent(self, device: int) -> MemoryDeviceLostError:
        self._tell_others(device, is_silent=True)
        self._kill_silent(device)
        return self._loss(self._connections[device], silence(self._heartbeat_s))

    def _tell_others(self, device: int, *, is_silent: bool) -> None:
        """Reports the lost device, so that the other devices do not take this worker's exit for the cause."""
        for connection in self._connections:
            if connection.device != device:
                with contextlib.suppress(MemoryDeviceLostError):
                    connection.send({"type": "lost", "device": device, "is_silent": is_silent})

    def _loss(self, connection: DeviceConnection, fate: str) -> MemoryDeviceLostError:
        return MemoryDeviceLostError(
            f"worker {self._rank}: memory device md{connection.device} (pid {connection.pid}) {fate}. "
            f"{after_a_failure(self._replicas)}{self._on_gpu()}"
        )

    def _on_gpu(self) -> str:
        return " Parameters on a GPU belong to no single step." if self._has_gpu_tensors() else ""


def _complaint(connection: DeviceConnection) -> CoarseError | None:
    """The error that the memory device's next message reports; None if it reports none."""
    try:
        received = connection.receive()
    except CoarseError as error:
        return error
    if received is not None:
        received.close()
    return None
