"""Reconnection: connections between nodes that broke are made anew, by processes of the job alone."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from coarse.startup.node_links import call_again, check_is_served
from coarse.startup.node_reconnection import Reconnection
from coarse.wire.reconnection_plan import NodeConnection, ReconnectionPlan

HOST = "127.0.0.1"
SECRET = bytes(range(32)).hex()
LIMIT_S = 20.0


@dataclass
class Links:
    """What a process is told about its connections: what happened, node, number, and a socket or a reason."""

    told: queue.Queue[tuple[str, int, int, object]] = field(default_factory=queue.Queue)

    def resume_link(self, node: int, number: int, fd: int) -> None:
        self.told.put(("resume", node, number, socket.socket(fileno=fd)))

    def interrupt_link(self, node: int, number: int) -> None:
        self.told.put(("interrupt", node, number, ""))

    def give_up_link(self, node: int, number: int, reason: str) -> None:
        self.told.put(("give up", node, number, reason))

    def next(self, what: str) -> tuple[int, int, object]:
        while True:
            told, node, number, value = self.told.get(timeout=LIMIT_S)
            if told == what:
                return node, number, value


@dataclass
class Side:
    """One process of the job."""

    holder: socket.socket
    plan: ReconnectionPlan
    links: Links
    reconnection: Reconnection


@pytest.fixture
def sides() -> Iterator[Callable[[], list[Side]]]:
    """Makes processes 0 and 1 of nodes 0 and 1, with connections 0 and 1 between them."""
    made: list[Side] = []

    def make() -> list[Side]:
        holders = []
        for _ in range(2):
            holder = socket.socket()
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((HOST, 0))
            holders.append(holder)
        for node, holder in enumerate(holders):
            port = holders[1 - node].getsockname()[1]
            plan = ReconnectionPlan(
                node=node,
                secret=SECRET,
                held_fd=holder.fileno(),
                connections=tuple(
                    NodeConnection(node=1 - node, number=each, connection=each, host=HOST, port=port)
                    for each in range(2)
                ),
            )
            links = Links()
            made.append(Side(holder, plan, links, Reconnection(plan, links)))
        return made

    yield make
    for side in made:
        side.reconnection.close()
        side.holder.close()


@pytest.mark.parametrize("delayed", [None, 0, 1])
def test_both_ends_get_a_new_connection(sides, delayed):
    """Also if one of them notices a second later than the other."""
    both = sides()
    for node, side in enumerate(both):
        if node != delayed:
            side.reconnection.begin(1 - node, 1)
    if delayed is not None:
        both[1 - delayed].links.next("interrupt")
        time.sleep(1.0)
        both[delayed].reconnection.begin(1 - delayed, 1)
    ends = []
    for node, side in enumerate(both):
        other, number, end = side.links.next("resume")
        assert (other, number) == (1 - node, 1)
        ends.append(end)
        side.reconnection.end(1 - node, 1)
    ends[0].sendall(b"one")
    ends[1].sendall(b"two")
    assert (ends[1].recv(3), ends[0].recv(3)) == (b"one", b"two")
    for end in ends:
        end.close()


@pytest.mark.parametrize("node", [0, 1])
def test_a_process_that_has_ended_is_given_up_soon(sides, node):
    """Its machine answers, and nobody listens."""
    both = sides()
    side, other = both[node], both[1 - node]
    port = other.holder.getsockname()[1]
    began_s = time.monotonic()
    side.reconnection.begin(1 - node, 0)
    assert side.links.next("interrupt")[:2] == (1 - node, 0)
    assert side.links.next("give up") == (
        1 - node,
        0,
        f"its process has ended: nobody listens at {HOST} port {port} any more",
    )
    assert time.monotonic() - began_s < 5.0


def test_a_process_listens_only_while_a_connection_is_in_trouble(sides):
    listening, calling = sides()
    connection = calling.plan.connections[0]
    with pytest.raises(ConnectionRefusedError):
        check_is_served(connection)
    listening.reconnection.begin(1, 0)
    listening.reconnection.begin(1, 1)
    check_is_served(connection)
    listening.reconnection.end(1, 0)
    check_is_served(connection)
    listening.reconnection.end(1, 1)
    with pytest.raises(ConnectionRefusedError):
        check_is_served(connection)


def test_strangers_are_turned_away(sides):
    listening, calling = sides()
    listening.reconnection.begin(1, 0)
    stranger = replace(calling.plan, secret=bytes(32).hex())
    with pytest.raises(ConnectionError, match="does not have the secret"):
        call_again(calling.plan.connections[0], stranger)
    call_again(calling.plan.connections[0], calling.plan).close()
    assert listening.links.next("resume")[:2] == (1, 0)


def test_a_connection_that_does_not_exist_is_refused(sides):
    listening, calling = sides()
    listening.reconnection.begin(1, 0)
    unknown = replace(calling.plan.connections[0], connection=7)
    link = call_again(unknown, calling.plan)
    link.settimeout(LIMIT_S)
    with pytest.raises(ConnectionResetError):
        link.recv(1)
    link.close()
    told = list(listening.links.told.queue)
    assert not [each for each in told if each[0] == "resume"], told
