"""Bytes between memory devices while they reduce a shard, as shares of its bytes (docs/design/queue-protocol.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from coarse.profiler.dual_sync import ring_factor
from coarse.simulator.events.fair_sharing import Usage
from coarse.simulator.machines.network import Network, Transfer, device_copies, largest_latency_s, usage_of

EXCHANGE, RING, DIRECT = "exchange", "ring", "direct"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One part of a shard's way between memory devices.

    Args:
        usage: Bytes in each bucket per byte of the shard.
        latency_s: Latencies of its iterations together.
        num_messages: Messages that one memory device sends.
    """

    usage: Usage
    latency_s: float
    num_messages: int


def stages(network: Network, proxies: Sequence[int], algorithm: str) -> tuple[Stage, Stage]:
    """The stages before and after the reduction.

    Args:
        network: The network.
        proxies: The memory device to which each worker pushed, by worker; all workers.
        algorithm: EXCHANGE, DIRECT or RING. A ring reduces on its way, so that it is all in the first stage.

    Raises:
        ValueError: If the algorithm is unknown.
    """
    clients = Counter(proxies)
    if algorithm == RING:
        return _ring(network, clients), Stage(usage=(), latency_s=0.0, num_messages=0)
    if algorithm not in (EXCHANGE, DIRECT):
        raise ValueError(f"no algorithm {algorithm!r} between memory devices: exchange, ring or direct")
    holders, copies = len(clients), device_copies(network)
    # Each memory device reduces a part of the shard: that of its clients, or its turn among all shards.
    share = {
        device: (num / len(proxies) if algorithm == EXCHANGE else 1 / holders)
        for device, num in clients.items()
    }
    there, back = list[Transfer](), list[Transfer]()
    for source, target in _pairs(network, clients):
        results = 1 if algorithm == EXCHANGE else clients[target]
        there.append(Transfer(source, target, clients[source] * share[target], copies))
        back.append(Transfer(source, target, share[source] * results, copies))
    return _stage(network, there, holders), _stage(network, back, holders)


def bytes_read(network: Network, proxies: Sequence[int]) -> Mapping[int, float]:
    """Contributions that each simulated memory device reads, in bytes per byte of a shard."""
    clients = Counter(proxies)
    return {device: float(clients[device]) for device in network.devices if clients[device]}


def _pairs(network: Network, clients: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    for source in network.devices:
        if source in clients:
            yield from ((source, target) for target in clients if target != source)


def _stage(network: Network, transfers: Sequence[Transfer], num_holders: int) -> Stage:
    latency_s = largest_latency_s(network, ((each.source, each.target) for each in transfers))
    return Stage(usage=usage_of(network, transfers), latency_s=latency_s, num_messages=num_holders - 1)


def _ring(network: Network, clients: Mapping[int, int]) -> Stage:
    members = sorted(clients)
    pairs = [(one, members[(place + 1) % len(members)]) for place, one in enumerate(members)]
    pairs = pairs if len(members) > 1 else []
    num_iterations = 2 * (len(members) - 1)
    return Stage(
        usage=usage_of(network, (Transfer(*pair, nbytes=ring_factor(len(members))) for pair in pairs)),
        latency_s=num_iterations * largest_latency_s(network, pairs),
        num_messages=num_iterations,
    )
