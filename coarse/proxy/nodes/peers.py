"""One memory device's connections to the other devices of its node."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence

from coarse.errors import ProtocolError
from coarse.proxy import outbox
from coarse.proxy.event_loop import EventLoop
from coarse.wire.device_job import DeviceJob
from coarse.wire.messages import ControlChannel, Message, Received

STOPPED = "stopped"
"""The last message of a memory device in an attempt: its sync cores have ended."""
ENDED = "ended"
"""The last message of a memory device whose workers have all left: its end does not count as a loss."""


class Peers:
    """Connections to the other memory devices. Used from the control thread alone.

    Args:
        job: This device's place in the session; this object takes ownership of the sockets.
        loop: Watches the sockets.
        on_message: Receives a device's number and message; owns the message's descriptors.
        on_lost: Receives the number of a device that has ended unannounced.
    """

    def __init__(
        self,
        job: DeviceJob,
        loop: EventLoop,
        *,
        on_message: Callable[[int, Received], None],
        on_lost: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._on_message = on_message
        self._on_lost = on_lost
        self._channels: dict[int, ControlChannel] = {}
        self._stopped: set[int] = set()
        self._missing = {device for device, fd in enumerate(job.peer_fds) if fd < 0} - {job.device}
        for device, fd in enumerate(job.peer_fds):
            if fd >= 0:
                self._open(device, fd)

    @property
    def is_complete(self) -> bool:
        """Whether all other devices have connected; False while a replacement of a lost device is missing."""
        return not self._missing

    def replace(self, device: int, fd: int) -> None:
        """Adds the replacement of a lost device.

        Args:
            device: Number of the device.
            fd: A connected SEQPACKET socket to it; this object takes ownership.
        """
        if (lost := self._channels.pop(device, None)) is not None:
            self._loop.unwatch(lost.fileno())
            lost.close()
        self._missing.discard(device)
        self._open(device, fd)

    def _open(self, device: int, fd: int) -> None:
        channel = ControlChannel(socket.socket(fileno=fd))
        channel.socket.setblocking(False)
        self._channels[device] = channel
        self._loop.watch(fd, lambda: self._read(device))

    def tell(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Sends to every other device; the socket of a lost device reports its end."""
        for device in self._channels:
            self.tell_one(device, message, fds)

    def tell_one(self, device: int, message: Message, fds: Sequence[int] = ()) -> None:
        """Sends to one device; the rest follows when its socket accepts more."""
        outbox.send(self._loop, self._channels[device], message, fds)

    def await_stop(self, deadline_s: float) -> set[int]:
        """Waits until every other device has sent STOPPED; does not read later messages.

        Returns:
            Devices that have ended without sending it.

        Raises:
            TimeoutError: If a device has not sent it before `deadline_s` of the monotonic clock.
        """
        ended = {
            device
            for device in self._channels
            if device not in self._stopped and not self.await_message(device, STOPPED, deadline_s)
        }
        return ended | self._missing

    def await_message(self, device: int, kind: str, deadline_s: float) -> bool:
        """Waits for a message of `kind` from one device; ignores earlier messages.

        Returns:
            Whether the message came; False if the device has ended.

        Raises:
            TimeoutError: If it has not come before `deadline_s` of the monotonic clock.
        """
        channel = self._channels[device]
        self._loop.unwatch(channel.fileno())
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLIN)
        while poll.poll(max(0.0, 1e3 * (deadline_s - time.monotonic()))):
            try:
                received = channel.receive()
            except (EOFError, OSError, ProtocolError):
                return False
            if received is not None:
                received.close()
                if received.kind == kind:
                    return True
        raise TimeoutError(f"memory device md{device} has not said {kind!r} in time")

    def close(self) -> None:
        """Closes all connections."""
        for channel in self._channels.values():
            channel.close()

    def _read(self, device: int) -> None:
        channel = self._channels[device]
        try:
            received = channel.receive()
        except BlockingIOError:
            return
        except (EOFError, OSError, ProtocolError):
            self._loop.unwatch(channel.fileno())
            self._on_lost(device)
            return
        if received is None:
            return
        if received.kind == STOPPED:
            self._loop.unwatch(channel.fileno())
            self._stopped.add(device)
        elif received.kind == ENDED:
            self._loop.unwatch(channel.fileno())
        else:
            self._on_message(device, received)
