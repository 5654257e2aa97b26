"""StepClock: derives the times of forward and backward from the pushes and pulls of steps."""

from __future__ import annotations

import pytest

from coarse.tuning.step_clock import StepClock


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _step(hand: Hand, clock: StepClock, forward_s: float, gaps_s: list[float], wait_s: float) -> None:
    hand.now += forward_s
    for tensor, gap_s in enumerate([0.0, *gaps_s]):
        hand.now += gap_s
        clock.pushed([len(gaps_s) - tensor])
    hand.now += wait_s
    clock.pulled_all()


def test_splits_steps_at_their_pushes() -> None:
    hand = Hand()
    clock = StepClock(hand)
    _step(hand, clock, 9.0, [9.0], 9.0)  # its start was not seen
    for _ in range(3):
        _step(hand, clock, 1.0, [0.5, 1.5], 0.25)
    assert clock.num_steps == 3
    assert clock.medians_s() == pytest.approx((1.0, 2.0, 3.25))
    assert clock.order == [2, 1, 0]
    assert clock.ready_s() == pytest.approx([0.0, 0.5, 2.0])


def test_one_slow_step_does_not_count() -> None:
    hand = Hand()
    clock = StepClock(hand)
    clock.pulled_all()
    for forward_s in (1.0, 50.0, 1.0):
        _step(hand, clock, forward_s, [2.0], 0.0)
    assert clock.medians_s()[:2] == (1.0, 2.0)


def test_restart_forgets() -> None:
    hand = Hand()
    clock = StepClock(hand)
    clock.pulled_all()
    _step(hand, clock, 1.0, [2.0], 0.0)
    clock.restart()
    assert clock.num_steps == 0
    with pytest.raises(ValueError, match="no whole step"):
        clock.medians_s()
    _step(hand, clock, 3.0, [4.0], 0.0)
    assert clock.medians_s() == pytest.approx((3.0, 4.0, 7.0))


def test_a_pull_without_pushes_is_no_step() -> None:
    hand = Hand()
    clock = StepClock(hand)
    clock.pulled_all()
    clock.pulled_all()
    assert clock.num_steps == 0
