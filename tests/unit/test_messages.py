"""The control protocol: any message arrives whole with its descriptors; anything else is a ProtocolError."""

from __future__ import annotations

import array
import contextlib
import json
import os
import resource
import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coarse.errors import CoarseError, ProtocolError
from coarse.wire.messages import (
    MAX_DESCRIPTORS,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    ControlChannel,
    Received,
    int_field,
)

HEADER = struct.Struct("<4sHHII")  # magic, version, descriptors, bytes of the message, offset of the fragment
MOST_FRAGMENT_BYTES = 48 << 10


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def channels():
    """Two connected channels; afterwards no descriptor is left."""
    before = open_descriptors()
    ours, theirs = (ControlChannel(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    theirs.socket.setblocking(False)
    ours.socket.setblocking(False)
    try:
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()
    assert open_descriptors() == before


@contextlib.contextmanager
def no_more_open_files():
    """As where a process has all that its limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_number = os.dup(0)
    os.close(next_number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_descriptors_that_a_process_may_not_have_are_no_fault_of_the_peer():
    with channels() as (ours, theirs):
        with (
            no_more_open_files(),
            pytest.raises(CoarseError, match=r"has reached its limit of .* open files.*ulimit -n"),
        ):
            ours.send({"type": "memory"}, [0, 1])
        ours.send({"type": "memory"}, [0, 1])
        with (
            no_more_open_files(),
            pytest.raises(CoarseError, match=r"has reached its limit of .* open files.*ulimit -n"),
        ):
            theirs.receive()


def frame(payload, *, magic=b"COAR", version=PROTOCOL_VERSION, num_fds=0, total=None, offset=0):
    return HEADER.pack(magic, version, num_fds, len(payload) if total is None else total, offset) + payload


def receive_whole(sender, receiver):
    """Receives one message, however many frames it has and however little the socket holds."""
    while True:
        sender.flush()
        received = receiver.receive()
        if received is not None:
            return received


def send_raw(channel, frame_bytes, fds=()):
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    channel.socket.sendmsg([frame_bytes], ancillary)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(), values, max_size=4),
    max_leaves=20,
)


# ---- messages ----


@given(st.dictionaries(st.text(), json_values, max_size=5))
def test_any_message_arrives_as_it_was_sent(message):
    with channels() as (ours, theirs):
        ours.send(message)
        received = receive_whole(ours, theirs)
        assert received.message == message
        assert received.fds == []


@pytest.mark.parametrize("length", [0, MOST_FRAGMENT_BYTES - 20, MOST_FRAGMENT_BYTES, 1_000_000, 10_000_000])
def test_a_message_of_any_length_arrives(length):
    with channels() as (ours, theirs):
        message = {"type": "register", "text": "x" * length}
        ours.send(message)
        assert receive_whole(ours, theirs).message == message


def test_messages_arrive_in_order_and_do_not_mix():
    with channels() as (ours, theirs):
        for number in range(5):
            ours.send({"type": str(number), "text": "x" * 100_000})
        assert [receive_whole(ours, theirs).kind for _ in range(5)] == list("01234")


def test_both_directions_are_independent():
    with channels() as (ours, theirs):
        ours.send({"type": "question"})
        theirs.send({"type": "answer"})
        assert ours.receive().kind == "answer"
        assert theirs.receive().kind == "question"


@pytest.mark.parametrize("length", [10, 200_000])
@pytest.mark.parametrize("num_fds", [1, 3, MAX_DESCRIPTORS])
def test_descriptors_arrive_in_order_as_duplicates(num_fds, length):
    with channels() as (ours, theirs):
        files = [os.memfd_create(str(number)) for number in range(num_fds)]
        for number, fd in enumerate(files):
            os.write(fd, str(number).encode())
        ours.send({"type": "memory", "text": "x" * length}, files)
        for fd in files:
            os.close(fd)  # the sender may close its own at once
        received = receive_whole(ours, theirs)
        assert [os.pread(fd, 10, 0) for fd in received.fds] == [str(n).encode() for n in range(num_fds)]
        assert not any(os.get_inheritable(fd) for fd in received.fds)
        received.close()
        received.close()
        assert received.fds == []


def test_descriptors_that_nobody_takes_are_closed_with_the_channel():
    with channels() as (ours, theirs):
        fd = os.memfd_create("x")
        ours.send({"type": "memory", "text": "x" * 100_000}, [fd])
        os.close(fd)
        assert theirs.receive() is None, "one of several frames"


def test_what_does_not_fit_the_socket_is_sent_later():
    with channels() as (ours, theirs):
        ours.send({"type": "long", "text": "x" * 5_000_000})
        assert not ours.flush()
        receive_everything(theirs)
        assert receive_whole(ours, theirs).kind == "long"
        assert ours.flush()


@pytest.mark.parametrize(
    ("message", "num_fds"),
    [({"text": "x" * MAX_MESSAGE_BYTES}, 0), ({}, MAX_DESCRIPTORS + 1)],
    ids=["bytes", "fds"],
)
def test_a_message_over_the_limits_is_not_sent(message, num_fds):
    with channels() as (ours, theirs), open("/dev/null") as null:
        with pytest.raises(ProtocolError, match="over the limits of"):
            ours.send(message, [null.fileno()] * num_fds)
        with pytest.raises(BlockingIOError):
            theirs.receive()


def test_the_end_of_the_peer_is_told():
    with channels() as (ours, theirs):
        ours.send({"type": "bye"})
        ours.close()
        assert theirs.receive().kind == "bye"
        with pytest.raises(EOFError, match="closed the control connection"):
            theirs.receive()
        with pytest.raises(OSError, match="Broken pipe"):
            theirs.send({"type": "welcome"})


# ---- frames that break the format ----

MALFORMED = {
    "noise": b"\x00" * 40,
    "less than a header": b"COAR\1\0",
    "another magic": frame(b"{}", magic=b"RAOC"),
    "version 0": frame(b"{}", version=0),
    "the next version": frame(b"{}", version=PROTOCOL_VERSION + 1),
    "descriptors that are not there": frame(b"{}", num_fds=1),
    "a message beyond the limit": frame(b"{}", total=MAX_MESSAGE_BYTES + 1),
    "the longest message": frame(b"{}", total=(1 << 32) - 1),
    "a fragment beyond its message": frame(b"{}", total=1),
    "a fragment from the middle": frame(b"{}", total=100, offset=10),
    "an empty fragment": frame(b"", total=100),
    "an empty message": frame(b""),
    "more than a frame holds": frame(b" " * (MOST_FRAGMENT_BYTES + 1)),
    "no JSON": frame(b"{"),
    "no text": frame(b"\xff\xfe\xfd"),
    "no object": frame(b"[]"),
    "a number": frame(b"1"),
    "endless digits": frame(b'{"a": ' + b"9" * 10_000 + b"}"),
    "endless depth": frame(b"[" * 40_000),
}


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_frame_is_a_protocol_error(sent):
    with channels() as (ours, theirs):
        send_raw(ours, sent)
        with pytest.raises(ProtocolError):
            theirs.receive()


@pytest.mark.parametrize(
    "second",
    [
        frame(b"}", total=3, offset=1),
        frame(b"}", total=2, offset=0),
        frame(b"}", total=2, offset=2),
        frame(b"}}", total=2, offset=1),
        frame(b"", total=2, offset=1),
    ],
    ids=["another length", "from the start", "a gap", "too much", "nothing"],
)
def test_a_frame_that_does_not_continue_the_last_one_is_a_protocol_error(second):
    with channels() as (ours, theirs):
        send_raw(ours, frame(b"{", total=2))
        assert theirs.receive() is None
        send_raw(ours, second)
        with pytest.raises(ProtocolError):
            theirs.receive()


@pytest.mark.parametrize("num_fds", [MAX_DESCRIPTORS + 1, 253])
def test_more_descriptors_than_allowed_are_closed(num_fds):
    with channels() as (ours, theirs), open("/dev/null") as null:
        send_raw(ours, frame(b"{}", num_fds=num_fds), [null.fileno()] * num_fds)
        with pytest.raises(ProtocolError):
            theirs.receive()


def test_descriptors_come_with_the_first_frame_only():
    with channels() as (ours, theirs), open("/dev/null") as null:
        send_raw(ours, frame(b"{", total=2, num_fds=1), [null.fileno()])
        assert theirs.receive() is None
        send_raw(ours, frame(b"}", total=2, offset=1, num_fds=1), [null.fileno()])
        with pytest.raises(ProtocolError, match="descriptors after the first"):
            theirs.receive()


def test_descriptors_of_a_malformed_message_are_closed():
    with channels() as (ours, theirs), open("/dev/null") as null:
        send_raw(ours, frame(b"[]", num_fds=100), [null.fileno()] * 100)
        with pytest.raises(ProtocolError):
            theirs.receive()


def receive_everything(channel):
    """Receives until nothing is there; the errors that a peer can cause, and no others, end it."""
    with contextlib.suppress(ProtocolError, EOFError, BlockingIOError):
        while True:
            received = channel.receive()
            assert received is None or isinstance(received, Received)
            if received is not None:
                received.close()


headers = st.builds(
    HEADER.pack,
    st.sampled_from([b"COAR", b"COAT"]),
    st.sampled_from([PROTOCOL_VERSION, 0, 2]),
    st.integers(0, 3),
    st.integers(0, 40) | st.integers(0, (1 << 32) - 1),
    st.integers(0, 40) | st.integers(0, (1 << 32) - 1),
)
frames = st.tuples(
    st.binary(max_size=60) | st.builds(lambda head, tail: head + tail, headers, st.binary(max_size=40)),
    st.integers(0, 3),
)


@settings(max_examples=300)
@given(st.lists(frames, min_size=1, max_size=6))
def test_no_frames_do_any_harm(sent):
    with channels() as (ours, theirs), open("/dev/null") as null:
        for frame_bytes, num_fds in sent:
            if frame_bytes:
                send_raw(ours, frame_bytes, [null.fileno()] * num_fds)
        receive_everything(theirs)


@settings(max_examples=300)
@given(st.data(), json_values.map(lambda value: json.dumps({"type": "x", "value": value}).encode()))
def test_no_mutation_of_a_message_does_any_harm(data, payload):
    cut = data.draw(st.integers(1, len(payload)))
    whole = [frame(payload[:cut], total=len(payload))]
    if cut < len(payload):
        whole.append(frame(payload[cut:], total=len(payload), offset=cut))
    with channels() as (ours, theirs):
        for frame_bytes in whole:
            mutated = bytearray(frame_bytes)
            for _ in range(data.draw(st.integers(0, 2))):
                mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
            send_raw(ours, bytes(mutated))
        receive_everything(theirs)


# ---- fields ----


@pytest.mark.parametrize("kind", [None, 1, ["hello"], {}])
def test_a_type_is_text(kind):
    with pytest.raises(ProtocolError, match="carries no type"):
        _ = Received({"type": kind}).kind


@pytest.mark.parametrize("value", [0, 5, 10])
def test_numbers_within_their_range_are_taken(value):
    assert int_field({"n": value}, "n", high=10) == value


@pytest.mark.parametrize("value", [-1, 11, 1.0, True, "1", None, [1], 1 << 100])
def test_anything_else_is_no_number(value):
    with pytest.raises(ProtocolError, match=r"n=.* is not in \[0, 10\]"):
        int_field({"type": "x", "n": value}, "n", high=10)


def test_a_missing_number_is_named():
    with pytest.raises(ProtocolError, match="'register': group=None"):
        int_field({"type": "register"}, "group")
