"""The initial profile: the firmware's data on NUMA memories, as links, and the plans from them."""

from __future__ import annotations

import pytest

from coarse.machine.firmware_links import firmware_links
from coarse.machine.host import MemoryAccess, NumaNode
from coarse.machine.memory_name import parse_memory_devices
from coarse.machine.partition_table import choose_partition_table
from coarse.profiler.link_plan import DEFAULT_SHARD_BYTES, plan_links
from coarse.profiler.linked import profile_from_links
from coarse.profiler.profile import DEVICES, PULL, PUSH, SIMULATED, WORKERS
from coarse.settings import Settings

NEAR = MemoryAccess(read_latency_ns=100, write_latency_ns=90, read_gbytes_per_s=200, write_gbytes_per_s=180)
FAR = MemoryAccess(read_latency_ns=250, write_latency_ns=300, read_gbytes_per_s=24, write_gbytes_per_s=18)
NODES = (
    NumaNode(node=0, cores=(0, 1), memory_bytes=1 << 30, access=NEAR),
    NumaNode(node=2, cores=(), memory_bytes=1 << 30, access=FAR),
    NumaNode(node=3, cores=(), memory_bytes=1 << 30),
)


def table_of(text, num_workers=2):
    return choose_partition_table("", num_workers=num_workers, devices=parse_memory_devices(text))


def seed(text):
    table = table_of(text)
    local_devices = [table.local_device(worker) for worker in range(table.num_workers)]
    return profile_from_links(firmware_links(table, NODES), local_devices)


@pytest.mark.parametrize(
    ("kind", "source", "target", "latency_us", "gbytes_per_s"),
    [
        (PUSH, 0, 0, 0.09, 180),  # written near
        (PUSH, 0, 1, 0.3, 18),  # written far
        (PULL, 1, 0, 0.1, 200),
        (PULL, 0, 1, 0.25, 24),
        (DEVICES, 0, 1, 0.4, 18),  # read near, written far
        (DEVICES, 1, 0, 0.34, 24),
        (WORKERS, 0, 1, 0.1, 200),  # read where worker 0's slots lie
        (WORKERS, 1, 0, 0.25, 24),
    ],
)
def test_each_path_reads_where_it_begins_and_writes_where_it_ends(
    kind, source, target, latency_us, gbytes_per_s
):
    curve = seed("numa:0,numa:2").curve(kind, source, target)
    nbytes = curve.points[-1].nbytes
    assert curve.points[-1].time_us == pytest.approx(latency_us + nbytes / gbytes_per_s / 1e3)


def test_it_is_called_simulated_and_of_this_machine():
    profile = seed("numa:0,numa:2")
    assert (profile.kind, profile.key.machine) == (SIMULATED, "host")


def test_devices_on_one_node_share_its_bandwidth():
    links = firmware_links(table_of("numa:2,numa:2"), NODES)
    assert [(bucket.name, bucket.gbytes_per_s) for bucket in links.buckets] == [
        ("numa:2 reads", 24),
        ("numa:2 writes", 18),
    ]
    assert links.path(0, links.device(0)).buckets == links.path(1, links.device(1)).buckets == (1,)


@pytest.mark.parametrize("text", ["host,numa:0", "numa:0,numa:3", "numa:0,numa:7", "numa:0,dax:/dev/dax0.0"])
def test_there_is_no_seed_unless_the_firmware_says_all_of_every_memory(text):
    assert firmware_links(table_of(text), NODES) is None


def test_routes_stay_local_by_a_seed_and_follow_it_when_asked_to():
    """As by a measured profile of this machine: a shard stays where it lies, on whichever device it is reduced."""

    def plan(**settings):
        made = plan_links(seed("numa:0,numa:2"), "seed", local_devices=(0, 1), settings=Settings(**settings))
        return [(each.lat_proxy, each.bw_proxy) for each in made.tables], made.shard_bytes

    assert plan() == ([(0, 0), (1, 1)], DEFAULT_SHARD_BYTES)
    assert plan(routing="profile") == ([(0, 0), (0, 0)], DEFAULT_SHARD_BYTES)
