"""MasterPort: only the intended server gets the port, from its choice until the end of the job."""

from __future__ import annotations

import socket

import pytest

from coarse.cli.workers.master_port import MasterPort
from coarse.rendezvous.socket_store import SocketStore, TcpAddress, serve


def listen(port: int, *, shares: bool) -> socket.socket:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, shares)
    try:
        server.bind(("", port))
        server.listen()
    except OSError:
        server.close()
        raise
    return server


def test_others_cannot_take_it_until_it_is_given_back():
    with MasterPort(None) as port:
        number = port.number
        with pytest.raises(OSError, match="in use"):
            listen(number, shares=False)
    listen(number, shares=False).close()


def test_worker_0_serves_its_store_there_meanwhile():
    with MasterPort(None) as port:
        address = TcpAddress("127.0.0.1", port.number)
        server = serve(address)
        client = SocketStore(address, timeout_s=60.0)
        client.set("key", b"value")
        assert client.get("key", 60.0) == b"value"
        client.close()
        server.close()


def test_a_restart_changes_to_another_port_that_is_held_too():
    with MasterPort(None) as port:
        before = port.number
        port.renew()
        assert port.number != before
        with pytest.raises(OSError, match="in use"):
            listen(port.number, shares=False)


def test_the_users_port_stays_and_is_held_on_the_node_of_worker_0():
    with MasterPort(None) as free:
        number = free.number
    with MasterPort(number, is_here=False) as elsewhere:
        listen(elsewhere.number, shares=False).close()
    with MasterPort(number) as port:
        port.renew()
        assert port.number == number
        with pytest.raises(OSError, match="in use"):
            listen(number, shares=False)


def test_the_users_port_may_be_taken_which_worker_0_tells_if_it_needs_it():
    with listen(0, shares=False) as taker:
        number = taker.getsockname()[1]
        with MasterPort(number) as port:
            assert port.number == number
