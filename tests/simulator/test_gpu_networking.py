"""GPU networking: triggers fire once, the ring loses nothing in any interleaving, and each planted error is found.

Planted in the trigger list: fires twice, takes one trigger more than its threshold, drops triggers before their
registration, forgets their count at registration, does not start at registration, counts for another tag. In the
ring: sets the status before the entry, never refreshes the read index, takes the write index for it, fills one entry
too many, completes before it performs, frees the entry before it reads.
"""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interleaving import interleave

from coarse.simulator.events.engine import simulate
from coarse.simulator.studies.gpu_networking import (
    active_messages,
    all_reduce,
    control_paths,
    messages,
    networking_study,
    ring,
    stages,
    triggers,
)
from coarse.simulator.studies.gpu_networking.memory import SharedMemory
from coarse.simulator.studies.gpu_networking.training import speedup
from coarse.simulator.studies.study import Basis

NUM_REQUESTS = 6
MOST_CHOICE = 1000

# ---- triggered operations ----


def calls_of(operations):
    """For each {tag: (threshold, number of triggers)}: its registration, and its triggers."""
    return [("register", tag) for tag in operations] + [
        ("trigger", tag) for tag, (_, num_triggers) in operations.items() for _ in range(num_triggers)
    ]


def check_triggers(operations, calls):
    """An operation starts at the call that makes its triggers enough, and never again."""
    interface = triggers.TriggerList()
    counted, registered, expected = dict.fromkeys(operations, 0), set(), []
    for call, tag in calls:
        threshold = operations[tag][0]
        if call == "register":
            registered.add(tag)
            has_fired = interface.register(f"put {tag}", tag=tag, threshold=threshold)
        else:
            counted[tag] += 1
            has_fired = interface.trigger(tag)
        is_due = tag in registered and counted[tag] >= threshold and f"put {tag}" not in expected
        if is_due:
            expected.append(f"put {tag}")
        assert has_fired == is_due, f"{call} of tag {tag}: {counted[tag]} of {threshold} triggers"
        assert interface.fired == expected
    return interface.fired


trigger_lists = st.dictionaries(
    st.integers(0, 5), st.tuples(st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=4
)


@settings(max_examples=300, deadline=None)
@given(trigger_lists, st.randoms(use_true_random=False))
def test_a_triggered_operation_starts_exactly_once_in_any_order(operations, chance):
    calls = calls_of(operations)
    chance.shuffle(calls)
    fired = check_triggers(operations, calls)
    assert sorted(fired) == sorted(
        f"put {tag}" for tag, (threshold, num) in operations.items() if num >= threshold
    )


def test_a_registration_takes_over_the_triggers_that_came_first():
    interface = triggers.TriggerList()
    assert not interface.trigger(3)
    assert not interface.trigger(3)
    assert interface.register("put", tag=3, threshold=2)
    assert not interface.trigger(3)


def test_a_tag_has_one_operation():
    interface = triggers.TriggerList()
    interface.register("put", tag=3, threshold=2)
    with pytest.raises(ValueError, match="tag 3 belongs to operation put; get needs another one"):
        interface.register("get", tag=3, threshold=2)
    with pytest.raises(ValueError, match="use at least 1"):
        interface.register("get", tag=4, threshold=0)


# ---- ComP-Net's ring ----


class WatchedMemory(SharedMemory):
    """Fails if an entry is overwritten before its operation is performed."""

    __slots__ = ("performed",)

    def store(self, actor, word, value):
        if word[0] == "entry":
            before = [number for number in range(value) if number % self.performed.capacity == word[1]]
            unread = set(before) - set(self.performed)
            assert not unread, f"request {value} overwrites {unread}"
        super().store(actor, word, value)


class Performed(list):
    """The requests that were performed, in order."""

    def __init__(self, capacity):
        super().__init__()
        self.capacity = capacity


def check_ring(capacity, choices):
    """All requests are performed once, in order, whole; none is complete before it is performed."""
    memory, performed = WatchedMemory(), Performed(capacity)
    memory.performed = performed
    producer = ring.Producer(memory, capacity)
    consumer = ring.Consumer(memory, capacity, performed.append)

    def post_all():
        for number in range(NUM_REQUESTS):
            yield from producer.post(number)
            for position in range(max(0, number - capacity + 1), number + 1):
                if producer.is_complete(position):
                    assert position in performed, f"request {position} is complete but was not performed"

    def serve_all():
        for _ in range(NUM_REQUESTS):
            yield from consumer.serve()

    def propagate(choice):
        if choice % 3 == 0:
            memory.propagate(choice // 3)

    interleave([post_all(), serve_all()], choices, between=propagate)
    assert performed == list(range(NUM_REQUESTS))


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(0, MOST_CHOICE), min_size=1, max_size=40))
def test_the_ring_loses_and_overwrites_nothing(capacity, choices):
    check_ring(capacity, choices)


# ---- planted errors ----


