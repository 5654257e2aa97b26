"""Worker 0 listens at the address that other workers receive."""

from __future__ import annotations

import socket

import pytest

from coarse.security.listening import host_and_port, listen_for_workers, rendezvous_host


def answers_at(listener, host):
    try:
        socket.create_connection((host, listener.getsockname()[1]), timeout=20.0).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_for_workers_of_one_machine_it_is_the_loopback_interface_alone(host):
    with listen_for_workers(host, 0) as listener:
        assert answers_at(listener, rendezvous_host(host))
        assert not answers_at(listener, "127.0.0.2")
        assert not answers_at(listener, "::1")


def test_another_address_of_the_machine_is_taken_as_it_is():
    with listen_for_workers("127.0.0.3", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.3"


def test_of_an_address_of_another_machine_all_interfaces_are_taken():
    """That of a service in front of this one: workers reach it through that."""
    with listen_for_workers("192.0.2.1", 0) as listener:
        assert answers_at(listener, "127.0.0.2")


def test_so_are_they_of_a_name_that_is_loopback_to_this_machine_only(monkeypatch):
    """Debian's /etc/hosts does this to a machine's own name, which others know by another address."""

    def resolve(host, port, **_):
        assert host == "node0"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    listener = listen_for_workers("node0", 0)
    monkeypatch.undo()
    with listener:
        assert answers_at(listener, "127.0.0.2")


def test_a_port_that_is_taken_is_told():
    with listen_for_workers("127.0.0.1", 0) as listener, pytest.raises(OSError, match="in use"):
        listen_for_workers("127.0.0.1", listener.getsockname()[1])


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_an_address_of_ipv6_is_taken_as_it_is():
    with listen_for_workers("::1", 0) as listener:
        assert answers_at(listener, "::1")
        assert not answers_at(listener, "127.0.0.1")


def test_addresses_are_written_so_that_the_port_stands_out():
    assert host_and_port("10.0.0.1", 29500) == "10.0.0.1:29500"
    assert host_and_port("fd00::1", 29500) == "[fd00::1]:29500"
