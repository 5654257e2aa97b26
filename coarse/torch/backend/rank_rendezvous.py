"""Rendezvous of the ranks of a process group: their identities and the shared memory of a node's ranks."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from typing import TYPE_CHECKING, Any

from coarse.env import WorkerIdentity
from coarse.errors import RendezvousError
from coarse.rendezvous.workers import NodeMap, PeerWatch, WorkerAddress, gather_workers
from coarse.security.local_sockets import peer_of
from coarse.settings import Settings
from coarse.startup.node_links import NodeLinks, link_nodes
from coarse.torch.backend.extension_agreement import agree_on_extension
from coarse.torch.backend.link_watch import watch_links

if TYPE_CHECKING:
    from coarse.kernels import _native
    from coarse.store import Store

_TOKEN_BYTES = 32
_ANSWER_TIMEOUT_S = 5.0
_LOOK_INTERVAL_S = 0.25
_LARGEST_BUFFER_BYTES = 512 << 10
_SMALLEST_BUFFER_BYTES = 64 << 10
_MOST_SCRATCH_BYTES = 64 << 20
_LINE_BYTES = 128
_BUFFER_US = 400  # of a largest buffer on a link of 10 Gbit/s
_FEWEST_BUFFERS = 2
_MOST_BUFFERS = 32  # kMostBuffers in group_scratch.hpp


def open_group(store: Store, *, rank: int, size: int, settings: Settings) -> tuple[_native.Collectives, Any]:
    """Joins the group whose ranks meet in `store`; collective over these ranks.

    Args:
        store: A store for this group only.
        rank, size: Rank of this process in the group, and number of ranks.
        settings: Time-outs and the identity of this node.

    Returns:
        The group's collectives, and the C++ backend as a module, through which all ranks call them.

    Raises:
        RendezvousError: If a rank does not arrive in time, two have the same number, or a node cannot reach another.
        BackendBuildError: If some rank cannot compile the C++ backend.
        WorkerLostError: If a rank dies meanwhile.
    """
    identity = WorkerIdentity(rank=rank, world_size=size, local_rank=rank, local_world_size=size)
    with PeerWatch(identity, settings.node) as watch:
        addresses = gather_workers(
            identity, store, timeout_s=settings.timeout_s, watch=watch, node=settings.node
        )
        nodes = NodeMap.of_addresses(addresses)
        if nodes.num_nodes > 1:
            watch.follow(store)
        with watch.telling():
            extension = agree_on_extension(store, watch, rank=rank, size=size, timeout_s=settings.timeout_s)
            with _links(nodes, rank, store, settings, watch) as links:
                buffers = _agree_on_buffers(nodes, rank, links, store, watch, settings)
                fd = _share_memory(store, watch, nodes, buffers, rank=rank, timeout_s=settings.timeout_s)
                try:
                    return _collectives(fd, addresses, nodes, rank, buffers, links, settings), extension
                finally:
                    os.close(fd)


def _links(nodes: NodeMap, rank: int, store: Store, settings: Settings, watch: PeerWatch) -> NodeLinks:
    """The sockets of a node's leader to the leaders of other nodes; none for other ranks."""
    node = nodes.node_of(rank)
    if nodes.num_nodes == 1 or rank != nodes.ranks[node][0]:
        return NodeLinks(num_nodes=nodes.num_nodes, num_devices=1)
    return link_nodes(nodes, node, store, num_devices=1, settings=settings, watch=watch)


def _agree_on_buffers(
    nodes: NodeMap, rank: int, links: NodeLinks, store: Store, watch: PeerWatch, settings: Settings
) -> int:
    """Number of each rank's buffers, for the longest round trip between two nodes; collective over the group."""
    if nodes.num_nodes == 1:
        return num_buffers(len(nodes.ranks[0]), 0)
    node = nodes.node_of(rank)
    if rank == nodes.ranks[node][0]:
        store.set(f"round trip/{node}", str(links.round_trip_us).encode())
    deadline = time.monotonic() + settings.timeout_s
    found = [
        _await(
            store,
            watch,
            f"round trip/{each}",
            f"rank {rank}: {nodes.describe(each)} did not connect",
            deadline,
        )
        for each in range(nodes.num_nodes)
    ]
    return num_buffers(sum(map(len, nodes.ranks)), max(map(int, found)))


def _collectives(
    fd: int,
    addresses: list[WorkerAddress],
    nodes: NodeMap,
    rank: int,
    num_buffers: int,
    links: NodeLinks,
    settings: Settings,
) -> _native.Collectives:
    from coarse.kernels import _native

    here = nodes.ranks[nodes.node_of(rank)]
    is_bridge = nodes.num_nodes > 1 and rank == here[0]
    plan = links.plan_of_device(0)
    collectives = _native.Collectives(
        fd=fd,
        rank=rank,
        num_ranks=len(addresses),
        buffer_bytes=buffer_bytes(len(addresses)),
        num_buffers=num_buffers,
        pidfds=[
            os.pidfd_open(address.pid) if peer in here and peer != rank else -1
            for peer, address in enumerate(addresses)
        ],
        nodes=[nodes.node_of(peer) for peer in range(len(addresses))],
        links=[fds[0] if fds else -1 for fds in links.fds_of_device(0)] if is_bridge else [],
        node_patience_ms=settings.node_patience_ms,
        resumes_links=plan is not None,
    )
    if plan is not None:
        watch_links(
            _native.GroupLinks(collectives),
            plan,
            name=lambda node: f"rank {rank}: node {node} (rank(s) {', '.join(map(str, nodes.ranks[node]))})",
            patience_s=settings.node_patience_ms / 1000,
        )
    return collectives


