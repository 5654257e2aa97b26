"""What the backward pass does that runs the calling hook."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch


def current_backward() -> int:
    """Its number: each call of backward() has another, also one within another."""
    return int(torch._C._current_graph_task_id())


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
