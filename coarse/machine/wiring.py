"""Turns a machine and a partition table into buckets and paths between endpoints (docs/design/machines.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from coarse.machine.links import Bucket, LinkTable, Path

if TYPE_CHECKING:
    from coarse.machine.description import Link, Machine, Network, PathClass
    from coarse.machine.partition_table import PartitionTable


def link_table(machine: Machine, table: PartitionTable, *, num_nodes: int = 1) -> LinkTable:
    """Builds the links between the endpoints of `table` on `machine`.

    With several nodes, each is such a machine with such a table. The table that is returned has the workers of all
    nodes, node by node, and then their memory devices; the names of its buckets begin with the node.

    Raises:
        ValueError: If the table does not fit the machine; if there are several nodes and the machine has no network.
    """
    check_network(machine, num_nodes)
    endpoints = _place_gpus(machine, table) if machine.topology.num_gpus else _place_expanders(table)
    if num_nodes > 1:
        everywhere = [_on_node(node, endpoint) for node in range(num_nodes) for endpoint in endpoints]
        endpoints = sorted(everywhere, key=lambda endpoint: endpoint.is_device)
    buckets = _Buckets()
    paths = tuple(
        tuple(None if source is target else _wire(machine, buckets, source, target) for target in endpoints)
        for source in endpoints
    )
    return LinkTable(
        machine=machine.name,
        num_workers=num_nodes * table.num_workers,
        num_devices=num_nodes * table.num_devices,
        buckets=tuple(buckets.buckets),
        paths=paths,
    )


def check_network(machine: Machine, num_nodes: int) -> None:
    """Raises ValueError if there are several nodes and the machine's file describes no network between them."""
    if num_nodes > 1 and machine.network is None:
        raise ValueError(
            f"the file of machine {machine.name} describes no network, but this job has {num_nodes} nodes; add a "
            "[network] to the file (docs/design/machines.md), or start the job on one node"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Endpoint:
    """The place of one endpoint.

    Args:
        name: Name for its buckets.
        is_device: Whether it is a memory device.
        gpu: Its GPU; -1 on machines with expanders.
        scopes: Its instance of each scope; it uses no link of missing scopes.
        node: Name of its node; "" if there is one only.
    """

    name: str
    is_device: bool
    gpu: int
    scopes: dict[str, str]
    node: str = ""


def _on_node(node: int, endpoint: _Endpoint) -> _Endpoint:
    name = f"node {node}"
    return replace(
        endpoint,
        name=f"{name} {endpoint.name}",
        scopes={scope: f"{name} {place}" for scope, place in endpoint.scopes.items()},
        node=name,
    )


class _Buckets:
    """Numbers buckets in the order of first use."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self._numbers: dict[str, int] = {}

    def number(self, name: str, gbytes_per_s: float) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.buckets)
            self.buckets.append(Bucket(name=name, gbytes_per_s=gbytes_per_s))
        return self._numbers[name]


def _place_gpus(machine: Machine, table: PartitionTable) -> list[_Endpoint]:
    topology = machine.topology
    workers, devices = _choose_gpus(machine, table)
    return [
        _Endpoint(
            name=f"gpu {gpu}",
            is_device=position >= len(workers),
            gpu=gpu,
            scopes={
                "endpoint": f"gpu {gpu}",
                "switch": f"switch {topology.switch_of(gpu)}",
                "socket": f"socket {topology.socket_of(gpu)}",
            },
        )
        for position, gpu in enumerate([*workers, *devices])
    ]


def _choose_gpus(machine: Machine, table: PartitionTable) -> tuple[list[int], list[int]]:
    """The GPU of each worker and memory device: from the table, or assigned one after the other."""
    available = machine.topology.num_gpus
    if table.worker_gpus:
        devices = [device.gpu for device in table.devices if device.gpu is not None]
        for gpu in (*table.worker_gpus, *devices):
            if gpu >= available:
                raise ValueError(
                    f"the partition table names GPU {gpu}, but {machine.name} has {available}, numbered from 0"
                )
        return list(table.worker_gpus), devices
    needed = table.num_workers + table.num_devices
    if needed > available:
        raise ValueError(
            f"{table.num_workers} workers and {table.num_devices} memory devices need {needed} GPUs, but "
            f"{machine.name} has {available}"
        )
    # In the order of the switches, each memory device directly after its workers, so that pairs share a switch.
    free = iter([gpu for switch in machine.topology.switches for gpu in switch])
    workers, devices = [0] * table.num_workers, [0] * table.num_devices
    for number, device in enumerate(table.devices):
        for worker in device.workers:
            workers[worker] = next(free)
        devices[number] = next(free)
    return workers, devices


def _place_expanders(table: PartitionTable) -> list[_Endpoint]:
    workers = [
        _Endpoint(name=f"worker {worker}", is_device=False, gpu=-1, scopes={"host": "host"})
        for worker in range(table.num_workers)
    ]
    devices = [
        _Endpoint(
            name=f"md{device}",
            is_device=True,
            gpu=-1,
            scopes={"endpoint": f"md{device}", "switch": "switch", "host": "host"},
        )
        for device in range(table.num_devices)
    ]
    return [*workers, *devices]


def _wire(machine: Machine, buckets: _Buckets, source: _Endpoint, target: _Endpoint) -> Path:
    links = {link.name: link for link in machine.links}
    path: PathClass | Network
    if source.node != target.node:
        assert machine.network is not None  # check_network()
        path = machine.network
        taken = list(_interface_buckets(buckets, path, source, target))
    else:
        path = _path_class(machine, source, target)
        taken = list(_own_buckets(buckets, path, source, target))
    for name in path.over:
        taken += _link_buckets(buckets, links[name], source, target)
    return Path(latency_us=float(path.latency_us.value), buckets=tuple(dict.fromkeys(taken)))


def _path_class(machine: Machine, source: _Endpoint, target: _Endpoint) -> PathClass:
    if source.gpu < 0:
        kinds = sorted(("worker", "device")[end.is_device] for end in (source, target))
        return machine.paths["-".join(reversed(kinds))]
    if source.is_device and target.is_device and "cci" in machine.paths:
        return machine.paths["cci"]
    for link in machine.direct_links:
        if {source.gpu, target.gpu} == set(link.between):
            return link.path
    if source.scopes["switch"] == target.scopes["switch"]:
        return machine.paths["local"]
    if source.scopes["socket"] != target.scopes["socket"] and "far" in machine.paths:
        return machine.paths["far"]
    return machine.paths["remote"]


def _own_buckets(buckets: _Buckets, path: PathClass, source: _Endpoint, target: _Endpoint) -> Iterator[int]:
    """Buckets of the two endpoints alone: their direction, and both directions together."""
    if path.gbytes_per_s is not None:
        yield buckets.number(f"{source.name} > {target.name}", float(path.gbytes_per_s.value))
    if path.duplex_gbytes_per_s is not None:
        yield buckets.number(_both(source.name, target.name), float(path.duplex_gbytes_per_s.value))


def _interface_buckets(
    buckets: _Buckets, network: Network, source: _Endpoint, target: _Endpoint
) -> Iterator[int]:
    """Buckets of the two nodes' interfaces: outgoing traffic of one, incoming traffic of the other."""
    yield buckets.number(f"{source.node} network out", float(network.gbytes_per_s.value))
    yield buckets.number(f"{target.node} network in", float(network.gbytes_per_s.value))


def _link_buckets(buckets: _Buckets, link: Link, source: _Endpoint, target: _Endpoint) -> Iterator[int]:
    """Buckets shared with others: the source's upward link, the target's downward link."""
    if link.scope == "between sockets":
        one, other = source.scopes["socket"], target.scopes["socket"]
        if one != other:
            yield buckets.number(f"{link.name} {one} > {other}", float(link.gbytes_per_s.value))
            if link.duplex_gbytes_per_s is not None:
                yield buckets.number(
                    f"{link.name} {_both(one, other)}", float(link.duplex_gbytes_per_s.value)
                )
        return
    for end, direction in ((source, "up"), (target, "down")):
        place = end.scopes.get(link.scope)
        if place is not None:
            figure = link.gbytes_per_s
            if end.is_device and direction == "up":
                figure = link.read_gbytes_per_s or figure
            yield buckets.number(f"{place} {link.name} {direction}", float(figure.value))
            if link.duplex_gbytes_per_s is not None:
                yield buckets.number(f"{place} {link.name} both", float(link.duplex_gbytes_per_s.value))


def _both(one: str, other: str) -> str:
    return " = ".join(sorted((one, other)))
