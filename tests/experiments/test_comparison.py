"""Comparison with the paper: a result like the paper's is within, any other differs, also a better one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning import key_of, profile_of

from coarse.bench.pace import Pacing
from coarse.bench.replay.driver import ReplayPlan, ReplayResult
from coarse.bench.timing import Timing
from coarse.profiler.linked import profile_from_links
from coarse.profiler.routing import RoutingTable, plan_routing
from experiments.common import DIFFERS, PAPER_MACHINES
from experiments.expectation import HIGHER, LOWER, WITHIN, Measured
from experiments.fig08_bandwidth_matrix import run as fig08
from experiments.fig14_bandwidth_by_size import run as fig14
from experiments.fig15_routing import run as fig15
from experiments.fig16_largest_batch import run as fig16
from experiments.fig17_blocked_time import run as fig17
from experiments.profiles import links_of
from experiments.recovery import run as recovery


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
def test_links_as_the_machine_profiles_give_them_are_the_papers(machine):
    profile = simulated(machine)
    assert fig08.compare(profile).verdict == WITHIN
    assert fig14.compare(profile).verdict == ("" if machine == "aws-g4dn" else WITHIN)
    assert fig15.compare(profile, plan_routing(profile)).verdict == WITHIN


@pytest.mark.parametrize(
    ("machine", "tables", "verdict"),
    [
        ("aws-g4dn", LOCAL, WITHIN),
        ("aws-g4dn", CROSSED, DIFFERS),
        ("aws-p3", CROSSED, WITHIN),
        ("aws-p3", LOCAL, DIFFERS),
        ("aws-p3", (CROSSED[0], LOCAL[1]), DIFFERS),
        ("aws-p3", (RoutingTable(lat_proxy=1, bw_proxy=1), RoutingTable(lat_proxy=0, bw_proxy=0)), DIFFERS),
        ("sdsc-p100", LOCAL, WITHIN),
        ("sdsc-p100", CROSSED, DIFFERS),
        ("host", LOCAL, ""),
    ],
)
def test_routes_of_all_workers_have_to_be_the_papers(machine, tables, verdict):
    assert routes(machine, *tables).verdict == verdict


def test_thresholds_are_told():
    assert routes("aws-p3", *CROSSED).found == "local for small, remote for large; threshold 128 KiB to 1 MiB"
    assert routes("host", *LOCAL).found == "always local"


@pytest.mark.parametrize(
    ("machine", "local", "remote", "deviations"),
    [
        ("aws-p3", 4.5, 8, []),
        ("aws-p3", 4.8, 7.6, []),
        ("aws-p3", 8, 4.5, ["local higher", "remote lower"]),
        ("aws-p3", 4.5, 6.5, ["remote lower"]),
        ("aws-p3", 4.5, 9.5, ["remote higher"]),
        ("sdsc-p100", 12.5, 9, []),
        ("sdsc-p100", 14, 9, ["local higher"]),
        ("aws-g4dn", 6, 6, []),
        ("aws-g4dn", 6, 6.5, ["remote / local higher"]),
        ("aws-g4dn", 6, 5.5, ["remote / local lower"]),
    ],
)
def test_bandwidths_have_to_be_within_a_tenth_of_the_papers(machine, local, remote, deviations):
    profile = profile_of(key_of(machine=machine), local=(1, local), remote=(1, remote))
    finding = fig08.compare(profile)
    assert finding.deviations == deviations
    assert finding.verdict == (DIFFERS if deviations else WITHIN)
    assert finding.kind == profile.kind


def test_bandwidths_of_a_machine_that_the_paper_does_not_have_are_told_without_a_verdict():
    finding = fig08.compare(profile_of(key_of(machine="host"), local=(1, 6), remote=(1, 5)))
    assert (finding.verdict, finding.found) == ("", "local 12, remote 10 GB/s")


def test_one_pair_that_differs_is_enough():
    (check,) = fig08._checks(profile_of(key_of(machine="aws-g4dn")), [10.0, 10.0], [10.0, 11.0])
    assert check.verdict == HIGHER
    local, remote = fig08._checks(profile_of(key_of(machine="aws-p3")), [9.0, 9.1], [16.0, 12.0])
    assert (local.verdict, remote.verdict) == (WITHIN, LOWER)


@pytest.mark.parametrize(
    ("alpha_us", "deviations"), [(20, []), (2, ["full from lower"]), (200, ["full from higher"])]
)
def test_links_have_to_be_full_at_2_mb_neither_sooner_nor_later(alpha_us, deviations):
    profile = profile_of(key_of(machine="aws-p3"), local=(alpha_us, 8), remote=(alpha_us, 8))
    assert fig14.compare(profile).deviations == deviations


PANELS = {panel.case.machine: panel for panel in reversed(fig17.PANELS)}


def blocked(ours, best, ring=40.0, *, dense=1000.0, ways=""):
    """Blocked times at one speed, in milliseconds; numbers have no spread."""
    times = {fig17.COARSE: ours, fig17.ALL_REDUCE: best, fig17.RING: ring, fig17.DENSE: dense}
    measured = {
        scheme: ms if isinstance(ms, Measured) else Measured.exactly(ms) for scheme, ms in times.items()
    }
    return fig17.Blocked(by_share=[measured], ways=ways)


@pytest.mark.parametrize(
    ("machine", "ratio", "verdict"),
    [
        ("aws-p3", 0.7, WITHIN),
        ("aws-p3", 0.84, WITHIN),
        ("aws-p3", 0.86, HIGHER),
        ("aws-p3", 0.5, LOWER),
        ("sdsc-p100", 0.72, WITHIN),
        ("sdsc-p100", 1.0, HIGHER),
        ("sdsc-p100", 0.6, LOWER),
        ("aws-g4dn", 1.19, WITHIN),
        ("aws-g4dn", 1.01, LOWER),
        ("aws-g4dn", 1.3, HIGHER),
    ],
)
def test_blocked_time_has_to_change_as_in_the_paper_neither_less_nor_more(machine, ratio, verdict):
    finding = fig17.compare(PANELS[machine], blocked(10 * ratio, 10))
    assert finding.verdict == (WITHIN if verdict == WITHIN else DIFFERS)
    assert finding.checks[0].verdict == verdict
    assert finding.kind == "emulated"
    assert "against 10 ms (a one-way ring: 40 ms)" in finding.found


def test_blocked_time_is_held_against_the_faster_all_reduce():
    of_ring = fig17.compare(PANELS["aws-p3"], blocked(9, 40, ring=10))
    of_fastest = fig17.compare(PANELS["aws-p3"], blocked(9, 10))
    assert of_ring.note.startswith("9 against 10 ms")
    assert of_fastest.note.startswith("9 against 10 ms")
    assert of_fastest.deviations == ["change of blocked time higher"]


def test_blocked_time_has_to_be_a_tenth_of_denses_at_most():
    finding = fig17.compare(PANELS["aws-p3"], blocked(7, 10, dense=60))
    assert finding.deviations == ["of DENSE's higher"]


def test_the_algorithms_of_all_reduce_are_told():
    finding = fig17.compare(PANELS["aws-p3"], blocked(9, 10, ways="tree up to 4096 bytes"))
    assert finding.note.endswith("; AllReduce by tree up to 4096 bytes")


def test_what_is_hidden_is_told_without_a_verdict():
    plan = ReplayPlan(schemes=("coarse",), trace=fig17.HIDDEN.trace(0.5), machine="aws-g4dn", num_workers=4)
    compute_us = 1e6 * plan.compute_s
    step = Timing(min_us=compute_us, p50_us=compute_us + 700, p99_us=compute_us + 900, iterations=3)
    pacing = Pacing(lateness_us=100, error=0, time_dilation=5)
    result = ReplayResult(scheme="coarse", plan=plan, step=step, decisions=(), pacing=pacing)
    finding = fig17.tell_hidden({fig17.COARSE: result})
    assert finding.verdict == ""
    assert finding.note == "COARSE 0.7 (0.001 to 1) ms of a step of 385 ms"


def test_each_panel_of_blocked_time_is_drawn_beside_the_papers_range():
    figure = fig17.draw(fig17.PANELS, {panel.case: blocked(9, 10) for panel in fig17.PANELS})
    (axes,) = figure.axes
    assert len(axes.patches) == 3 * len(fig17.PANELS)
    marks = {round(line.get_ydata()[0], 2) for line in axes.lines if len(line.get_ydata()) == 2}
    assert marks >= {1.18, 1.2, 0.72, 0.58, 0.8, 0.54, 0.77}


def test_the_spread_of_blocked_time_is_that_of_both():
    spread = blocked(
        Measured(value=8, low=7, high=9), Measured(value=10, low=9, high=14), ring=Measured.exactly(20)
    )
    check, _ = fig17.compare(PANELS["aws-p3"], spread).checks
    assert (check.measured.value, check.measured.low, check.measured.high) == pytest.approx((-20, -50, 0))


def test_the_range_of_blocked_time_is_that_over_the_assumed_speeds():
    speeds = [blocked(ours, 10).by_share[0] for ours in (6, 8, 9)]
    check, _ = fig17.compare(PANELS["aws-p3"], fig17.Blocked(by_share=speeds)).checks
    assert (check.measured.value, check.measured.low, check.measured.high) == pytest.approx((-20, -40, -10))


def trial(batch, *steps_s):
    return fig16.Trial(batch=batch, steps_s=steps_s, peak_bytes=0)


@pytest.mark.parametrize(
    ("ours", "deviations"),
    [
        (trial(4, 2 / 1.48), []),
        (trial(4, 2 / 1.28), ["samples/s lower"]),
        (trial(4, 2 / 1.9), ["samples/s higher"]),
        (trial(2, 1 / 1.48), ["batch lower"]),
        (trial(8, 4 / 1.48), ["batch higher"]),
        (None, ["batch lower", "samples/s lower"]),
    ],
)
def test_the_largest_batch_has_to_be_twice_as_large_and_48_percent_faster(ours, deviations):
    found = {fig16.DDP: trial(2, 1.0), "coarse-offload": ours}
    assert fig16._finding(fig16.FULL, "coarse-offload", found).deviations == deviations


def test_without_a_batch_of_ddp_there_is_nothing_to_compare():
    found = {fig16.DDP: None, "coarse-offload": trial(4, 1.0)}
    assert fig16._finding(fig16.FULL, "coarse-offload", found).verdict == ""
    assert fig16._finding(fig16.FULL, fig16.DDP, found).found == "not even 1"


UNDISTURBED = recovery.Run(param_hash="a", resumed_at=(), lost_s=(), seconds=20.0)
TWICE = recovery.Run(param_hash="a", resumed_at=(3, 9), lost_s=(1.5, 2.5), seconds=30.0)


@pytest.mark.parametrize(
    ("changes", "deviations"),
    [
        ({}, []),
        ({"param_hash": "b"}, ["parameters and those of an undisturbed run, bitwise: other"]),
        ({"resumed_at": (3,)}, ["went on lower"]),
    ],
)
def test_recovered_parameters_have_to_be_equal_after_every_kill(changes, deviations):
    assert recovery._equality("how", replace(TWICE, **changes), UNDISTURBED, 2).deviations == deviations


def test_recovery_has_to_lose_less_from_memory():
    slow = replace(TWICE, lost_s=(2.0, 3.0))
    found = recovery._lost_time(TWICE, slow)
    assert found.verdict == WITHIN
    assert found.checks[0].measured == Measured(value=80, low=50, high=125)
    assert found.note == "2.0 s beside 2.5 s"
    assert recovery._lost_time(slow, TWICE).deviations == ["lost from memory higher"]


def test_restoring_the_state_has_to_take_a_tenth_of_the_time_of_a_file():
    times = {"recover_s": 0.01, "load_s": 0.2, "construct_s": 0.1, "fresh_construct_s": 0.2, "state_bytes": 1}
    times |= {"least_recover_s": 0.008, "least_load_s": 0.16}
    found = recovery._state_alone(times)
    assert found.verdict == WITHIN
    (check,) = found.checks
    assert (check.measured.low, check.measured.high) == (pytest.approx(4), pytest.approx(6.25))
    slow = {**times, "load_s": 0.05, "least_load_s": 0.05}
    assert recovery._state_alone(slow).deviations == ["from memory higher"]
