"""A worker that reduces tensors of a GPU, for which gpu_stand_in.cc stands: python gpu_worker.py DIRECTORY LIBRARY.

DIRECTORY/RANK.json has the devices of the ops, the number of copies, and by dtype the result.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

import coarse.tensorflow

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32")


def devices_of_ops(function: Any) -> list[str]:
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(node for each in graph.library.function for node in each.node_def)]
    return sorted({node.device for node in nodes if node.op == "CoarseReduce"})


def main() -> None:
    directory, library = Path(sys.argv[1]), sys.argv[2]
    tf.load_library(library)
    stand_in = ctypes.CDLL(library)
    strategy = coarse.tensorflow.Strategy()

    @tf.function  # type: ignore[untyped-decorator,unused-ignore]
    def add_up(values: Any) -> Any:
        def replica(values: Any) -> Any:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(values))

        return strategy.run(replica, args=(values,))

    report: dict[str, Any] = {}
    for dtype in DTYPES:
        values = tf.cast(tf.range(1, 9) * (strategy.rank + 1), dtype)
        devices = devices_of_ops(add_up.get_concrete_function(values))
        before = stand_in.gpu_stand_in_copies()
        results = [tf.cast(add_up(values), tf.float64).numpy().tolist() for _ in range(3)]
        report[dtype] = {
            "devices": devices,
            "copies": stand_in.gpu_stand_in_copies() - before,
            "results": results,
        }
    (directory / f"{strategy.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
