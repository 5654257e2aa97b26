"""SlotTurns: waiting gradients move to their slot as soon as it is free, not only when backward ends."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

from coarse.client.tensor_group import TensorGroup
from coarse.torch.gradients.paths.gradient_path import GradientPath
from coarse.torch.gradients.paths.slot_window import SlotWindow


class _Slots:
    """Slots of tensors, of which a test says when memory devices have reduced them."""

    def __init__(self, slots: Sequence[tuple[int, int]]) -> None:
        self.slots = slots
        self.specs = [SimpleNamespace(nbytes=end - begin) for begin, end in slots]
        self.late: set[int] = set()
        self.sent: list[int] = []
        self.waits: list[tuple[int, float]] = []
        self.are_devices_done = True

    def slot(self, index: int) -> tuple[int, int]:
        return self.slots[index]

    def is_late(self, index: int) -> bool:
        return index in self.late

    def send(self, index: int) -> None:
        self.sent.append(index)
        self.late.add(index)

    def pull(self, index: int) -> None:
        self.late.remove(index)

    def is_complete_within(self, index: int, timeout_s: float) -> bool:
        self.waits.append((index, timeout_s))
        if self.are_devices_done:
            self.late.remove(index)
        return self.are_devices_done

    def flush(self) -> None:
        pass


def _turns(slots: _Slots, most_waiting_bytes: int | None = None) -> SlotWindow:
    return SlotWindow(
        cast("TensorGroup", slots),
        cast("GradientPath", slots),
        slots.send,
        most_waiting_bytes=most_waiting_bytes,
    )


def test_a_gradient_that_waits_goes_when_another_one_comes_and_its_slot_is_free():
    slots = _Slots([(0, 4), (0, 4), (0, 4), (0, 4)])  # one slot for all
    turns = _turns(slots)
    turns.take(3)
    turns.take(2)
    assert slots.sent == [3]
    slots.late.remove(3)  # memory devices are done
    turns.take(1)
    assert slots.sent == [3, 2]
    turns.take(0)
    turns.finish()
    assert slots.sent == [3, 2, 1, 0]


def test_a_gradient_with_a_free_slot_overtakes_those_that_wait():
    slots = _Slots([(4, 8), (0, 4), (0, 4)])
    turns = _turns(slots)
    for index in (2, 1, 0):
        turns.take(index)
    assert slots.sent == [2, 0]


def test_backward_waits_for_memory_devices_when_gradients_of_too_many_bytes_wait():
    slots = _Slots([(0, 4)] * 4)  # one slot for all
    turns = _turns(slots, most_waiting_bytes=4)
    turns.take(3)
    turns.take(2)
    assert (slots.sent, slots.waits) == ([3], [])  # 4 bytes may wait
    turns.take(1)
    assert slots.sent == [3, 2]
    turns.take(0)
    assert slots.sent == [3, 2, 1]
    assert [index for index, _ in slots.waits] == [3, 2]


def test_backward_waits_in_vain_once_and_for_half_as_long_the_next_time():
    """Another worker may wait for a gradient that is still to come here."""
    slots = _Slots([(0, 4)] * 4)
    slots.are_devices_done = False
    turns = _turns(slots, most_waiting_bytes=0)
    patience = []
    for _ in range(2):
        for index in (3, 2, 1, 0):
            turns.take(index)
        assert len(slots.waits) == 1
        patience.append(slots.waits.pop()[1])
        turns.finish()
        slots.late.clear()
        turns.restart()
    assert patience[1] == patience[0] / 2


def test_backward_does_not_wait_for_a_slot_of_a_gradient_that_is_still_to_come():
    slots = _Slots([(0, 4), (4, 8), (0, 4), (4, 8)])
    turns = _turns(slots, most_waiting_bytes=0)
    turns.take(2)
    turns.take(1)  # behind 3
    assert (slots.sent, slots.waits) == ([2], [])
    turns.take(3)
    assert slots.sent == [2, 3, 1]
