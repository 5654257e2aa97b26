"""What a worker trains, in each mode of Keras and of loops of one's own: run by scenario_worker.py."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

ROWS, BATCH = (
    90,
    32,
)  # so that the last batch has 26 rows, and that of an evaluation of 21 rows leaves one worker little
GENERATOR_SEED = 5


def inputs(width: int = 8) -> tuple[Any, Any]:
    x = np.random.default_rng(GENERATOR_SEED).normal(size=(ROWS, width)).astype("f4")
    return x, x.sum(1, keepdims=True)


def tokens() -> tuple[Any, Any]:
    x = np.random.default_rng(GENERATOR_SEED).integers(0, 50, size=(ROWS, 4)).astype("i4")
    return x, x.mean(1, keepdims=True).astype("f4") / 25


def perceptron(*layers: Any) -> Any:
    entry = keras.Input((8,))
    hidden = keras.layers.Dense(16, activation="relu")(entry)
    for layer in layers:
        hidden = layer(hidden)
    return keras.Model(entry, keras.layers.Dense(1, dtype="float32")(hidden))


def digest(model: Any) -> str:
    return hashlib.sha256(
        b"".join(np.ascontiguousarray(w).tobytes() for w in model.get_weights())
    ).hexdigest()


def trained(
    strategy: Any, build: Callable[[], Any], data: tuple[Any, Any], *, shuffle: bool = False
) -> dict[str, Any]:
    x, y = data
    with strategy.scope():
        model = build()
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=shuffle, verbose=0).history
    evaluated = model.evaluate(x[:21], y[:21], batch_size=8, verbose=0, return_dict=True)
    predicted = model.predict(x[:21], batch_size=8, verbose=0)
    return {
        "digest": digest(model),
        "weights": [float(np.sum(np.abs(weight))) for weight in model.get_weights()],
        "loss": [float(loss) for loss in history["loss"]],
        "evaluated": {name: float(value) for name, value in evaluated.items()},
        "predicted": predicted.ravel().tolist(),
        "rows in order": bool(np.allclose(predicted, np.asarray(model(x[:21])), atol=1e-4)),
    }


def dense(strategy: Any) -> dict[str, Any]:
    def build() -> Any:
        model = perceptron()
        model.compile(keras.optimizers.AdamW(1e-2), "mse", metrics=["mae"])
        return model

    return trained(strategy, build, inputs())


def several_steps_per_execution_and_batch_norm(strategy: Any) -> dict[str, Any]:
    def build() -> Any:
        model = perceptron(keras.layers.BatchNormalization(synchronized=True))
        model.compile(keras.optimizers.SGD(1e-2), "mse", steps_per_execution=2)
        return model

    return trained(strategy, build, inputs())


def embedding_and_accumulation(strategy: Any) -> dict[str, Any]:
    def build() -> Any:
        entry = keras.Input((4,), dtype="int32")
        hidden = keras.layers.Flatten()(keras.layers.Embedding(50, 8)(entry))
        model = keras.Model(entry, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(1e-2, gradient_accumulation_steps=2), "mse")
        return model

    return trained(strategy, build, tokens())


def eager(strategy: Any) -> dict[str, Any]:
    def build() -> Any:
        model = perceptron()
        model.compile(keras.optimizers.Adam(1e-2), "mse", run_eagerly=True)
        return model

    return trained(strategy, build, inputs())


def shuffled_and_clipped(strategy: Any) -> dict[str, Any]:
    def build() -> Any:
        model = perceptron()
        model.compile(keras.optimizers.SGD(1e-2, global_clipnorm=0.5), "mse")
        return model

    return trained(strategy, build, inputs(), shuffle=True)


def mixed_precision(strategy: Any) -> dict[str, Any]:
    """With loss scaling; one worker meets an infinity, and all skip that step."""
    x, y = inputs()
    x[BATCH + BATCH // 2 + 1] = np.inf  # in the second worker's half of the second batch
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        with strategy.scope():
            model = perceptron()
            model.compile(keras.optimizers.SGD(1e-2), "mse")
        model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    return {
        "digest": digest(model),
        "weights": [float(np.sum(np.abs(weight))) for weight in model.get_weights()],
        "steps": int(model.optimizer.inner_optimizer.iterations.numpy()),
    }


def own_loop(strategy: Any) -> dict[str, Any]:
    """strategy.run, reduce, gather and both ways to distribute a dataset, in a function and eagerly."""
    x, y = inputs()
    with strategy.scope():
        weights = tf.Variable(tf.random.stateless_normal((8, 1), (1, 2)))
        optimizer = keras.optimizers.SGD(1e-2)
        optimizer.build([weights])
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(30))

    def step(rows: Any, targets: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((rows @ weights - targets) ** 2) / 30
        optimizer.apply_gradients([(tape.gradient(loss, weights), weights)])
        return loss

    @tf.function
    def train(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

    losses = [float(train(batch)) for batch in dataset]

    def rows_of_worker(context: Any) -> Any:
        start = 10 * context.input_pipeline_id
        rows = tf.range(start, start + 10 // context.num_input_pipelines)
        return tf.data.Dataset.from_tensor_slices(tf.cast(rows, tf.float32)).batch(10)

    own = next(iter(strategy.distribute_datasets_from_function(rows_of_worker)))
    whole = strategy.gather(own, axis=0)
    return {
        "digest": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        "loss": losses,
        "weights": [float(np.sum(np.abs(weights.numpy())))],
        "gathered": whole.numpy().tolist(),
        "sum of whole numbers": int(strategy.reduce("SUM", tf.constant(3), axis=None)),
        "mean of whole numbers": int(strategy.reduce("MEAN", tf.constant(7), axis=None)),
        "mean of rows": float(strategy.reduce("MEAN", own, axis=0)),
    }


def saving(strategy: Any) -> dict[str, Any]:
    """Each worker has callbacks that write to a folder of its own, and the first one saves by hand too."""
    x, y = inputs()
    with strategy.scope():
        model = perceptron()
        model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        callbacks = [
            keras.callbacks.ModelCheckpoint(str(folder / "best.keras")),
            keras.callbacks.BackupAndRestore(str(folder / "backup"), delete_checkpoint=False),
            keras.callbacks.CSVLogger(str(folder / "log.csv")),
        ]
        model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
        written = sorted(path.name for path in folder.iterdir() if path.is_file() or any(path.rglob("*.*")))
        if strategy.rank == 0:
            tf.train.Checkpoint(model=model).write(str(folder / "checkpoint"))
            restored = perceptron()
            tf.train.Checkpoint(model=restored).read(str(folder / "checkpoint")).expect_partial()
            loaded = keras.models.load_model(folder / "best.keras")
            digests = [digest(each) for each in (model, restored, loaded)]
        else:
            digests = [digest(model)]
    return {"digest": digest(model), "written": written, "digests": digests}


SCENARIOS: dict[str, Callable[[Any], dict[str, Any]]] = {
    scenario.__name__: scenario
    for scenario in (
        dense,
        several_steps_per_execution_and_batch_norm,
        embedding_and_accumulation,
        eager,
        shuffled_and_clipped,
        mixed_precision,
        own_loop,
        saving,
    )
}
