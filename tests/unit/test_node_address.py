"""address_of_this_node: an address that other nodes can reach, also if its own name resolves to loopback."""

import socket

import pytest

from coarse.settings import Settings
from coarse.startup.node_address import address_of_this_node


def test_a_name_that_is_loopback_here_gives_the_address_of_the_default_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "debian.test"
    resolve = socket.getaddrinfo

    def as_etc_hosts_of_debian(host: str, *args: object, **kwargs: object) -> object:
        return resolve("127.0.1.1" if host == name else host, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", as_etc_hosts_of_debian)
    monkeypatch.setenv("MASTER_ADDR", name)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no route to other networks")
        expected = probe.getsockname()[0]
    assert address_of_this_node(Settings()) == expected


@pytest.mark.parametrize("master", ["127.0.0.1", "localhost", ""])
def test_loopback_that_was_asked_for_stays(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    monkeypatch.setenv("MASTER_ADDR", master)
    assert address_of_this_node(Settings()) in ("127.0.0.1", "::1")
