"""Shard size: the smallest tested size that fills the link; pipelines of such shards are close to the best."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import SIZES, curves, key_of, line, profile_of

from coarse.profiler.routing import plan_routing
from coarse.profiler.shard_size import (
    FULL_FRACTION,
    choose_shard_size,
    plan_shard_size,
)

PIPELINE_STAGES = 3
"""Push, synchronisation, pull (Fig 9)."""

fractions = st.floats(0.01, 1.0)


def pipeline_us(nbytes, shard_bytes, curve):
    """How long tensors take in equal shards: every stage as long as the curve says, so k shards need k + 2 turns."""
    num_shards = max(1, nbytes // shard_bytes)
    return (num_shards + PIPELINE_STAGES - 1) * curve.time_us(nbytes / num_shards)


@given(curves, fractions)
def test_the_smallest_tested_size_with_full_bandwidth_by_brute_force(curve, fraction):
    size = choose_shard_size(curve, full_fraction=fraction)
    full = fraction * max(point.gbytes_per_s for point in curve.points)
    by_size = {point.nbytes: point.gbytes_per_s for point in curve.points}
    assert by_size[size.nbytes] == size.gbytes_per_s >= full
    assert all(bandwidth < full for nbytes, bandwidth in by_size.items() if nbytes < size.nbytes)


@pytest.mark.parametrize(("fraction", "multiple"), [(0.5, 1), (0.8, 4), (0.9, 9), (0.95, 19)])
def test_a_fraction_of_full_bandwidth_takes_so_many_times_alpha_beta(fraction, multiple):
    alpha_us, beta = 20, 8
    alpha_beta = alpha_us * beta * 1e3
    tested = [int(alpha_beta * multiple), int(alpha_beta * multiple * 0.99), 1 << 34]
    assert (
        choose_shard_size(line(alpha_us, beta, tested), full_fraction=fraction * 0.9999).nbytes == tested[0]
    )


def test_the_reason_has_the_numbers():
    size = choose_shard_size(line(20, 8))
    assert size.nbytes == 2 << 20
    assert (
        size.reason
        == "smallest tested size that reaches 90% of the highest bandwidth: 7.43 of 7.98 GB/s each way"
    )


@pytest.mark.parametrize("fraction", [0, -1, 1.1, float("nan")])
def test_fractions_out_of_range_are_refused(fraction):
    with pytest.raises(ValueError, match="full_fraction="):
        choose_shard_size(line(1, 1), full_fraction=fraction)


def test_a_job_takes_the_size_that_its_neediest_worker_needs():
    profile = profile_of(key_of(local_devices=(0, 1), num_devices=2), local=(5, 10), remote=(9, 5))
    links = dict(profile.curves)
    slow = next(link for link in links if (link.kind, link.source, link.target) == ("both", 1, 1))
    links[slow] = line(50, 10)
    uneven = profile_of(profile.key, curves=links)
    tables = plan_routing(uneven)
    assert [table.bw_proxy for table in tables] == [0, 1]
    sizes = [choose_shard_size(uneven.both_at_once(w)[w]).nbytes for w in (0, 1)]
    assert plan_shard_size(uneven, tables).nbytes == max(sizes) > min(sizes)


@pytest.mark.parametrize("link", [(10, 4.5), (20, 8), (30, 11.5), (10, 12.5), (2, 25)])
def test_a_step_of_bert_large_is_within_a_tenth_of_the_best_shard_size(link):
    curve, nbytes = line(*link), 1_336_364_040
    best_us = min(pipeline_us(nbytes, size, curve) for size in SIZES)
    chosen_us = pipeline_us(nbytes, choose_shard_size(curve).nbytes, curve)
    assert chosen_us <= best_us / FULL_FRACTION
