"""Checks that the nodes of a job reach each other, before a library connects that would wait without a word."""

from __future__ import annotations

from collections.abc import Sequence

from coarse.env import WorkerIdentity
from coarse.errors import RendezvousError
from coarse.rendezvous.workers import NodeMap, PeerWatch, WorkerAddress
from coarse.security.node_ports import NodePorts
from coarse.settings import Settings
from coarse.startup.node_address import try_address_of_this_node
from coarse.startup.node_links import link_nodes
from coarse.store import Store

_PATIENCE_S = 5.0  # for the reason that another worker gives at the same time limit


def watch_for_start(identity: WorkerIdentity, settings: Settings) -> PeerWatch:
    """A watch of this job's workers, also of those of other nodes, before there is a session."""
    has_other_nodes = identity.local_world_size < identity.world_size
    return PeerWatch(
        identity,
        reached_at=try_address_of_this_node(settings) if has_other_nodes else "",
        ports=NodePorts.parse(settings.node_ports),
    )


def check_reach(
    rank: int, addresses: Sequence[WorkerAddress], store: Store, settings: Settings, watch: PeerWatch
) -> None:
    """Waits until every node has reached all others; all workers call it.

    Args:
        rank: Rank of this worker.
        addresses: Addresses of all workers, by rank.
        store: The store in which they have met.
        settings: Time-out, address and ports.
        watch: Notices workers that die during the wait.

    Raises:
        RendezvousError: If nodes cannot reach each other, or have too few ports; all workers give one reason.
        WorkerLostError: If a worker dies meanwhile.
    """
    nodes = NodeMap.of_addresses(addresses)
    if nodes.num_nodes > 1:
        watch.follow(store)
        with watch.telling():
            _reach(rank, nodes, store, settings, watch)


def _reach(rank: int, nodes: NodeMap, store: Store, settings: Settings, watch: PeerWatch) -> None:
    node = nodes.node_of(rank)
    NodePorts.parse(settings.node_ports).check(len(nodes.ranks[node]))
    watch.require_liveness()
    if rank == nodes.ranks[node][0]:
        link_nodes(nodes, node, store, num_devices=1, settings=settings, watch=watch).close()
        store.set(f"reached/{node}", b"")
    for other in range(nodes.num_nodes):
        try:
            watch.get(store, f"reached/{other}", settings.timeout_s + _PATIENCE_S)
        except TimeoutError:
            raise RendezvousError(
                f"worker {rank}: {nodes.describe(other)} has not reached the other nodes within "
                f"{settings.timeout_s:.1f} s (COARSE_TIMEOUT_S). Look at the output of its workers."
            ) from None
