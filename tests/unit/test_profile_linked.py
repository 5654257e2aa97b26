"""Plans from link tables: routes match the paper's measurements, costs include every shared link."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coarse.machine.catalogue import load_machine, machine_names
from coarse.machine.links import Bucket, LinkTable, Path
from coarse.machine.partition_table import PartitionTable
from coarse.machine.wiring import link_table
from coarse.profiler.direct_allreduce import (
    ALL_GATHER,
    ALL_TO_ALL,
    RING,
    TREE,
    TWO_WAY_RING,
    choose_collective,
    widest_collective,
)
from coarse.profiler.dual_sync import DualSyncInputs, plan_dual_sync
from coarse.profiler.linked import (
    _tree_edges,
    collectives_from_links,
    profile_from_links,
    spread_over_links,
    sync_costs_from_links,
)
from coarse.profiler.partition import plan_partition
from coarse.profiler.profile import SIMULATED, PathId
from coarse.profiler.routing import RoutingTable, plan_routing, route_shards
from coarse.profiler.shard_size import plan_shard_size
from coarse.schema import TensorSpec


def links_of(machine, table=None):
    table = PartitionTable.load(table or machine)
    links = link_table(load_machine(machine), table)
    return links, [table.local_device(worker) for worker in range(table.num_workers)]


def profile_of(machine, table=None):
    return profile_from_links(*links_of(machine, table))


def two_by_two(lane=10.0, pair=8.0, pair_both=None):
    """Two workers and two memory devices: a lane each way per endpoint, and a limit for each pair."""
    buckets = [
        Bucket(name=f"lane {end} {way}", gbytes_per_s=lane) for end in range(4) for way in ("up", "down")
    ]
    paths = [[None] * 4 for _ in range(4)]
    for source in range(4):
        for target in range(4):
            if source != target:
                taken = [2 * source, 2 * target + 1, len(buckets)]
                buckets.append(Bucket(name=f"{source} > {target}", gbytes_per_s=pair))
                paths[source][target] = taken
    for source in range(4):
        for target in range(source + 1, 4):
            if pair_both is not None:
                paths[source][target].append(len(buckets))
                paths[target][source].append(len(buckets))
                buckets.append(Bucket(name=f"{source} = {target}", gbytes_per_s=pair_both))
    return LinkTable(
        machine="test",
        num_workers=2,
        num_devices=2,
        buckets=tuple(buckets),
        paths=tuple(
            tuple(taken and Path(latency_us=3.0, buckets=tuple(taken)) for taken in row) for row in paths
        ),
    )


# ---- the paper's machines (section V-C) ----


def test_t4_local_and_remote_are_alike_and_always_local():
    profile = profile_of("aws-g4dn")
    curves = profile.both_at_once(0)
    assert all(curves[device] == curves[0] for device in curves)
    for worker, table in enumerate(plan_routing(profile)):
        assert (table.lat_proxy, table.bw_proxy) == (worker, worker)


def test_v100_local_for_small_and_remote_for_large():
    tables = plan_routing(profile_of("aws-p3"))
    for worker, table in enumerate(tables):
        assert table.lat_proxy == worker
        assert table.bw_proxy != worker
        assert 4096 < table.threshold_bytes < 2 << 20  # the paper: below 2 MB latency matters
    assert sorted(table.bw_proxy for table in tables) == [0, 1, 2, 3]


def test_p100_always_local():
    for worker, table in enumerate(plan_routing(profile_of("sdsc-p100"))):
        assert (table.lat_proxy, table.bw_proxy) == (worker, worker)


def test_v100_with_two_workers_to_a_memory_device():
    assert {table.bw_proxy for table in plan_routing(profile_of("aws-p3", "aws-p3-2to1"))} == {0, 1}


@pytest.mark.parametrize("machine", ["aws-p3", "sdsc-p100"])
def test_links_are_full_from_2_mb_on(machine):
    """COARSE, Fig 14 and section III-E."""
    profile = profile_of(machine)
    assert plan_shard_size(profile, plan_routing(profile)).nbytes == 2 << 20


def test_bidirectional_bandwidths_are_those_of_figure_8():
    local, remote = PathId(kind="both", source=0, target=0), PathId(kind="both", source=0, target=1)
    for machine, expected in {"aws-p3": (9, 16), "sdsc-p100": (25, 18)}.items():
        curves = profile_of(machine).curves
        # At 64 MiB latency is a fraction of a per cent; bytes go each way.
        measured = [2 * curves[path].peak_gbytes_per_s for path in (local, remote)]
        assert measured == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize("machine", machine_names())
def test_every_machine_has_a_plan(machine):
    table = PartitionTable.even(num_workers=2, num_devices=2)
    links = link_table(load_machine(machine), table)
    profile = profile_from_links(links, [0, 1])
    assert profile.kind == SIMULATED
    assert profile.key.machine == machine
    tables = plan_routing(profile)
    assert len(tables) == 2
    assert plan_shard_size(profile, tables).nbytes >= 4096


# ---- profiles ----


def test_one_direction_gets_the_tightest_bucket_and_its_latency():
    profile = profile_from_links(two_by_two(lane=10, pair=8), [0, 1], sizes=[8000])
    for kind in ("push", "pull", "both"):
        assert profile.curve(kind, 0, 1).time_us(8000) == pytest.approx(3 + 1)
    for kind in ("devices", "workers"):
        assert profile.curve(kind, 1, 0).time_us(8000) == pytest.approx(3 + 1)


def test_both_directions_share_what_is_duplex():
    profile = profile_from_links(two_by_two(lane=10, pair=8, pair_both=10), [0, 1], sizes=[10_000])
    assert profile.curve("push", 0, 1).time_us(10_000) == pytest.approx(3 + 1.25)
    assert profile.curve("both", 0, 1).time_us(10_000) == pytest.approx(3 + 2)


def test_a_local_device_for_each_worker():
    with pytest.raises(ValueError, match="1 local devices for 2 workers"):
        profile_from_links(two_by_two(), [0])


def test_paths_share_links_where_the_lane_is_the_limit():
    assert profile_from_links(two_by_two(lane=8, pair=8), [0, 1]).paths_share_links
    assert not profile_from_links(two_by_two(lane=10, pair=8), [0, 1]).paths_share_links
    assert profile_of("aws-g4dn").paths_share_links
    assert not profile_of("aws-p3").paths_share_links


# ---- costs ----


def test_costs_add_up_in_every_bucket():
    tables = [RoutingTable(lat_proxy=worker, bw_proxy=worker) for worker in (0, 1)]
    costs = sync_costs_from_links(two_by_two(lane=10, pair=8), tables)
    # A device's lane: its client's push or pull, and 2 (p-1)/p = 1 of the exchange.
    assert costs.proxy_s_per_byte == pytest.approx((1 + 1) / 10e9)
    assert costs.worker_s_per_byte == pytest.approx(1 / 8e9)
    assert all(shared == pytest.approx((1 / 10e9, 1 / 10e9)) for shared in costs.shared)
    assert len(costs.shared) == 4  # each worker's lane, up and down


@pytest.mark.parametrize(("proxies", "lane_bytes"), [([0, 1], 1 + 1), ([0, 0], 2)])
def test_workers_on_one_device_share_its_lane_and_need_no_exchange(proxies, lane_bytes):
    tables = [RoutingTable(lat_proxy=proxy, bw_proxy=proxy) for proxy in proxies]
    costs = sync_costs_from_links(two_by_two(lane=10, pair=1000), tables)
    assert costs.proxy_s_per_byte == pytest.approx(lane_bytes / 10e9)


@given(st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_the_exchange_of_devices_costs_the_bytes_of_its_protocol(proxies):
    """docs/design/queue-protocol.md: k contributions at each of d devices, (k+1)(d-1)/d n into and out of each."""
    table = PartitionTable.even(num_workers=4, num_devices=4)
    links = link_table(load_machine("aws-p3"), table)
    tables = [RoutingTable(lat_proxy=proxy, bw_proxy=proxy) for proxy in proxies]
    num_clients = {proxy: proxies.count(proxy) for proxy in proxies}
    if len(set(num_clients.values())) > 1:
        return  # the formula is of equally many contributions at each
    (d, k) = len(num_clients), next(iter(num_clients.values()))
    lanes = [number for number, bucket in enumerate(links.buckets) if "cci up" in bucket.name]
    crowded = dataclasses.replace(
        links,
        buckets=tuple(
            dataclasses.replace(bucket, gbytes_per_s=0.001 if number in lanes else bucket.gbytes_per_s)
            for number, bucket in enumerate(links.buckets)
        ),
    )
    costs = sync_costs_from_links(crowded, tables)
    if d > 1:
        assert costs.proxy_s_per_byte == pytest.approx((k + 1) * (d - 1) / d / 1e6)


def test_collectives_among_workers_count_the_links_that_pairs_share():
    """Two workers: all ways send every byte once, or half of it twice."""
    collectives = collectives_from_links(two_by_two(lane=10, pair=8))
    assert {name: each.beta_gbytes_per_s for name, each in collectives.items()} == pytest.approx(
        {RING: 8, ALL_GATHER: 8, ALL_TO_ALL: 8, TWO_WAY_RING: 8, TREE: 8}
    )
    assert {name: each.alpha_us for name, each in collectives.items()} == {
        RING: 6,
        ALL_GATHER: 3,
        ALL_TO_ALL: 6,
        TWO_WAY_RING: 6,
        TREE: 6,
    }
    assert choose_collective(collectives, 1 << 30) == widest_collective(collectives) == ALL_GATHER
    assert choose_collective(collectives, 1 << 10, RING) == widest_collective(collectives, RING) == RING


@pytest.mark.parametrize(("machine", "widest"), [("aws-p3", ALL_TO_ALL), ("aws-g4dn", ALL_TO_ALL)])
def test_one_latency_for_small_shards_and_few_bytes_for_large_ones(machine, widest):
    links, _ = links_of(machine)
    collectives = collectives_from_links(links)
    assert choose_collective(collectives, 4096) == ALL_GATHER
    assert choose_collective(collectives, 16 << 20) == widest_collective(collectives) == widest


def test_a_ring_uses_one_link_of_each_worker_and_all_to_all_every_one():
    """aws-p3: a pair carries 8.32 GB/s, a worker's lane 13."""
    links, _ = links_of("aws-p3")
    collectives = collectives_from_links(links)
    assert collectives[RING].beta_gbytes_per_s == pytest.approx(8.32 / 1.5)
    assert collectives[ALL_TO_ALL].beta_gbytes_per_s == pytest.approx(13 / 1.5)


