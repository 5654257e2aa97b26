"""What a node that is asked for its metrics may do: answer too late, too slowly, too much, or not to the end."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from coarse.dashboard import other_nodes
from coarse.dashboard.other_nodes import OtherNode

GOOD = b'coarse_world_size{worker="1"} 2.0\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"


@contextlib.contextmanager
def serving(*pieces, pause_s=0.0):
    """HOST:PORT at which each client gets these pieces, with pauses between them, and then no more."""

    def serve():
        with contextlib.suppress(OSError):
            while True:
                client, _ = server.accept()
                with client, contextlib.suppress(OSError):
                    client.recv(1 << 16)
                    for piece in pieces:
                        client.sendall(piece)
                        time.sleep(pause_s)

    server = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def read(address):
    """The node, and how long reading it took."""
    node = OtherNode(address)
    began_s = time.monotonic()
    node.read()
    return node, time.monotonic() - began_s


def test_its_workers_are_read():
    with serving(HEAD % len(GOOD), GOOD) as address:
        node, _ = read(address)
    assert node.problem == ""
    assert [worker.rank for worker in node.workers] == [1]


@pytest.mark.parametrize(
    "pieces",
    [
        [HEAD % 1000, *([b"#"] * 1000)],
        [b"HTTP/1.1 200 OK\r\nX: ", *([b"y"] * 1000)],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *([b"1\r\n#\r\n"] * 1000)],
    ],
    ids=["body", "headers", "chunks"],
)
def test_an_answer_in_small_pieces_is_broken_off(pieces):
    with serving(*pieces, pause_s=0.05) as address:
        node, took_s = read(address)
    assert node.problem == "its answer takes longer than 1 s"
    assert node.workers == ()
    assert took_s < 5


def test_a_node_that_says_nothing_is_not_waited_for():
    with serving(b"", pause_s=3) as address:
        node, took_s = read(address)
    assert node.problem in ("timed out", "its answer takes longer than 1 s")
    assert took_s < 2.5


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        ([b"HTTP/1.1 404 Not Found\r\n\r\n"], "it has answered with status 404"),
        ([b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n"], "it has answered with status 302"),
        ([HEAD % 1000, GOOD], f"IncompleteRead({len(GOOD)} bytes read, {1000 - len(GOOD)} more expected)"),
        ([HEAD % 2, b"# "], "no worker of COARSE counts there"),
        ([HEAD % 2, b"\xff\xff"], "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    ],
)
def test_what_is_no_answer_is_told(pieces, problem):
    with serving(*pieces) as address:
        assert read(address)[0].problem == problem


def test_an_answer_that_is_too_long_is_told(monkeypatch):
    monkeypatch.setattr(other_nodes, "_MOST_BYTES", 1 << 20)
    with serving(HEAD % (2 << 20), b"#" * (2 << 20)) as address:
        assert read(address)[0].problem == "it has answered with 1 MiB or more"


class SlowToReturn(socket.socket):
    """A socket whose shutdown() returns late, as on a busy machine."""

    def shutdown(self, how):
        super().shutdown(how)
        time.sleep(0.5)


def test_a_reader_that_is_broken_off_learns_why_before_shutdown_returns():
    with contextlib.ExitStack() as open_sockets:
        far, near = map(open_sockets.enter_context, socket.socketpair())
        slow = open_sockets.enter_context(SlowToReturn(fileno=near.detach()))
        with pytest.raises(TimeoutError, match=r"longer than 0\.1 s"), other_nodes._at_most(0.1, slow):
            assert slow.recv(1) == b""
        far.close()
