"""Writes a snapshot to disk during training, and reports the progress to the requesting worker."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from dataclasses import fields
from typing import Any

from coarse.checkpoint.catalogue import read_back
from coarse.checkpoint.folder import Folder
from coarse.checkpoint.names import CheckpointName
from coarse.checkpoint.writer import SaveDetails, WriteOptions, write_checkpoint
from coarse.errors import ProtocolError
from coarse.process.scheduling import lower_priority
from coarse.proxy.snapshots.snapshot_source import SnapshotSource
from coarse.wire.messages import ControlChannel, Message

logger = logging.getLogger(__name__)

_REPORT_INTERVAL_S = 0.1


class SnapshotWriter:
    """Writes one checkpoint to disk, in a thread of low priority.

    Sends `progress`, then `written`, and `verified` after reading it back; or `failed` at any time. The worker
    stops it by closing the other end of the connection.

    Args:
        source: The snapshot; closed in every case.
        request: Message with the fields of write_request().
        connection: Connection to the requesting worker; the writer takes ownership.
        is_closing: Set when the device ends.

    Raises:
        ProtocolError: If the request cannot be read.
    """

    def __init__(
        self, source: SnapshotSource, request: Message, connection: socket.socket, is_closing: threading.Event
    ) -> None:
        self._source = source
        self._folder = str(request.get("folder"))
        self._details = _read(SaveDetails, request.get("details"))
        self._options = _read(WriteOptions, request.get("options"))
        self._connection = connection
        self._channel = ControlChannel(connection)
        self._is_closing = is_closing
        self._last_report_s = 0.0

    def run(self) -> None:
        """Writes; never raises."""
        lower_priority()  # safe: a reader of a snapshot holds nothing that updates wait for
        try:
            name = self._write()
            self._tell({"type": "written", "step": name.step, "attempt": name.attempt})
            self._source.log_pool()
            self._verify(name)
            self._tell({"type": "verified"})
        except Exception as error:  # any error fails only this save, not the device
            logger.info("a snapshot could not be written to %s: %s", self._folder, error)
            self._tell({"type": "failed", "error": type(error).__name__, **_words_of(error)})
        finally:
            self._source.close()
            self._channel.close()

    def _write(self) -> CheckpointName:
        with contextlib.closing(Folder.open(self._folder, create=True)) as parent:
            return write_checkpoint(
                parent,
                self._source,
                self._details,
                options=self._options,
                progress=self._progress,
                should_stop=self._should_stop,
            )

    def _verify(self, name: CheckpointName) -> None:
        with contextlib.closing(Folder.open(self._folder)) as parent:
            read_back(parent, name, self._should_stop)

    def _progress(self, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        if now_s - self._last_report_s >= _REPORT_INTERVAL_S:
            self._last_report_s = now_s
            self._tell({"type": "progress", "done_bytes": done_bytes, "total_bytes": total_bytes})

    def _tell(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # the worker is gone or has closed the connection
            self._connection.settimeout(_REPORT_INTERVAL_S)
            self._channel.send(message)

    def _should_stop(self) -> bool:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return self._is_closing.is_set() or bool(poll.poll(0))


def _words_of(error: Exception) -> Message:
    """The message of a failure; for a system error its parts, from which the worker rebuilds the same error."""
    if isinstance(error, OSError) and error.errno is not None:
        return {"text": str(error.strerror), "errno": error.errno, "filename": error.filename}
    return {"text": str(error)}


def _read(kind: type[Any], values: object) -> Any:
    """A value object from the fields that a message carries."""
    if not isinstance(values, dict) or not values.keys() <= {field.name for field in fields(kind)}:
        raise ProtocolError(f"a request to write a snapshot carries no {kind.__name__}")
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"a request to write a snapshot: {error}") from None
