"""Translated addresses are told from those of a direct connection, by comparing what both ends see."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

import pytest

from coarse.startup.address_translation import ends_of, translation


@contextlib.contextmanager
def connection(host):
    """The caller's end, and that of a listener at `host`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2]) as caller,
        listener.accept()[0] as accepted,
    ):
        yield caller, accepted


def packed(caller, callee):
    return b"".join(ipaddress.IPv6Address(f"::ffff:{host}").packed for host in (caller, callee))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5", "::1"])
def test_a_direct_connection_has_the_same_addresses_at_both_ends(host):
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with connection(host) as (caller, accepted):
        assert translation(accepted, ends_of(caller)) == ""


def test_a_caller_behind_a_router_is_told_by_both_addresses():
    with connection("127.0.0.1") as (_, accepted):
        assert translation(accepted, packed("172.17.0.2", "127.0.0.1")) == (
            "its address is 172.17.0.2, but its connection comes from 127.0.0.1"
        )


def test_so_is_a_listener_behind_one():
    with connection("127.0.0.1") as (_, accepted):
        assert translation(accepted, packed("127.0.0.1", "203.0.113.5")) == (
            "it connected to 203.0.113.5, but the connection came to 127.0.0.1"
        )
