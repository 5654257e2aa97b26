"""Narrow interfaces of a client for its own parts, so that none of them needs the whole client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from coarse.kernels import _native
from coarse.wire.messages import Message, Received


class Waiter(Protocol):
    """Waits for native calls and raises their errors."""

    @property
    def rank(self) -> int:
        """This worker's rank."""

    @property
    def ranks(self) -> Sequence[int]:
        """Ranks of this node's workers, by client number."""

    @property
    def timeout_s(self) -> float:
        """Seconds that a wait may take before it fails."""

    def check(
        self, status: _native.WaitStatus, describe: Callable[[], str], *, timeout_s: float = 0.0
    ) -> None:
        """Raises an error unless `status` is a success."""


class HomeDevice(Protocol):
    """The home memory device of this node."""

    def tell_home(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Sends a message; the caller closes the descriptors."""

    def ask_home(self, message: Message, kind: str, about: str) -> Received:
        """Sends a message and waits for its answer."""
