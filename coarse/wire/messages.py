"""Control messages between workers and memory devices: framed JSON and descriptors over AF_UNIX SEQPACKET.

Messages never carry tensors, only names, numbers and file descriptors of shared memory. A frame is a fixed header
(magic, version, number of descriptors, length of the whole message, offset of this fragment) and a fragment of
a JSON object. A message larger than one frame is split over several; its descriptors come with the first. All input
from a peer is untrusted: lengths are capped before memory is allocated, and a violation of the format raises
ProtocolError. docs/design/control-protocol.md describes the format.
"""

from __future__ import annotations

import array
import errno
import json
import os
import resource
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from coarse.errors import CoarseError, ProtocolError

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 64 << 20
MAX_DESCRIPTORS = 250  # the kernel's own limit per message is 253

UNPROVED_MESSAGE_BYTES = 64 << 10
"""The longest message of a peer that has not presented the session's token."""
UNPROVED_DESCRIPTORS = 1
"""The most descriptors that come with such a message: "replace" has one."""

_MOST_KEY_CHARACTERS = 1000

_MAGIC = b"COAR"
_HEADER = struct.Struct("<4sHHII")
_FRAGMENT_BYTES = 48 << 10

Message = dict[str, Any]


@dataclass(slots=True)
class Received:
    """A whole message and the descriptors that came with it, which the receiver owns."""

    message: Message
    fds: list[int] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The message's type, checked to be text."""
        kind = self.message.get("type")
        if not isinstance(kind, str):
            raise ProtocolError("a control message carries no type")
        return kind

    def close(self) -> None:
        """Closes descriptors that were not taken."""
        while self.fds:
            os.close(self.fds.pop())


