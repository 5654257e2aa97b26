"""A Keras worker of a job from which workers are lost. Run by `coarse run -n 4 --min-workers N`.

    elastic_worker.py FOLDER losses     worker 3 is killed at the end of an epoch, worker 0 in a step, 2 in predict()
    elastic_worker.py FOLDER leaving    worker 3 gets SIGTERM in a step of fit(), worker 0 is killed in a loop's step

Workers that go on write FOLDER/MODE-RANK.json, and so does a worker that leaves: the rows that they have seen and the
parameters after each step.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from elastic_data import BATCH, RATE, X

import coarse.tensorflow

NUM_PIECES, MOST_EPOCHS, LAST_EPOCHS = 4, 400, 3

seen: list[list[float]] = []
"""The rows of each training step."""
steps: list[dict[str, Any]] = []
"""The parameters and members after each training step."""
signals: list[int] = []
"""What this process sends itself in its next backward."""


def note(rows: Any) -> Any:
    seen.append(rows.ravel().tolist())
    return rows


def be_hit(values: Any) -> Any:
    if signals:
        time.sleep(0.3)  # until other gradients are under way
        os.kill(os.getpid(), signals.pop())
    return values


def passed(function: Any, values: Any) -> Any:
    """The values, which a function of an array has seen."""
    result = tf.numpy_function(function, [values], values.dtype)
    result.set_shape(values.shape)
    return result


@tf.custom_gradient
def barrier(values: Any) -> Any:
    return tf.identity(values), lambda gradient: passed(be_hit, gradient)


class Moved(keras.layers.Layer):  # type: ignore[misc,unused-ignore]
    """Parameters whose gradients are the mean of the rows; backward comes to `early` after it has come to `late`.

    The table's gradients, of which each row has one, sum up to 1.
    """

    def build(self, shape: Any) -> None:
        self.early = self.add_weight(shape=(1,), initializer="zeros", name="early")
        self.late = self.add_weight(shape=(1,), initializer="zeros", name="late")
        self.table = self.add_weight(shape=(NUM_PIECES, 1), initializer="zeros", name="table")

    def call(self, x: Any, training: bool = False) -> Any:
        x = tf.stop_gradient(passed(note, x) if training else x)
        pieces = tf.cast(x[:, 0] * 8, tf.int32) % NUM_PIECES
        return barrier(x * self.early) + x * self.late + tf.gather(tf.convert_to_tensor(self.table), pieces)


def mean_output(_: Any, output: Any) -> Any:
    return output


def built(strategy: Any) -> Any:
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), Moved()])
        optimizer = coarse.tensorflow.DistributedOptimizer(keras.optimizers.SGD(RATE))
        target = keras.metrics.MeanMetricWrapper(lambda target, _: target, name="target")
        model.compile(optimizer, mean_output, metrics=[target])
    return model


def parameters(model: Any) -> list[float]:
    early, late, table = model.get_weights()
    return [float(early[0]), float(late[0]), float(table.sum())]


def digest(model: Any) -> str:
    values = [*model.get_weights(), *(np.asarray(each) for each in model.optimizer.variables)]
    return hashlib.sha256(b"".join(np.ascontiguousarray(each).tobytes() for each in values)).hexdigest()


class Follows(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Notes each step; ends this worker when its time has come."""

    def __init__(self, strategy: Any, number: int, at: tuple[int, int] | None) -> None:
        super().__init__()
        self._strategy, self._number, self._at = strategy, number, at
        self._epoch, self._last = 0, MOST_EPOCHS

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (self._epoch, batch) == self._at:
            signals.append(self._number)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        members = list(self._strategy.session.members)
        steps.append({"epoch": self._epoch, "parameters": parameters(self.model), "members": members})

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._at == (epoch, -1):
            os.kill(os.getpid(), self._number)
        if self._last == MOST_EPOCHS and len(self._strategy.session.members) < 4:
            self._last = epoch + LAST_EPOCHS
        self.model.stop_training = epoch >= self._last


def files_of_callbacks(folder: Path) -> list[Any]:
    return [
        keras.callbacks.ModelCheckpoint(str(folder / "{epoch}.weights.h5"), save_weights_only=True),
        keras.callbacks.ModelCheckpoint(
            str(folder / "best-{epoch}.weights.h5"),
            monitor="loss",
            mode="max",  # the loss becomes less with each epoch, so that the first one stays
            save_best_only=True,
            save_weights_only=True,
        ),
        keras.callbacks.CSVLogger(str(folder / "log.csv")),
        keras.callbacks.TensorBoard(str(folder / "logs"), write_steps_per_second=True),
        keras.callbacks.BackupAndRestore(str(folder / "backup"), delete_checkpoint=False),
    ]


