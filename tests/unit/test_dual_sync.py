"""Dual synchronisation: the paper's formula, its closed form and rounding, against brute force over boundaries."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import curves, key_of, profile_of

from coarse.profiler.dual_sync import (
    ALIKE_FRACTION,
    DualSyncInputs,
    SyncCosts,
    parse_mode,
    plan_dual_sync,
    ring_factor,
)
from coarse.profiler.routing import plan_routing
from coarse.profiler.shard_size import plan_shard_size

seconds = st.floats(0, 10)
costs_per_byte = st.one_of(st.just(0.0), st.floats(1e-12, 1e-6))
sync_costs = st.builds(
    SyncCosts,
    proxy_s_per_byte=costs_per_byte,
    worker_s_per_byte=costs_per_byte,
    shared=st.lists(st.tuples(costs_per_byte, costs_per_byte), max_size=3).map(tuple),
)
inputs = st.builds(
    DualSyncInputs,
    tensor_bytes=st.lists(st.integers(1, 1 << 28), min_size=1, max_size=30).map(tuple),
    forward_s=seconds,
    backward_s=seconds,
    costs=sync_costs,
)


def ring_costs(num_workers, proxy_gbytes_per_s, worker_gbytes_per_s):
    """The paper's: rings of p memory devices and of p workers, on links of their own."""
    factor = ring_factor(num_workers)
    return SyncCosts(
        proxy_s_per_byte=factor / (proxy_gbytes_per_s * 1e9),
        worker_s_per_byte=factor / (worker_gbytes_per_s * 1e9),
    )


paper_costs = st.builds(ring_costs, st.integers(2, 64), st.floats(0.1, 100), st.floats(0.1, 100))


def paper(tensor_bytes=(1000,) * 10, *, p=4, forward_s=1.0, backward_s=2.0, proxy=1.0, worker=1.0):
    """With sizes in GB, so that bandwidths of 1 GB/s make seconds of them."""
    return DualSyncInputs(
        tensor_bytes=tuple(int(size * 1e6) for size in tensor_bytes),
        forward_s=forward_s,
        backward_s=backward_s,
        costs=ring_costs(p, proxy, worker),
    )


# ---- the formula ----


def test_the_formula_of_the_paper():
    job, m, n, factor = paper(proxy=3.0, worker=2.0), 4e9, 10e9, 2 * 3 / 4
    gpu_s, proxy_s = factor * (n - m) / 2e9, factor * m / 3e9
    assert job.train_s(m) == pytest.approx(max(1 + 2 + gpu_s, 1 + proxy_s))


@given(inputs, paper_costs)
def test_the_closed_form_of_the_paper(job, costs):
    job = DualSyncInputs(
        tensor_bytes=job.tensor_bytes, forward_s=job.forward_s, backward_s=job.backward_s, costs=costs
    )
    a, g, n = costs.proxy_s_per_byte, costs.worker_s_per_byte, job.total_bytes
    expected = (job.backward_s + g * n) / (a + g)
    assert job.optimum_bytes() == pytest.approx(min(expected, n), rel=1e-6)


