"""Training scenarios for each mode of Keras and for custom loops: run by scenario_worker.py."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import itertools
import logging
import os
import tempfile
import time
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import coarse.tensorflow
from coarse.tensorflow import keras_patches

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


def perceptron(*layers: Any, activation: str = "relu") -> Any:
    entry = keras.Input((8,))
    hidden = keras.layers.Dense(16, activation=activation)(entry)
    for layer in layers:
        hidden = layer(hidden)
    return keras.Model(entry, keras.layers.Dense(1, dtype="float32")(hidden))


def digest(model: Any) -> str:
    return hashlib.sha256(
        b"".join(np.ascontiguousarray(w).tobytes() for w in model.get_weights())
    ).hexdigest()


def fitted(
    strategy: Any, build: Callable[[], Any], data: tuple[Any, Any], *, shuffle: bool = False
) -> tuple[Any, dict[str, Any]]:
    x, y = data
    with strategy.scope():
        model = build()
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=shuffle, verbose=0).history
    return model, {
        "digest": digest(model),
        "weights": [float(np.sum(np.abs(weight))) for weight in model.get_weights()],
        "loss": [float(loss) for loss in history["loss"]],
    }


def trained(
    strategy: Any, build: Callable[[], Any], data: tuple[Any, Any], *, shuffle: bool = False
) -> dict[str, Any]:
    x, y = data
    model, found = fitted(strategy, build, data, shuffle=shuffle)
    evaluated = model.evaluate(x[:21], y[:21], batch_size=8, verbose=0, return_dict=True)
    predicted = model.predict(x[:21], batch_size=8, verbose=0)
    return {
        **found,
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


def embedding(strategy: Any) -> dict[str, Any]:
    def build() -> Any:
        entry = keras.Input((4,), dtype="int32")
        hidden = keras.layers.Flatten()(keras.layers.Embedding(50, 8)(entry))
        model = keras.Model(entry, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(1e-2), "mse")
        return model

    return trained(strategy, build, tokens())


def fewer_rows_than_workers(strategy: Any) -> dict[str, Any]:
    """First batches that are unequal, and of one row, also of text."""
    x, y = inputs()
    with strategy.scope():
        model = perceptron()
        model.compile(keras.optimizers.SGD(1e-2), "mse", metrics=["mae"])
        reader = keras.Sequential(
            [
                keras.Input((1,), dtype="string"),
                keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot"),
                keras.layers.Dense(1),
            ]
        )
        reader.compile(keras.optimizers.SGD(1e-2), "mse")
    evaluated = [model.evaluate(x[:rows], y[:rows], verbose=0) for rows in (3, 1)]
    for rows in (3, 1):
        model.train_on_batch(x[:rows], y[:rows])
    for rows in (5, 1):
        model.fit(x[:rows], y[:rows], verbose=0)
    reader.fit(tf.constant([["a"], ["b"], ["a"]]), y[:3], verbose=0)
    model.compile("sgd", "mse", run_eagerly=True)
    eager = model.fit(x[:1], y[:1], verbose=0).history
    return {
        "evaluated": [np.asarray(each, "f8").tolist() for each in evaluated],
        "eager": eager,
        "predicted": list(np.shape(model.predict(x[:1], verbose=0))),
        "digest": digest(model) + digest(reader),
    }


class Halves(keras.Model):
    """A model with a step of its own and no call(), as Keras's examples of VAEs and GANs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = keras.layers.Dense(2), keras.layers.Dense(8)

    def train_step(self, data: Any) -> dict[str, Any]:
        rows, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=rows, y_pred=self.decoder(self.encoder(rows)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class InFunctions(keras.Model):
    """A model whose step takes losses within functions of its own and within branches, as GANs do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (keras.layers.Dense(1, name=name) for name in ("first", "second"))
        self.error = keras.losses.MeanSquaredError()

    def share(self, layer: Any, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.error(y, layer(x))
        return tape.gradient(loss, layer.trainable_variables)

    @tf.function
    def share_of_first(self, x: Any, y: Any) -> Any:
        return self.share(self.first, x, y)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        outer = self.share(self.second, x, y)
        inner = self.share_of_first(x, y)
        either = tf.cond(
            tf.size(self.first.bias) > 0,  # alike on all workers, and not known when the function is traced
            lambda: self.share(self.second, x, y),
            lambda: self.share(self.second, x, 2 * y),
        )
        outer = [one + other for one, other in zip(outer, either, strict=True)]
        weights = self.first.trainable_variables + self.second.trainable_variables
        self.optimizer.apply([*inner, *outer], weights)
        return {"steps": tf.cast(self.optimizer.iterations, tf.float32)}


def losses_in_functions(strategy: Any) -> dict[str, Any]:
    """Trained twice by a step that is traced anew while a function within it is not, and eagerly."""
    x, y = inputs()
    found: dict[str, Any] = {}
    for runs_eagerly in (False, True):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = InFunctions()
            for layer in (model.first, model.second):
                layer.build((None, 8))
        for rows in (51, 5):
            with strategy.scope():
                model.compile(keras.optimizers.SGD(0.01), run_eagerly=runs_eagerly)
            model.fit(x[:rows], y[:rows], batch_size=32, epochs=1, shuffle=False, verbose=0)
        found[str(runs_eagerly)] = np.concatenate([each.ravel() for each in model.get_weights()]).tolist()
    return found


def uneven_rows(strategy: Any) -> dict[str, Any]:
    """One batch of 51 rows, and batches of one row, of which a worker has none: by SGD, which shows every factor."""
    found: dict[str, Any] = {}
    x, y = inputs()
    y = y + 10 * (np.arange(len(y))[:, None] > 25)  # the shares of the workers differ
    for name, rows, batch in (("odd", 51, 64), ("none", 5, 1)):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, kernel_regularizer="l2")])
            model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
        history = model.fit(x[:rows], y[:rows], batch_size=batch, epochs=2, shuffle=False, verbose=0).history
        found[name] = {
            "weights": np.concatenate([weight.ravel() for weight in model.get_weights()]).tolist(),
            "loss": [float(each) for each in history["loss"]],
            "mae": [float(each) for each in history["mae"]],
        }
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = Halves()
        model.compile(keras.optimizers.SGD(0.01), "mse")
    model.fit(x[:51], batch_size=64, epochs=2, shuffle=False, verbose=0)
    found["without call"] = {
        "weights": np.concatenate([each.ravel() for each in model.get_weights()]).tolist()
    }
    return found


def one_alone(strategy: Any) -> dict[str, Any]:
    """What one worker does by itself inside scope(), and what libraries ask to find out which one it is."""
    x, y = inputs()
    with tempfile.TemporaryDirectory() as folder, strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
        path = os.path.join(folder, "checkpoint.keras")
        backup = keras.callbacks.BackupAndRestore(os.path.join(folder, "backup"))
        callbacks = [keras.callbacks.ModelCheckpoint(path), backup]
        model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks)
        found: dict[str, Any] = {"checkpoint": os.path.exists(path)}
        if strategy.rank == 0:
            model.save(os.path.join(folder, "own.keras"))
            model.save_weights(os.path.join(folder, "own.weights.h5"))
            found["saved"] = sorted(name for name in os.listdir(folder) if name.startswith("own"))
    resolver = strategy.cluster_resolver
    found["task"] = [resolver.task_type, resolver.task_id, strategy.extended._task_id]
    found["tasks"] = len(resolver.cluster_spec().as_dict()["worker"])
    return found


def statistics_of_batches(strategy: Any) -> dict[str, Any]:
    """BatchNormalization's, behind fit() and behind train_on_batch()."""
    x, y = inputs()
    with strategy.scope():
        model = perceptron(keras.layers.BatchNormalization())
        model.compile(keras.optimizers.SGD(0.01), "mse")
    seen: list[str] = []
    saved = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(digest(model)))
    with saying_on_stdout() as printed:
        model.fit(x, y, batch_size=BATCH, epochs=2, validation_data=(x, y), callbacks=[saved])
    share = slice(strategy.rank * 8, strategy.rank * 8 + 8)
    model.train_on_batch(x[share], y[share])
    before = digest(model)
    loss = float(model.evaluate(x, y, verbose=0))
    return {
        "at epochs": seen,
        "behind train_on_batch": digest(model),
        "evaluated": loss,
        "had own": before != digest(model),
        "averaged": averaged_weights(),
        "shows progress": "Epoch 1/2" in printed.getvalue(),
    }


