"""What the backward pass does that runs the calling hook."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch.autograd import Variable


def current_backward() -> int:
    """Its number: each call of backward() has another, also one within another."""
    return int(torch._C._current_graph_task_id())


def at_end(call: Callable[[], object]) -> None:
    """Has something called as this backward ends, after all that was asked for before."""
    Variable._execution_engine.queue_callback(call)


def finish_in_order(place: int, finish: Callable[[], object]) -> None:
    """Called as a backward ends: has the averaging of a model finished when all models have given away gradients.

    Workers may end the backward of two models in different orders. If one waited for the first model before it gave
    away all gradients of the second, all would wait for ever; so they would if they finished in different orders.

    Args:
        place: Models that several workers share have places of the same order on all of these.
        finish: Waits for averages.
    """
    _unfinished.of_backward(current_backward()).append((place, finish))
    at_end(_finish_all)


class _Unfinished(threading.local):
    """What the backward that ends in this thread has to finish."""

    def __init__(self) -> None:
        self._backward = -1
        self._calls: list[tuple[int, Callable[[], object]]] = []

    def of_backward(self, number: int) -> list[tuple[int, Callable[[], object]]]:
        """The list of this one. An earlier one that has left something in it failed as it ended."""
        if number != self._backward:
            self._backward, self._calls = number, []
        return self._calls


_unfinished = _Unfinished()


def _finish_all() -> None:
    calls = _unfinished.of_backward(current_backward())
    todo = sorted(calls, key=operator.itemgetter(0))
    calls.clear()
    for _, finish in todo:
        finish()


def may_accumulate(parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Whether it adds to the gradients of `parameters`, as far as the hook of an output can see.

    torch.autograd.grad() does not, nor backward(inputs=) of other tensors. One whose graph has none of them may:
    they are in a part that is checkpointed, or this worker uses none.
    """
    nodes = set()
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        try:
            if torch._C._will_engine_execute_node(node):
                return True
        except RuntimeError as error:
            if "autograd.grad" in str(error):  # it was asked for the gradient of this very parameter
                return False
            raise
        nodes.add(node)
    return not _leads_to(nodes, torch._C._current_autograd_node())


def _leads_to(nodes: Collection[Any], start: Any) -> bool:
    """Whether one of `nodes` is in the graph behind `start`."""
    seen, ahead = {start}, [start]
    while ahead:
        for node, _ in ahead.pop().next_functions:
            if node in nodes:
                return True
            if node is not None and node not in seen:
                seen.add(node)
                ahead.append(node)
    return False
