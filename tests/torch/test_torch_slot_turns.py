"""SlotTurns: gradients that wait for a slot go there when it is free, not only when backward ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from coarse.client.tensor_group import TensorGroup
from coarse.torch.gradient_path import GradientPath
from coarse.torch.slot_turns import SlotTurns


class _Slots:
    """Slots of tensors, of which a test says when memory devices have reduced them."""

    def __init__(self, slots: Sequence[tuple[int, int]]) -> None:
        self.specs = slots
        self.late: set[int] = set()
        self.sent: list[int] = []

    def slot(self, index: int) -> tuple[int, int]:
        return self.specs[index]

    def is_late(self, index: int) -> bool:
        return index in self.late

    def send(self, index: int) -> None:
        self.sent.append(index)
        self.late.add(index)

    def pull(self, index: int) -> None:
        self.late.remove(index)

    def flush(self) -> None:
        pass


def _turns(slots: _Slots) -> SlotTurns:
    return SlotTurns(cast("TensorGroup", slots), cast("GradientPath", slots), slots.send)


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
