"""Routes and shards of workers on GPUs follow the measurements between their GPUs and the memory devices' GPUs."""

from __future__ import annotations

import numpy as np

from coarse.client.gpu.gpu_routes import NOTHING_TO_COPY, SIZES, plan_routes, plan_shards
from coarse.profiler.link_plan import DEFAULT_SHARD_BYTES
from coarse.profiler.routing import RoutingTable

INFINITE = [np.inf] * len(SIZES)
NOTHING = [NOTHING_TO_COPY] * len(SIZES)


def link(latency_us, gbytes_per_s):
    """Times of a path, by size."""
    return [latency_us + size / gbytes_per_s / 1e3 for size in SIZES]


def planned(*workers, local_devices):
    tables = plan_routes(np.array(workers), local_devices)
    return [(table.lat_proxy, table.bw_proxy) for table in tables]


def test_small_shards_go_where_they_arrive_first_and_large_ones_where_most_pass():
    near, wide = link(10, 9), link(20, 16)
    (table,) = plan_routes(np.array([[near, wide]]), [0])
    assert (table.route(4096), table.route(16 << 20)) == (0, 1)
    # Where both take equally long: 10 + n / 9 = 20 + n / 16, with n in thousands of bytes.
    assert abs(table.threshold_bytes - 10 / (1 / 9 - 1 / 16) * 1e3) < 0.02 * table.threshold_bytes


def test_alike_links_stay_local_and_wide_ones_are_shared_out():
    assert planned([link(10, 9)] * 2, [link(10, 9)] * 2, local_devices=[0, 1]) == [(0, 0), (1, 1)]
    narrow, wide = link(10, 9), link(10, 16)
    workers = [[narrow, wide, wide], [narrow, wide, wide]]
    assert planned(*workers, local_devices=[0, 0]) == [(1, 1), (2, 2)]


def test_tensors_that_are_their_slots_stay_there():
    assert planned([NOTHING, link(1, 100)], local_devices=[0]) == [(0, 0)]


def test_a_memory_device_out_of_reach_takes_nothing():
    assert planned([INFINITE, link(10, 9)], local_devices=[0]) == [(1, 1)]
    assert planned([link(10, 9), INFINITE], local_devices=[0]) == [(0, 0)]


def test_workers_without_a_gpu_stay_with_their_own():
    assert planned([INFINITE, INFINITE], [link(1, 1), link(1, 9)], local_devices=[1, 0]) == [(1, 1), (1, 1)]


def test_shards_fill_the_link_of_the_worker_that_needs_the_largest():
    tables = [RoutingTable(lat_proxy=0, bw_proxy=0), RoutingTable(lat_proxy=0, bw_proxy=1)]
    quick, slow = link(10, 9), link(40, 9)  # 9 times latency times bandwidth: 810 kB, 3.2 MB
    assert plan_shards(np.array([[quick, slow]]), tables[:1]).nbytes == 1 << 20
    size = plan_shards(np.array([[quick, slow], [quick, slow]]), tables)
    assert size.nbytes == 4 << 20
    assert size.reason.startswith("smallest tested size that reaches 90% of the highest bandwidth")


def test_links_that_small_shards_fill_leave_shards_at_their_default_size():
    size = plan_shards(np.array([[link(1, 1)]]), [RoutingTable(lat_proxy=0, bw_proxy=0)])
    assert size.nbytes == DEFAULT_SHARD_BYTES
    assert size.reason.startswith("the default, for links need less (the smallest tested size")


def test_where_nothing_is_copied_no_link_determines_shards():
    local = RoutingTable(lat_proxy=0, bw_proxy=0)
    assert plan_shards(np.array([[NOTHING, link(1, 9)], [INFINITE, INFINITE]]), [local, local]) is None
