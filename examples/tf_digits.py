"""Handwritten digits with Keras: a small convolutional network, trained with model.fit()."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import coarse.tensorflow

TEST_EVERY = 5  # every fifth picture is for testing


class StepTimes(keras.callbacks.Callback):
    """Measures steps, except those of the first epoch, which traces."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._began_at = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._epoch > 0:
            self.seconds.append(time.perf_counter() - self._began_at)


def build_model() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.BatchNormalization(momentum=0.9, synchronized=True),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(2e-3), loss, metrics=["accuracy"])
    return model


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="of this process (default: one per core)")
    parser.add_argument("--report", type=Path, help="write REPORT-RANK.json")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    keras.utils.set_random_seed(options.seed)
    tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    pictures, digits = load_digits(return_X_y=True)
    pictures = (pictures / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    is_test = np.arange(len(digits)) % TEST_EVERY == 0

    strategy = coarse.tensorflow.Strategy()
    with strategy.scope():
        model = build_model()
    times = StepTimes()
    model.fit(
        pictures[~is_test],
        digits[~is_test],
        batch_size=options.batch_size,
        epochs=options.epochs,
        verbose=0,
        callbacks=[times],
    )
    loss, accuracy = model.evaluate(pictures[is_test], digits[is_test], verbose=0)
    print(f"loss {loss:.4f}, accuracy {100 * accuracy:.2f} %", flush=True)
    if options.report is not None:
        rank = getattr(strategy, "rank", 0)
        step_s = float(np.median(times.seconds))
        weights = b"".join(np.ascontiguousarray(weight).tobytes() for weight in model.get_weights())
        report = {
            "accuracy": accuracy,
            "loss": loss,
            "step_ms_p50": 1e3 * step_s,
            "samples_per_s": options.batch_size / step_s,
            "weights": hashlib.sha256(weights).hexdigest(),
        }
        options.report.with_name(f"{options.report.name}-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
