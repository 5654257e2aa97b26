"""A worker with a fault in fit(): python fault_worker.py DIRECTORY; prints the time and reason of its end."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import coarse.tensorflow
from coarse.errors import CoarseError


class DiesInSecondEpoch(keras.callbacks.Callback):
    """Ends this process without a word, as the kernel does for want of memory."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 1 and self.model.optimizer.iterations.numpy() > 4:
            (self._directory / "died").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)


def outcome(action: Any) -> str:
    """What it raises, in words."""
    try:
        action()
    except (CoarseError, ValueError, tf.errors.OpError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def asked_alone(rank: int) -> dict[str, str]:
    """What the first worker is told that reads a metric, and creates a variable, while the other one does not."""
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=6.0)
    reads, creates = (coarse.tensorflow.Strategy(communication_options=options) for _ in range(2))
    with reads.scope():
        metric = keras.metrics.Mean()
        metric.update_state([1.0])

    def create() -> None:
        with creates.scope():
            tf.Variable(tf.zeros(2), name="of_one_worker")

    if rank != 0:
        return {}
    with concurrent.futures.ThreadPoolExecutor() as threads:
        waits = {
            "metric": threads.submit(outcome, metric.result),
            "variable": threads.submit(outcome, create),
        }
    return {name: wait.result() for name, wait in waits.items()}


def main() -> None:
    directory = Path(sys.argv[1])
    first, second = coarse.tensorflow.Strategy(), coarse.tensorflow.Strategy()
    rank = first.rank
    said = {
        "devices": [first.session.device_pids, second.session.device_pids],
        "two strategies": [
            float(strategy.reduce("SUM", tf.constant(float(value)), axis=None))
            for strategy, value in ((first, 1 + rank), (second, 10 * rank))
        ],
        "unknown operation": outcome(lambda: first.reduce("MAX", tf.constant(1.0), axis=None)),
        "strings": outcome(lambda: first.gather(tf.constant(["a"]), axis=0)),
    }
    with second.scope():
        said["different variables"] = outcome(
            lambda: tf.Variable(tf.zeros(2 + rank), name=f"of_worker_{rank}")
        )
    said.update(asked_alone(rank))
    with first.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((40, 4), "f4")
    callbacks = [DiesInSecondEpoch(directory)] if rank == 1 else []
    said["fit"] = outcome(
        lambda: model.fit(x, x[:, :1], batch_size=8, epochs=50, verbose=0, callbacks=callbacks)
    )
    said["over"] = time.monotonic()
    said["after"] = outcome(lambda: first.reduce("SUM", tf.constant(1.0), axis=None))
    (directory / f"{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
