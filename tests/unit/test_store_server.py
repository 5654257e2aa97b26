"""A served store accepts clients with the job's secret; others can use or delay only a bounded amount."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import tempfile
import threading

import pytest

from coarse.errors import RendezvousError
from coarse.rendezvous import store_server
from coarse.rendezvous.socket_store import LocalAddress, SocketStore, TcpAddress, serve
from coarse.security.job_secret import JobSecret
from coarse.security.private_directories import make_root

LIMIT_S = 20.0
SECRET = JobSecret(b"s" * 32)


@pytest.fixture
def server():
    served = serve(TcpAddress("127.0.0.1", 0), secret=SECRET, timeout_s=LIMIT_S)
    yield served
    served.close()


def join(server, secret=SECRET):
    return SocketStore(TcpAddress("127.0.0.1", server.port), timeout_s=LIMIT_S, secret=secret)


@contextlib.contextmanager
def stranger(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S) as connection:
        yield connection


@contextlib.contextmanager
def worker(server):
    """A connection past the handshake, which says what it likes."""
    store = join(server)
    try:
        yield store._socket
    finally:
        store.close()


def is_dropped(connection):
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    return True


def check_served(server):
    store = join(server)
    store.set("key", b"value")
    assert store.get("key", LIMIT_S) == b"value"
    store.close()


def request(operation=b"S", key=b"key", value=b"", key_bytes=None, value_bytes=None):
    sizes = [len(key) if key_bytes is None else key_bytes, len(value) if value_bytes is None else value_bytes]
    return store_server.REQUEST.pack(operation, *sizes) + key + value


GREETING = store_server.GREETING.pack(store_server.MAGIC, b"n" * 32)

STRANGERS = {
    "noise": secrets.token_bytes(1000),
    "another protocol": b"GET / HTTP/1.1\r\n",
    "a request at once": request(value=b"x" * 100),
    "no proof": GREETING + b"\0" * 32,
    "a proof of another secret": GREETING + JobSecret().prove(b"store client", GREETING + b"n" * 32),
}


@pytest.mark.parametrize("sent", STRANGERS.values(), ids=STRANGERS.keys())
def test_a_stranger_is_dropped_and_workers_are_served(server, sent):
    with stranger(server) as connection:
        connection.sendall(sent)
        assert is_dropped(connection)
    check_served(server)


@pytest.mark.parametrize(
    "sent",
    [
        request(operation=b"X"),
        request(key_bytes=store_server.MOST_KEY_BYTES + 1),
        request(value_bytes=store_server.MOST_VALUE_BYTES + 1),
        request(value_bytes=(1 << 32) - 1),
    ],
    ids=["an unknown operation", "a long key", "a large value", "a value beyond all"],
)
def test_a_worker_that_breaks_the_protocol_is_dropped(server, sent):
    with worker(server) as connection:
        connection.sendall(sent)
        assert is_dropped(connection)
    check_served(server)


def test_of_many_who_prove_nothing_the_first_are_dropped(server, monkeypatch):
    monkeypatch.setattr(store_server, "_MOST_UNPROVED", 4)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(stranger(server)) for _ in range(6)]
        assert all(map(is_dropped, silent[:2]))
        check_served(server)


def test_connections_have_a_limit(server, monkeypatch):
    monkeypatch.setattr(store_server, "_MOST_CONNECTIONS", 2)
    first, second = join(server), join(server)
    with stranger(server) as connection:
        assert is_dropped(connection)
    first.close()
    second.set("key", b"")
    check_served(server)
    second.close()


def test_who_does_not_finish_is_dropped(monkeypatch):
    monkeypatch.setattr(store_server, "_HANDSHAKE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(store_server, "_SWEEP_INTERVAL_S", 0.05)
    server = serve(TcpAddress("127.0.0.1", 0), secret=SECRET, timeout_s=0.2)
    try:
        idle = join(server)
        with stranger(server) as silent, worker(server) as half:
            half.sendall(request(value=b"x", value_bytes=100))
            assert is_dropped(silent)
            assert is_dropped(half)
        idle.set("key", b"who has begun nothing may take any time")
        idle.close()
    finally:
        server.close()


def test_requests_that_come_in_pieces_have_a_limit_together(server, monkeypatch):
    monkeypatch.setattr(store_server, "MOST_BYTES", 1 << 20)
    with worker(server) as first, worker(server) as second:
        for connection in (first, second):
            with contextlib.suppress(ConnectionError):
                connection.sendall(request(value=b"x" * (900 << 10), value_bytes=1 << 20))
        dropped, _, _ = select.select([first, second], [], [], LIMIT_S)  # whose last piece came last
        assert len(dropped) == 1
        assert is_dropped(*dropped)
    check_served(server)


def test_a_full_store_says_so_and_goes_on(server, monkeypatch):
    monkeypatch.setattr(store_server, "MOST_BYTES", 10_000)
    store = join(server)
    store.set("small", b"x" * 5000)
    with pytest.raises(RendezvousError, match=r"refused 'large': it is full: it keeps 5261 of at most 10000"):
        store.set("large", b"x" * 5000)
    store.set("small", b"y" * 6000)
    store.set("small", b"z")
    store.set("large", b"x" * 5000)
    assert store.get("small", LIMIT_S) == b"z"
    store.add("counter", (1 << 63) - 1)
    with pytest.raises(RendezvousError, match="a counter would overflow"):
        store.add("counter", 1)
    store.close()


def test_a_reader_that_takes_nothing_holds_nobody_up(server):
    store = join(server)
    store.set("large", b"x" * store_server.MOST_VALUE_BYTES)
    with worker(server) as connection:
        connection.sendall(request(operation=b"G", key=b"large") * 3)
        check_served(server)
        left = 3 * (store_server.ANSWER.size + store_server.MOST_VALUE_BYTES)
        while left > 0:
            left -= len(connection.recv(1 << 20))
        assert left == 0
    store.close()


def test_behind_a_shut_door_those_who_are_in_stay(server):
    store = join(server)
    server.shut_door()
    with contextlib.suppress(ConnectionRefusedError):
        while True:  # its thread may be about to hear of it
            with stranger(server) as connection:
                is_dropped(connection)
    store.set("key", b"value")
    assert store.get("key", LIMIT_S) == b"value"
    store.close()


@pytest.mark.parametrize("secret", [JobSecret(b"t" * 32), JobSecret()], ids=["another", "none"])
def test_a_worker_refuses_a_server_that_does_not_know_its_secret(server, secret):
    """Whoever has taken MASTER_PORT; and workers that were started with different secrets."""
    with pytest.raises(RendezvousError, match="does not have this job's COARSE_JOB_SECRET"):
        join(server, secret)


def test_a_server_that_does_not_answer_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = TcpAddress("127.0.0.1", listener.getsockname()[1])
        with pytest.raises(
            RendezvousError, match=rf"no process answered at {address} within 0 s \(timed out\)"
        ):
            SocketStore(address, timeout_s=0.2)


def test_a_server_that_stops_answering_is_given_up(server, monkeypatch):
    store = join(server)
    at_work, go_on = threading.Event(), threading.Event()

    def stand_still(*_):
        at_work.set()
        go_on.wait(LIMIT_S)

    monkeypatch.setattr(server._values, "answer", stand_still)
    store._timeout_s = 0.2
    with pytest.raises(
        RendezvousError, match=r"has not answered within 0.2 s. It is stopped or can no longer be"
    ):
        store.set("key", b"")
    assert at_work.is_set()
    with pytest.raises(RendezvousError, match="is gone"):
        store.set("key", b"")  # never an answer to another question
    go_on.set()


# ---- on one machine ----


@pytest.fixture
def name(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return f"test-{os.getpid()}-{secrets.token_hex(4)}"


def test_no_name_of_a_store_can_be_taken_by_another_user(name):
    """An abstract name could be taken: the first process got it."""
    taken = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    taken.bind(f"\0coarse/{os.getuid()}/{name}")
    server = serve(LocalAddress(name))
    store = SocketStore(LocalAddress(name), timeout_s=LIMIT_S)
    store.add("number", 1)
    store.close()
    server.close()
    taken.close()


def test_a_store_leaves_nothing_behind(name):
    server = serve(LocalAddress(name))
    directory = make_root() / "stores" / name
    assert directory.is_dir()
    store = SocketStore(LocalAddress(name), timeout_s=LIMIT_S)
    server.shut_door()
    assert not directory.exists()
    assert store.add("number", 1) == 1
    store.close()
    server.close()


def test_a_store_takes_the_place_of_one_that_was_killed_and_of_no_other(name):
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            serve(LocalAddress(name))
        os._exit(0)
    os.waitpid(child, 0)
    assert (make_root() / "stores" / name).is_dir(), "it was not cleaned up"
    server = serve(LocalAddress(name))
    with pytest.raises(OSError, match="in use"):
        serve(LocalAddress(name))
    server.close()