def fires_twice(monkeypatch):
    def forgetting(self, entry):
        if not triggers.is_due(entry):
            return False
        self.fired.append(entry.operation)
        return True

    monkeypatch.setattr(triggers.TriggerList, "fire_if_due", forgetting)


def takes_one_trigger_more(monkeypatch):
    monkeypatch.setattr(
        triggers, "is_due", lambda entry: entry.threshold is not None and entry.counter > entry.threshold
    )


def drops_triggers_before_their_registration(monkeypatch):
    trigger = triggers.TriggerList.trigger
    monkeypatch.setattr(
        triggers.TriggerList, "trigger", lambda self, tag: tag in self.entries and trigger(self, tag)
    )


def forgets_the_count_at_registration(monkeypatch):
    register = triggers.TriggerList.register

    def fresh(self, operation, *, tag, threshold):
        self.entries.pop(tag, None)
        return register(self, operation, tag=tag, threshold=threshold)

    monkeypatch.setattr(triggers.TriggerList, "register", fresh)


def does_not_start_at_registration(monkeypatch):
    def late(self, operation, *, tag, threshold):
        entry = self.entry(tag)
        entry.operation, entry.threshold = operation, threshold
        return False

    monkeypatch.setattr(triggers.TriggerList, "register", late)


def counts_for_another_tag(monkeypatch):
    trigger = triggers.TriggerList.trigger
    monkeypatch.setattr(triggers.TriggerList, "trigger", lambda self, tag: trigger(self, tag & ~1))


def sets_the_status_before_the_entry(monkeypatch):
    def plain(self):
        self.memory.store("work-group", ring.status_word(self.write_index, self.capacity), 1)

    monkeypatch.setattr(ring.Producer, "publish", plain)


def never_refreshes_the_read_index(monkeypatch):
    monkeypatch.setattr(ring.Producer, "refresh", lambda self: None)


def takes_the_write_index_for_the_read_index(monkeypatch):
    def guess(self):
        self.local_read_index = self.write_index

    monkeypatch.setattr(ring.Producer, "refresh", guess)


def fills_one_entry_too_many(monkeypatch):
    monkeypatch.setattr(
        ring.Producer, "is_full", lambda self: self.write_index - self.local_read_index > self.capacity
    )


def completes_before_it_performs(monkeypatch):
    def early(self, request):
        status = ring.status_word(self.read_index, self.capacity)
        self.memory.store_release("command processor", status, 0)
        yield "clears the status"
        self.perform(request)
        yield "performs the operation"

    monkeypatch.setattr(ring.Consumer, "finish", early)


def frees_the_entry_before_it_reads(monkeypatch):
    serve = ring.Consumer.serve

    def eager(self):
        self.memory.store_release("command processor", ring.READ_INDEX, self.read_index + 1)
        yield "advances the read index"
        yield from serve(self)

    monkeypatch.setattr(ring.Consumer, "serve", eager)


TRIGGER_ERRORS = (
    fires_twice,
    takes_one_trigger_more,
    drops_triggers_before_their_registration,
    forgets_the_count_at_registration,
    does_not_start_at_registration,
    counts_for_another_tag,
)
RING_ERRORS = (
    sets_the_status_before_the_entry,
    never_refreshes_the_read_index,
    takes_the_write_index_for_the_read_index,
    fills_one_entry_too_many,
    completes_before_it_performs,
    frees_the_entry_before_it_reads,
)


def random_triggers(seed):
    chance = random.Random(seed)
    operations = {tag: (chance.randint(1, 3), chance.randint(0, 5)) for tag in chance.sample(range(6), 3)}
    calls = calls_of(operations)
    chance.shuffle(calls)
    return operations, calls


def random_choices(seed):
    chance = random.Random(seed)
    return chance.randint(1, 3), [chance.randint(0, MOST_CHOICE) for _ in range(30)]


def num_found(check, cases):
    found = 0
    for case in cases:
        try:
            check(*case)
        except AssertionError:
            found += 1
    return found


@pytest.mark.parametrize("plant", TRIGGER_ERRORS, ids=lambda plant: plant.__name__)
def test_a_planted_error_of_the_trigger_list_is_found(plant, monkeypatch):
    cases = [random_triggers(seed) for seed in range(30)]
    assert num_found(check_triggers, cases) == 0
    plant(monkeypatch)
    assert num_found(check_triggers, cases) >= 1


@pytest.mark.parametrize("plant", RING_ERRORS, ids=lambda plant: plant.__name__)
def test_a_planted_error_of_the_ring_is_found(plant, monkeypatch):
    cases = [random_choices(seed) for seed in range(30)]
    assert num_found(check_ring, cases) == 0
    plant(monkeypatch)
    assert num_found(check_ring, cases) >= 1


# ---- XTQ's indices ----


def target_with_a_kernel():
    target = active_messages.Target()
    target.register_queue(0xF0)
    target.register_queue(0xF8)
    target.register_kernel(active_messages.Kernel(0xA0, 0xB0, 2))
    return target


