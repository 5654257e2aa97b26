"""How many buffers the ranks of a process group have, by the round trip between their nodes."""

from __future__ import annotations

import socket
import time

import pytest

from coarse.startup.node_links import NodeLinks

pytest.importorskip("torch")

from coarse.torch.backend.rank_rendezvous import buffer_bytes, num_buffers


@pytest.mark.parametrize(
    ("round_trip_us", "expected"),
    [(0, 2), (100, 2), (799, 2), (800, 4), (5_000, 14), (25_000, 32), (10**6, 32)],
)
def test_two_ranks_have_buffers_for_the_delay(round_trip_us, expected):
    assert num_buffers(2, round_trip_us) == expected


@pytest.mark.parametrize("num_ranks", [2, 8, 64, 1000])
def test_many_ranks_have_fewer_buffers(num_ranks):
    number = num_buffers(num_ranks, 10**6)
    assert number % 2 == 0
    assert number == 2 or number * num_ranks * buffer_bytes(num_ranks) <= 64 << 20


def test_links_know_their_round_trip():
    """Of loopback here: some microseconds, and less than an exchange of messages takes."""
    with socket.create_server(("127.0.0.1", 0)) as server, NodeLinks(num_nodes=2, num_devices=1) as links:
        near = socket.create_connection(server.getsockname())
        far = server.accept()[0]
        links.add(1, 0, near)
        began_s = time.monotonic()
        for _ in range(10):
            near.sendall(b"x")
            assert far.recv(1) == b"x"
            far.sendall(b"y")
            assert near.recv(1) == b"y"
        assert 0 < links.round_trip_us <= (time.monotonic() - began_s) * 1e6
        far.close()


def test_a_job_of_one_node_has_no_round_trip():
    with NodeLinks(num_nodes=1, num_devices=1) as links:
        assert links.round_trip_us == 0
