"""Costs of synchronisation through memory devices and NCCL, from trials of both; the step clock on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from coarse.client.gpu.nccl_direct_allreduce import less_accurate_by_nccl
from coarse.schema import TensorSpec
from coarse.tuning import gpu_step_clock
from coarse.tuning.gpu_dual_sync_trial import TrialTimes
from coarse.tuning.gpu_step_clock import GpuStepClock

GIB = 1 << 30


def trial(by_devices: float, by_workers: float, by_both: float) -> TrialTimes:
    return TrialTimes(num_bytes=GIB, by_devices=by_devices, by_workers=by_workers, by_both=by_both)


def test_ways_with_nothing_in_common_share_no_link_that_counts() -> None:
    costs = trial(2.0, 1.0, 1.0).costs()  # the longer half alone
    assert (costs.proxy_s_per_byte, costs.worker_s_per_byte) == (2.0 / GIB, 1.0 / GIB)
    ((proxy, worker),) = costs.shared
    assert proxy * GIB / 2 + worker * GIB / 2 == pytest.approx(1.0)


def test_ways_over_one_link_take_turns_on_it() -> None:
    ((proxy, worker),) = trial(2.0, 1.0, 1.5).costs().shared
    assert (proxy, worker) == pytest.approx((2.0 / GIB, 1.0 / GIB))


def test_halves_that_take_longer_than_one_after_the_other_do_not_make_links_slower_than_they_are() -> None:
    assert trial(2.0, 1.0, 9.0).costs().shared == trial(2.0, 1.0, 1.5).costs().shared


def test_what_was_tried_is_told() -> None:
    told = trial(0.02, 0.01, 0.0125).describe()
    assert told.startswith(
        "1024 MiB took 20.00 ms through the memory devices, 10.00 ms by NCCL between the workers"
    )
    assert told.endswith("12.50 ms half by each")


@pytest.mark.parametrize(
    ("dtype", "op", "is_refused"),
    [
        ("float32", "mean", False),
        ("float64", "sum", False),
        ("bfloat16", "mean", True),
        ("float16", "sum", True),
        ("int32", "sum", True),
        ("float32", "max", True),
    ],
)
def test_nccl_gets_what_it_does_as_accurately(dtype: str, op: str, is_refused: bool) -> None:
    specs = [
        TensorSpec(name="good", dtype="float32", num_elements=1, op="sum"),
        TensorSpec(name="one", dtype=dtype, num_elements=3, op=op),
    ]
    reason = less_accurate_by_nccl(specs)
    assert bool(reason) == is_refused
    assert not is_refused or f"{op} of {dtype}" in reason


class EventByHand:
    """Marks the moment at which the GPU of a test is, not that at which it is asked to."""

    now_ms = 0.0

    def __init__(self, context: Any, *, is_timed: bool) -> None:
        assert is_timed
        self._at_ms = 0.0

    def record(self, stream: int) -> None:
        assert stream == 7
        self._at_ms = EventByHand.now_ms

    def synchronize(self) -> None:
        pass

    def milliseconds_since(self, start: EventByHand) -> float:
        return self._at_ms - start._at_ms


def test_steps_on_a_gpu_are_split_at_their_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_step_clock._native, "CudaEvent", EventByHand)
    context: Any = None
    clock = GpuStepClock(context, lambda: 7)
    for _ in range(4):
        EventByHand.now_ms += 1000.0  # forward
        clock.pushed([2])
        EventByHand.now_ms += 500.0
        clock.pushed([1, 0])
        EventByHand.now_ms += 250.0
        clock.pulled_all()
    assert clock.num_steps == 3, "the first one's start was not seen"
    assert clock.medians_s() == pytest.approx((1.0, 0.5, 1.75))
    assert clock.order == [2, 1, 0]
    assert clock.ready_s() == pytest.approx([0.0, 0.5, 0.5])
