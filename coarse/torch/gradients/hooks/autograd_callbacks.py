"""Inspects and extends the backward pass that runs the calling hook."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch.autograd import Variable


def current_backward() -> int:
    """The number of the running backward; every call of backward() has a different one, also a nested call."""
    return int(torch._C._current_graph_task_id())


def at_end(call: Callable[[], object]) -> None:
    """Calls a function at the end of this backward, after all functions registered before."""
    Variable._execution_engine.queue_callback(call)


def finish_in_order(place: int, finish: Callable[[], object]) -> None:
    """Called at the end of a backward: finishes a model's averaging after all models have pushed their gradients.

    Workers may end the backward of two models in different orders. If a worker waited for the first model before it
    pushed all gradients of the second, all workers would wait forever. The same would happen if workers finished
    models in different orders.

    Args:
        place: Position of the model; models that several workers share have the same order on all of them.
        finish: Waits for averages.
    """
    _unfinished.of_backward(current_backward()).append((place, finish))
    at_end(_finish_all)


class _Unfinished(threading.local):
    """The models that the backward ending in this thread must finish."""

    def __init__(self) -> None:
        self._backward = -1
        self._calls: list[tuple[int, Callable[[], object]]] = []

    def of_backward(self, number: int) -> list[tuple[int, Callable[[], object]]]:
        """The list of this backward. Entries left by an earlier backward, which failed at its end, are dropped."""
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
    """Whether this backward may add to the gradients of `parameters`, as far as an output's hook can detect.

    torch.autograd.grad() does not, and backward(inputs=) of other tensors does not. A backward whose graph contains
    none of the parameters may: they can be in a checkpointed part, or this worker does not use any.
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
            if "autograd.grad" in str(error):  # the gradient of this parameter was requested
                return False
            raise
        nodes.add(node)
    return not _leads_to(nodes, torch._C._current_autograd_node())


def _leads_to(nodes: Collection[Any], start: Any) -> bool:
    """Whether one of `nodes` is reachable from `start` in the graph."""
    seen, ahead = {start}, [start]
    while ahead:
        for node, _ in ahead.pop().next_functions:
            if node in nodes:
                return True
            if node is not None and node not in seen:
                seen.add(node)
                ahead.append(node)
    return False
