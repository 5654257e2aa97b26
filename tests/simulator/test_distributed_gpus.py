"""Distributed GPUs: data before flag, one put per iteration, requests by counting; each planted error is found.

Planted in put and notify: flag on another queue, flag before the data, reset in two steps, newest request first. In
the last block: counter without an atomic, one flag for all iterations, sends from the first block, does not reset
the counter, flag before the boundary. In coalescing: merges across a gap, merges across packets, forgets the last
request.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interleaving import interleave

from coarse.profiler.alpha_beta import AlphaBeta
from coarse.profiler.switchover import predict_all_to_all_crossing
from coarse.simulator.studies.distributed_gpus import (
    coalescing,
    collectives,
    distributed_study,
    last_block,
    notifications,
    put_get,
    stencil,
    transfers,
)
from coarse.simulator.studies.distributed_gpus.global_addresses import GlobalAddressSpace
from coarse.simulator.studies.distributed_gpus.machines import IVY_BRIDGE, PUT_US, SANDY_BRIDGE
from coarse.simulator.studies.distributed_gpus.put_get import GPU_QUEUES, HOST_QUEUES
from coarse.simulator.studies.study import Basis

MOST_CHOICE = 1000
choices_of_schedules = st.lists(st.integers(0, MOST_CHOICE), min_size=1, max_size=40)

# ---- put and notify ----


def check_notifications(num_queues, choices):
    """A flag that is seen has its data, and of two threads that reset it one gets it."""
    segment = notifications.Segment()
    queues = notifications.Queues(segment)
    num_writes = 6
    for number in range(num_writes):
        queues.write_notify(
            number, f"data {number}", number=number, flag=number + 1, queue=number % num_queues
        )
    taken = Counter()

    def take_all():
        """Waits for any flag, resets it, reads its data; until all were taken."""
        while sum(taken.values()) < num_writes:
            for found in notifications.wait_some(segment, 0, num_writes):
                if found is None:
                    if sum(taken.values()) == num_writes:
                        return
                    yield "polls"
            value = yield from last_of(notifications.reset(segment, found))
            if value:
                assert segment.data.get(found) == f"data {found}", f"flag {found} before its data"
                assert value == found + 1
                taken[found] += 1
            yield "took"

    def deliver_all():
        while queues.deliver(choices[len(taken) % len(choices)]):
            yield "delivers"

    interleave([deliver_all(), take_all(), take_all()], choices)
    assert taken == Counter(range(num_writes)), f"flags were taken {dict(taken)} times"


def last_of(steps):
    values = []
    for value in steps:
        values.append(value)
        yield "resets"
    return values[-1]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3), choices_of_schedules)
def test_a_flag_has_its_data_and_is_taken_once(num_queues, choices):
    check_notifications(num_queues, choices)


# ---- the last block ----


def check_last_blocks(num_blocks, choices):
    """Two GPUs exchange boundaries for some iterations, each put once and complete."""
    gpus = [last_block.Gpu(num_blocks), last_block.Gpu(num_blocks)]
    iterations = 5
    started = [0, 0]

    def block(number, iteration):
        """A block of a stream: its kernel starts when all blocks of the last one have ended."""
        while started[number] < iteration * num_blocks:
            yield "waits for its kernel"
        yield from gpus[number].block(iteration, gpus[1 - number])
        started[number] += 1

    actors = [
        block(number, iteration)
        for iteration in range(iterations)
        for number in range(2)
        for _ in range(num_blocks)
    ]
    interleave(actors, choices)
    for gpu in gpus:
        assert gpu.puts == list(range(iterations))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), choices_of_schedules)
def test_the_last_block_puts_each_boundary_once(num_blocks, choices):
    check_last_blocks(num_blocks, choices)


# ---- coalescing ----


def check_requests(addresses, nbytes=4):
    """Requests carry each stored byte once and in order, none crosses a packet, and no two could have been one."""
    requests = coalescing.write_requests(addresses, nbytes)
    carried = [
        byte for request in requests for byte in range(request.address, request.address + request.nbytes)
    ]
    assert carried == [byte for address in addresses for byte in range(address, address + nbytes)]
    for request in requests:
        assert coalescing.is_same_packet(request.address, request.address + request.nbytes - 1)
    for one, other in pairwise(requests):
        continues = other.address == one.address + one.nbytes
        assert not (continues and coalescing.is_same_packet(one.address, other.address))


addresses_of_values = st.lists(st.integers(0, 60).map(lambda value: 4 * value), max_size=40)


@settings(max_examples=200, deadline=None)
@given(addresses_of_values)
def test_stores_are_merged_as_far_as_packets_allow(addresses):
    check_requests(addresses)


@settings(max_examples=200, deadline=None)
@given(addresses_of_values)
def test_loads_fetch_every_packet_that_they_need(addresses):
    requests = coalescing.read_requests(addresses)
    assert {address // 64 for address in addresses} == {request.address // 64 for request in requests}
    assert len(requests) <= len(addresses)


# ---- planted errors ----


def puts_the_flag_on_another_queue(monkeypatch):
    def apart(self, offset, value, *, number, flag, queue):
        self.write(offset, value, queue=queue)
        self.notify(number, flag, queue=queue + 1)

    monkeypatch.setattr(notifications.Queues, "write_notify", apart)


def puts_the_flag_before_the_data(monkeypatch):
    def early(self, offset, value, *, number, flag, queue):
        self.notify(number, flag, queue=queue)
        self.write(offset, value, queue=queue)

    monkeypatch.setattr(notifications.Queues, "write_notify", early)


def resets_in_two_steps(monkeypatch):
    def torn(segment, number):
        value = segment.flags.get(number, 0)
        yield value
        segment.flags[number] = 0
        yield value

    monkeypatch.setattr(notifications, "reset", torn)


def delivers_the_newest_first(monkeypatch):
    def newest(self, request, queue):
        self.waiting.setdefault(queue, notifications.deque()).appendleft(request)

    monkeypatch.setattr(notifications.Queues, "post", newest)


def counts_blocks_without_an_atomic(monkeypatch):
    def torn(self):
        before = self.counter
        yield "loads"
        self.counter = before + 1
        yield "stores"
        return before

    monkeypatch.setattr(last_block.Gpu, "arrive", torn)


def has_one_flag_for_all_iterations(monkeypatch):
    monkeypatch.setattr(last_block, "place", lambda iteration: 0)


def sends_from_the_first_block(monkeypatch):
    def first(self):
        yield "arrives"
        return self.num_blocks - 1

    monkeypatch.setattr(last_block.Gpu, "arrive", first)


def does_not_reset_the_counter(monkeypatch):
    send = last_block.Gpu.send

    def keeping(self, iteration, neighbour):
        before = self.counter
        steps = send(self, iteration, neighbour)
        next(steps)
        self.counter = before
        yield "resets the flag alone"
        yield from steps

    monkeypatch.setattr(last_block.Gpu, "send", keeping)


def puts_the_flag_before_the_boundary(monkeypatch):
    def early(self, iteration, neighbour):
        self.counter = 0
        self.flags[last_block.place(iteration)] = 0
        neighbour.flags[last_block.place(iteration + 1)] = 1
        yield "puts the flag"
        neighbour.boundaries[last_block.place(iteration + 1)] = iteration
        self.puts.append(iteration)
        yield "puts the boundary"

    monkeypatch.setattr(last_block.Gpu, "send", early)


def merges_across_a_gap(monkeypatch):
    def lax(self, address):
        last = self.open_request
        return last is not None and coalescing.is_same_packet(address, last.address)

    monkeypatch.setattr(coalescing.WriteCombiner, "joins", lax)


def merges_across_packets(monkeypatch):
    def lax(self, address):
        last = self.open_request
        return last is not None and address == last.address + last.nbytes

    monkeypatch.setattr(coalescing.WriteCombiner, "joins", lax)


def forgets_the_last_request(monkeypatch):
    monkeypatch.setattr(coalescing.WriteCombiner, "flush", lambda self: None)


def random_choices(seed):
    chance = random.Random(seed)
    return chance.randint(1, 3), [chance.randint(0, MOST_CHOICE) for _ in range(30)]


def random_addresses(seed):
    chance = random.Random(seed)
    return ([start + 4 * value for start in chance.sample(range(0, 512, 4), 3) for value in range(20)],)


PLANTED = (
    (check_notifications, random_choices, puts_the_flag_on_another_queue),
    (check_notifications, random_choices, puts_the_flag_before_the_data),
    (check_notifications, random_choices, resets_in_two_steps),
    (check_notifications, random_choices, delivers_the_newest_first),
    (check_last_blocks, random_choices, counts_blocks_without_an_atomic),
    (check_last_blocks, random_choices, has_one_flag_for_all_iterations),
    (check_last_blocks, random_choices, sends_from_the_first_block),
    (check_last_blocks, random_choices, does_not_reset_the_counter),
    (check_last_blocks, random_choices, puts_the_flag_before_the_boundary),
    (check_requests, random_addresses, merges_across_a_gap),
    (check_requests, random_addresses, merges_across_packets),
    (check_requests, random_addresses, forgets_the_last_request),
)


def num_found(check, cases):
    found = 0
    for case in cases:
        try:
            check(*case)
        except AssertionError:
            found += 1
    return found


@pytest.mark.parametrize(("check", "draw", "plant"), PLANTED, ids=lambda each: each.__name__)
def test_a_planted_error_is_found(check, draw, plant, monkeypatch):
    cases = [draw(seed) for seed in range(12)]
    assert num_found(check, cases) == 0
    plant(monkeypatch)
    assert num_found(check, cases) >= 1


# ---- global addresses ----


@given(st.integers(1, 16), st.data())
def test_every_address_of_the_window_is_one_place_of_one_node(nodes, data):
    starts = tuple(1 << (30 + node) for node in range(nodes))
    space = GlobalAddressSpace(window_start=1 << 40, window_bytes=nodes << 12, target_starts=starts)
    node = data.draw(st.integers(0, nodes - 1))
    offset = data.draw(st.integers(0, space.interval_bytes - 1))
    remote = space.egress(space.address_of(node, offset))
    assert remote == (node, offset)
    assert space.ingress(remote) == starts[node] + offset


def test_a_window_has_its_limits():
    space = GlobalAddressSpace(window_start=4096, window_bytes=256 << 20, target_starts=(0,) * 8)
    assert space.interval_bytes == 32 << 20  # section 6.4.1
    for address in (4095, 4096 + (256 << 20)):
        with pytest.raises(ValueError, match="outside of the window at 0x1000"):
            space.egress(address)
    with pytest.raises(ValueError, match="3 nodes cannot share 256 bytes evenly"):
        GlobalAddressSpace(window_start=0, window_bytes=256, target_starts=(0, 0, 0))


# ---- times ----


@pytest.mark.parametrize("machine", [SANDY_BRIDGE, IVY_BRIDGE], ids=lambda machine: machine.name)
def test_hybrid_is_the_faster_of_both_ways(machine):
    switch = transfers.switch_bytes(machine)
    for power in range(8, 22):
        ways = transfers.direct_us(machine, 1 << power), transfers.staged_us(machine, 1 << power)
        assert transfers.hybrid_us(machine, 1 << power, switch_bytes=switch) == min(ways)


def test_an_all_to_all_sends_at_the_rate_of_its_slowest_part():
    gpus, nbytes = 4, 1 << 24
    direct, staged = (
        transfers.all_to_all_us(SANDY_BRIDGE, gpus=gpus, nbytes=nbytes, is_staged=is_staged)
        for is_staged in (False, True)
    )
    assert direct == pytest.approx((gpus - 1) * nbytes / SANDY_BRIDGE.peer_read.value + PUT_US.value)
    first_copy_us = transfers.STAGING_US.value + nbytes / SANDY_BRIDGE.copy.value
    assert staged == pytest.approx(
        first_copy_us + (gpus - 1) * nbytes / SANDY_BRIDGE.link.value + PUT_US.value
    )


def test_an_all_to_all_switches_at_smaller_messages_than_a_write():
    """Copies of later messages hide behind earlier ones."""
    assert transfers.all_to_all_switch_bytes(SANDY_BRIDGE, 8) < transfers.switch_bytes(SANDY_BRIDGE)


def test_chunks_of_a_staged_write_overlap():
    """The last chunk leaves host memory after all others have left, and only the first copy is not hidden."""
    nbytes, chunk = 8 << 20, 1 << 20
    copy_us = transfers.STAGING_US.value + chunk / SANDY_BRIDGE.copy.value
    assert transfers.staged_us(SANDY_BRIDGE, nbytes, chunk) == pytest.approx(
        copy_us + nbytes / SANDY_BRIDGE.link.value + PUT_US.value
    )


def test_a_completion_is_polled_while_the_answer_flies():
    assert put_get.half_round_us(GPU_QUEUES) == pytest.approx(GPU_QUEUES.post_us + PUT_US.value)


def test_a_completion_that_outlasts_the_answer_delays_the_next_post():
    slow = GPU_QUEUES._replace(poll_us=100.0)
    assert put_get.half_round_us(slow) > put_get.half_round_us(GPU_QUEUES) + 30


def test_queues_on_the_host_are_limited_by_their_bus():
    one, many = (put_get.message_rate_per_s(HOST_QUEUES, number) for number in (1, 32))
    bus_us = HOST_QUEUES.pcie_accesses * put_get.PCIE_ACCESS_US.value
    assert one == pytest.approx(1e6 / HOST_QUEUES.post_us)
    assert many < 1e6 / bus_us < 32 * one


def test_a_stream_of_small_puts_is_limited_by_the_thread():
    expected = 1024 / (GPU_QUEUES.post_us + GPU_QUEUES.poll_us)
    assert put_get.stream_mbytes_per_s(GPU_QUEUES, 1024) == pytest.approx(expected)


BYTES_OF_GPUS = {
    "remote read": lambda gpus: gpus * (gpus - 1),
    "gather": lambda gpus: 2 * (gpus - 1),
    "all-gather": lambda gpus: gpus * (gpus - 1),
    "all-to-all": lambda gpus: 2 * (gpus - 1),
    "tree": lambda gpus: 2 * (gpus - 1),
}
"""Vectors that all GPUs together send in an all-reduce."""


@pytest.mark.parametrize("method", collectives.METHODS)
@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_bytes_of_an_all_reduce_are_those_of_the_closed_form(method, gpus):
    program = collectives.Program(gpus)
    collectives.METHODS[method](program, 1024.0, is_all=True)
    sent = sum(task.nbytes for task in program.tasks)
    assert sent == pytest.approx(1024 * BYTES_OF_GPUS[method](gpus))


@pytest.mark.parametrize(("method", "barriers"), [("gather", 2), ("all-gather", 1), ("all-to-all", 2)])
def test_an_all_reduce_of_nothing_takes_its_barriers(method, barriers):
    """Check-ins of a second barrier may overlap with check-outs of the first one."""
    flags_us = 7 * collectives.request_us(coalescing.Request(0, 4))
    all_us = barriers * collectives.barrier_us(8)
    assert all_us - flags_us <= collectives.reduction_us(method, nbytes=1e-9) <= all_us + 1e-6


def test_a_barrier_stores_a_flag_each_way():
    for gpus in (2, 3, 8):
        flag_us = collectives.request_us(coalescing.Request(0, 4))
        one_way_us = (gpus - 1) * flag_us + collectives.STORE_US.value
        expected = 2 * one_way_us + collectives.BARRIER_US.value
        assert collectives.barrier_us(gpus) == pytest.approx(expected)


def test_communication_that_computation_hides_costs_the_host_alone():
    grid = stencil.Grid(name="large", mflop=1e6, boundary_bytes=1024)
    extra_us = stencil.iteration_us(grid, 4) - stencil.iteration_us(grid, 1) / 4
    assert extra_us == pytest.approx(2 * stencil.EVENT_US.value)


def test_a_sleeping_processor_saves_energy_until_the_job_takes_too_long():
    assert stencil.efficiency_gain(1.0) > stencil.efficiency_gain(0.95) > 0 > stencil.efficiency_gain(0.9)


@pytest.mark.parametrize("gpus", [4, 8])
def test_the_runtimes_formula_predicts_the_simulated_switch(gpus):
    path = AlphaBeta(alpha_us=collectives.barrier_us(gpus), beta_gbytes_per_s=0.8)
    formula = predict_all_to_all_crossing(path, gpus)
    assert collectives.switch_bytes(gpus) == pytest.approx(formula, rel=0.05)


# ---- the study ----


@pytest.fixture(name="result", scope="module")
def result_of_the_study():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_study, "find_spec", lambda name: None)  # no pictures
        return distributed_study.STUDY.run(lambda words: None)


def test_exact_figures_agree_and_others_say_why_not(result):
    assert all(each.agrees for each in result.comparisons if each.basis is Basis.EXACT)
    assert all(each.reason for each in result.deviations())


def test_four_of_five_predicted_figures_agree(result):
    predicted = [each.agrees for each in result.comparisons if each.basis is Basis.PREDICTED]
    assert sum(predicted) >= 0.8 * len(predicted)


def test_two_runs_give_the_same(result, monkeypatch):
    monkeypatch.setattr(distributed_study, "find_spec", lambda name: None)
    assert distributed_study.STUDY.run(lambda words: None) == result


def test_pictures_can_be_drawn():
    pytest.importorskip("matplotlib")
    assert set(distributed_study._pictures()) == {"transfers", "all-reduce", "message-rate"}