def buffer_bytes(num_ranks: int) -> int:
    """Size of a rank's buffer: fits into a core's own cache; smaller with very many ranks."""
    share = _MOST_SCRATCH_BYTES // (2 * num_ranks) // _LINE_BYTES * _LINE_BYTES
    needed = num_ranks * _LINE_BYTES
    return max(min(share, _LARGEST_BUFFER_BYTES), _SMALLEST_BUFFER_BYTES, needed)


def num_buffers(num_ranks: int, round_trip_us: int) -> int:
    """Number of a rank's buffers: half of them fill a link of 10 Gbit/s for its delay. Fewer with very many ranks.

    Args:
        num_ranks: Ranks of the group.
        round_trip_us: Between the nodes that are farthest from each other; 0 with one node.
    """
    needed = 2 * (1 + round_trip_us // 2 // _BUFFER_US)
    share = _MOST_SCRATCH_BYTES // (num_ranks * buffer_bytes(num_ranks)) // 2 * 2
    return max(min(needed, share, _MOST_BUFFERS), _FEWEST_BUFFERS)


def _share_memory(
    store: Store, watch: PeerWatch, nodes: NodeMap, num_buffers: int, *, rank: int, timeout_s: float
) -> int:
    """The group's scratch memory on this node: created by the leader, passed to the others by descriptor."""
    from coarse.kernels import _native

    deadline = time.monotonic() + timeout_s
    here, size = nodes.ranks[nodes.node_of(rank)], sum(map(len, nodes.ranks))
    leader = here[0]
    door = f"door/{leader}"
    if rank != leader:
        lack = f"rank {rank}: rank {leader} did not share the group's memory"
        return _receive_descriptor(_await(store, watch, door, lack, deadline), leader)
    fd = _native.create_sealed_memory(
        "coarse-torch-group",
        _native.group_scratch_bytes(size, buffer_bytes(size), num_buffers),
    )
    try:
        _hand_out(fd, store, watch, door, leader, len(here) - 1, deadline)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _hand_out(
    fd: int, store: Store, watch: PeerWatch, door: str, leader: int, num_peers: int, deadline: float
) -> None:
    # An abstract name disappears with the process, also after SIGKILL. Connecting processes are checked below.
    name, token = f"\0coarse-{secrets.token_hex(16)}", secrets.token_bytes(_TOKEN_BYTES)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(name)
        listener.listen(max(1, num_peers))
        store.set(door, token + name.encode())
        listener.settimeout(_LOOK_INTERVAL_S)
        served = 0
        while served < num_peers:
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"rank {leader}: {num_peers - served} rank(s) did not request the group's memory in time"
                )
            try:
                visitor = listener.accept()[0]
            except TimeoutError:
                watch.check()
                continue
            with visitor:
                served += _serve(visitor, fd, token)


def _serve(visitor: socket.socket, fd: int, token: bytes) -> bool:
    """Passes the descriptor to `visitor` if it is a rank of this user with the token; returns whether it was."""
    if peer_of(visitor)[1] != os.geteuid():
        return False
    visitor.settimeout(_ANSWER_TIMEOUT_S)
    try:
        if not hmac.compare_digest(visitor.recv(_TOKEN_BYTES), token):
            return False
        socket.send_fds(visitor, [b"\1"], [fd])
    except OSError:  # the visitor is silent or gone
        return False
    return True


def _await(store: Store, watch: PeerWatch, key: str, lack: str, deadline: float) -> bytes:
    """The value that another rank has put into the store. `lack` is the error without it."""
    try:
        return watch.get(store, key, max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        raise RendezvousError(f"{lack} in time") from None


def _receive_descriptor(door: bytes, leader: int) -> int:
    token, name = door[:_TOKEN_BYTES], door[_TOKEN_BYTES:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_ANSWER_TIMEOUT_S)
        try:
            connection.connect(name)
            pid, user = peer_of(connection)
            if user != os.geteuid():
                raise RendezvousError(
                    f"refused the group's memory: process {pid} of user {user} offers it, not rank {leader} of user "
                    f"{os.geteuid()}. Another process has written to the ranks' store."
                )
            connection.sendall(token)
            _, fds, _, _ = socket.recv_fds(connection, 1, 1)
        except OSError as error:
            raise RendezvousError(
                f"rank {leader}, which has the group's memory, does not answer: {error}"
            ) from error
    if len(fds) != 1:
        raise RendezvousError(f"rank {leader} did not hand out the group's memory")
    return fds[0]
