"""Figure 10, with one pair of orders: real workers and memory devices."""

from __future__ import annotations

import pytest

from experiments.expectation import HIGHER, LOWER, WITHIN
from experiments.fig10_deadlock import run as fig10

OPPOSITE = ((0, 1), (1, 0))


@pytest.mark.parametrize("scheduling", [fig10.FCFS, fig10.QUEUES])
def test_opposite_orders_deadlock_first_come_first_serve_alone(scheduling):
    (run,) = fig10.run_orders(scheduling, [OPPOSITE])
    assert run.orders_differ
    assert run.is_deadlock == (scheduling == fig10.FCFS)
    assert (run.seconds >= run.limit_s) == run.is_deadlock


def test_the_same_order_never_deadlocks():
    runs = fig10.run_orders(fig10.FCFS, [((1, 0, 2), (1, 0, 2))] * 3)
    assert [(run.is_deadlock, run.orders_differ) for run in runs] == [(False, False)] * 3


def test_random_orders_are_the_same_for_the_same_seed():
    assert fig10.random_orders(5, 1) == fig10.random_orders(5, 1)
    assert fig10.random_orders(5, 1) != fig10.random_orders(5, 2)
    orders = [fig10.random_orders(2, seed) for seed in range(400)]
    differ = sum(first != second for first, second in orders)
    assert differ / 400 == pytest.approx(fig10.expected_share(2), abs=0.1)


def run_of(**changes):
    values = {"num_tensors": 2, "seconds": 0.001, "limit_s": 3.0, "is_deadlock": False, "orders_differ": True}
    return fig10.Run(**{**values, **changes})


def test_a_machine_that_is_slow_with_queues_gets_a_longer_limit():
    assert fig10.longest_wait_s([run_of(seconds=0.001)] * 3) == fig10.LIMIT_S
    assert fig10.longest_wait_s([run_of(seconds=seconds) for seconds in (0.01, 0.1, 9.0)]) == pytest.approx(
        10
    )


def test_a_deadlock_that_should_not_be_is_run_again_with_a_longer_limit():
    slow, stuck = run_of(is_deadlock=True), run_of(is_deadlock=True, orders_differ=True)
    again = fig10._confirm(fig10.QUEUES, OPPOSITE, slow)
    assert (again.is_deadlock, again.limit_s) == (False, fig10.SECOND_LIMIT * slow.limit_s)
    assert fig10._confirm(fig10.FCFS, OPPOSITE, stuck) is stuck


def test_the_limit_does_not_count_joining():
    """A limit that is far shorter than joining a session takes still lets opposite orders arrive."""
    (run,) = fig10.run_orders(fig10.QUEUES, [OPPOSITE], limit_s=0.2)
    assert not run.is_deadlock


def test_a_deadlock_too_few_or_too_many_is_not_what_the_paper_says():
    stuck, fine = run_of(is_deadlock=True), run_of()
    same = run_of(orders_differ=False)

    same_stuck = run_of(is_deadlock=True, orders_differ=False)

    def verdicts(fcfs, queues):
        found = fig10.findings({fig10.FCFS: fcfs, fig10.QUEUES: queues})
        return [[check.verdict for check in finding.checks] for finding in found]

    assert verdicts([stuck, same], [fine, same]) == [[WITHIN, WITHIN], [WITHIN, WITHIN]]
    assert verdicts([fine, same], [fine, same]) == [[LOWER, WITHIN], [WITHIN, WITHIN]]
    assert verdicts([stuck, same_stuck], [fine, same]) == [[WITHIN, HIGHER], [WITHIN, WITHIN]]
    assert verdicts([stuck, same], [stuck, same_stuck]) == [[WITHIN, WITHIN], [HIGHER, HIGHER]]