def averaged_weights() -> list[str]:
    """Names of the weights that workers average, of a model with a frozen layer."""
    frozen = keras.layers.Dense(3, trainable=False)
    model = keras.Sequential([keras.Input((8,)), frozen, keras.layers.BatchNormalization()])
    return [weight.name for weight in keras_patches._statistics_weights(model)]


@contextlib.contextmanager
def saying_on_stdout() -> Iterator[io.StringIO]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        yield printed


def rows_of_tables(strategy: Any) -> dict[str, Any]:
    """Rows of two tables, one of which travels twice, and what comes of them in graphs and eagerly."""
    rank = strategy.rank
    shape = tf.constant([6, 2, 2], tf.int64)

    def slices(rows: list[int], dtype: Any) -> Any:
        values = [[[row + 1.0, 10.0 * rank], [0.5, place]] for place, row in enumerate(rows)]
        return tf.IndexedSlices(
            tf.constant(values, dtype, (len(rows), 2, 2)), tf.constant(rows, tf.int32), shape
        )

    def reduce() -> Any:
        context = tf.distribute.get_replica_context()
        own = [5, 0, 5, 3] if rank == 0 else [3, 1, 3, 3]
        nothing = [] if rank == 0 else [2]
        return (
            context.all_reduce("SUM", [slices(own, tf.float32), slices(nothing, tf.bfloat16)]),
            context.all_reduce("MEAN", slices(own, tf.float32)),
        )

    function = tf.function(lambda: strategy.run(reduce))
    kinds = [op.type for op in function.get_concrete_function().graph.get_operations()]
    found = [
        {"rows": each.indices.numpy().tolist(), "values": each.values.numpy().astype("f4").tolist()}
        for results in (function(), function(), strategy.run(reduce))
        for each in tf.nest.flatten(results)
    ]
    return {"found": found, "ops": kinds.count("CoarseReduceRows"), "calls": kinds.count("PyFunc")}


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.05, 200), weight_decay=1e-3),
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True, clipnorm=10.0),
    "adam": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.01, 50, 0.5), amsgrad=True
    ),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.05),
}