def test_a_ring_of_both_directions_and_trees_use_two_links_of_each_worker():
    """aws-p3: a worker's lane limits the ring, and of the trees it carries two tensors out of an inner worker."""
    links, _ = links_of("aws-p3")
    collectives = collectives_from_links(links)
    assert collectives[TWO_WAY_RING].beta_gbytes_per_s == pytest.approx(13 / 1.5)
    assert collectives[TREE].beta_gbytes_per_s == pytest.approx(13 / 2)
    assert collectives[TWO_WAY_RING].alpha_us == pytest.approx(collectives[RING].alpha_us)
    assert collectives[TREE].alpha_us == pytest.approx(4 * 22), "two levels up, two down"


@pytest.mark.parametrize("num_workers", range(1, 33))
def test_trees_connect_all_workers_and_no_worker_has_children_in_both(num_workers):
    edges = _tree_edges(num_workers)
    trees = edges[: num_workers - 1], edges[num_workers - 1 :]
    for tree in trees:
        parents = dict(tree)
        assert len(parents) == num_workers - 1
        for worker in parents:
            path = [worker]
            while path[-1] in parents:
                path.append(parents[path[-1]])
                assert len(path) <= math.ceil(math.log2(num_workers)) + 1
    inner = [{parent for _, parent in tree} & set(dict(tree)) for tree in trees]  # without the root
    assert not inner[0] & inner[1]