def test_an_active_message_needs_no_address_of_the_target():
    target = target_with_a_kernel()
    packet = target.receive(active_messages.Put(b"data", queue_index=1, kernel_index=0, arguments=(5, 6)))
    assert packet == active_messages.CommandPacket(0xA0, 0xB0, (5, 6))
    assert (target.memory, target.queues[0xF8], target.doorbells) == ({0xB0: b"data"}, [packet], [0xF8])


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (active_messages.Put(b"", 2, 0, (1, 2)), "queue 2 is not registered; the target has 2"),
        (active_messages.Put(b"", 0, 1, (1, 2)), "kernel 1 is not registered; the target has 1"),
        (active_messages.Put(b"", -1, 0, (1, 2)), "queue -1 is not registered"),
        (active_messages.Put(b"", 0, 0, (1,)), "kernel 0 takes 2 arguments; the put has 1"),
    ],
)
def test_a_refused_active_message_writes_nothing(put, message):
    target = target_with_a_kernel()
    with pytest.raises(ValueError, match=message):
        target.receive(put)
    assert (target.memory, target.doorbells) == ({}, [])


# ---- times ----


def test_stages_follow_each_other():
    for of in stages.SLIDE_16.values():
        for each in of.values():
            assert messages.active_message_us(each) == pytest.approx(math.fsum(each))


def test_two_messages_share_the_parts_that_they_cross():
    """The second one waits for the slowest stage of the first one: 0.31 us."""
    stage = stages.SLIDE_16[64]["XTQ"]
    tasks = [task for name in ("one", "two") for task in messages.active_message_tasks(name, stage)]
    end_us = simulate(tasks, {}).end_s / messages.US
    assert end_us == pytest.approx(math.fsum(stage) + max(stage.post, stage.network))


def test_host_threads_serve_work_groups_in_turns():
    put_us = stages.HOST_PUT_US.value
    assert messages.service_us(work_groups=8, threads=8) == pytest.approx(put_us)
    assert messages.service_us(work_groups=64, threads=8) == pytest.approx(8 * put_us)


@pytest.mark.parametrize("path", control_paths.PATHS, ids=lambda path: path.who.name)
def test_no_all_reduce_is_faster_than_its_link(path):
    nodes, nbytes = 4, 1 << 22
    us = all_reduce.all_reduce_us(path, nodes=nodes, nbytes=nbytes)
    link_us = 2 * (nodes - 1) / nodes * nbytes / (stages.LINK_GBYTES_PER_S.value * 1e3)
    assert link_us < us < 1.5 * link_us


def test_kernel_boundaries_cost_a_launch_and_a_teardown_per_reduction():
    """In closed form, for a chunk that takes no time."""
    nodes = 5
    us = all_reduce.all_reduce_us(control_paths.HDN, nodes=nodes, nbytes=1e-6)
    reduction = stages.LAUNCH_US.value + stages.EXECUTION_US.value + stages.TEARDOWN_US.value
    message = stages.HOST_PUT_US.value + sum(hop.us for hop in messages.DELIVERY)
    assert us == pytest.approx((nodes - 1) * reduction + 2 * (nodes - 1) * message)


def test_an_all_reduce_needs_two_nodes():
    with pytest.raises(ValueError, match="a ring of 1 nodes sends nothing"):
        all_reduce.all_reduce_us(control_paths.HDN, nodes=1, nbytes=1)


@pytest.mark.parametrize(
    ("blocked", "ratio", "expected"), [(0.5, 2.0, 1 / 0.75), (0.0, 9.0, 1.0), (0.2, 1.0, 1.0)]
)
def test_a_workload_gains_where_it_waits(blocked, ratio, expected):
    assert speedup(blocked, ratio) == pytest.approx(expected)


def test_a_workload_that_only_waits_is_refused():
    with pytest.raises(ValueError, match="have no meaning"):
        speedup(1.0, 2.0)


# ---- the study ----


@pytest.fixture(name="result", scope="module")
def result_of_the_study():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(networking_study, "find_spec", lambda name: None)  # no pictures
        return networking_study.STUDY.run(lambda words: None)


def test_exact_figures_agree_and_others_say_why_not(result):
    off = [each.what for each in result.comparisons if each.basis is Basis.EXACT and not each.agrees]
    assert off == ["XTQ's gain over HSA, 64 B"]
    assert all(each.reason for each in result.deviations())


def test_stages_of_one_slide_predict_those_of_another(result):
    predicted = {each.what: each.agrees for each in result.comparisons if each.basis is Basis.PREDICTED}
    waits = [agrees for what, agrees in predicted.items() if "the target's wait" in what]
    assert waits == [True, True, True]


@pytest.mark.parametrize("path", control_paths.PATHS, ids=lambda path: path.who.name)
def test_two_runs_give_the_same(path):
    one, other = (all_reduce.all_reduce_us(path, nodes=4, nbytes=1 << 20) for _ in range(2))
    assert one == other


def test_pictures_can_be_drawn():
    pytest.importorskip("matplotlib")
    assert set(networking_study._pictures()) == {"stages", "puts", "all-reduce"}
