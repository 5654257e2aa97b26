"""How the parts of a memory device's control path answer without knowing connections."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from coarse.proxy.event_loop import EventLoop
from coarse.wire.messages import Channel, Message

SendToWorker = Callable[[int, Message, Sequence[int]], None]
"""Sends a message and descriptors to a client; does nothing if it is gone."""

SendToPeers = Callable[[Message, Sequence[int]], None]
"""Sends a message and descriptors to every other memory device."""


def send(loop: EventLoop, channel: Channel, message: Message, fds: Sequence[int] = ()) -> None:
    """Sends a message; what a socket that `loop` watches does not take yet goes out when it does.

    Does nothing if the other end is gone, which is for whoever reads from it to notice.
    """
    with contextlib.suppress(OSError):
        channel.send(message, fds)
    if not _flush(channel):
        loop.flush_later(channel.fileno(), lambda: _flush(channel))


def _flush(channel: Channel) -> bool:
    """Whether nothing is left that could be sent; of one whose other end is gone nothing can."""
    try:
        return channel.flush()
    except OSError:
        return True