def offloaded_optimizers(strategy: Any) -> dict[str, Any]:
    """200 steps of each rule; in one process Keras's own optimizers do them."""
    x, y = inputs()
    x, y = x[: 2 * BATCH], y[: 2 * BATCH]
    found: dict[str, Any] = {}
    for name, make in OPTIMIZERS.items():
        keras.utils.set_random_seed(3 + strategy.rank)
        with strategy.scope(), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = perceptron(activation="tanh")  # where relu has a kink, a rounding becomes a difference
            optimizer = coarse.tensorflow.DistributedOptimizer(make())
            if name == "adamw":
                optimizer.exclude_from_weight_decay(var_names=["bias"])
            optimizer.build(model.trainable_variables)
        steps = own_steps(strategy, model, optimizer, x, y)
        for count in (100, 100):
            steps(count)
            if name == "momentum":  # what is assigned in between is not lost
                model.set_weights([0.9 * weight for weight in model.get_weights()])
        found[name] = {
            "weights": [weight.ravel().tolist() for weight in model.get_weights()],
            "states": {key: np.ravel(value).tolist() for key, value in saved_state(optimizer).items()},
            "on the worker": sum(isinstance(each, keras.Variable) for each in optimizer.variables),
            "said": [str(each.message) for each in said if "memory devices" in str(each.message)],
        }
        found[name]["digest"] = digest(model)
    return found


def own_steps(strategy: Any, model: Any, optimizer: Any, x: Any, y: Any) -> Callable[..., None]:
    """What does a number of steps, with other inputs if they are given."""

    def step(rows: Any, targets: Any) -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum((model(rows) - targets) ** 2) / len(x))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    @tf.function
    def steps(count: Any, rows: Any, targets: Any) -> None:
        for _ in tf.range(count):
            strategy.run(step, args=(rows, targets))

    num_workers = strategy.num_replicas_in_sync
    own = slice(strategy.rank * len(x) // num_workers, (strategy.rank + 1) * len(x) // num_workers)
    return lambda count, rows=x: steps(tf.constant(count), tf.constant(rows[own]), tf.constant(y[own]))


def saved_state(optimizer: Any) -> dict[str, Any]:
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    return store


def offloaded_fit(strategy: Any) -> dict[str, Any]:
    """fit, saving and loading of a model whose optimizer runs in the memory devices, and one that stays."""
    with tempfile.TemporaryDirectory() as temporary:
        path = str(Path(temporary) / "model.keras")

        def build() -> Any:
            entry = keras.Input((4,), dtype="int32")
            hidden = keras.layers.Flatten()(keras.layers.Embedding(50, 8)(entry))
            model = keras.Model(entry, keras.layers.Dense(1)(hidden))
            model.compile(
                coarse.tensorflow.DistributedOptimizer(keras.optimizers.SGD(1e-2, momentum=0.9)),
                "mse",
                steps_per_execution=2,
            )
            return model

        trained_model, found = fitted(strategy, build, tokens())
        trained_model.save(path)
        loaded = keras.models.load_model(path)
        with strategy.scope():
            again = keras.models.load_model(path)
            again.compile(coarse.tensorflow.DistributedOptimizer(again.optimizer), "mse")
        x, y = tokens()
        histories = [
            model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0).history["loss"]
            for model in (trained_model, again)
        ]
    with strategy.scope(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        coarse.tensorflow.DistributedOptimizer(keras.optimizers.RMSprop())
    states = [saved_state(model.optimizer) for model in (trained_model, again)]
    return {
        **found,
        "continued": histories,
        "digests": [digest(trained_model), digest(again)],
        "states alike": all(np.array_equal(states[0][key], states[1][key]) for key in states[0]),
        "loaded state": [float(np.sum(np.abs(v.numpy()))) for v in loaded.optimizer.variables],
        "said": [str(each.message) for each in said],
    }


WRAPPED: dict[str, Callable[[], Any]] = {
    "accumulation and moving average": lambda: keras.optimizers.AdamW(
        0.01, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
    ),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.01, momentum=0.9, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=1),
        initial_scale=2.0**10,
        dynamic_growth_steps=4,
    ),
}


