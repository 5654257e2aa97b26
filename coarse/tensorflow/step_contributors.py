"""Which workers contribute to a step, and with how many rows, in a job that goes on without lost workers."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from coarse.tensorflow.operations import Operations


class StepContributors:
    """The contributors of one worker's current step, in variables, which functions read when they run.

    Workers sum one-hot vectors of their ranks. If one is lost later in the step, the weights of the others' losses
    include its rows, but its gradients are missing: weights() makes reductions compensate for that.

    Args:
        operations: Operations of the strategy.
    """

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        num_workers = operations.num_workers
        with tf.init_scope(), tf.device("/CPU:0"):
            self._present = tf.Variable(
                tf.zeros(num_workers, tf.int64), trainable=False, name="workers_of_step"
            )
            self._weights = tf.Variable(
                tf.zeros(num_workers, tf.float64), trainable=False, name="weights_of_step"
            )

    def begin_step(self) -> None:
        """Forgets the contributors of the last step."""
        self._present.assign(tf.zeros_like(self._present))
        self._weights.assign(tf.zeros_like(self._weights))

    def count(self, rows: Any) -> Any:
        """Counts the workers and their rows; returns the rows of each, by rank, float64. Collective.

        Args:
            rows: This worker's number of rows, an int64 scalar; None if the step has no rows, so that each worker
                has one.
        """
        own = tf.one_hot(self._operations.rank, self._operations.num_workers, dtype=tf.int64)
        ranks = own if rows is None else own * (1 + rows)
        (counts,) = self._operations.reduce("sum", [ranks])
        self._present.assign(counts)
        return tf.cast(counts if rows is None else tf.maximum(counts - 1, 0), tf.float64)

    def weigh(self, rows: Any) -> Any:
        """As count(), for losses that are weighted by rows; returns this worker's weight, a float32 scalar."""
        rows_of_workers = self.count(rows)
        self._weights.assign(rows_of_workers)
        own = rows_of_workers[self._operations.rank]
        return tf.cast(tf.math.divide_no_nan(own, tf.reduce_sum(rows_of_workers)), tf.float32)

    def weights(self) -> Any:
        """The weights of this step's losses for Operations.reduce(); all 0 if none was weighted."""
        return self._weights.read_value()

    def present(self) -> list[int]:
        """For each rank whether its worker has contributed to the last step; [] if that step has counted nobody.

        Equal on all workers after the same step.
        """
        counts = self._present.numpy()
        return [int(count > 0) for count in counts] if counts.any() else []
