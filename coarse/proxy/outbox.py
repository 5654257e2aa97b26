"""How the parts of a memory device's control path answer without knowing connections."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coarse.proxy.protocol import Message

SendToWorker = Callable[[int, Message, Sequence[int]], None]
"""Sends a message and descriptors to a client; does nothing if it is gone."""

SendToPeers = Callable[[Message, Sequence[int]], None]
"""Sends a message and descriptors to every other memory device."""
