"""Small jobs for tests of schemes."""

from __future__ import annotations

from coarse.bench.replay.trace import ComputeTrace, GradientEvent
from coarse.machine.links import Bucket, LinkTable, Path
from coarse.simulator.machines.network import LinkNetwork
from coarse.simulator.setup import Setup

ELEMENTS = (2_000_000, 300, 9_000_000, 70_000, 4_000_000)


def small_trace(elements=ELEMENTS):
    events = tuple(
        GradientEvent(
            name=f"t{number}", num_elements=num, dtype="float32", ready=(number + 1) / len(elements)
        )
        for number, num in enumerate(elements)
    )
    return ComputeTrace(
        model="small",
        batch=1,
        sequence=0,
        forward_s=1e-3,
        backward_s=2e-3,
        flops=1e9,
        events=events,
        source="made up",
    )


def small_setup(machine="cxl-switch", **changes):
    values = {"machine": machine, "trace": small_trace(), "num_workers": 8, "workers_per_switch": 4}
    return Setup(**{**values, **changes})


def as_link_network(network):
    """The same network from a link table."""
    names = list(network.capacities)
    buckets = tuple(
        Bucket(name=name, gbytes_per_s=capacity / 1e9) for name, capacity in network.capacities.items()
    )
    ends = range(network.num_workers + network.num_devices)

    def path(source, target):
        route = network.route(source, target)
        return Path(latency_us=route.latency_s * 1e6, buckets=tuple(map(names.index, route.buckets)))

    links = LinkTable(
        machine=network.machine,
        num_workers=network.num_workers,
        num_devices=network.num_devices,
        buckets=buckets,
        paths=tuple(tuple(None if one == two else path(one, two) for two in ends) for one in ends),
    )
    local = tuple(network.local_device(worker) - network.num_workers for worker in range(network.num_workers))
    return LinkNetwork(links=links, local_devices=local)
