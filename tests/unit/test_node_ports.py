"""NodePorts: a node listens only at ports of COARSE_NODE_PORTS, and says how many it needs."""

from __future__ import annotations

import contextlib
import socket

import pytest

from coarse.errors import RendezvousError
from coarse.security.node_ports import NodePorts
from coarse.settings import Settings

HOST = "127.0.0.7"  # no other test listens there


def free_ports(count):
    """A range of free ports at HOST, below those that the kernel gives to connections."""
    first = 21_000
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server((HOST, port)))
            return NodePorts(first, first + count - 1)
        first += count


@pytest.mark.parametrize(
    ("text", "ports"),
    [("", NodePorts()), ("20000-20099", NodePorts(20_000, 20_099)), ("7-7", NodePorts(7, 7))],
)
def test_ports_mean_what_they_say(text, ports):
    assert NodePorts.parse(text) == ports


@pytest.mark.parametrize("text", ["20000", "20099-20000", "0-5", "65000-65536", "a-b", "1-2-3", "20000-"])
def test_anything_else_is_no_range(text):
    with pytest.raises(
        ValueError, match=rf"^COARSE_NODE_PORTS='{text}' is not a range of ports; write .*20000-20099$"
    ):
        Settings.from_environment({"COARSE_NODE_PORTS": text})


def test_sockets_take_the_free_ports_of_the_range_in_turn():
    ports = free_ports(3)
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(ports.listen(HOST, backlog=1)).getsockname()[1] for _ in range(3)]
        assert taken == [ports.first, ports.first + 1, ports.last]
        with pytest.raises(RendezvousError, match=f"all 3 ports of COARSE_NODE_PORTS={ports} are taken"):
            ports.listen(HOST, backlog=1)


def test_a_port_whose_listener_has_closed_is_free_although_its_connections_last():
    ports = free_ports(1)
    listener = ports.listen(HOST, backlog=1)
    with socket.create_connection(listener.getsockname()), listener.accept()[0]:
        listener.close()
        ports.listen(HOST, backlog=1).close()


def test_ports_that_are_held_are_the_last_ones_and_can_be_listened_at_later():
    ports = free_ports(3)
    with ports.reserve(HOST) as last, ports.reserve(HOST) as middle, ports.listen(HOST, backlog=1) as first:
        held = [each.getsockname()[1] for each in (first, middle, last)]
        assert held == [ports.first, ports.first + 1, ports.last]
        with pytest.raises(RendezvousError, match="all 3 ports of"):
            ports.reserve(HOST)
        socket.create_server(last.getsockname()).close()


def test_without_a_range_any_port_will_do():
    with NodePorts().listen(HOST, backlog=1) as one, NodePorts().listen(HOST, backlog=1) as other:
        assert one.getsockname() != other.getsockname()


@pytest.mark.parametrize("ports", [NodePorts(), NodePorts(20_000, 20_002)])
def test_an_address_of_another_machine_is_refused_as_such(ports):
    with pytest.raises(OSError, match="assign requested address"):
        ports.listen("192.0.2.1", backlog=1)


@pytest.mark.parametrize(("num_workers", "needed"), [(1, 4), (8, 18)])
def test_a_range_that_is_too_small_says_how_many_ports_are_needed(num_workers, needed):
    NodePorts(20_000, 20_000 + needed - 1).check(num_workers)
    NodePorts().check(num_workers)
    with pytest.raises(
        RendezvousError,
        match=rf"has {needed - 1} port\(s\), but a node of {num_workers} worker\(s\) needs {needed}: one for each",
    ):
        NodePorts(20_000, 20_000 + needed - 2).check(num_workers)