def offloaded(optimizer: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in one process it stays there
        return coarse.tensorflow.DistributedOptimizer(optimizer)


def offloaded_and_wrapped(strategy: Any) -> dict[str, Any]:
    """Optimizers in the memory devices with all that Keras puts around an update; in one process Keras's own."""
    x, y = inputs()
    x, y = x[: 2 * BATCH], y[: 2 * BATCH]
    found: dict[str, Any] = {}
    for name, make in WRAPPED.items():
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((8,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
            )
            optimizer = offloaded(make())
            optimizer.build(model.trainable_variables)
        steps = own_steps(strategy, model, optimizer, x, y)
        steps(8)
        infinite = np.array(x)
        infinite[-1, 0] = np.inf  # on the last worker alone
        if name == "loss scale":
            steps(1, infinite)
        steps(8)
        found[name] = {
            "weights": [weight.ravel().tolist() for weight in model.get_weights()],
            "states": {key: np.ravel(value).tolist() for key, value in saved_state(optimizer).items()},
            "iterations": int(optimizer.iterations),
            "kinds": sorted({type(variable).__name__ for variable in optimizer.variables}),
            "digest": digest(model),
        }
    return found


def offloaded_eagerly_in_mixed_precision(strategy: Any) -> dict[str, Any]:
    """Keras scales the loss of what it is given; one worker meets an infinity, and all skip that step."""
    x, y = tokens()
    y[BATCH + BATCH // 2 + 1] = np.inf  # in the second worker's half of the second batch
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        with strategy.scope(), saying() as said:
            entry = keras.Input((4,), dtype="int32")
            hidden = keras.layers.Flatten()(keras.layers.Embedding(50, 8)(entry))
            model = keras.Model(entry, keras.layers.Dense(1, dtype="float32")(hidden))
            model.compile(offloaded(keras.optimizers.SGD(0.1, momentum=0.9)), "mse", run_eagerly=True)
            model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
        # Shared by the job, as in offloaded_checkpoints().
        path = Path(tempfile.gettempdir(), "offloaded.keras")
        if strategy.rank == 0:
            model.save(path)
        strategy.reduce("SUM", tf.constant(1), axis=None)
        loaded = keras.models.load_model(path)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    states = [saved_state(each.optimizer) for each in (model, loaded)]
    return {
        "digest": digest(model),
        "weights": [weight.ravel().tolist() for weight in model.get_weights()],
        "steps": int(model.optimizer.inner_optimizer.iterations.numpy()),
        "kinds": [type(model.optimizer).__name__, type(model.optimizer.variables[-1]).__name__],
        "states alike": all(np.array_equal(states[0][key], states[1][key]) for key in states[0]),
        "number of states": len(states[0]),
        "said": said.getvalue(),
    }


def offloaded_checkpoints(strategy: Any) -> dict[str, Any]:
    """Worker 0 writes, all restore: into the memory devices, before and after a build, and into Keras's own."""
    x, y = inputs()
    x, y = x[: 2 * BATCH], y[: 2 * BATCH]
    # All workers of the job have this directory.
    folder = Path(tempfile.gettempdir(), "offloaded_checkpoints")

    def make(offloaded: bool) -> tuple[Any, Any, Any]:
        with strategy.scope(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = perceptron(activation="tanh")
            optimizer = keras.optimizers.AdamW(0.01, amsgrad=True)
            if offloaded:
                coarse.tensorflow.DistributedOptimizer(optimizer)
        return model, optimizer, tf.train.Checkpoint(model=model, optimizer=optimizer)

    def meet() -> None:
        strategy.reduce("SUM", tf.constant(1), axis=None)

    def write(checkpoint: Any, name: str) -> str:
        path = str(folder / name)
        if strategy.rank == 0:
            checkpoint.write(path)
        meet()
        return path

    def build(model: Any, optimizer: Any) -> None:
        with strategy.scope():
            optimizer.build(model.trainable_variables)

    model, optimizer, checkpoint = make(offloaded=True)
    build(model, optimizer)
    steps = own_steps(strategy, model, optimizer, x, y)
    steps(3)
    written_by_ours = write(checkpoint, "ours")
    steps(3)

    plain, plain_optimizer, checkpoint = make(offloaded=False)
    status = checkpoint.read(written_by_ours)
    build(plain, plain_optimizer)
    status.assert_consumed()
    written_by_keras = write(checkpoint, "keras")
    own_steps(strategy, plain, plain_optimizer, x, y)(3)

    again, optimizer, checkpoint = make(offloaded=True)
    build(again, optimizer)
    checkpoint.read(written_by_keras).assert_consumed()
    own_steps(strategy, again, optimizer, x, y)(3)

    with strategy.scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        coarse.tensorflow.DistributedOptimizer(plain_optimizer)
    written_by_moved = write(tf.train.Checkpoint(model=plain, optimizer=plain_optimizer), "moved")
    late, optimizer, checkpoint = make(offloaded=True)
    status = checkpoint.read(written_by_moved)
    build(late, optimizer)
    status.assert_consumed()
    meet()  # worker 0 writes to the memory devices
    states = [saved_state(each) for each in (plain_optimizer, optimizer)]
    return {
        "digests": [digest(each) for each in (model, again)],
        "moved digests": [digest(each) for each in (plain, late)],
        "weights": [[weight.ravel().tolist() for weight in each.get_weights()] for each in (model, plain)],
        "states alike": all(np.array_equal(states[0][key], states[1][key]) for key in states[0]),
        "states": {key: np.ravel(value).tolist() for key, value in states[1].items()},
        "names": [variable.path.partition("/")[2] for variable in optimizer.variables],
        "kinds": sorted({type(variable).__name__ for variable in optimizer.variables}),
    }


def batches_in_memory_of_numpy(strategy: Any) -> dict[str, Any]:
    """Where an array begins at 64 bytes, TensorFlow does not copy the batches that a PyDataset takes from it."""

    def aligned(values: Any) -> Any:
        memory = np.empty(values.nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 64
        array = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
        array[:] = values
        return array

    x, y = (aligned(values[:80]) for values in inputs())
    before = x.copy(), y.copy()

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            return x[index * 16 : index * 16 + 16], y[index * 16 : index * 16 + 16]

    with strategy.scope():
        model = perceptron()
        model.compile(keras.optimizers.SGD(1e-2), "mse")
    history = model.fit(Batches(), epochs=2, shuffle=False, verbose=0).history
    assert all(np.array_equal(*pair) for pair in zip((x, y), before, strict=True))
    return {
        "digest": digest(model),
        "weights": [float(np.sum(np.abs(weight))) for weight in model.get_weights()],
        "loss": [float(loss) for loss in history["loss"]],
    }


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


class LossOfItsOwn(keras.Model):  # type: ignore[misc,unused-ignore]
    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            of_all = loss / self.distribute_strategy.num_replicas_in_sync
        self.optimizer.apply(tape.gradient(of_all, self.trainable_variables), self.trainable_variables)
        return {"mine": loss, "exact": tf.cast(loss, tf.float64), "rows": tf.shape(x)[0]}


def logs(strategy: Any) -> dict[str, Any]:
    """What callbacks are told: of each batch, of a step of one's own, and of a loss that is NaN on one worker."""
    x, y = inputs()
    seen: dict[str, list[float]] = {}

    def told(_: int, logs: dict[str, Any]) -> None:
        for name, value in logs.items():
            seen.setdefault(name, []).append(float(value))

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=told)
    with strategy.scope():
        model = perceptron()
        model.compile(keras.optimizers.SGD(1e-2), "mse", metrics=["mae"])
        own = LossOfItsOwn(model.inputs, model.outputs)
        own.compile(keras.optimizers.SGD(1e-2))
    own.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0, callbacks=[callback])
    own.compile("sgd", run_eagerly=True)  # outside of the scope
    eager = own.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0).history
    model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0, callbacks=[callback])
    y[BATCH + BATCH // 2 + 1] = np.nan  # in the second worker's half of the second batch
    batches: list[int] = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))
    ends = [count, keras.callbacks.TerminateOnNaN()]
    model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0, callbacks=ends)
    return {"seen": seen, "eager": eager, "batches": batches}


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
            keras.callbacks.TensorBoard(str(folder / "board"), update_freq="batch"),
        ]
        options = {"batch_size": BATCH, "epochs": 1, "shuffle": False, "verbose": 0}
        model.fit(x, y, validation_data=(x, y), callbacks=callbacks, **options)
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