class ControlChannel:
    """One end of a control connection. Use it from one thread at a time.

    Args:
        connection: A connected SEQPACKET socket; the channel owns it.
        is_proved: Whether the peer has proved to belong to the session. If not, it can make this end buffer only
            little until trust().
    """

    def __init__(self, connection: socket.socket, *, is_proved: bool = True) -> None:
        self.socket = connection
        self._most_bytes = MAX_MESSAGE_BYTES if is_proved else UNPROVED_MESSAGE_BYTES
        self._most_descriptors = MAX_DESCRIPTORS if is_proved else UNPROVED_DESCRIPTORS
        self._outgoing: deque[tuple[bytes, list[int]]] = deque()
        self._incoming = bytearray()
        self._incoming_fds: list[int] = []
        self._expected_bytes = 0

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self.socket.fileno()

    def trust(self) -> None:
        """Accepts messages of any length that the format allows, from this call on."""
        self._most_bytes, self._most_descriptors = MAX_MESSAGE_BYTES, MAX_DESCRIPTORS

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queues `message` and sends as much as the socket accepts; duplicates descriptors, the caller keeps its own.

        Raises:
            ProtocolError: If the message exceeds the format's limits.
            CoarseError: If this process cannot open more descriptors.
            OSError: If the peer is gone.
        """
        payload = json.dumps(message, separators=(",", ":")).encode()
        if len(payload) > MAX_MESSAGE_BYTES or len(fds) > MAX_DESCRIPTORS:
            raise ProtocolError(
                f"a control message of {len(payload)} bytes and {len(fds)} descriptors is over the limits of "
                f"{MAX_MESSAGE_BYTES} bytes and {MAX_DESCRIPTORS} descriptors"
            )
        for offset in range(0, len(payload), _FRAGMENT_BYTES):
            fragment = payload[offset : offset + _FRAGMENT_BYTES]
            attached = _duplicates(fds) if offset == 0 else []
            header = _HEADER.pack(_MAGIC, PROTOCOL_VERSION, len(attached), len(payload), offset)
            self._outgoing.append((header + fragment, attached))
        self.flush()

    def flush(self) -> bool:
        """Sends queued frames until the socket would block; True if nothing is left."""
        while self._outgoing:
            frame, fds = self._outgoing[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                self.socket.sendmsg([frame], ancillary, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            self._outgoing.popleft()
            for fd in fds:
                os.close(fd)
        return True

    def receive(self) -> Received | None:
        """Reads one frame; returns the message that it completes, or None if more frames follow.

        Raises:
            EOFError: If the peer closed the connection.
            ProtocolError: If the frame violates the format; the connection is no longer usable.
            CoarseError: If this process cannot open more descriptors; the connection is no longer usable.
            BlockingIOError: If the socket is non-blocking and has no input.
        """
        frame, fds = _receive_frame(self.socket, self._most_descriptors)
        self._incoming_fds += fds
        if not frame:
            raise EOFError("the peer closed the control connection")
        self._take(frame, len(fds))
        if len(self._incoming) < self._expected_bytes:
            return None
        payload, self._incoming = bytes(self._incoming), bytearray()
        received = Received(_parse(payload), self._incoming_fds)
        self._incoming_fds = []
        return received

    def close(self) -> None:
        """Closes the connection and every descriptor still queued. Idempotent."""
        for _, fds in self._outgoing:
            for fd in fds:
                os.close(fd)
        self._outgoing.clear()
        while self._incoming_fds:
            os.close(self._incoming_fds.pop())
        self.socket.close()

    def _take(self, frame: bytes, num_fds: int) -> None:
        if len(frame) < _HEADER.size:
            raise ProtocolError(f"a control frame of {len(frame)} bytes is shorter than its header")
        magic, version, announced_fds, total, offset = _HEADER.unpack_from(frame)
        if magic != _MAGIC or version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"a control frame of version {version} arrived, but this is version {PROTOCOL_VERSION}"
            )
        if announced_fds != num_fds or total > self._most_bytes:
            raise ProtocolError("a control frame announces contents that it does not carry")
        fragment = memoryview(frame)[_HEADER.size :]
        if not fragment or (num_fds and offset):
            raise ProtocolError(
                "a control frame without contents, or with descriptors after the first, arrived"
            )
        if offset == 0 and not self._incoming:
            self._expected_bytes = total
        if offset != len(self._incoming) or total != self._expected_bytes or offset + len(fragment) > total:
            raise ProtocolError("control frames arrived that do not continue each other")
        self._incoming += fragment


def _duplicates(fds: Sequence[int]) -> list[int]:
    made: list[int] = []
    try:
        for fd in fds:
            made.append(os.dup(fd))
    except OSError as error:
        for fd in made:
            os.close(fd)
        if error.errno == errno.EMFILE:
            raise _too_many_open_files() from None
        raise
    return made


def _too_many_open_files() -> CoarseError:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CoarseError(
        f"process {os.getpid()} has reached its limit of {limit} open files, and each group of tensors needs "
        f"some for its shared memory. Raise the limit, up to {most}: `ulimit -n` in a shell, LimitNOFILE of a "
        "service"
    )


def _receive_frame(connection: socket.socket, most_descriptors: int) -> tuple[bytes, list[int]]:
    descriptors = array.array("i")
    space = socket.CMSG_SPACE(most_descriptors * descriptors.itemsize)
    frame, ancillary, flags, _ = connection.recvmsg(
        _HEADER.size + _FRAGMENT_BYTES, space, socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    # The kernel rounds the space up, so that more descriptors may arrive than requested.
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(descriptors) > most_descriptors:
        for fd in descriptors:
            os.close(fd)
        if flags & socket.MSG_CTRUNC and len(descriptors) < most_descriptors:
            raise _too_many_open_files()  # the kernel drops descriptors for which it has no free number
        raise ProtocolError("a control frame is larger than the format allows")
    return frame, list(descriptors)


def _parse(payload: bytes) -> Message:
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a control message is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise ProtocolError("a control message is not a JSON object")
    return message


def int_field(message: Message, name: str, *, low: int = 0, high: int = 1 << 62) -> int:
    """The whole number under `name`, checked to lie in [low, high].

    Raises:
        ProtocolError: If it is missing, not a whole number, or out of range.
    """
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ProtocolError(
            f"control message {message.get('type')!r}: {name}={value!r} is not in [{low}, {high}]"
        )
    return value


def text_field(message: Message, name: str) -> str:
    """The text under `name`, checked to be neither empty nor longer than the limit for keys.

    Raises:
        ProtocolError: If it is missing or invalid.
    """
    value = message.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= _MOST_KEY_CHARACTERS:
        raise ProtocolError(
            f"control message {message.get('type')!r}: {name} is not a string of an accepted length"
        )
    return value
