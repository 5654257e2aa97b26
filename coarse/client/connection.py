"""A worker's control connection to one memory device."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Sequence

from coarse import errors
from coarse.errors import CoarseError, MemoryDeviceLostError, ProtocolError, SyncTimeoutError
from coarse.proxy.protocol import Channel, Message, Received

_RAISABLE = {
    name: getattr(errors, name)
    for name in ("WorkerLostError", "MemoryDeviceLostError", "SchemaMismatchError", "OutOfDeviceMemoryError")
}


class DeviceConnection:
    """One memory device, seen from one worker.

    Args:
        device: Its number.
        path: Where it listens.

    Raises:
        MemoryDeviceLostError: If nobody listens there.
    """

    def __init__(self, device: int, path: str) -> None:
        self.device = device
        self.pid = 0
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(path)
        except OSError as error:
            connection.close()
            raise MemoryDeviceLostError(f"memory device md{device} cannot be reached: {error}") from error
        self._channel = Channel(connection)

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._channel.fileno()

    def send(self, message: Message) -> None:
        """Sends a control message.

        Raises:
            MemoryDeviceLostError: If the device is gone.
        """
        try:
            self._channel.send(message)
        except OSError as error:
            raise MemoryDeviceLostError(f"memory device md{self.device} is gone: {error}") from error

    def receive(self) -> Received | None:
        """Reads one frame; a whole message if it completes one.

        Raises:
            MemoryDeviceLostError: If the device is gone.
            CoarseError: What the device says has gone wrong, as its own type.
        """
        try:
            received = self._channel.receive()
        except (EOFError, OSError) as error:
            raise MemoryDeviceLostError(f"memory device md{self.device} (pid {self.pid}) died") from error
        if received is not None and received.kind in ("aborted", "refused"):
            raise _error_of(received.message)
        return received

    def close(self) -> None:
        """Closes the connection. Idempotent."""
        self._channel.close()


def _error_of(message: Message) -> CoarseError:
    kind = _RAISABLE.get(str(message.get("error")), CoarseError)
    error = kind(str(message.get("text")))
    assert isinstance(error, CoarseError)
    return error


def collect_replies(
    connections: Sequence[DeviceConnection], *, kind: str, group: int | None, timeout_s: float, what: str
) -> dict[int, Received]:
    """Waits until every memory device has sent a message of `kind` (about `group`).

    Returns:
        The messages by device.

    Raises:
        SyncTimeoutError: If one has not answered within `timeout_s`; the message names `what` and the devices.
        CoarseError: What a device says has gone wrong.
    """
    deadline = time.monotonic() + timeout_s
    replies: dict[int, Received] = {}
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ, connection)
        while len(replies) < len(connections):
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() >= deadline:
                silent = [f"md{c.device}" for c in connections if c.device not in replies]
                raise SyncTimeoutError(
                    f"{what}: no answer from {', '.join(silent)} within {timeout_s:.1f} s. A worker that has not "
                    "reached this point holds up all others."
                )
            for key, _ in ready:
                answering: DeviceConnection = key.data
                received = answering.receive()
                if received is None:
                    continue
                if received.kind != kind or (group is not None and received.message.get("group") != group):
                    raise ProtocolError(f"md{answering.device} sent {received.kind!r} instead of {kind!r}")
                replies[answering.device] = received
    return replies
