"""The other memory devices of a node, as one of them sees them."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Sequence

from coarse.errors import ProtocolError
from coarse.proxy.event_loop import EventLoop
from coarse.proxy.job import DeviceJob
from coarse.proxy.protocol import Channel, Message, Received

STOPPED = "stopped"
"""The last message of a memory device in an attempt: its sync cores have ended."""


class Peers:
    """Connections to the other memory devices. Used from the control thread alone.

    Args:
        job: This device's place in the session; the sockets now belong to the peers.
        loop: Watches them.
        on_message: Takes a device's number and what it says; owns the descriptors that came with it.
        on_lost: Takes the number of a device that has ended.
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
        self._channels: dict[int, Channel] = {}
        self._stopped: set[int] = set()
        for device, fd in enumerate(job.peer_fds):
            if device == job.device:
                continue
            channel = Channel(socket.socket(fileno=fd))
            channel.socket.setblocking(False)
            self._channels[device] = channel
            loop.watch(fd, lambda device=device: self._read(device))  # type: ignore[misc]

    def tell(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Sends to every other device; one that is gone is noticed by its socket."""
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                channel.send(message, fds)

    def await_stop(self, deadline_s: float) -> bool:
        """Waits until every other device has said STOPPED; what it says after that is not read.

        Returns:
            Whether all have; not if one has ended, or has not said it by `deadline_s` of the monotonic clock.
        """
        return all(
            device in self._stopped or self.await_message(device, STOPPED, deadline_s)
            for device in self._channels
        )

    def await_message(self, device: int, kind: str, deadline_s: float) -> bool:
        """As await_stop(), of one device and any message. What it says before is of no interest any more."""
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
        return False

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
        else:
            self._on_message(device, received)
