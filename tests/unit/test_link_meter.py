"""A profiler's measurements: every path once, by a worker at one end of it, and each size equally."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coarse.machine.partition_table import PartitionTable
from coarse.profiler.profile import profile_key
from coarse.profiler.routing import RoutingTable, sizes_in_doubt
from coarse.tuning.measure import (
    MOST_REPEATS,
    SIZES,
    LinkMeter,
    MeasurePlan,
    paths_of_worker,
    summarise,
    transfers_of,
)

tables = st.builds(PartitionTable.even, num_workers=st.integers(2, 9), num_devices=st.integers(1, 9))


class Links:
    """Links whose transfers take a given time on the processor's clock."""

    def __init__(self, s_per_byte):
        self._s_per_byte = s_per_byte
        self.taken = []

    def time_s(self, probes, nbytes):
        until_s = time.monotonic() + self._s_per_byte * nbytes
        while time.monotonic() < until_s:
            pass
        self.taken.append(nbytes)
        return self._s_per_byte * nbytes


def test_sizes_reach_from_4_kib_to_64_mib():
    assert (SIZES[0], SIZES[-1]) == (4 << 10, 64 << 20)
    assert all(large == 2 * small for small, large in pairwise(SIZES))


@given(tables)
def test_workers_measure_each_path_of_a_profile_once(table):
    measured = [path for worker in range(table.num_workers) for path in paths_of_worker(worker, table)]
    assert sorted(measured) == sorted(profile_key(table, "host").paths())


@given(tables)
def test_a_probe_starts_and_ends_where_its_path_does(table):
    for worker in range(table.num_workers):
        for path in paths_of_worker(worker, table):
            probes = transfers_of(path, table)
            assert len(probes) == (2 if path.kind == "both" else 1)
            for probe in probes:
                if path.kind == "devices":
                    assert (probe.device, probe.target) == (path.source, path.target)
                    owners = table.devices[path.target].workers
                    assert probe.slot_owner in owners or not owners
                elif path.kind == "workers":
                    assert (probe.device, probe.target) == (table.local_device(path.source), path.target)
                else:
                    assert probe.device == path.target


def test_everything_is_measured_once_even_without_time():
    links = Links(0.0)
    transfers = {path: [] for path in paths_of_worker(0, PartitionTable.even(num_workers=2, num_devices=2))}
    repeats = LinkMeter(links, transfers, 0.0).measure([1024, 16, 64], lambda done: None)
    assert {path: {size: len(times) for size, times in of.items()} for path, of in repeats.items()} == {
        path: {16: 1, 64: 1, 1024: 1} for path in transfers
    }
    assert links.taken[-3 * len(transfers) :] == sorted(links.taken[-3 * len(transfers) :]), (
        "small sizes first"
    )


def test_small_sizes_are_repeated_more_often_and_time_is_kept():
    links = Links(1e-9)
    transfers = {path: [] for path in paths_of_worker(0, PartitionTable.even(num_workers=2, num_devices=1))}
    shares = []
    begin_s = time.monotonic()
    repeats = LinkMeter(links, transfers, 0.4).measure([1000, 1_000_000, 8_000_000], shares.append)
    took_s = time.monotonic() - begin_s
    counts = Counter({size: len(next(iter(repeats.values()))[size]) for size in (1000, 1_000_000, 8_000_000)})
    assert counts[1000] == MOST_REPEATS
    assert counts[1000] >= counts[1_000_000] > counts[8_000_000] >= 1
    assert took_s < 5.0  # 0.4, and the load of other tests
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


class DelayedLinks:
    """Two equal links; the first transfers to memory device 0 of both directions are delayed, as on a busy host."""

    def __init__(self, delays):
        self._delays = iter(delays)
        self.taken = Counter()

    def time_s(self, probes, nbytes):
        device = probes[0].device
        self.taken[device, nbytes] += 1
        delay_s = next(self._delays, 0.0) if device == 0 and len(probes) == 2 else 0.0
        return 1e-5 + 1e-9 * nbytes + delay_s


def settled(delays, *, most_s, worker=0):
    table = PartitionTable.even(num_workers=2, num_devices=2)
    transfers = {path: transfers_of(path, table) for path in paths_of_worker(worker, table)}
    links = DelayedLinks(delays)
    meter = LinkMeter(links, transfers, 0.0)
    repeats = meter.measure([4096, 1 << 20], lambda done: None)
    meter.resolve_doubts(worker, table.local_device(worker), is_emulated=True, most_s=most_s)
    both = [path for path in repeats if path.kind == "both"]
    return {path.target: summarise(repeats[path], is_emulated=True) for path in both}, repeats, both


def test_routes_rest_on_two_repeats_at_least_even_without_time():
    _, repeats, both = settled([], most_s=0.0)
    assert {len(times) for path in both for times in repeats[path].values()} == {2}


def test_what_noise_leaves_in_doubt_is_measured_again_until_repeats_agree():
    curves, repeats, both = settled([0.01, 0.02, 0.03, 0.04], most_s=60.0)
    assert sizes_in_doubt(curves, 0) == ()
    assert RoutingTable.from_profiles(curves, local_proxy=0).bw_proxy == 0
    assert 2 < len(repeats[both[0]][1 << 20]) < MOST_REPEATS


def test_measuring_again_ends_and_the_local_proxy_is_kept():
    endless = (0.001 * 1.2**n for n in range(1000))  # no two repeats ever agree
    curves, repeats, both = settled(endless, most_s=60.0)
    assert sizes_in_doubt(curves, 0) == (4096, 1 << 20)
    table = RoutingTable.from_profiles(curves, local_proxy=0)
    assert (table.lat_proxy, table.bw_proxy) == (0, 0)
    assert "is kept, because repeats spread too widely" in str(table)
    assert len(repeats[both[0]][4096]) == 2 + MOST_REPEATS


@pytest.mark.parametrize(
    "wrong",
    [
        {"sizes": ()},
        {"sizes": (0, 1)},
        {"sizes": (64, 64)},
        {"sizes": (1 << 32,)},
        {"budget_s": -1.0},
        {"budget_s": float("nan")},
    ],
)
def test_plans_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=r"sizes must be|smaller than 4 GiB|budget"):
        MeasurePlan(**wrong)
