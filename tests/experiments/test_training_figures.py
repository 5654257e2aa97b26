"""Figures 2, 3, 13 and 16: a result like the paper's is within, any other differs; ranges are the assumptions'."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning import key_of, profile_of

from coarse.bench.pace import Paced, Pacing
from coarse.bench.replay.driver import check_replay
from experiments.common import DIFFERS, WITHIN
from experiments.expectation import HIGHER, LOWER, OTHER, Measured
from experiments.fig02_communication_share import run as fig02
from experiments.fig13_cci_bandwidth import run as fig13
from experiments.fig16_training_time import run as fig16
from experiments.fig17_blocked_time import run as fig17
from experiments.replays import (
    ALL_REDUCE,
    COARSE,
    DENSE,
    LEAST_DENSE,
    RING,
    SHARES,
    Case,
    over_shares,
    plan_of,
)

CASES = (
    *(panel.case for panel in (*fig16.PANELS, *fig17.PANELS)),
    *(case for panel in fig16.BATCH_PANELS for case in (panel.ours, panel.theirs)),
    fig17.HIDDEN,
)


@pytest.mark.parametrize("case", dict.fromkeys(CASES), ids=str)
def test_machines_have_the_places_of_every_panel(case):
    for scheme in (COARSE, ALL_REDUCE, RING, *((DENSE, LEAST_DENSE) if case.nodes == 1 else ())):
        check_replay(plan_of(case.under(scheme), scheme, SHARES[0], steps=1))


# ---- Figures 3 and 13 ----


def profile(gbytes_per_s, *, late_us=0.0):
    links = (0, gbytes_per_s)
    return Paced(
        value=profile_of(key_of(machine="aws-p3"), local=links, remote=links),
        pacing=Pacing(lateness_us=late_us, error=0.0, time_dilation=20.0),
    )


@pytest.mark.parametrize(
    ("slower", "verdicts"), [(17, (WITHIN, HIGHER)), (4, (LOWER, WITHIN)), (1, (LOWER, LOWER))]
)
def test_loads_and_stores_have_to_be_slower_by_the_papers_ratios(slower, verdicts):
    finding = fig13.compare(profile(8), profile(8 / slower))
    assert tuple(check.verdict for check in finding.checks) == verdicts
    assert finding.verdict == DIFFERS


def test_the_spread_of_a_ratio_contains_the_delays_of_both_sessions():
    (reads, _) = fig13.compare(profile(8, late_us=70), profile(4, late_us=0)).checks
    largest_us = (64 << 20) / 8e3 / 1.2  # a pull alone
    assert reads.measured.value == pytest.approx(2)
    assert reads.measured.low == pytest.approx(2 * largest_us / (largest_us + 70))
    assert reads.measured.high == pytest.approx(2 * largest_us / (largest_us - 70))


def test_the_model_is_drawn_and_kept_as_simulated():
    assert {values["kind"] for values in fig13._model_as_json()} == {"simulated"}
    assert fig13.draw().axes


# ---- Figure 16 ----


def steps(*, coarse, peer=20.0, dense=100.0, least=100.0, share=0.5):
    by_scheme = {COARSE: coarse, fig16.ALL_REDUCE: peer, DENSE: dense, LEAST_DENSE: least}
    return fig16.Steps(share=share, by_scheme={name: Measured.exactly(ms) for name, ms in by_scheme.items()})


PANEL_C = next(panel for panel in fig16.PANELS if panel.letter == "c")


@pytest.mark.parametrize(("speedup", "verdict"), [(3.4, WITHIN), (3.0, LOWER), (5.0, HIGHER)])
def test_the_speedup_over_dense_has_to_be_the_papers(speedup, verdict):
    finding = fig16.compare(PANEL_C, [steps(coarse=100 / speedup)])
    assert finding.checks[0].verdict == verdict
    assert finding.kind == "emulated"


def test_the_range_is_that_of_the_assumed_speeds_and_of_both_slow_downs():
    (check,) = fig16.compare(
        PANEL_C,
        [steps(coarse=40), steps(coarse=30, least=60), steps(coarse=25)],
    ).checks
    assert (check.measured.low, check.measured.value, check.measured.high) == pytest.approx((2, 100 / 30, 4))


def test_each_panel_is_drawn_beside_the_papers_range():
    figure = fig16.draw(fig16.PANELS, {panel.case: [steps(coarse=10)] for panel in fig16.PANELS})
    (axes,) = figure.axes
    assert len(axes.patches) == 3 * len(fig16.PANELS)
    marks = {line.get_ydata()[0] for line in axes.lines if len(line.get_ydata()) == 2}
    assert marks >= {3.3, 4.3, 11.3, 13.3, 3.4, 10.8, 13.8}


@pytest.mark.parametrize(("large_ms", "verdict"), [(27, WITHIN), (40, LOWER), (20, HIGHER)])
def test_a_larger_batch_on_one_node_has_to_pay_as_in_the_paper(large_ms, verdict):
    panel = fig16.BATCH_PANELS[0]
    finding = fig16.compare_batches(panel, [steps(coarse=large_ms)], [steps(coarse=1, peer=20)])
    assert finding.checks[0].verdict == verdict


def test_the_range_includes_the_spread_of_the_steps():
    spread = steps(coarse=10)
    spread = replace(spread, by_scheme={**spread.by_scheme, COARSE: Measured(value=10, low=8, high=12.5)})
    (check,) = fig16.compare(PANEL_C, [spread]).checks
    assert (check.measured.low, check.measured.value, check.measured.high) == pytest.approx((8, 10, 12.5))


@pytest.mark.parametrize("scheme", [fig16.ALL_REDUCE, DENSE])
def test_schemes_without_the_tables_memory_devices_run_once_for_all_tables(scheme):
    half = Case("aws-p3", "bert-large", 2, "aws-p3-2to1")
    assert half.under(scheme) == Case("aws-p3", "bert-large", 2)
    assert half.under(COARSE) == half


@pytest.mark.parametrize(("position", "gain"), [(1, 42.7), (2, 38.6)])
@pytest.mark.parametrize(("factor", "verdict"), [(1, WITHIN), (1.1, LOWER), (0.9, HIGHER)])
def test_two_nodes_have_to_gain_as_in_the_paper(position, gain, factor, verdict):
    panel = fig16.BATCH_PANELS[position]
    assert panel.letter == "f"
    step_ms = 20 * panel.ours.samples / panel.theirs.samples / (1 + gain / 100)
    at_other_speeds = [steps(coarse=1, peer=peer, share=share) for peer, share in ((9, 0.3), (90, 0.7))]
    finding = fig16.compare_batches(
        panel, [steps(coarse=factor * step_ms)], [steps(coarse=1, peer=20), *at_other_speeds]
    )
    assert finding.checks[0].verdict == verdict
    assert "2 nodes" in finding.ran


def test_a_step_on_one_node_has_as_many_samples_as_one_of_half_the_batch_on_two():
    assert fig16.LARGE.samples == fig16.SMALL_OF_TWO.samples == 16
    assert str(fig16.SMALL_OF_TWO) == "bert-large, batch 2, aws-p3, 2 nodes"


# ---- Figure 17 ----


@pytest.mark.parametrize(("ours", "verdict"), [(7, WITHIN), (12, HIGHER), (3, LOWER)])
def test_two_nodes_are_held_against_the_all_reduce_that_blocks_least_and_not_against_dense(ours, verdict):
    (panel,) = [panel for panel in fig17.PANELS if panel.letter == "f"]
    blocked = {COARSE: ours, fig16.ALL_REDUCE: 10.0, fig17.RING: 20.0}
    by_scheme = {scheme: Measured.exactly(float(value)) for scheme, value in blocked.items()}
    finding = fig17.compare(panel, fig17.Blocked(by_share=[by_scheme], ways="two-level up to 4 MiB"))
    assert [check.verdict for check in finding.checks] == [verdict]
    assert "two-level" in finding.note


def test_cases_say_which_job_they_are():
    case = Case("aws-p3", "bert-large", 4, "aws-p3-2to1")
    assert str(case) == "bert-large, batch 4, aws-p3, 4:2"
    fast, slow = case.trace(0.7), case.trace(0.35)
    assert slow.forward_s == pytest.approx(2 * fast.forward_s)
    assert slow.flops == pytest.approx(2 * Case("aws-p3", "bert-large", 2).trace(0.7).flops)
    assert "assumed: 70% of the peak of a V100" in fast.source


def test_the_value_is_that_of_the_middle_speed():
    measured = over_shares([Measured.exactly(value) for value in (3.0, 1.0, 2.0)])
    assert (measured.low, measured.value, measured.high) == (1, 1, 3)
    assert sorted(SHARES) == list(SHARES)


# ---- Figure 2 ----


def shares(model, steps_ms, all_reduce_ms=380.0):
    return [
        fig02.Share(
            model=model,
            gpus=gpus,
            step_ms=step_ms,
            compute_ms=100.0,
            all_reduce_ms=all_reduce_ms * gpus / 4,
            pacing=Pacing(lateness_us=1, error=0.001, time_dilation=10),
        )
        for gpus, step_ms in zip(fig02.GPU_COUNTS, steps_ms, strict=True)
    ]


@pytest.mark.parametrize(
    ("steps_ms", "all_reduce_ms", "verdicts"),
    [
        ((400, 450, 500), 380, (WITHIN, WITHIN)),
        ((400, 450, 500), 100, (LOWER, WITHIN)),
        ((400, 450, 500), 480, (HIGHER, WITHIN)),
        ((100, 100, 200), 152, (WITHIN, OTHER)),
        ((250, 375, 500), 380, (WITHIN, OTHER)),
    ],
)
def test_communication_has_to_grow_to_the_papers_share(steps_ms, all_reduce_ms, verdicts):
    finding = fig02.compare_growth(shares("vgg16", steps_ms, all_reduce_ms))
    assert tuple(check.verdict for check in finding.checks) == verdicts


def test_one_model_that_does_not_grow_is_enough():
    finding = fig02.compare_growth([*shares("vgg16", (400, 450, 500)), *shares("alexnet", (200, 400, 500))])
    assert finding.checks[1].verdict == OTHER
    assert "alexnet does not" in finding.found


def test_the_largest_share_spans_the_assumed_speeds():
    of_one = shares("vgg16", (400, 450, 500), 300)
    others = [replace(of_one[-1], step_ms=step_ms) for step_ms in (400, 600)]
    measured = (
        fig02.compare_growth([*of_one, *shares("alexnet", (400, 450, 500), 100)], others).checks[0].measured
    )
    assert (measured.low, measured.value, measured.high) == pytest.approx((50, 60, 75))


@pytest.mark.parametrize(("all_reduce_ms", "verdict"), [(380, WITHIN), (0.1, DIFFERS)])
def test_all_reduce_has_to_take_longer_than_copies_of_inputs(all_reduce_ms, verdict):
    finding = fig02.compare_operations(shares("vgg16", (200, 300, 500), all_reduce_ms))
    assert finding.verdict == verdict


def test_a_step_is_never_more_communication_than_itself():
    (share,) = [each for each in shares("vgg16", (200, 300, 310), 400.0) if each.gpus == 4]
    assert share.busy_percent == 100
    assert replace(share, all_reduce_ms=31.0).busy_percent == pytest.approx(10)
    assert replace(share, step_ms=99.9).waiting_percent == 0


def test_every_model_is_drawn_with_every_number_of_gpus():
    all_shares = [each for model in fig02.BATCHES for each in shares(model, (110, 120, 130), 40.0)]
    left, right = fig02.draw(all_shares).axes
    assert left.lines[0].get_ydata()[0] == 76
    assert len(left.patches) == len(fig02.BATCHES) * len(fig02.GPU_COUNTS)
    assert len(right.patches) == 2 * len(fig02.BATCHES)
