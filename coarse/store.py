"""Rendezvous store: the small key-value service through which the workers of a job find each other.

Only addresses and counters pass through it, never tensors. Frameworks bring their own (torch's TCPStore);
DirectoryStore serves processes that were started by one parent on one node.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
import time
from pathlib import Path
from typing import Protocol

_POLL_INTERVAL_S = 0.005
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")


class Store(Protocol):
    """The rendezvous store's operations for COARSE. Safe to use from several processes at once."""

    def set(self, key: str, value: bytes) -> None:
        """Publishes `value` under `key`, replacing any earlier value."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """Returns the value of `key`, waiting until somebody sets it.

        Raises:
            TimeoutError: If nobody set it within `timeout_s` seconds.
        """

    def add(self, key: str, amount: int) -> int:
        """Adds to the counter `key` (0 before its first use) and returns its new value, atomically."""


class DirectoryStore:
    """A Store in a directory of one node: a file per key.

    Args:
        path: An existing directory that only this user can enter.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def set(self, key: str, value: bytes) -> None:
        path = self._file(key, "value")
        temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        temporary.write_bytes(value)
        temporary.replace(path)

    def get(self, key: str, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._file(key, "value").read_bytes()
            except FileNotFoundError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"no process set {key!r} within {timeout_s:.1f} s") from None
                time.sleep(_POLL_INTERVAL_S)

    def add(self, key: str, amount: int) -> int:
        with self._file(key, "counter").open("a+b") as counter:
            fcntl.flock(counter, fcntl.LOCK_EX)
            counter.seek(0)
            value = int(counter.read() or b"0") + amount
            counter.truncate(0)
            counter.write(str(value).encode())
        return value

    def _file(self, key: str, kind: str) -> Path:
        return self._path / f"{_UNSAFE.sub(_escape, key)}.{kind}"


def _escape(match: re.Match[str]) -> str:
    return f"%{ord(match.group()):X}%"