def plan_bert_large(machine, forward_s, backward_s):
    """BERT-large's 1.34 GB of gradients, in equal tensors."""
    links, local_devices = links_of(machine)
    tables = plan_routing(profile_from_links(links, local_devices))
    return plan_dual_sync(
        DualSyncInputs(
            tensor_bytes=(4 << 20,) * 319,
            forward_s=forward_s,
            backward_s=backward_s,
            costs=sync_costs_from_links(links, tables),
            ready_s=tuple(backward_s * number / 318 for number in range(319)),
        )
    )


def test_dual_synchronisation_pays_on_v100_and_not_on_t4():
    """COARSE, section V-E. Times of a step of 2 x 384 tokens at 8 and 4 sustained TFLOPS."""
    v100 = plan_bert_large("aws-p3", 0.077, 0.108)
    assert v100.offloaded
    assert 0 < v100.m_bytes < 319 * (4 << 20)
    assert v100.predicted_s < v100.workers_only_s
    t4 = plan_bert_large("aws-g4dn", 0.154, 0.216)
    assert not t4.offloaded
    assert "does not pay" in t4.reason


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_large_shards_in_turn_use_the_link_that_the_paper_leaves_idle(num_workers):
    table = PartitionTable.even(num_workers=num_workers, num_devices=num_workers)
    links = link_table(load_machine("aws-p3"), table)
    profile = profile_from_links(links, [table.local_device(worker) for worker in range(num_workers)])
    alone = plan_routing(profile)
    spread = spread_over_links(links, alone)
    gain = (
        sync_costs_from_links(links, alone).proxy_s_per_byte
        / sync_costs_from_links(links, spread).proxy_s_per_byte
    )
    assert gain > 1.5
    for before, after in zip(alone, spread, strict=True):
        assert (after.lat_proxy, after.bw_proxy, after.threshold_bytes) == (
            before.lat_proxy,
            before.bw_proxy,
            before.threshold_bytes,
        )
        assert set(after.turns) == {before.lat_proxy, before.bw_proxy}


@pytest.mark.parametrize("machine", ["aws-g4dn", "sdsc-p100"])
def test_nothing_is_spread_where_one_memory_device_has_all_the_links(machine):
    table = PartitionTable.even(num_workers=2, num_devices=2)
    links = link_table(load_machine(machine), table)
    tables = plan_routing(profile_from_links(links, [0, 1]))
    assert spread_over_links(links, tables) == tables


def test_turns_are_for_large_shards_and_taken_evenly():
    table = RoutingTable(lat_proxy=0, bw_proxy=1, threshold_bytes=1024, turns=(1, 1, 0))
    specs = [
        TensorSpec(name=f"t{i}", dtype="float32", num_elements=n, op="sum")
        for i, n in enumerate([100, 9000, 10])
    ]
    plan = plan_partition(specs, shard_bytes=4096, gather_bytes=0)
    assert [shard.tensor for shard in plan.shards] == [0, *[1] * 8, 2]
    assert route_shards(table, plan, specs) == [0, 1, 1, 0, 1, 1, 0, 1, 1, 0]
