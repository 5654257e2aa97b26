"""A worker's snapshots of parameters and optimizer states in the memory devices."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from coarse.client.interfaces import HomeDevice
from coarse.errors import CoarseError, MemoryDeviceLostError, told_error
from coarse.kernels import _native
from coarse.wire.messages import ControlChannel, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """Memory and cost of the old versions to which snapshots of one tensor group refer.

    Args:
        limit_bytes: Size of the pool.
        taken_bytes, peak_bytes: Pool memory in use now, and at most so far.
        kept_bytes: Total size of all versions that were ever kept.
        num_waits, waited_s: Number and total time of shard updates that waited because the pool was full.
        num_lost: Snapshots that were dropped because no memory was freed.
    """

    limit_bytes: int
    taken_bytes: int
    peak_bytes: int
    kept_bytes: int
    num_waits: int
    waited_s: float
    num_lost: int


class Snapshot:
    """A remote optimizer's parameters and states at the start of the snapshot.

    Training continues: blocks are copied before they change, and the copies use memory until release(). Release the
    snapshot, use it in a `with` block, or pass it on with write(). TensorGroup.snapshot() creates it. One caller at a
    time, as for the group.
    """

    def __init__(self, client: HomeDevice, group: int, number: int) -> None:
        self._client = client
        self._place = {"group": group, "snapshot": number}
        self.number = number
        self._is_held = True

    def read(self, tensor: int, array: int = 0) -> memoryview[Any]:
        """A copy of one array of a tensor, in device memory that is freed with the last reference to it.

        Args:
            tensor: Position in the group's specs.
            array: 0 for the parameter; n + 1 for array n of TensorGroup.state().

        Raises:
            SnapshotLostError: If the snapshot was dropped because the pool for old versions was full.
        """
        request = {"type": "read_snapshot", **self._place, "tensor": tensor, "array": array}
        reply = self._client.ask_home(request, "snapshot_read", f"snapshot {self.number}")
        try:
            return memoryview(mmap.mmap(reply.fds[0], 0, prot=mmap.PROT_READ))
        finally:
            reply.close()

    def write(self, request: Message, sent: Sequence[bytes | memoryview[Any]] = ()) -> SnapshotWrite:
        """Makes the home device write the snapshot to disk and release it. Returns at once.

        Args:
            request: The fields of SnapshotContents.to_message() and write_request() in coarse.wire.
            sent: Bytes of its `sent` tensors, one after the other.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = [theirs.fileno()]
        try:
            if num_bytes := sum(map(len, sent)):
                fds.append(_native.create_sealed_memory("coarse-tensors of a checkpoint", num_bytes))
                with mmap.mmap(fds[1], num_bytes) as target:
                    for each in sent:
                        target.write(each)
            self._client.tell_home({"type": "write_snapshot", **self._place, **request}, fds)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            for fd in fds[1:]:
                os.close(fd)
        self._is_held = False
        return SnapshotWrite(ours)

    def release(self) -> None:
        """Frees the snapshot's memory. Idempotent."""
        if self._is_held:
            self._is_held = False
            self._client.tell_home({"type": "release_snapshot", **self._place})

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class SnapshotWrite:
    """A snapshot that is being written to disk. Use it from one thread, which may be any.

    Args:
        connection: Connection to the home device's writer.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._channel = ControlChannel(connection)
        self._remains = "nothing of the checkpoint remains"

    def wait(self, progress: Callable[[int, int], None] = lambda done, total: None) -> tuple[int, int]:
        """Waits until the checkpoint is on disk; returns its step and attempt, which form its name.

        The writer then reads it back: call wait_until_verified(), or close() to stop the writer.

        Args:
            progress: Receives the written and the total number of bytes.

        Raises:
            CoarseError: If the write fails; CheckpointError and SnapshotLostError as the writer raised them.
            OSError: If the disk write fails.
            MemoryDeviceLostError: If the home device is gone.
        """
        message = self._await("written", progress)
        self._remains = "the checkpoint is on the disk, and was not read back to the end"
        return int(message["step"]), int(message["attempt"])

    def wait_until_verified(self) -> None:
        """Waits until the checkpoint has been read back from disk and verified; call it after wait().

        Raises:
            CoarseError, OSError: As for wait(), if it is wrong or cannot be read.
        """
        self._await("verified", lambda done, total: None)
        self.close()

    def close(self) -> None:
        """Stops the writer, if it has not ended. Idempotent."""
        self._channel.close()

    def _await(self, kind: str, progress: Callable[[int, int], None]) -> Message:
        """The next message of a kind; closes the connection if none will come."""
        try:
            while (message := self._next())["type"] != kind:
                if message["type"] != "progress":
                    raise _failure(message)
                progress(int(message["done_bytes"]), int(message["total_bytes"]))
        except BaseException:
            self.close()
            raise
        return message

    def _next(self) -> Message:
        while True:
            try:
                received = self._channel.receive()
            except (EOFError, OSError):
                raise MemoryDeviceLostError(
                    f"the memory device that wrote a checkpoint is gone; {self._remains}"
                ) from None
            if received is not None:
                return received.message


def _failure(message: Message) -> Exception:
    if message.get("errno") is not None:
        return OSError(int(message["errno"]), str(message["text"]), message["filename"])
    error: CoarseError = told_error(message.get("error"), message.get("text"))
    return error