def losses(folder: Path, strategy: Any) -> None:
    model = built(strategy)
    dies = {3: (0, -1), 0: (2, 2)}.get(strategy.rank)
    callbacks = [Follows(strategy, signal.SIGKILL, dies), *files_of_callbacks(folder)]
    changes: list[Any] = []
    strategy.session.on_change(lambda change: changes.append([len(steps), *change.new]))
    history = model.fit(
        X, X, batch_size=BATCH, epochs=MOST_EPOCHS, shuffle=False, callbacks=callbacks, verbose=0
    ).history
    found = {
        "seen": seen,
        "steps": steps,
        "changes": list(changes),
        "history": {name: list(map(float, values)) for name, values in history.items()},
        "digest": digest(model),
        "is chief": strategy.is_chief,
        "best": float(callbacks[2].best),
    }
    if strategy.rank == 2:
        (folder / "losses-2.json").write_text(json.dumps(found))
        strategy.extended._collectives._add_up = die_in_exchange
    predicted = model.predict(X, batch_size=BATCH, verbose=0)
    found |= {"has all rows": bool(np.allclose(predicted, model(X))), "members": strategy.session.members}
    (folder / f"losses-{strategy.rank}.json").write_text(json.dumps(found))


def die_in_exchange(channel: str, contents: Any, *_: Any) -> bool:
    """Takes the place of Collectives._add_up(), when this worker has told the others what it brings."""
    if contents.size:
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def leaving(folder: Path, strategy: Any) -> None:
    model = built(strategy)
    asked = (0, 3) if strategy.rank == 3 else None
    try:
        model.fit(
            X,
            X,
            batch_size=BATCH,
            epochs=MOST_EPOCHS,
            shuffle=False,
            callbacks=[Follows(strategy, signal.SIGTERM, asked)],
            verbose=0,
        )
    except SystemExit:
        (folder / f"leaving-{strategy.rank}.json").write_text(json.dumps({"steps": steps, "seen": seen}))
        raise
    found = {"steps": list(steps), "seen": list(seen), "digest": digest(model)}
    steps.clear()
    seen.clear()
    own_loop(strategy, model)
    found |= {"loop": {"steps": steps, "seen": seen}, "digest of loop": digest(model)}
    evaluated = model.evaluate(X, X, batch_size=BATCH, verbose=0, return_dict=True)
    found |= {
        "evaluated": float(evaluated["target"]),
        "members": strategy.session.members,
        "reductions": reductions(strategy),
    }
    (folder / f"leaving-{strategy.rank}.json").write_text(json.dumps(found))


def reductions(strategy: Any) -> dict[str, Any]:
    rank = strategy.rank
    with strategy.scope():
        variable = tf.Variable(float(rank))
    whole = {op: int(strategy.reduce(op, tf.constant(4 * rank + 1), axis=None)) for op in ("SUM", "MEAN")}
    return {
        **whole,
        "gathered": strategy.gather(tf.fill((rank,), rank), axis=0).numpy().tolist(),
        "variable": float(variable.numpy()),
        "replicas": strategy.num_replicas_in_sync,
    }


def own_loop(strategy: Any, model: Any) -> None:
    """Two epochs of a loop with a tape; worker 0 dies in the first."""
    loss_of = keras.losses.MeanAbsoluteError()
    dataset = tf.data.Dataset.from_tensor_slices(X).batch(BATCH)

    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            output = model(x, training=True)
            loss = loss_of(
                tf.stop_gradient(output) - 1, output
            )  # of which the derivative is that of the output
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def train(batch: Any) -> None:
        strategy.run(step, args=(batch,))

    for epoch in range(2):
        for number, batch in enumerate(strategy.experimental_distribute_dataset(dataset)):
            strategy.begin_step()
            if (strategy.rank, epoch, number) == (0, 0, 3):
                signals.append(signal.SIGKILL)
            train(batch)
            members = list(strategy.session.members)
            steps.append({"epoch": epoch, "parameters": parameters(model), "members": members})


def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = coarse.tensorflow.Strategy()
    {"losses": losses, "leaving": leaving}[mode](folder, strategy)


if __name__ == "__main__":
    main()
