"""address_of_this_node: an address that other nodes can reach, also if its own name resolves to loopback."""

import socket

import pytest

from coarse.errors import RendezvousError
from coarse.settings import Settings
from coarse.startup import node_address
from coarse.startup.node_address import address_of_this_node, describe_interfaces, gloo_variables


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


def test_an_interface_has_the_address_of_the_family_of_worker_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert address_of_this_node(Settings(node_address="lo")) == "127.0.0.1"
    if "::1" in describe_interfaces():
        monkeypatch.setenv("MASTER_ADDR", "fd00::1")
        assert address_of_this_node(Settings(node_address="lo")) == "::1"


@pytest.mark.parametrize("address", ["10.1.2.3", "fd00::7"])
def test_an_address_that_was_chosen_stays(address: str) -> None:
    assert address_of_this_node(Settings(node_address=address)) == address


def test_what_is_neither_an_address_nor_an_interface_is_told_with_those_that_there_are() -> None:
    with pytest.raises(
        RendezvousError,
        match=r"COARSE_NODE_ADDRESS='ib7.invalid' is neither .* interfaces: .*lo \(127\.0\.0\.1",
    ):
        address_of_this_node(Settings(node_address="ib7.invalid"))


def test_worker_0_that_cannot_be_resolved_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    with pytest.raises(RendezvousError, match=r"no interface of this node leads to 'nowhere\.invalid'"):
        address_of_this_node(Settings())


def test_gloo_listens_at_the_interface_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.4"], "ib0": ["10.8.0.4", "fd08::4"]}
    monkeypatch.setattr(node_address, "_interfaces", lambda: found)
    environ = {"MASTER_ADDR": "10.0.0.1"}
    assert gloo_variables(Settings(node_address="ib0"), environ) == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert gloo_variables(Settings(node_address="fd08::4"), environ) == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert gloo_variables(Settings(node_address="ib0"), environ | {"GLOO_SOCKET_IFNAME": "eth0"}) == {}
