"""The narrow sides of a client that its own pieces use, so that none of them needs the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from coarse.kernels import _native
from coarse.wire.messages import Message, Received


class Waiter(Protocol):
    """Waits for native calls, and turns their ends into errors."""

    @property
    def rank(self) -> int:
        """Of this worker."""

    @property
    def ranks(self) -> Sequence[int]:
        """Of the workers of this node, by client number."""

    @property
    def timeout_s(self) -> float:
        """Longest wait before it is an error."""

    def check(
        self, status: _native.WaitStatus, describe: Callable[[], str], *, timeout_s: float = 0.0
    ) -> None:
        """Raises an error unless `status` is a good end."""


class HomeDevice(Protocol):
    """The home memory device of this node."""

    def tell_home(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Sends a message; descriptors stay the caller's."""

    def ask_home(self, message: Message, kind: str, about: str) -> Received:
        """Sends a message and waits for its answer."""
