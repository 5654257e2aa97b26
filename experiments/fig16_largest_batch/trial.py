"""One trial: a few training steps of one system with one batch. Prints seconds per step as a line of JSON.

Run by run.py, under a memory limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence

from coarse.bench.statistics import slowest_worker
from coarse.bench.worker_pool import WorkerPool

SEQUENCE = 128


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, and prints the median seconds of a step of the slowest worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("system")
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args(argv)
    options = {
        "model": arguments.model,
        "batch": arguments.batch,
        "sequence": SEQUENCE,
        "optimizer": "adamw",
        "threads": 1,
    }
    with WorkerPool(f"train-{arguments.system}", arguments.workers, options, threads=1) as fleet:
        fleet.start()
        answers = fleet.ask("run", steps=arguments.steps)
    seconds = slowest_worker([answer["step"] for answer in answers])
    print(json.dumps({"step_s": statistics.median(seconds.tolist())}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
