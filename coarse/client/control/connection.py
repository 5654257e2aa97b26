"""A worker's control connection to one memory device."""

from __future__ import annotations

import contextlib
import select
import selectors
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from coarse.errors import (
    CoarseError,
    MemoryDeviceLostError,
    ProtocolError,
    RendezvousError,
    SyncTimeoutError,
    told_error,
)
from coarse.security import local_sockets
from coarse.wire.messages import ControlChannel, Message, Received

_SILENCE_S = 0.25


class DeviceConnection:
    """A worker's connection to one memory device.

    Args:
        device: Number of the device.
        path: Socket path on which the device listens.

    Raises:
        MemoryDeviceLostError: If no process listens there.
        RendezvousError: If another user listens there, or could.
    """

    def __init__(self, device: int, path: str) -> None:
        self.device = device
        self.pid = 0
        self.is_gone = False
        self._sending = (
            threading.Lock()
        )  # a message may take several frames, and another thread requests snapshots
        try:
            connection = local_sockets.connect(path)
        except OSError as error:
            raise MemoryDeviceLostError(f"memory device md{device} cannot be reached: {error}") from error
        self._channel = ControlChannel(connection)

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._channel.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Sends a control message and duplicates of descriptors. Callable from any thread.

        Raises:
            MemoryDeviceLostError: If the device is gone.
        """
        try:
            with self._sending:
                self._channel.send(message, fds)
        except OSError as error:
            raise MemoryDeviceLostError(f"memory device md{self.device} is gone: {error}") from error

    def receive(self) -> Received | None:
        """Reads one frame; returns the message if the frame completes one.

        Raises:
            MemoryDeviceLostError: If the device is gone.
            CoarseError: If the device reports that the session has ended; gives the reason.
        """
        try:
            received = self._hear()
        except (EOFError, OSError) as error:
            self.is_gone = True
            raise MemoryDeviceLostError(f"memory device md{self.device} (pid {self.pid}) died") from error
        if received is not None and received.kind == "aborted":
            raise _error_of(received.message)
        return received

    def _hear(self) -> Received | None:
        try:
            return self._channel.receive()
        except ConnectionResetError:  # it ended with unread input; its earlier messages are still readable
            return self._channel.receive()

    def await_end(self, timeout_s: float) -> None:
        """Waits until the device has closed the connection.

        Raises:
            RendezvousError: If it has not after `timeout_s` seconds.
        """
        self._channel.socket.settimeout(timeout_s)
        try:
            self._channel.receive()
        except TimeoutError:
            raise RendezvousError(
                f"memory device md{self.device} of an earlier run of this job still serves workers. End that "
                "run, or give this job another name (torchrun --rdzv-id) or port"
            ) from None
        except (EOFError, OSError):
            return

    def close(self) -> None:
        """Closes the connection. Idempotent."""
        self._channel.close()


class ExplainedLossError(MemoryDeviceLostError):
    """A memory device is lost, and a report by it or by another device of its node already gives the full reason."""


class DeviceUnreadyError(MemoryDeviceLostError):
    """A memory device cannot serve workers.

    Args:
        reason: The error that the device reports.
    """

    def __init__(self, reason: CoarseError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class SilentDeviceError(MemoryDeviceLostError):
    """A memory device of this node exists but does not work.

    Args:
        device: Number of the device.
    """

    def __init__(self, device: int) -> None:
        super().__init__(f"memory device md{device} gives no sign of life")
        self.device = device


def _error_of(message: Message) -> CoarseError:
    silent = message.get("silent_device", -1)
    if isinstance(silent, int) and silent >= 0:
        return SilentDeviceError(silent)
    error = told_error(message.get("error"), message.get("text"))
    if message.get("is_unready") is True:
        return DeviceUnreadyError(error)
    is_final = isinstance(error, MemoryDeviceLostError) and message.get("is_final") is True
    return ExplainedLossError(str(error)) if is_final else error


def check_peers(connections: Sequence[DeviceConnection]) -> None:
    """Reads unrequested messages of memory devices.

    Raises:
        CoarseError: If a device reports an error, or is gone.
    """
    poll = select.poll()
    by_fd = {connection.fileno(): connection for connection in connections}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    for fd, _ in poll.poll(0):
        received = by_fd[fd].receive()
        if received is not None:
            received.close()


def send_to_all(connections: Iterable[DeviceConnection], message: Message) -> None:
    """Sends a message to each memory device that still exists."""
    for connection in connections:
        # The wait for a lost device's work reports the loss.
        with contextlib.suppress(MemoryDeviceLostError):
            connection.send(message)


def collect_replies(
    connections: Sequence[DeviceConnection],
    *,
    kind: str,
    group: int | None,
    timeout_s: float,
    what: str,
    on_silence: Callable[[], None] = lambda: None,
    notes: Mapping[str, Callable[[Message], None]] = MappingProxyType({}),
) -> dict[int, Received]:
    """Waits until every memory device has sent a message of `kind` (about `group`).

    Ignores replies about other groups: they are late replies to abandoned requests.

    Args:
        connections: One to each device.
        kind, group: Type and group of the expected messages.
        timeout_s: Longest wait in seconds.
        what: Description of the operation, for the error message.
        on_silence: Called when no message has come for a while; may raise.
        notes: Handlers, by message type, for other messages about the group, which are not replies.

    Returns:
        The messages by device.

    Raises:
        SyncTimeoutError: If one has not answered within `timeout_s`; the message names `what` and the devices.
        CoarseError: If a device reports an error.
    """
    replies: dict[int, Received] = {}
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as if_it_fails, selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ, connection)
        while len(replies) < len(connections):
            ready = selector.select(min(_SILENCE_S, max(0.0, deadline - time.monotonic())))
            if not ready:
                on_silence()
            if not ready and time.monotonic() >= deadline:
                silent = [f"md{c.device}" for c in connections if c.device not in replies]
                raise SyncTimeoutError(
                    f"{what}: no answer from {', '.join(silent)} within {timeout_s:.1f} s. All workers must "
                    "make this call; one that has not made it blocks all others."
                )
            for key, _ in ready:
                answering: DeviceConnection = key.data
                received = answering.receive()
                if received is None:
                    continue
                if received.message.get("group") != group:
                    received.close()
                    continue
                if received.kind in notes:
                    notes[received.kind](received.message)
                    received.close()
                    continue
                if received.kind == "refused":
                    raise _error_of(received.message)
                if received.kind != kind:
                    received.close()
                    raise ProtocolError(f"md{answering.device} sent {received.kind!r} instead of {kind!r}")
                if_it_fails.callback(received.close)  # open descriptors keep memory allocated
                replies[answering.device] = received
        if_it_fails.pop_all()
    return replies