@given(inputs, st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_no_m_is_better_than_the_optimum(job, fractions):
    best_s = job.train_s(job.optimum_bytes())
    assert 0 <= job.optimum_bytes() <= job.total_bytes
    for fraction in (0, *fractions, 1):
        assert best_s <= job.train_s(fraction * job.total_bytes) * (1 + 1e-9)


@given(inputs, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_the_estimate_is_convex(job, one, other, weight):
    x, y = one * job.total_bytes, other * job.total_bytes
    middle = weight * x + (1 - weight) * y
    above = weight * job.train_s(x) + (1 - weight) * job.train_s(y)
    assert job.train_s(middle) <= above * (1 + 1e-9) + 1e-12


# ---- the plan ----


@given(inputs)
def test_no_tensor_boundary_is_better_by_brute_force(job):
    plan = plan_dual_sync(job)
    assert plan.predicted_s <= min(job.train_s(m) for m in job.boundaries()) * (1 + 1e-9)


@given(inputs)
def test_the_plan_is_within_a_tensor_of_the_optimum_and_never_worse_than_its_neighbours(job):
    plan = plan_dual_sync(job)
    if not plan.offloaded:
        assert plan.workers_only_s == plan.predicted_s or plan.optimum_bytes < job.tensor_bytes[0]
        return
    boundaries = job.boundaries()
    assert plan.m_bytes == boundaries[plan.num_offloaded]
    assert abs(plan.m_bytes - plan.optimum_bytes) <= max(job.tensor_bytes)
    for neighbour in job.neighbours(plan.optimum_bytes):
        assert plan.predicted_s <= job.train_s(boundaries[neighbour])
    assert plan.predicted_s == job.train_s(plan.m_bytes)


@given(inputs, st.floats(0, 1.5))
def test_neighbours_enclose_a_size(job, fraction):
    m = fraction * job.total_bytes
    below, above = job.neighbours(m)
    boundaries = job.boundaries()
    assert above - below <= 1
    if m <= job.total_bytes:
        assert boundaries[below] <= m <= boundaries[above]
    else:
        assert below == above == len(job.tensor_bytes)


@given(inputs)
def test_a_plan_is_never_worse_than_either_end(job):
    plan = plan_dual_sync(job)
    assert plan.predicted_s <= plan.devices_only_s * (1 + 1e-9)
    assert plan.predicted_s <= plan.workers_only_s


def test_both_paths_finish_together():
    plan = plan_dual_sync(paper(backward_s=2.0))
    # (2 s + 1.5 s/GB * 10 GB) / (3 s/GB) = 5.67 GB, between the fifth and sixth tensor.
    assert plan.optimum_bytes == pytest.approx(17 / 3 * 1e9)
    assert (plan.num_offloaded, plan.m_bytes) == (6, 6_000_000_000)
    assert plan.predicted_s == pytest.approx(1 + 1.5 * 6)
    assert plan.offloaded
    assert "both finish together" in plan.reason


def test_a_long_backward_pass_hides_everything():
    plan = plan_dual_sync(paper(backward_s=20.0))
    assert plan.num_offloaded == 10
    assert plan.predicted_s == plan.devices_only_s == 21.0
    assert "keep up with everything" in plan.reason


def test_slow_memory_devices_do_not_pay():
    plan = plan_dual_sync(paper(backward_s=14.0, proxy=0.5))
    assert not plan.offloaded
    assert plan.m_bytes == 0
    assert plan.predicted_s == plan.workers_only_s == pytest.approx(1 + 14 + 1.5)
    assert "offloading does not pay" in plan.reason


def test_shared_links_do_not_pay_although_each_is_as_fast():
    """What goes through memory devices is pushed and pulled besides, on the links that workers use (paper: T4)."""
    alone = SyncCosts(proxy_s_per_byte=2.5e-9, worker_s_per_byte=1.5e-9)
    shared = SyncCosts(proxy_s_per_byte=2.5e-9, worker_s_per_byte=1.5e-9, shared=((2.5e-9, 1.5e-9),))
    job = {"tensor_bytes": (10**9,) * 10, "forward_s": 1.0, "backward_s": 1.0}
    assert plan_dual_sync(DualSyncInputs(**job, costs=alone)).offloaded
    assert not plan_dual_sync(DualSyncInputs(**job, costs=shared)).offloaded


@given(inputs)
def test_one_worker_has_nothing_to_synchronise(job):
    costs = ring_costs(1, 1, 1)
    alone = DualSyncInputs(
        tensor_bytes=job.tensor_bytes, forward_s=job.forward_s, backward_s=job.backward_s, costs=costs
    )
    plan = plan_dual_sync(alone)
    assert plan.num_offloaded == len(job.tensor_bytes)
    assert plan.predicted_s == job.forward_s + job.backward_s


# ---- by when tensors are ready ----


@st.composite
def timed(draw):
    """Inputs that know when each tensor is ready."""
    job = draw(inputs)
    shares = sorted(
        draw(st.lists(st.floats(0, 1), min_size=len(job.tensor_bytes), max_size=len(job.tensor_bytes)))
    )
    return dataclasses.replace(job, ready_s=tuple(share * job.backward_s for share in shares))


@given(timed(), st.floats(0, 1))
def test_no_timeline_ends_before_what_any_link_carries(job, share):
    offloaded = job.spread(share)
    m = sum(job.tensor_bytes[position] for position in offloaded)
    rest, costs = job.total_bytes - m, job.costs
    end_s = job.timeline_s(offloaded) - job.forward_s
    least_s = [job.backward_s, costs.proxy_s_per_byte * m, costs.worker_s_per_byte * rest]
    least_s += [proxy * m + worker * rest for proxy, worker in costs.shared]
    assert end_s >= max(least_s) * (1 - 1e-6) - 1e-6
    # And none after everything has been ready, and every way has served its tensors.
    assert end_s <= job.backward_s + max(least_s) * (1 + 1e-6) + 1e-6


@given(timed(), st.floats(0, 1))
def test_what_is_ready_earlier_ends_no_later(job, share):
    earlier = dataclasses.replace(job, ready_s=tuple(each / 2 for each in job.ready_s))
    offloaded = job.spread(share)
    assert earlier.timeline_s(offloaded) <= job.timeline_s(offloaded)


@given(inputs, st.floats(0, 1))
def test_a_share_is_spread_over_the_whole_step(job, share):
    offloaded = job.spread(share)
    for pushed in range(1, len(job.tensor_bytes) + 1):
        m = sum(nbytes for i, nbytes in enumerate(job.tensor_bytes[:pushed]) if i in offloaded)
        n = sum(job.tensor_bytes[:pushed])
        assert share * n - max(job.tensor_bytes) <= m <= share * n
    assert job.spread(1.0) == set(range(len(job.tensor_bytes)))


@given(timed())
def test_the_plan_is_as_good_as_any_share_and_either_way_alone(job):
    plan = plan_dual_sync(job)
    everything = range(len(job.tensor_bytes))
    splits = [everything, (), *(job.spread(share / 16) for share in range(1, 16))]
    assert plan.predicted_s == job.timeline_s(plan.offloaded)
    assert plan.predicted_s <= min(map(job.timeline_s, splits)) * (1 + ALIKE_FRACTION)
    assert (plan.devices_only_s, plan.workers_only_s) == (job.timeline_s(everything), job.timeline_s(()))
    assert plan.m_bytes == sum(job.tensor_bytes[position] for position in plan.offloaded)
    assert plan.optimum_bytes == job.optimum_bytes(), "the paper's m is shown"


def test_both_ways_are_busy_during_the_whole_backward_pass():
    """Ten tensors of a second each on either way, one every half second: both ways keep up with half of them."""
    job = DualSyncInputs(
        tensor_bytes=(10**9,) * 10,
        forward_s=1.0,
        backward_s=4.5,
        costs=SyncCosts(proxy_s_per_byte=1e-9, worker_s_per_byte=1e-9),
        ready_s=tuple(number / 2 for number in range(10)),
    )
    plan = plan_dual_sync(job)
    assert (plan.devices_only_s, plan.workers_only_s) == (11.0, 11.0)
    assert job.timeline_s(range(7)) == 8.0, "the best of all that send the first ones to the memory devices"
    assert plan.offloaded == {1, 3, 5, 7, 9}
    assert plan.predicted_s == 1 + 4.5 + 1
    assert "spread over the backward pass" in plan.reason


@pytest.mark.parametrize("ready_s", [(0.0,), (2.0, 1.0), (0.0, 3.0), (-1.0, 0.0), (float("nan"), 1.0)])
def test_times_that_cannot_be_are_refused(ready_s):
    costs = SyncCosts(proxy_s_per_byte=1.0, worker_s_per_byte=1.0)
    with pytest.raises(ValueError, match="is ready, in order"):
        DualSyncInputs(tensor_bytes=(1, 1), forward_s=1.0, backward_s=2.0, costs=costs, ready_s=ready_s)


def test_without_times_there_are_no_timelines():
    with pytest.raises(ValueError, match="unknown"):
        paper().timeline_s(())


# ---- modes ----


@given(inputs)
def test_off_sends_everything_to_the_memory_devices(job):
    plan = plan_dual_sync(job, mode="off")
    assert (plan.num_offloaded, plan.m_bytes) == (len(job.tensor_bytes), job.total_bytes)
    assert plan.predicted_s == plan.devices_only_s == job.train_s(job.total_bytes)


@given(inputs, st.integers(0, 1 << 34))
def test_a_size_is_rounded_to_a_tensor_boundary(job, asked):
    plan = plan_dual_sync(job, mode=asked)
    assert plan.num_offloaded in job.neighbours(asked)
    assert plan.predicted_s == job.train_s(plan.m_bytes)
    if asked == 0:
        assert not plan.offloaded


@pytest.mark.parametrize(("text", "mode"), [("off", "off"), ("auto", "auto"), ("64MiB", 64 << 20), ("0", 0)])
def test_modes_are_read(text, mode):
    assert parse_mode(text) == mode


@pytest.mark.parametrize("text", ["on", "-1", "4 parsecs", ""])
def test_other_modes_are_refused(text):
    with pytest.raises(ValueError, match="off, auto or a size"):
        parse_mode(text)


@pytest.mark.parametrize(("mode", "message"), [("maybe", "must be off"), (-1, "cannot offload -1 bytes")])
def test_plans_of_other_modes_are_refused(mode, message):
    with pytest.raises(ValueError, match=message):
        plan_dual_sync(paper(), mode=mode)


# ---- what cannot be ----


@pytest.mark.parametrize(
    "wrong",
    [
        {"tensor_bytes": ()},
        {"tensor_bytes": (1, 0)},
        {"forward_s": -1.0},
        {"backward_s": float("inf")},
        {"forward_s": float("nan")},
    ],
)
def test_inputs_that_cannot_be_are_refused(wrong):
    values = {
        "tensor_bytes": (1,),
        "forward_s": 1.0,
        "backward_s": 1.0,
        "costs": SyncCosts(proxy_s_per_byte=1.0, worker_s_per_byte=1.0),
    }
    with pytest.raises(ValueError, match="at least"):
        DualSyncInputs(**{**values, **wrong})


def test_costs_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="finite and at least 0"):
        SyncCosts(proxy_s_per_byte=-1.0, worker_s_per_byte=0.0)
    with pytest.raises(ValueError, match="finite and at least 0"):
        SyncCosts(proxy_s_per_byte=0.0, worker_s_per_byte=0.0, shared=((0.0, float("nan")),))


# ---- costs of a profile ----


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_costs_of_a_profile(num_workers):
    key = key_of(local_devices=range(num_workers), num_devices=num_workers)
    profile = profile_of(key, local=(0, 10), remote=(0, 5))
    tables = plan_routing(profile)
    costs = SyncCosts.of_profile(profile, tables, shard_bytes=1 << 20)
    ring = ring_factor(num_workers) / 6e9  # one direction of a remote path is 1.2 times the two at once
    assert costs.worker_s_per_byte == pytest.approx(ring)
    assert costs.proxy_s_per_byte == pytest.approx(max(ring, 1 / 10e9))
    assert costs.shared == ()


def test_shared_links_take_turns():
    profile = profile_of(local=(0, 10), remote=(0, 5), paths_share_links=True)
    costs = SyncCosts.of_profile(profile, plan_routing(profile), shard_bytes=1 << 20)
    ring = 1 / 6e9
    assert costs.proxy_s_per_byte == pytest.approx(ring + 1 / 10e9)
    assert costs.shared == ((costs.proxy_s_per_byte, costs.worker_s_per_byte),)


def test_workers_that_share_a_memory_device_share_its_link():
    two = profile_of(key_of(local_devices=(0, 0), num_devices=1), local=(0, 10))
    one = profile_of(key_of(local_devices=(0,), num_devices=1), local=(0, 10))
    cost = [
        SyncCosts.of_profile(profile, plan_routing(profile), shard_bytes=1 << 20).proxy_s_per_byte
        for profile in (one, two)
    ]
    assert cost[1] == pytest.approx(2 * cost[0])


@given(
    st.lists(curves, min_size=3, max_size=3),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
    st.lists(st.integers(1, 1 << 28), min_size=1, max_size=10),
    st.booleans(),
)
def test_any_profile_and_any_tensors_have_a_plan(drawn, local_devices, tensor_bytes, paths_share_links):
    key = key_of(local_devices=local_devices, num_devices=3)
    links = {link: drawn[(link.source + 2 * link.target) % 3] for link in key.paths()}
    profile = profile_of(key, curves=links, paths_share_links=paths_share_links)
    tables = plan_routing(profile)
    size = plan_shard_size(profile, tables)
    costs = SyncCosts.of_profile(profile, tables, shard_bytes=size.nbytes)
    job = DualSyncInputs(tensor_bytes=tuple(tensor_bytes), forward_s=0.1, backward_s=0.2, costs=costs)
    plan = plan_dual_sync(job)
    assert 0 <= plan.m_bytes <= job.total_bytes
    assert plan.predicted_s <= min(plan.devices_only_s * (1 + 1e-9), plan.workers_only_s)


# ---- workers that compute ----


def test_workers_that_compute_reduce_nothing_meanwhile():
    job = dataclasses.replace(paper(worker=2.0), workers_compute=True)
    assert job.workers_only_s() == job.train_s(0) > paper(worker=2.0).workers_only_s()
    plan = plan_dual_sync(job)
    assert plan.predicted_s == min(job.train_s(m) for m in job.boundaries())


@pytest.mark.parametrize(("wanted", "splits"), [(0.0, True), (0.9, True), (1.1, False)])
def test_a_split_that_saves_too_little_is_not_made(wanted, splits):
    """`wanted` is a multiple of what the best split saves."""
    job = dataclasses.replace(paper(backward_s=0.5), workers_compute=True)
    devices_only_s = job.train_s(job.total_bytes)
    saved = 1 - min(job.train_s(m) for m in job.boundaries()) / devices_only_s
    assert saved > 0.3
    plan = plan_dual_sync(job, least_gain=wanted * saved)
    assert (plan.num_offloaded < 10) == splits
    assert plan.predicted_s == pytest.approx(devices_only_s * (1 - saved if splits else 1))
    assert ("splitting does not pay" in plan.reason) == (not splits)
