"""A Keras callback that reports COARSE's metrics to TensorBoard or to a function, and counts samples."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from coarse.metrics.reporter import MetricsReporter, WriteScalar
from coarse.tensorflow.strategy import Strategy


class MetricsCallback(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Reports the metrics of the first worker's node while `fit` trains a model of a coarse.tensorflow.Strategy.

    On every worker it also counts the rows of each batch as samples. Pass one on each worker; only the first one that
    is not lost writes.

    Args:
        log_dir: Folder for TensorBoard, as keras.callbacks.TensorBoard's; None if only `write` is wanted.
        write: Takes tag, value and step of each scalar.
        every: Batches between two reports.

    Raises:
        ValueError: If neither `log_dir` nor `write` is given; or if `every` is below 1.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        *,
        write: WriteScalar | None = None,
        every: int = 100,
    ) -> None:
        super().__init__()
        if log_dir is None and write is None:
            raise ValueError("give MetricsCallback log_dir= for TensorBoard, write= for a function, or both")
        if every < 1:
            raise ValueError(f"every={every} must be at least 1 batch")
        self._log_dir = None if log_dir is None else os.fspath(log_dir)
        self._write = write
        self._every = every
        self._reporter: MetricsReporter | None = None
        self._num_batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins to report, on the first worker."""
        self._open_reporter()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts to count batches anew."""
        self._num_batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts the batch, and reports if a report is due."""
        new, self._num_batches = batch + 1 - self._num_batches, batch + 1
        strategy = self._strategy()
        strategy.session.count_samples(new * strategy.extended.rows_of_step())
        self._open_reporter()
        if self._reporter is not None:
            for _ in range(new):
                self._reporter.step()

    def _open_reporter(self) -> None:
        strategy = self._strategy()
        if not strategy.is_chief or self._reporter is not None:
            return
        writes = [] if self._log_dir is None else [_tensorboard(self._log_dir)]
        writes += [] if self._write is None else [self._write]
        self._reporter = MetricsReporter(strategy.session.metrics, _to_all(writes), every=self._every)

    def _strategy(self) -> Strategy:
        strategy = self.model.distribute_strategy
        if not isinstance(strategy, Strategy):
            raise TypeError(
                f"MetricsCallback needs a model of a coarse.tensorflow.Strategy, not of a {type(strategy).__name__}; "
                "build the model in strategy.scope()"
            )
        return strategy


def _to_all(writes: Sequence[WriteScalar]) -> WriteScalar:
    def write(tag: str, value: float, step: int) -> None:
        for each in writes:
            each(tag, value, step)

    return write


def _tensorboard(log_dir: str) -> WriteScalar:
    writer = tf.summary.create_file_writer(os.path.join(log_dir, "coarse"))

    def write(tag: str, value: float, step: int) -> None:
        with writer.as_default():
            tf.summary.scalar(tag, value, step=step)

    return write
