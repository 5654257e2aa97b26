"""The engine on cases with results in closed form, and its errors."""

from __future__ import annotations

import random

import pytest
from engine_checks import check_max_min

from coarse.simulator.events.engine import simulate
from coarse.simulator.events.tasks import Task

ONE = (("link", 1.0),)


def finish(tasks, **capacities):
    return {name: times.finished_s for name, times in simulate(tasks, capacities).times.items()}


def test_a_transfer_takes_overhead_bytes_and_latency():
    task = Task(name="t", ready_s=1, overhead_s=0.5, nbytes=10, usage=ONE, latency_s=0.25)
    assert finish([task], link=5.0) == {"t": 1 + 0.5 + 2 + 0.25}


def test_two_flows_halve_a_link_until_the_shorter_one_ends():
    tasks = [Task(name="short", nbytes=10, usage=ONE), Task(name="long", nbytes=30, usage=ONE)]
    assert finish(tasks, link=10.0) == {"short": 2.0, "long": 4.0}


def test_a_flow_takes_what_the_bottleneck_of_another_leaves():
    tasks = [
        Task(name="both", nbytes=10, usage=(("narrow", 1.0), ("wide", 1.0))),
        Task(name="wide", nbytes=90, usage=(("wide", 1.0),)),
    ]
    assert finish(tasks, narrow=1.0, wide=10.0) == {"both": 10.0, "wide": 10.0}


def test_a_latency_does_not_hold_the_queue():
    tasks = [
        Task(name=str(number), queue="copy", order=number, nbytes=10, usage=ONE, latency_s=5)
        for number in range(3)
    ]
    assert finish(tasks, link=10.0) == {"0": 6.0, "1": 7.0, "2": 8.0}


def test_a_queue_with_two_channels_serves_two_at_once():
    tasks = [Task(name=str(number), queue="copy", order=number, overhead_s=1) for number in range(3)]
    times = simulate(tasks, {}, channels={"copy": 2}).times
    assert [times[str(number)].finished_s for number in range(3)] == [1, 1, 2]


def test_a_queue_needs_a_channel():
    with pytest.raises(ValueError, match="a queue with 0 channels serves nothing"):
        simulate([Task(name="a", queue="copy")], {}, channels={"copy": 0})


def test_a_thousand_unequal_flows_share_max_min():
    chance = random.Random(3)
    capacities = {f"{kind}{end}": chance.uniform(1, 9) for kind in ("up", "down") for end in range(200)}
    tasks = [
        Task(
            name=f"t{number}",
            nbytes=chance.uniform(1, 100),
            usage=((f"up{number % 200}", 1.0), (f"down{chance.randrange(200)}", 1.0)),
        )
        for number in range(1000)
    ]
    stretches = []
    simulate(tasks, capacities, observe=lambda *stretch: stretches.append(stretch))
    assert len(stretches[0][2]) == 1000
    for _, _, rates in stretches[::100]:
        check_max_min({task.name: task for task in tasks}, capacities, rates)


def test_thousands_of_equal_flows_are_one_class():
    tasks = [Task(name=str(number), nbytes=1, usage=ONE) for number in range(5000)]
    assert set(finish(tasks, link=5000.0).values()) == {1.0}


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([Task(name="a"), Task(name="a")], "two tasks are named a"),
        ([Task(name="a", after=("b",))], "task a waits for b, which does not exist"),
        ([Task(name="a", nbytes=1, usage=(("x", 1),))], "task a crosses bucket x, which does not exist"),
        ([Task(name="a", after=("b",)), Task(name="b", after=("a",))], "2 tasks wait for each other"),
    ],
)
def test_wrong_tasks_are_refused_by_name(tasks, message):
    with pytest.raises(ValueError, match=message):
        simulate(tasks, {"link": 1.0})


@pytest.mark.parametrize("capacity", [0.0, -1.0, float("inf"), float("nan")])
def test_a_bucket_needs_a_rate(capacity):
    with pytest.raises(ValueError, match=r"bucket link: .* bytes per second is not positive and finite"):
        simulate([], {"link": capacity})


@pytest.mark.parametrize(
    "wrong", [{"nbytes": -1}, {"latency_s": float("nan")}, {"nbytes": 1}, {"usage": (("link", -1.0),)}]
)
def test_a_wrong_task_names_itself(wrong):
    with pytest.raises(ValueError, match="task t"):
        Task(name="t", **wrong)
