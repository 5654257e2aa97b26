"""Streaming checksums of a file: CRC32C of each chunk, and optionally SHA-256 of the whole file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from coarse.errors import CheckpointError


def crc32c_function() -> Callable[[Any, int], int]:
    """Returns a function that computes a buffer's CRC32C, continuing from the checksum of the preceding bytes.

    Raises:
        CheckpointError: If the package is not installed; says how to install it.
    """
    try:
        from crc32c import crc32c
    except ImportError:
        raise CheckpointError(
            "checkpoints need the package crc32c: pip install 'coarse-train[checkpoint]'"
        ) from None
    function: Callable[[Any, int], int] = crc32c
    return function


class RunningChecksums:
    """Checksums of a stream of bytes, independent of its division into pieces.

    Args:
        chunk_bytes: Length of each chunk; the last one may be shorter.
        with_sha256: Whether to compute SHA-256 too, which takes twelve times as long.
    """

    def __init__(self, chunk_bytes: int, *, with_sha256: bool = False) -> None:
        self._chunk_bytes = chunk_bytes
        self._crc32c = crc32c_function()
        self._sha256 = hashlib.sha256() if with_sha256 else None
        self._finished: list[int] = []
        self._chunk_crc = 0
        self._chunk_length = 0
        self.num_bytes = 0

    def add(self, data: bytes | bytearray | memoryview) -> None:
        """Adds the next bytes."""
        view = memoryview(data)
        if self._sha256 is not None:
            self._sha256.update(view)
        self.num_bytes += len(view)
        while view:
            part = view[: self._chunk_bytes - self._chunk_length]
            self._chunk_crc = self._crc32c(part, self._chunk_crc)
            self._chunk_length += len(part)
            view = view[len(part) :]
            if self._chunk_length == self._chunk_bytes:
                self._finished.append(self._chunk_crc)
                self._chunk_crc = self._chunk_length = 0

    @property
    def sha256(self) -> str:
        """SHA-256 of all bytes so far, in hexadecimal digits; "" if not computed."""
        return "" if self._sha256 is None else self._sha256.hexdigest()

    @property
    def crc32c(self) -> tuple[int, ...]:
        """CRC32C of each chunk so far."""
        return (*self._finished, self._chunk_crc) if self._chunk_length else tuple(self._finished)
