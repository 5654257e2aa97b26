"""Comparison with the paper: equal results agree, other results do not."""

from __future__ import annotations

import pytest
from planning import key_of, profile_of

from coarse.profiler.linked import profile_from_links
from coarse.profiler.routing import RoutingTable, plan_routing
from experiments.common import PAPER_MACHINES
from experiments.fig08_bandwidth_matrix import run as fig08
from experiments.fig14_bandwidth_by_size import run as fig14
from experiments.fig15_routing import run as fig15
from experiments.fig17_blocked_time import run as fig17
from experiments.profiles import links_of


def simulated(machine):
    return profile_from_links(*links_of(machine))


def routes(machine, *tables):
    """The finding of Figure 15 for these tables on a machine with two workers."""
    return fig15.compare(profile_of(key_of(machine=machine)), tables)


LOCAL = (RoutingTable(lat_proxy=0, bw_proxy=0), RoutingTable(lat_proxy=1, bw_proxy=1))
CROSSED = (
    RoutingTable(lat_proxy=0, bw_proxy=1, threshold_bytes=1 << 17),
    RoutingTable(lat_proxy=1, bw_proxy=0, threshold_bytes=1 << 20),
)


@pytest.mark.parametrize("machine", PAPER_MACHINES)
def test_links_as_the_machine_profiles_give_them_agree_with_the_paper(machine):
    profile = simulated(machine)
    assert fig08.compare(profile).agrees
    assert fig14.compare(profile).agrees is (None if machine == "aws-g4dn" else True)
    assert fig15.compare(profile, plan_routing(profile)).agrees


@pytest.mark.parametrize(
    ("machine", "tables", "agrees"),
    [
        ("aws-g4dn", LOCAL, True),
        ("aws-g4dn", CROSSED, False),
        ("aws-p3", CROSSED, True),
        ("aws-p3", LOCAL, False),
        ("aws-p3", (CROSSED[0], LOCAL[1]), False),
        ("aws-p3", (RoutingTable(lat_proxy=1, bw_proxy=1), RoutingTable(lat_proxy=0, bw_proxy=0)), False),
        ("sdsc-p100", LOCAL, True),
        ("sdsc-p100", CROSSED, False),
        ("host", LOCAL, None),
    ],
)
def test_routes_of_all_workers_have_to_be_the_papers(machine, tables, agrees):
    assert routes(machine, *tables).agrees is agrees


def test_thresholds_are_told():
    assert routes("aws-p3", *CROSSED).found == "local for small, remote for large, from 128 KiB to 1 MiB on"


@pytest.mark.parametrize(
    ("machine", "local", "remote", "agrees"),
    [
        ("aws-p3", 4.5, 8, True),
        ("aws-p3", 4.8, 7.6, True),
        ("aws-p3", 8, 4.5, False),
        ("aws-p3", 4.5, 6.5, False),
        ("sdsc-p100", 12.5, 9, True),
        ("aws-g4dn", 6, 6, True),
        ("aws-g4dn", 6, 5, False),
        ("host", 6, 5, None),
    ],
)
def test_bandwidths_have_to_be_within_a_tenth_of_the_papers(machine, local, remote, agrees):
    profile = profile_of(key_of(machine=machine), local=(1, local), remote=(1, remote))
    finding = fig08.compare(profile)
    assert finding.agrees is agrees
    assert finding.kind == profile.kind


@pytest.mark.parametrize(("alpha_us", "agrees"), [(20, True), (2, False), (200, False)])
def test_links_have_to_be_full_at_2_mb_neither_sooner_nor_later(alpha_us, agrees):
    profile = profile_of(key_of(machine="aws-p3"), local=(alpha_us, 8), remote=(alpha_us, 8))
    assert fig14.compare(profile).agrees is agrees


@pytest.mark.parametrize(
    ("machine", "ratio", "agrees"),
    [
        ("aws-p3", 0.7, True),
        ("aws-p3", 0.9, False),
        ("sdsc-p100", 0.72, True),
        ("sdsc-p100", 1.0, False),
        ("aws-g4dn", 1.04, True),
        ("aws-g4dn", 1.2, False),
    ],
)
def test_blocked_time_has_to_fall_by_a_fifth_except_on_t4(machine, ratio, agrees):
    finding = fig17.compare(machine, {fig17.COARSE: ratio * 1e4, fig17.RING: 4e4, fig17.FASTEST: 1e4})
    assert finding.agrees is agrees
    assert finding.kind == "emulated"
    assert "against 10 ms (a one-way ring: 40 ms)" in finding.found


def test_blocked_time_is_held_against_the_faster_all_reduce():
    of_ring = fig17.compare("aws-p3", {fig17.COARSE: 9e3, fig17.RING: 1e4, fig17.FASTEST: 4e4})
    of_fastest = fig17.compare("aws-p3", {fig17.COARSE: 9e3, fig17.RING: 4e4, fig17.FASTEST: 1e4})
    assert of_ring.found.startswith("10% less: 9 against 10 ms")
    assert of_fastest.found.startswith("10% less: 9 against 10 ms")
    assert not of_fastest.agrees
