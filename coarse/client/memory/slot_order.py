"""In slot windows: the gradients that must be reduced before another one may use its slot."""

from __future__ import annotations

from collections.abc import Sequence


def find_predecessors(slots: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """For each tensor, the tensors that used bytes of its slot before it, in the order of a backward pass.

    That order is the reverse of the tensors' own order. If on every worker a tensor enters its slot only after its
    predecessors have been reduced, no deadlock is possible: each tensor waits only for tensors that precede it in an
    order that is the same on all workers.

    Args:
        slots: Start and exclusive end of each tensor's slot, in bytes.
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