def interrupted(strategy: Any) -> dict[str, Any]:
    """Training that ends early and goes on from a backup, which the first worker alone has written and finds."""
    x, y = inputs()
    options = {"batch_size": BATCH, "epochs": 3, "shuffle": False, "verbose": 0}

    def interrupt(epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            raise KeyboardInterrupt

    def build() -> Any:
        keras.utils.set_random_seed(7 + 100 * strategy.rank)
        with strategy.scope():
            model = perceptron()
            model.compile(offloaded(keras.optimizers.Adam(1e-2)), "mse")
        return model

    whole, broken, resumed = (build() for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:  # of this worker
        backup = keras.callbacks.BackupAndRestore(folder)
        with contextlib.suppress(KeyboardInterrupt):
            stop = keras.callbacks.LambdaCallback(on_epoch_end=interrupt)
            broken.fit(x, y, callbacks=[backup, stop], **options)
        again = resumed.fit(x, y, callbacks=[backup], **options)
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # of a job that died as the first worker wrote its first backup
        begun = build()
        if strategy.rank == 0:
            begun.set_weights([2 * weight for weight in begun.get_weights()])
            begun.save_weights(Path(folder, "latest.weights.h5"))
        begun.fit(x, y, callbacks=[keras.callbacks.BackupAndRestore(folder)], **options)
    whole.fit(x, y, **options)
    states = [saved_state(model.optimizer) for model in (whole, resumed)]
    return {
        "epochs": again.epoch,
        "digest": digest(resumed),
        "digest of the whole": digest(whole),
        "digest of what was begun": digest(begun),
        "states alike": all(np.array_equal(states[0][key], states[1][key]) for key in states[0]),
    }


def files_of_callbacks(strategy: Any) -> dict[str, Any]:
    """The first worker writes as the last thing of fit(), for a while; the others look for it after fit()."""
    x, y = inputs()
    path = Path(tempfile.gettempdir(), "written at the end")  # of the job

    def write(logs: Any = None) -> None:
        if strategy.rank == 0:
            time.sleep(0.5)
            path.touch()

    with strategy.scope():
        model = perceptron()
        model.compile(keras.optimizers.SGD(1e-2), "mse")
    callbacks = [keras.callbacks.LambdaCallback(on_train_end=write)]
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=callbacks)
    return {"is there": path.exists(), "digest": digest(model)}


def shuffled_by_seeds_of_its_own(strategy: Any) -> dict[str, Any]:
    """All rows are one batch, whose order does not matter; a row that is dealt out twice does."""
    x, y = inputs()
    with strategy.scope():
        model = perceptron()
        model.compile(keras.optimizers.SGD(1e-2), "mse")
    keras.utils.set_random_seed(11 + strategy.rank)
    drawn = [float(tf.random.uniform(())) for _ in range(2)]
    keras.utils.set_random_seed(11 + strategy.rank)
    first = float(tf.random.uniform(()))
    history = model.fit(x, y, batch_size=ROWS, epochs=2, verbose=0).history
    second = float(tf.random.uniform(()))  # what this process draws goes on as if nothing had been shuffled
    return {
        "digest": digest(model),
        "weights": [float(np.sum(np.abs(weight))) for weight in model.get_weights()],
        "loss": history["loss"],
        "draws alike": drawn == [first, second],
    }


def generators_that_end(strategy: Any) -> dict[str, Any]:
    """Each after as many batches as are asked for, first of a model that is to be built, then of one that is."""
    x, y = inputs()

    def batches(epochs: int) -> Iterator[tuple[Any, Any]]:
        for _ in range(epochs):
            for start in range(0, ROWS, BATCH):
                yield x[start : start + BATCH], y[start : start + BATCH]

    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-2), "mse", metrics=["mae"])
    first = model.fit(batches(3), epochs=3, steps_per_epoch=3, verbose=0).history
    second = model.fit(batches(1), validation_data=batches(1), verbose=0).history
    last = model.evaluate(batches(1), verbose=0)
    return {
        "digest": digest(model),
        "weights": [float(np.sum(np.abs(weight))) for weight in model.get_weights()],
        "loss": [*first["loss"], *second["loss"], *second["val_loss"], *last],
    }


