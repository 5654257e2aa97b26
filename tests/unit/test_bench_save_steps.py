"""What `coarse bench checkpoint` makes of the seconds of a loop's steps."""

from __future__ import annotations

import pytest

from coarse.bench.checkpoint.driver import SavePlan, SaveSteps, _Measured, _require_steps_without
from coarse.bench.harness.commands import BenchError

# Steps of 1 s; 2 s of set-up before the first save, and saves that add 3 and 5 s in the steps that follow them.
STEPS = [2.0, 2.0, 1.0, 2.0, 3.0, 1.0, 1.0, 4.0, 3.0, 1.0, 1.0, 1.0]


def test_steps_with_a_save_are_compared_with_those_before_the_next_one() -> None:
    steps = SaveSteps.of(STEPS, saves=2, every=4)
    assert steps.before == [2, 2, 1]
    assert steps.saving == [[2, 3], [4, 3]]
    assert steps.without == [[1, 1], [1, 1]]
    assert steps.added_s == [3, 5]
    assert steps.setup_s == 2


def test_odd_distances_leave_out_the_last_step() -> None:
    steps = SaveSteps.of([1.0, 1.0, 5.0, 2.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0], saves=1, every=5)
    assert (steps.saving, steps.without) == ([[9, 1]], [[1, 1]])


def test_slower_steps_of_the_whole_machine_are_not_a_cost_of_saves() -> None:
    """As by the median of all steps, of which those of a slow minute are the larger part."""
    slow = [3.0] * 10 + [1.0] * 90
    steps = SaveSteps.of(slow, saves=4, every=20)
    assert steps.added_s == [0, 0, 0, 0]


def measured(steps_to_disk: list[float]) -> _Measured:
    result = _Measured()
    answer = {"stop": [0.1, 0.2], "to_disk": [3.0], "step": STEPS, "steps_to_disk": steps_to_disk}
    result.add(PLAN_OF_STEPS, [answer, answer])
    return result


PLAN_OF_STEPS = SavePlan(
    systems=("torch",),
    model="digits",
    batch=4,
    sequence=8,
    num_workers=2,
    threads=1,
    optimizer="adamw",
    saves=2,
    every=4,
)


def test_result_has_the_mean_of_all_saves_and_its_standard_error() -> None:
    result = measured([2.0, 1.0]).result("torch", PLAN_OF_STEPS)
    assert result.added_s == 4
    assert result.added_error_s == pytest.approx(1)
    assert (result.setup_s, result.longest_s, result.longest_without_s) == (2, 4, 1)
    assert result.step.iterations == 12
    assert result.as_json()["longest_step_without_s"] == 1


def test_a_save_that_lasts_until_the_steps_without_one_is_refused() -> None:
    _require_steps_without(PLAN_OF_STEPS, "torch", measured([2.0, 1.0]))
    with pytest.raises(
        BenchError, match=r"torch: a save was in progress for 3 steps of 4; give at least --every=8"
    ):
        _require_steps_without(PLAN_OF_STEPS, "torch", measured([1.0, 3.0]))
