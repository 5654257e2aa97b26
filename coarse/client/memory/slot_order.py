"""Which gradients must be out of the way before another one may take its slot, where tensors share slots."""

from __future__ import annotations

from collections.abc import Sequence


def find_predecessors(slots: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """For each tensor, the tensors that had bytes of its slot before it, in the order of a backward pass.

    That order is the reverse of the tensors' own. If on every worker a tensor goes to its slot only after its
    predecessors have gone to theirs and been reduced, then nobody waits for ever: each waits for tensors that come
    before it in an order that is the same on all workers.

    Args:
        slots: First byte of each tensor's slot, and the first one behind it.
    """
    predecessors: list[tuple[int, ...]] = [()] * len(slots)
    occupied: list[tuple[int, int, int]] = []  # (first byte, end, tensor), disjoint
    for tensor in reversed(range(len(slots))):
        start, end = slots[tensor]
        overlapping = [run for run in occupied if run[0] < end and start < run[1]]
        predecessors[tensor] = tuple(sorted({run[2] for run in overlapping}))
        occupied = [run for run in occupied if run not in overlapping]
        for low, high, owner in overlapping:
            occupied += [piece for piece in ((low, start, owner), (end, high, owner)) if piece[0] < piece[1]]
        occupied.append((start, end, tensor))
    return predecessors