def unlike_numbers_of_batches(strategy: Any) -> dict[str, Any]:
    """Six batches of worker 0 beside four of worker 1; one process has the rows of both in a batch."""
    x, y = inputs()
    rows = [range(start, start + 8) for start in range(0, 80, 8)]
    shares = [rows[:6], rows[6:]]
    if strategy.num_replicas_in_sync == 1:
        shares = [[[*one, *other] for one, other in itertools.zip_longest(*shares, fillvalue=())]]

    def share(context: Any) -> Any:
        batches = shares[context.input_pipeline_id]
        kinds = (tf.TensorSpec((None, 8), tf.float32), tf.TensorSpec((None, 1), tf.float32))
        return tf.data.Dataset.from_generator(
            lambda: ((x[list(each)], y[list(each)]) for each in batches), output_signature=kinds
        )

    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
    history = model.fit(strategy.distribute_datasets_from_function(share), epochs=2, verbose=0).history
    return {
        "digest": digest(model),
        "weights": np.concatenate([weight.ravel() for weight in model.get_weights()]).tolist(),
        "loss": [float(each) for each in history["loss"]],
        "mae": [float(each) for each in history["mae"]],
    }


def models_one_after_another(strategy: Any) -> dict[str, Any]:
    """A search: models of unlike sizes, which workers give up and collect at different times, and train meanwhile."""
    x, y = inputs()

    def device_mib() -> float:
        kib = 0
        for pid in strategy.session.device_pids:
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            kib += sum(int(line.split()[1]) for line in status if line.startswith("RssShmem"))
        return kib / 1024

    def train(width: int, *, offloaded: bool) -> Any:
        with strategy.scope(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one worker alone has no memory devices
            entry = keras.Input((8,))
            hidden = keras.layers.Dense(width, activation="relu")(entry)
            model = keras.Model(entry, keras.layers.Dense(1)(hidden))
            optimizer = keras.optimizers.Adam(1e-4)
            model.compile(
                coarse.tensorflow.DistributedOptimizer(optimizer) if offloaded else optimizer, "mse"
            )
        model.fit(x, y, batch_size=BATCH, verbose=0)
        return model

    found: dict[str, Any] = {"digest": ""}
    for offloaded in (True, False):
        kept: list[Any] = []
        seen = []
        for i in range(8):
            kept.append(train(60_000 + 500 * i, offloaded=offloaded))
            kept[-1].fit(x, y, batch_size=BATCH, verbose=0)
            seen.append(device_mib())
            found["digest"] += digest(kept[-1])
            del kept[: -1 if strategy.rank == 0 else -2]
            if strategy.rank == 0 or i % 2 == 1:
                gc.collect()
        found["offloaded" if offloaded else "on workers"] = seen
    return found


class StepOfTheGuide(keras.Model):  # type: ignore[misc,unused-ignore]
    """As in Keras's guide to training steps of one's own."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted)
        return {metric.name: metric.result() for metric in self.metrics}


def metrics_of_the_guide(strategy: Any) -> dict[str, Any]:
    """Metrics that are no means of those of each worker's rows."""
    x, y = inputs()
    targets = (y > 0.5).astype("f4")
    with strategy.scope():
        hidden = perceptron()
        entry = keras.Input((8,))
        model = StepOfTheGuide(entry, keras.layers.Activation("sigmoid")(hidden(entry)))
        metrics = [keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision")]
        model.compile(keras.optimizers.SGD(1e-2), "binary_crossentropy", metrics=metrics)
    history = model.fit(x, targets, batch_size=ROWS, epochs=2, shuffle=False, verbose=0).history
    return {"auc": history["auc"], "precision": history["precision"], "digest": digest(model)}


def saved_by_all(strategy: Any) -> dict[str, Any]:
    """All workers save to the same files at once, again and again."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(100_000), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-2), "mse")
    folder = Path(tempfile.gettempdir(), "of all workers")  # of the job
    folder.mkdir(exist_ok=True)
    for _ in range(5):
        model.save(folder / "whole.keras")
        model.save(folder / "whole.h5")
        model.save_weights(folder / "whole.weights.h5")
        # Nobody waits: another worker may be about to save each of them again.
        loaded = [
            keras.models.load_model(folder / name, compile=False) for name in ("whole.keras", "whole.h5")
        ]
        model.load_weights(folder / "whole.weights.h5")
        model.save_weights(folder / "cut.weights.json", max_shard_size=3.5e-3)
        model.load_weights(folder / "cut.weights.json")
        cut = digest(model)
    strategy.gather(tf.zeros(1), axis=0)  # until all have
    return {
        "digest": digest(model),
        "digests": [*(digest(each) for each in loaded), cut],
        "left": sorted(path.name for path in folder.iterdir()),
    }


@contextlib.contextmanager
def saying() -> Iterator[io.StringIO]:
    """What COARSE logs meanwhile."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("coarse.tensorflow").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("coarse.tensorflow").removeHandler(handler)


def without_compiler(strategy: Any) -> dict[str, Any]:
    """A strategy that finds no compiler, and so reduces through Python."""
    with saying() as said, unittest.mock.patch.dict(os.environ, CXX="/nonexistent/c++"):
        own = coarse.tensorflow.Strategy(seed=1)

    def build() -> Any:
        model = perceptron()
        model.compile(keras.optimizers.SGD(1e-2), "mse", steps_per_execution=2)
        return model

    try:
        keras.utils.set_random_seed(7 + 100 * strategy.rank)
        return {**trained(own, build, inputs()), "said": said.getvalue()}
    finally:
        own.close()


def many_in_flight(strategy: Any) -> dict[str, Any]:
    """The first worker reduces 64 tensors in a graph; the others bring one after the other, the last one first."""
    tensors = [tf.fill((32,), float(i + 100 * strategy.rank)) for i in range(64)]

    @tf.function
    def reduce_all(values: Any) -> Any:
        return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", values))

    graph = reduce_all.get_concrete_function(tensors).graph
    keys = [op.get_attr("key").decode() for op in graph.get_operations() if op.type == "CoarseReduce"]
    if strategy.rank == 0:
        return {"sums": [float(each[0]) for each in reduce_all(tensors)]}
    reducer = strategy.extended._collectives._reducer
    sums = []
    for i, key in reversed(list(enumerate(keys))):
        own, result = tensors[i].numpy(), np.empty(32, "f4")
        reducer.reduce_all([(key, own.ctypes.data, result.ctypes.data, own.nbytes)])
        sums.append(float(result[0]))
    return {"sums": sums[::-1]}


def constants(strategy: Any) -> dict[str, Any]:
    """What a worker reduces may be a constant of its graph: numbers of rows, in a graph for each."""

    @tf.function
    def count(rows: Any) -> Any:
        return strategy.reduce("SUM", tf.shape(rows)[0], axis=None)

    @tf.function
    def add_rows(rows: Any) -> Any:
        values = tf.IndexedSlices(tf.ones((rows.shape[0], 2)), tf.range(rows.shape[0]), tf.constant([40, 2]))
        return tf.convert_to_tensor(strategy.reduce("SUM", values, axis=None))

    lengths = [((32, 32), (30, 30), (32, 30), (30, 32))[step][strategy.rank] for step in range(4)]
    found = [
        (int(count(tf.zeros((n, 3)))), float(tf.reduce_sum(add_rows(tf.zeros((n, 3)))))) for n in lengths
    ]
    return {"found": found}


def scope_missing(strategy: Any) -> dict[str, Any]:
    """What is said of models and variables from outside of scope(), and of data and operations that there are not."""
    if strategy.num_replicas_in_sync == 1:
        return {}
    x, y = inputs()
    outside = perceptron()
    outside.compile(keras.optimizers.SGD(1e-2), "mse")
    optimizer_outside = keras.optimizers.SGD(1e-2)
    variable = tf.Variable(tf.ones(2), name="of_each_worker")
    metric = keras.metrics.MeanAbsoluteError(name="of_each_worker")
    said = {}
    with strategy.scope():
        optimizer = keras.optimizers.SGD(1e-2)
        for name, action in (
            ("fit in scope", lambda: outside.fit(x, y, batch_size=BATCH, verbose=0)),
            ("optimizer", lambda: perceptron().compile(optimizer_outside, "mse")),
            ("metric", lambda: with_metric(metric).fit(x, y, batch_size=BATCH, verbose=0)),
            ("metric of one batch", lambda: with_metric(metric).test_on_batch(x, y)),
            ("update", lambda: strategy.run(lambda: optimizer.apply([tf.ones(2)], [variable]))),
            (
                "no batches",
                lambda: unbuilt().fit(tf.data.Dataset.from_tensor_slices((x[:0], y[:0])).batch(4)),
            ),
            ("jit_compile", lambda: compiled_by_xla().fit(x, y, batch_size=BATCH, verbose=0)),
            ("MAX", lambda: strategy.run(lambda: all_reduce("MAX"))),
            ("product", lambda: strategy.run(lambda: all_reduce("product"))),
        ):
            try:
                action()
            except ValueError as error:
                said[name] = str(error)
    with saying() as text:
        outside.fit(x, y, batch_size=BATCH, verbose=0)
    said["fit"] = text.getvalue()
    with strategy.scope():
        variable = tf.Variable(tf.ones(2))
        optimizer, in_scope, in_run = (keras.optimizers.SGD(1e-2) for _ in range(3))
        for each in (optimizer, in_scope, in_run):
            each.build([variable])
        with saying() as text:
            in_scope.apply([tf.ones(2)], [variable])
        said["applied in scope"] = text.getvalue()
    with saying() as text:
        for _ in range(2):
            optimizer.apply([tf.ones(2)], [variable])
    said["applied"] = text.getvalue()
    with saying() as text:
        strategy.run(lambda: in_run.apply([tf.ones(2)], [variable]))
    said["applied in run"] = text.getvalue()
    return said


def unbuilt() -> Any:
    model = keras.Sequential([keras.layers.Dense(1)], name="unbuilt")
    model.compile(keras.optimizers.SGD(1e-2), "mse")
    return model


def with_metric(metric: Any) -> Any:
    model = perceptron()
    model.compile(keras.optimizers.SGD(1e-2), "mse", metrics=[metric])
    return model


def compiled_by_xla() -> Any:
    model = perceptron()
    model.compile(keras.optimizers.SGD(1e-2), "mse", jit_compile=True)
    return model


def all_reduce(op: str) -> Any:
    return tf.distribute.get_replica_context().all_reduce(op, tf.ones(2))


SCENARIOS: dict[str, Callable[[Any], dict[str, Any]]] = {
    scenario.__name__: scenario
    for scenario in (
        dense,
        several_steps_per_execution_and_batch_norm,
        embedding_and_accumulation,
        embedding,
        fewer_rows_than_workers,
        uneven_rows,
        losses_in_functions,
        one_alone,
        statistics_of_batches,
        rows_of_tables,
        offloaded_optimizers,
        offloaded_fit,
        offloaded_checkpoints,
        offloaded_and_wrapped,
        offloaded_eagerly_in_mixed_precision,
        models_one_after_another,
        eager,
        shuffled_and_clipped,
        mixed_precision,
        logs,
        own_loop,
        batches_in_memory_of_numpy,
        saving,
        interrupted,
        files_of_callbacks,
        shuffled_by_seeds_of_its_own,
        generators_that_end,
        unlike_numbers_of_batches,
        metrics_of_the_guide,
        saved_by_all,
        without_compiler,
        many_in_flight,
        constants,
        scope_missing,
    )
}
