"""Lets parts of a memory device's control path send replies without access to connections."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from coarse.proxy.event_loop import EventLoop
from coarse.wire.messages import ControlChannel, Message

SendToWorker = Callable[[int, Message, Sequence[int]], None]
"""Sends a message and descriptors to a client; does nothing if it is gone."""

SendToPeers = Callable[[Message, Sequence[int]], None]
"""Sends a message and descriptors to every other memory device."""


def send(loop: EventLoop, channel: ControlChannel, message: Message, fds: Sequence[int] = ()) -> None:
    """Sends a message; `loop`, which watches the socket, sends the rest when the socket accepts more.

    Does nothing if the other end is gone; the reader of the connection notices that.
    """
    with contextlib.suppress(OSError):
        channel.send(message, fds)
    if not _flush(channel):
        loop.flush_later(channel.fileno(), lambda: _flush(channel))


def _flush(channel: ControlChannel) -> bool:
    """Whether no output is left; True also if the other end is gone."""
    try:
        return channel.flush()
    except OSError:
        return True
