"""A worker that runs scenarios and writes their results: python scenario_worker.py DIRECTORY [SCENARIO...]."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from scenarios import SCENARIOS

import coarse.tensorflow

tf.config.threading.set_intra_op_parallelism_threads(1)


def run(name: str, strategy: Any) -> dict[str, Any]:
    keras.utils.set_random_seed(7 + 100 * strategy.rank)  # worker 0's initial values are those that count
    try:
        return SCENARIOS[name](strategy)
    except Exception:
        return {"error": traceback.format_exc()}


def main() -> None:
    directory = Path(sys.argv[1])
    strategy = coarse.tensorflow.Strategy()
    results = {}
    for name in sys.argv[2:] or SCENARIOS:
        results[name] = run(name, strategy)
        if "error" in results[name]:
            break  # the other workers are elsewhere now
    results["launched by"] = sorted({"RANK", "PMI_RANK"} & set(os.environ))
    results["modules"] = sorted({module.partition(".")[0] for module in sys.modules} & {"torch"})
    Path(directory, f"{strategy.num_replicas_in_sync}-{strategy.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
