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
    """Counts of names and graphs found in one graph so far."""

    num_collectives: int = 0
    children: dict[str, list[Any]] = field(default_factory=dict)


class CollectiveNames:
    """Names each collective operation of a graph independently of the number of traces.

    The name consists of the names of the enclosing graphs, without the numbers that TensorFlow appends. Each has its
    position among the graphs of the same name in its enclosing graph. So a function keeps its names if only one
    worker traces it again.
    """

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[Any, _Seen] = weakref.WeakKeyDictionary()

    def next(self) -> str:
        """Returns a name for the next operation in the current graph; "eager" outside of functions."""
        graph = ops.get_default_graph()
        if not ops.inside_function() or not isinstance(graph, func_graph.FuncGraph):
            return "eager"
        seen = self._seen_in(graph)
        seen.num_collectives += 1
        return f"{self._name_of(graph)}/{seen.num_collectives - 1}"

    def graphs(self) -> list[Any]:
        """The current graph and its enclosing graphs; none outside of functions."""
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
