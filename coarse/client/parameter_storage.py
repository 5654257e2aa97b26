"""A worker's access to the parameter storage of the memory devices (COARSE paper, section III-D)."""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Sequence
from typing import Any

from coarse.client.connection import DeviceConnection
from coarse.client.questions import Questions
from coarse.client.stored_value import StoredValue
from coarse.kernels import _native


class ParameterStorage:
    """Keeps values at the memory device that their key belongs to.

    Args:
        connections: One to each memory device.
        questions: Wait for its answers.
    """

    def __init__(self, connections: Sequence[DeviceConnection], questions: Questions) -> None:
        self._connections = connections
        self._questions = questions

    def store(self, key: str, value: memoryview[Any]) -> int:
        """Keeps a value; returns its version.

        Who has loaded the key before keeps what he has; who loads it from now on gets this value, whole.
        """
        connection = self._keeper(key)
        connection.send({"type": "reserve", "key": key, "num_bytes": value.nbytes})
        reserved = self._questions.wait_for(connection, "reserved", f"storage of {key!r}")
        with mmap.mmap(reserved.fds[0], value.nbytes) as target:
            target[:] = value
        reserved.close()
        connection.send({"type": "commit"})
        return int(
            self._questions.wait_for(connection, "committed", f"storage of {key!r}").message["version"]
        )

    def load(self, key: str) -> StoredValue:
        """The newest value of `key`, by any worker; version 0 and no bytes if there is none."""
        connection = self._keeper(key)
        connection.send({"type": "lookup", "key": key})
        found = self._questions.wait_for(connection, "found", f"storage of {key!r}")
        version = int(found.message["version"])
        if not found.fds:
            return StoredValue(version=version, value=memoryview(b""))
        mapping = mmap.mmap(found.fds[0], _native.sealed_bytes(found.fds[0]), prot=mmap.PROT_READ)
        found.close()
        return StoredValue(version=version, value=memoryview(mapping))

    def _keeper(self, key: str) -> DeviceConnection:
        return self._connections[zlib.crc32(key.encode()) % len(self._connections)]
