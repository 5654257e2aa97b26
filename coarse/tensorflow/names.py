"""Names of collective operations in graphs, the same on every worker that traces the same function."""

from __future__ import annotations

import re
import weakref
from dataclasses import dataclass, field
from typing import Any

from tensorflow.python.framework import func_graph, ops

_NUMBERS = re.compile(r"_\d+")


@dataclass(slots=True)
class _Seen:
    """What was met in one graph so far."""

    num_collectives: int = 0
    children: dict[str, list[Any]] = field(default_factory=dict)


class CollectiveNames:
    """Gives each collective operation of a graph a name that does not depend on how often anything was traced.

    It is made of the names of the graphs around the operation, without the numbers that TensorFlow appends, each
    with its place among those of the same name in the graph around it. So a function that one worker alone traces
    anew keeps its names.
    """

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[Any, _Seen] = weakref.WeakKeyDictionary()

    def next(self) -> str:
        """The name of the operation that is added to the current graph now; "eager" outside of functions."""
        graph = ops.get_default_graph()
        if not ops.inside_function() or not isinstance(graph, func_graph.FuncGraph):
            return "eager"
        seen = self._seen_in(graph)
        seen.num_collectives += 1
        return f"{self._name_of(graph)}/{seen.num_collectives - 1}"

    def graphs(self) -> list[Any]:
        """The current graph and those around it; none outside of functions."""
        graphs = []
        graph = ops.get_default_graph()
        while ops.inside_function() and isinstance(graph, func_graph.FuncGraph):
            graphs.append(graph)
            graph = graph.outer_graph
        return graphs

    def _name_of(self, graph: Any) -> str:
        name = _NUMBERS.sub("", graph.name)
        outer = graph.outer_graph
        if not isinstance(outer, func_graph.FuncGraph):
            return name
        siblings = self._seen_in(outer).children.setdefault(name, [])
        place = next((i for i, sibling in enumerate(siblings) if sibling() is graph), len(siblings))
        if place == len(siblings):
            siblings.append(weakref.ref(graph))
        return f"{self._name_of(outer)}/{name}:{place}"

    def _seen_in(self, graph: Any) -> _Seen:
        return self._seen.setdefault(graph, _Seen())
