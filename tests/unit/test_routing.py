"""RoutingTable: small shards go to the nearest proxy, others to the widest one; planned from curves alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import SIZES, curves, key_of, line, profile_of, sizes

from coarse.profiler.curve import Curve
from coarse.profiler.partition import plan_partition
from coarse.profiler.profile import BOTH, EMULATED, PathId
from coarse.profiler.routing import (
    TIE_FRACTION,
    RoutingTable,
    is_better,
    plan_routing,
    predict_time_us,
    route_shards,
    sizes_in_doubt,
)
from coarse.schema import TensorSpec

curves_by_proxy = st.dictionaries(st.integers(0, 7), curves, min_size=1, max_size=5)
histograms = st.dictionaries(sizes, st.integers(1, 100), min_size=1, max_size=10)
proxies = st.integers(0, 3)
tables = st.builds(RoutingTable, lat_proxy=proxies, bw_proxy=proxies, threshold_bytes=sizes)
curves_of_four = st.fixed_dictionaries(dict.fromkeys(range(4), curves))


@pytest.mark.parametrize(("nbytes", "proxy"), [(0, 1), (4095, 1), (4096, 2), (1 << 40, 2)])
def test_shards_below_the_threshold_take_the_shortest_way(nbytes, proxy):
    assert RoutingTable(lat_proxy=1, bw_proxy=2, threshold_bytes=4096).route(nbytes) == proxy


def test_without_a_threshold_everything_takes_the_widest_way():
    assert RoutingTable(lat_proxy=1, bw_proxy=2).route(0) == 2


@pytest.mark.parametrize("wrong", [{"lat_proxy": -1}, {"bw_proxy": -1}, {"threshold_bytes": -1}])
def test_negative_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match="no negative numbers"):
        RoutingTable(**{"lat_proxy": 0, "bw_proxy": 0, **wrong})


def test_reasons_do_not_make_tables_differ():
    assert RoutingTable(lat_proxy=0, bw_proxy=0, reasons=("why",)) == RoutingTable(lat_proxy=0, bw_proxy=0)


# ---- from curves ----


def test_near_for_small_and_wide_for_large():
    table = RoutingTable.from_profiles({0: line(5, 4.5), 1: line(10, 8)}, local_proxy=0)
    crossing = 5 / (1 / 4.5e3 - 1 / 8e3)
    assert (table.lat_proxy, table.bw_proxy) == (0, 1)
    assert table.threshold_bytes == math.ceil(crossing)
    assert [table.route(n) for n in (4096, 1 << 20)] == [0, 1]


def test_one_proxy_where_the_near_one_is_the_wide_one():
    table = RoutingTable.from_profiles({0: line(5, 12.5), 1: line(10, 9)}, local_proxy=0)
    assert (table.lat_proxy, table.bw_proxy, table.threshold_bytes) == (0, 0, 0)


@pytest.mark.parametrize("local", [0, 1, 2])
def test_of_equal_proxies_the_local_one_is_taken(local):
    curves = {proxy: line(10 * (1 + TIE_FRACTION / 2 * (proxy != local)), 6) for proxy in range(3)}
    table = RoutingTable.from_profiles(curves, local_proxy=local)
    assert (table.lat_proxy, table.bw_proxy) == (local, local)


def test_of_equal_remote_proxies_the_lower_number_is_taken():
    curves = {0: line(5, 4.5), 1: line(10, 8), 2: line(10, 8)}
    assert RoutingTable.from_profiles(curves, local_proxy=0).bw_proxy == 1


def test_of_equal_remote_proxies_the_one_that_fewer_others_take():
    curves = {0: line(5, 4.5), 1: line(10, 8), 2: line(10, 8)}
    assert RoutingTable.from_profiles(curves, local_proxy=0, load={0: 0, 1: 1}).bw_proxy == 2


def test_a_wide_proxy_that_never_overtakes_is_not_used():
    # md1 is alike at the largest size and local, yet slower everywhere.
    curves = {0: line(5, 8), 1: line(20, 8)}
    table = RoutingTable.from_profiles(curves, local_proxy=1)
    assert (table.lat_proxy, table.bw_proxy, table.threshold_bytes) == (0, 0, 0)


def test_a_near_proxy_that_is_only_alike_is_not_used():
    curves = {0: line(5.1, 4), 1: line(5, 8)}
    table = RoutingTable.from_profiles(curves, local_proxy=0)
    assert (table.lat_proxy, table.bw_proxy, table.threshold_bytes) == (1, 1, 0)


def test_reasons_say_what_was_compared():
    table = RoutingTable.from_profiles({0: line(5, 4.5), 1: line(10, 8)}, local_proxy=0)
    lat, bw, threshold = table.reasons
    assert lat.startswith(
        "md0 (local) has the lowest latency: 5.9 us for 4096 bytes, others need 10.5 us or more"
    )
    assert bw.startswith("md1 (remote) has the highest bandwidth")
    assert threshold == f"md1 stays ahead of md0 from {table.threshold_bytes} bytes on"


def test_the_local_proxy_must_have_a_curve():
    with pytest.raises(ValueError, match="the local proxy md3 has no curve"):
        RoutingTable.from_profiles({0: line(1, 1)}, local_proxy=3)


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=8), st.integers(64, 1 << 18), tables)
def test_each_shard_goes_where_its_size_says(lengths, shard_bytes, table):
    specs = [
        TensorSpec(name=str(i), dtype="bfloat16", num_elements=length) for i, length in enumerate(lengths)
    ]
    plan = plan_partition(specs, shard_bytes=shard_bytes, gather_bytes=0)
    assert route_shards(table, plan, specs) == [table.route(2 * shard.num_elements) for shard in plan.shards]


@given(curves_by_proxy, st.randoms(), st.data())
def test_curves_in_any_order_give_the_same_table(curves, random, data):
    local = data.draw(st.sampled_from(sorted(curves)))
    table = RoutingTable.from_profiles(curves, local_proxy=local)
    items = list(curves.items())
    random.shuffle(items)
    again = RoutingTable.from_profiles(dict(items), local_proxy=local)
    assert (table, table.reasons) == (again, again.reasons)


@given(curves_by_proxy, st.data())
def test_proxies_and_threshold_against_brute_force(curves, data):
    local = data.draw(st.sampled_from(sorted(curves)))
    table = RoutingTable.from_profiles(curves, local_proxy=local)
    smallest = min(curve.points[0].nbytes for curve in curves.values())
    largest = max(curve.points[-1].nbytes for curve in curves.values())
    curves = {**curves, local: curves[local].at_its_least()}  # by which the default is judged
    lat, bw = curves[table.lat_proxy], curves[table.bw_proxy]

    def is_among_the_best(curve, nbytes):
        return all(
            curve.time_us(nbytes) <= (1 + TIE_FRACTION) * other.time_us(nbytes) * (1 + 1e-9)
            for other in curves.values()
        )

    if table.lat_proxy != table.bw_proxy:
        assert is_among_the_best(lat, smallest)
        assert is_among_the_best(bw, largest)
        every_size = {p.nbytes for c in curves.values() for p in c.points}
        beyond = {n for n in every_size if n >= table.threshold_bytes} | {table.threshold_bytes}
        assert all(bw.time_us(n) <= lat.time_us(n) * (1 + 1e-6) for n in beyond)
        below = table.threshold_bytes - 1
        assert bw.time_us(below) > lat.time_us(below) * (1 - 1e-6)
    else:
        assert is_among_the_best(lat, smallest) or is_among_the_best(lat, largest)


# ---- noisy measurements ----


def noisy(curve, *, from_bytes=0, delay=1.0, spread=0.0):
    """The curve with every time from a size on `delay` times as long, and a spread of that part of it."""
    return Curve(
        points=tuple(
            replace(p, time_us=delay * p.time_us, spread_us=spread * delay * p.time_us)
            if p.nbytes >= from_bytes
            else p
            for p in curve.points
        )
    )


def test_the_local_proxy_is_kept_where_its_repeats_spread_too_widely():
    curves = {0: noisy(line(5, 8), delay=2.5, spread=0.3), 1: line(10, 8)}
    table = RoutingTable.from_profiles(curves, local_proxy=0)
    assert (table.lat_proxy, table.bw_proxy) == (0, 0)
    assert "md0 (local) is kept, because repeats spread too widely" in table.reasons[0]
    assert "lowest latency" in table.reasons[0]
    assert "highest bandwidth" in table.reasons[1]
    assert sizes_in_doubt(curves, 0) == SIZES


def test_another_proxy_is_taken_where_its_lead_is_beyond_the_spread():
    curves = {0: noisy(line(5, 4.5), spread=0.1), 1: noisy(line(10, 8), spread=0.1)}
    table = RoutingTable.from_profiles(curves, local_proxy=0)
    assert (table.lat_proxy, table.bw_proxy) == (0, 1)
    assert sizes_in_doubt(curves, 0) == (64 << 10, 128 << 10, 256 << 10)  # around the threshold
    without = RoutingTable.from_profiles({0: line(5, 4.5), 1: line(10, 8)}, local_proxy=0)
    assert table.threshold_bytes > without.threshold_bytes  # only from where there is no doubt


def test_the_threshold_lies_where_no_repeats_disagree_any_more():
    curves = {0: noisy(line(5, 4.5), from_bytes=1 << 20, spread=0.4), 1: line(10, 8)}
    curves[0] = Curve(points=(*curves[0].points[:-1], line(5, 4.5).points[-1]))
    table = RoutingTable.from_profiles(curves, local_proxy=0)
    assert (table.lat_proxy, table.bw_proxy) == (0, 1)
    assert SIZES[-2] < table.threshold_bytes <= SIZES[-1]
    assert sizes_in_doubt(curves, 0) == tuple(size for size in SIZES[:-1] if size >= 1 << 20)


def test_a_wide_spread_of_a_remote_proxy_gives_it_no_advantage():
    curves = {0: line(5, 8), 1: noisy(line(10, 8), delay=2.5, spread=0.9)}
    assert RoutingTable.from_profiles(curves, local_proxy=0).bw_proxy == 0
    assert sizes_in_doubt(curves, 0) == ()


def test_one_worker_with_noise_changes_no_other_workers_routes():
    """As on emulated links of aws-p3 under load, where one of four workers sent everything to a remote device."""
    key = key_of(local_devices=range(4), num_devices=4, machine="aws-p3")
    profile = profile_of(key, local=(5, 4.5), remote=(10, 8), kind=EMULATED)
    path = PathId(kind=BOTH, source=1, target=1)
    delayed = noisy(profile.curves[path], delay=3.0, spread=0.7)
    tables = plan_routing(replace(profile, curves={**profile.curves, path: delayed}))
    assert [table.lat_proxy for table in tables] == [0, 1, 2, 3]
    assert "is kept" in tables[1].reasons[0]
    assert not any("is kept" in why for worker in (0, 2, 3) for why in tables[worker].reasons)


# ---- all workers ----


def test_workers_do_not_all_take_the_same_of_equal_remote_proxies():
    profile = profile_of(key_of(local_devices=range(4), num_devices=4), local=(5, 4.5), remote=(10, 8))
    assert [table.bw_proxy for table in plan_routing(profile)] == [1, 0, 3, 2]
    assert [table.lat_proxy for table in plan_routing(profile)] == [0, 1, 2, 3]


def test_two_workers_to_a_memory_device():
    profile = profile_of(key_of(local_devices=(0, 0, 1, 1), num_devices=2), local=(5, 4.5), remote=(10, 8))
    assert [table.bw_proxy for table in plan_routing(profile)] == [1, 1, 0, 0]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.data())
def test_every_worker_plans_the_same_tables(local_devices, data):
    key = key_of(local_devices=local_devices, num_devices=4)
    drawn = data.draw(st.lists(curves, min_size=4, max_size=4))
    links = {link: drawn[(link.source + link.target) % 4] for link in key.paths()}
    for link in links:
        if link.kind in ("push", "pull"):  # else both at once might contradict them
            links[link] = links[type(link)(kind="both", source=link.source, target=link.target)]
    here = profile_of(key, curves=links)
    there = profile_of(key, curves=dict(reversed(links.items())))
    assert here == there
    assert plan_routing(here) == plan_routing(there)


# ---- hysteresis ----


@given(tables, curves_of_four, histograms)
def test_the_predicted_time_is_that_of_each_shard_on_its_route(table, curves, histogram):
    expected = sum(count * curves[table.route(n)].time_us(n) for n, count in histogram.items())
    assert predict_time_us(table, curves, histogram) == pytest.approx(expected)


@given(tables, tables, curves_of_four, histograms, st.floats(0, 0.9))
def test_no_change_back_and_forth(new, old, curves, histogram, margin):
    assert not (
        is_better(new, old, curves, histogram, margin=margin)
        and is_better(old, new, curves, histogram, margin=margin)
    )
    assert not is_better(old, old, curves, histogram, margin=margin)


@pytest.mark.parametrize(("gain", "adopted"), [(0.05, False), (0.2, True)])
def test_a_change_needs_the_margin(gain, adopted):
    curves = {0: line(0, 1), 1: line(0, 1 / (1 - gain))}
    old, new = (RoutingTable(lat_proxy=proxy, bw_proxy=proxy) for proxy in (0, 1))
    assert is_better(new, old, curves, {SIZES[5]: 10}, margin=0.1) is adopted


def test_only_sizes_that_occur_count():
    near, wide = RoutingTable(lat_proxy=0, bw_proxy=0), RoutingTable(lat_proxy=1, bw_proxy=1)
    curves = {0: line(5, 1), 1: line(50, 10)}
    assert is_better(wide, near, curves, {1 << 24: 1})
    assert not is_better(wide, near, curves, {4096: 1000})
    assert is_better(near, wide, curves, {4096: 1000})


@pytest.mark.parametrize("margin", [-0.1, 1.0])
def test_a_margin_out_of_range_is_refused(margin):
    table = RoutingTable(lat_proxy=0, bw_proxy=0)
    with pytest.raises(ValueError, match="margin="):
        is_better(table, table, {0: line(1, 1)}, {1: 1}, margin=margin)
