"""Arrival counters: a model of Proxy::record(), complete() and finishShard(), run through every interleaving.

A separate memory device serves each client's descriptors, which gives the highest concurrency. A device's steps are
the accesses to shared memory, in the order of coarse/kernels/src/device/proxy.cpp. The counter and its threshold are
registered once, and an arrival that is early for the others, or for the others' last step, counts.
tests/native/arrival_order_test.cpp runs the proxies themselves through every order of arrivals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest


@dataclass(frozen=True, slots=True)
class State:
    """Shared memory of one shard, and where each device is in its program."""

    contributed: tuple[int, ...]  # step of each client's contribution
    done: tuple[int, ...]  # last step whose result each client has
    arrivals: int
    fired: tuple[int, ...]  # contributions' steps at each reduction, one number per step
    at: tuple[int, ...]  # each device's position in its program
    step: tuple[int, ...]  # the step that each device serves
    seen: tuple[int, ...]  # a device's register


Program = Callable[[State, int], State | None]
"""The next access to shared memory of a device; None while it waits."""


def put(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


def contribute(state: State, i: int) -> State | None:
    if state.done[i] != state.step[i] - 1:
        return None  # the client pushes a step when it has the result of the one before
    return advance(replace(state, contributed=put(state.contributed, i, state.step[i])), i)


def count(state: State, i: int) -> State:
    arrived = state.arrivals + 1
    return decide(replace(state, arrivals=arrived, seen=put(state.seen, i, arrived)), i)


def read_count(state: State, i: int) -> State:
    return advance(replace(state, seen=put(state.seen, i, state.arrivals + 1)), i)


def write_count(state: State, i: int) -> State:
    return decide(replace(state, arrivals=state.seen[i]), i)


def reset(state: State, i: int) -> State:
    return advance(replace(state, arrivals=0), i)


def reduce(state: State, i: int) -> State:
    assert set(state.contributed) == {state.step[i]}, "reduced a shard that is not complete"
    return advance(replace(state, fired=(*state.fired, state.step[i])), i)


def finish(client: int) -> Program:
    return lambda state, i: advance(replace(state, done=put(state.done, client, state.step[i])), i)


def advance(state: State, i: int) -> State:
    return replace(state, at=put(state.at, i, state.at[i] + 1))


def decide(state: State, i: int) -> State:
    """Completes the shard at the threshold, else turns to the client's next step."""
    return advance(state, i) if state.seen[i] == len(state.done) else turn(state, i)


def turn(state: State, i: int) -> State:
    return replace(state, at=put(state.at, i, 0), step=put(state.step, i, state.step[i] + 1))


def shipped(num_clients: int) -> list[Program]:
    return [contribute, count, reset, reduce, *map(finish, range(num_clients))]


def successors(state: State, program: list[Program], num_steps: int) -> Iterator[State]:
    for i, step in enumerate(state.step):
        if step <= num_steps and (following := program[state.at[i]](state, i)) is not None:
            yield turn(following, i) if following.at[i] == len(program) else following


def final_states(program: list[Program], num_clients: int, num_steps: int) -> set[State]:
    """Where all interleavings end, whether all devices have ended or wait for ever."""
    zeros = (0,) * num_clients
    start = State(zeros, zeros, 0, (), zeros, (1,) * num_clients, zeros)
    reached, open_states, final = {start}, [start], set()
    while open_states:
        state = open_states.pop()
        following = set(successors(state, program, num_steps))
        if not following:
            final.add(state)
        open_states += following - reached
        reached |= following
    return final


@pytest.mark.parametrize(("num_clients", "num_steps"), [(1, 4), (2, 4), (3, 3), (4, 2)])
def test_every_interleaving_fires_each_step_exactly_once(num_clients, num_steps):
    final = final_states(shipped(num_clients), num_clients, num_steps)
    assert final
    for state in final:
        assert state.fired == tuple(range(1, num_steps + 1))
        assert state.done == (num_steps,) * num_clients
        assert state.arrivals == 0


def test_a_reset_after_the_results_would_lose_an_early_arrival():
    """The model can fail: a client that has its result pushes the next step before the others have theirs."""
    late = [contribute, count, reduce, finish(0), finish(1), reset]
    assert any(len(state.fired) < 2 for state in final_states(late, 2, 2))


def test_a_count_in_two_accesses_would_lose_an_arrival():
    torn = [contribute, read_count, write_count, reset, reduce, finish(0), finish(1)]
    assert any(len(state.fired) < 1 for state in final_states(torn, 2, 1))
