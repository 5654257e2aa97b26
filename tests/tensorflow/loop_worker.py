"""A process that runs training loops (training_loops_of_keras.py) until a request ends it: a worker or the reference.

test_keras_training_loops.py starts it with a name, a rendezvous path and a pipe.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from training_loops_of_keras import NUM_ROWS, TWICE, WHOLE, Compiled, Fit, Other, TrainingLoop

import coarse.tensorflow

WIDTH = 8
CLASSES = 4
REFERENCE = "reference"

# ---- Layers ----

registered = keras.saving.register_keras_serializable("loops")


@registered
class Scaled(keras.layers.Layer):  # type: ignore[misc,unused-ignore]
    """A parameter without dimensions."""

    def build(self, shape: Any) -> None:
        self.factor = self.add_weight(shape=(), initializer="ones", name="factor")

    def call(self, x: Any) -> Any:
        return x * self.factor


@registered
class LookedUp(keras.layers.Layer):  # type: ignore[misc,unused-ignore]
    """A table of which the inputs choose rows."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.table = keras.layers.Embedding(20, WIDTH)

    def build(self, shape: Any) -> None:
        self.table.build(shape)

    def call(self, x: Any) -> Any:
        # Whole numbers, which rounding does not change.
        numbers = keras.ops.abs(keras.ops.cast(keras.ops.round(keras.ops.stop_gradient(x[:, :4])), "int32"))
        return x + keras.ops.mean(self.table(numbers % 20), axis=1)


@registered
class WithUnused(keras.layers.Layer):  # type: ignore[misc,unused-ignore]
    """A layer, and another one that is never used."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.used, self.unused = keras.layers.Dense(WIDTH), keras.layers.Dense(WIDTH)

    def build(self, shape: Any) -> None:
        self.used.build(shape)
        self.unused.build(shape)

    def call(self, x: Any) -> Any:
        return self.used(x)


@registered
class InTurn(keras.layers.Layer):  # type: ignore[misc,unused-ignore]
    """Layers one after the other, whose width stays."""

    def __init__(self, layers: Any, **options: Any) -> None:
        super().__init__(**options)
        self.layers = [keras.layers.deserialize(each) if isinstance(each, dict) else each for each in layers]

    def build(self, shape: Any) -> None:
        for layer in self.layers:
            layer.build(shape)
            shape = layer.compute_output_shape(shape)

    def call(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x

    def compute_output_shape(self, shape: Any) -> Any:
        return shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "layers": [keras.layers.serialize(each) for each in self.layers]}


@registered
class Attention(keras.layers.Layer):  # type: ignore[misc,unused-ignore]
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.attention = keras.layers.MultiHeadAttention(2, 3)

    def build(self, shape: Any) -> None:
        self.attention.build((None, WIDTH // 2, 2), (None, WIDTH // 2, 2))

    def call(self, x: Any) -> Any:
        rows = keras.ops.reshape(x, (-1, WIDTH // 2, 2))
        return x + keras.ops.reshape(self.attention(rows, rows), (-1, WIDTH))


def in_turn(*layers: Any) -> Any:
    return InTurn(layers)


layers = keras.layers
PIECES: dict[str, Callable[[], Any]] = {
    "dense": lambda: layers.Dense(WIDTH, activation="tanh"),
    "wide": lambda: in_turn(layers.Dense(600, activation="tanh"), layers.Dense(WIDTH)),
    "conv": lambda: in_turn(
        layers.Reshape((WIDTH, 1)),
        layers.Conv1D(3, 3, padding="same", activation="tanh"),
        layers.AveragePooling1D(2),
        layers.Flatten(),
        layers.Dense(WIDTH),
    ),
    "layer norm": layers.LayerNormalization,
    "group norm": lambda: layers.GroupNormalization(2),
    "synchronized batch norm": lambda: layers.BatchNormalization(synchronized=True, momentum=0.7),
    "batch norm": lambda: layers.BatchNormalization(momentum=0.7),
    "attention": Attention,
    "recurrent": lambda: in_turn(layers.Reshape((4, 2)), layers.GRU(WIDTH)),
    "looked up": LookedUp,
    "scaled": Scaled,
    "frozen": lambda: layers.Dense(WIDTH, trainable=False),
    "penalised": lambda: layers.Dense(WIDTH, kernel_regularizer="l2", bias_regularizer="l1"),
    "activity penalised": lambda: layers.Dense(WIDTH, activity_regularizer="l2"),
    "constrained": lambda: layers.Dense(WIDTH, kernel_constraint=keras.constraints.MaxNorm(0.8)),
    "with unused": WithUnused,
    "residual": lambda: in_turn(layers.Dense(WIDTH, activation="sigmoid"), layers.UnitNormalization()),
    "dropout": lambda: layers.Dropout(0.3, seed=3),
    "noise": lambda: layers.GaussianNoise(0.3, seed=4),
}


def pieces_of(loop: TrainingLoop) -> list[Any]:
    made: list[Any] = []
    for name in loop.pieces:
        made.append(made[0] if name == TWICE else PIECES[name]())
    return made


def heads_of(loop: TrainingLoop) -> list[Any]:
    width = CLASSES if loop.loss == "classes" else 1
    activation = "sigmoid" if loop.loss == "binary" else "softmax" if loop.loss == "classes" else None
    own = layers.Dense(width, activation=activation, name="first", dtype=dtype_of(loop))
    return [own, layers.Dense(1, name="second", dtype=dtype_of(loop))][: loop.num_outputs]


def dtype_of(loop: TrainingLoop) -> str:
    return "float64" if loop.policy == "float64" else "float32"


class Subclassed(keras.Model):  # type: ignore[misc,unused-ignore]
    """Built when it sees data."""

    def __init__(self, loop: TrainingLoop) -> None:
        super().__init__()
        self.pieces, self.heads = pieces_of(loop), heads_of(loop)

    def call(self, inputs: Any) -> Any:
        x = sum(inputs.values()) if isinstance(inputs, dict) else inputs
        for piece in self.pieces:
            x = piece(x)
        results = [head(x) for head in self.heads]
        return results[0] if len(results) == 1 else {"first": results[0], "second": results[1]}


class OwnStep(Subclassed):
    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True), weights)
            scaled = self.optimizer.scale_loss(loss)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss * self.distribute_strategy.num_replicas_in_sync)
            else:
                metric.update_state(y, self(x, training=False), weights)
        return {metric.name: metric.result() for metric in self.metrics}


def functional(loop: TrainingLoop) -> Any:
    entries = [keras.Input((WIDTH,), name=name) for name in ("a", "b")[: loop.num_inputs]]
    x = entries[0] if len(entries) == 1 else layers.Add()(entries)
    for piece in pieces_of(loop):
        x = piece(x)
    heads = heads_of(loop)
    inputs = {entry.name: entry for entry in entries} if len(entries) > 1 else entries[0]
    outputs = {head.name: head(x) for head in heads} if len(heads) > 1 else heads[0](x)
    return keras.Model(inputs, outputs)


# ---- Optimizers ----

make = keras.optimizers
EPSILON = 1e-3  # so that gradients that are rounding alone are not made as large as any other
MAKERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda lr, **options: make.SGD(lr, **options),
    "momentum": lambda lr, **options: make.SGD(lr, momentum=0.9, **options),
    "nesterov": lambda lr, **options: make.SGD(lr, momentum=0.9, nesterov=True, **options),
    "adam": lambda lr, **options: make.Adam(lr, epsilon=EPSILON, **options),
    "amsgrad": lambda lr, **options: make.Adam(lr, epsilon=EPSILON, amsgrad=True, **options),
    "adamw": lambda lr, **options: make.AdamW(lr, epsilon=EPSILON, weight_decay=0.05, **options),
    "nadam": lambda lr, **options: make.Nadam(lr, epsilon=EPSILON, **options),
    "adamax": lambda lr, **options: make.Adamax(lr, epsilon=EPSILON, **options),
    "rmsprop": lambda lr, **options: make.RMSprop(lr, epsilon=EPSILON, momentum=0.5, **options),
    "centered rmsprop": lambda lr, **options: make.RMSprop(lr, epsilon=EPSILON, centered=True, **options),
    "adagrad": lambda lr, **options: make.Adagrad(lr, epsilon=EPSILON, **options),
    "adadelta": lambda lr, **options: make.Adadelta(lr, epsilon=EPSILON, **options),
    "ftrl": lambda lr, **options: make.Ftrl(lr, **options),
    "lamb": lambda lr, **options: make.Lamb(lr, epsilon=EPSILON, **options),
    "adafactor": lambda lr, **options: make.Adafactor(lr, **options),
    "muon": lambda lr, **options: make.Muon(lr, epsilon=EPSILON, **options),
    "lion": lambda lr, **options: make.Lion(3e-4, **options),
}


def optimizer_of(compiled: Compiled) -> Any:
    options: dict[str, Any] = {}
    rate: Any = 0.02
    for option in compiled.options:
        if option == "ema":
            options |= {"use_ema": True, "ema_momentum": 0.7}
        elif option == "ema overwrites":
            options |= {"use_ema": True, "ema_momentum": 0.7, "ema_overwrite_frequency": 2}
        elif option == "accumulates":
            options["gradient_accumulation_steps"] = 2
        elif option in ("decays", "decays but biases"):
            options["weight_decay"] = 0.03
        elif option == "schedule":
            rate = make.schedules.ExponentialDecay(0.02, 3, 0.5)
        else:
            options[option] = 0.05
    if compiled.optimizer in ("adamw", "lamb"):
        options.pop("weight_decay", None)
    optimizer = MAKERS[compiled.optimizer](rate, **options)
    if "decays but biases" in compiled.options:
        optimizer.exclude_from_weight_decay(var_names=["bias"])
    return offloaded(optimizer) if compiled.offloads else optimizer


def offloaded(optimizer: Any) -> Any:
    in_scope_of_workers = isinstance(tf.distribute.get_strategy(), coarse.tensorflow.Strategy)
    return coarse.tensorflow.DistributedOptimizer(optimizer) if in_scope_of_workers else optimizer


# ---- Data ----


def arrays(loop: TrainingLoop, rows: int, seed: int) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    dtype = dtype_of(loop)
    x = random.normal(size=(rows, WIDTH)).round(2)
    sums = x.sum(1, keepdims=True)
    if loop.loss == "classes":
        y: Any = (np.abs(sums[:, 0]) % CLASSES).astype("int32")
    elif loop.loss == "binary":
        y = (sums > 0).astype(dtype)
    else:
        y = (sums / 3).astype(dtype)
    x = x.astype(dtype)
    inputs: Any = {"a": x, "b": (0.5 * x[:, ::-1]).copy()} if loop.num_inputs > 1 else x
    targets: Any = {"first": y, "second": sums.astype(dtype) ** 2 / 9} if loop.num_outputs > 1 else y
    return inputs, targets


def rows_between(values: Any, start: int, end: int) -> Any:
    return tf.nest.map_structure(lambda each: each[start:end], values)


class Batches(keras.utils.PyDataset):  # type: ignore[misc,unused-ignore]
    def __init__(self, values: Any, batch_size: int) -> None:
        super().__init__()
        self._values, self._batch_size = values, batch_size

    def __len__(self) -> int:
        return -(-NUM_ROWS // self._batch_size)

    def __getitem__(self, index: int) -> Any:
        return rows_between(self._values, index * self._batch_size, (index + 1) * self._batch_size)


def source(data: str, values: tuple[Any, ...], batch_size: int, *, trains: bool) -> dict[str, Any]:
    """What fit() or evaluate() takes it by."""
    names = ("x", "y", "sample_weight")
    # Keras goes beyond, to a multiple of steps_per_execution, which are one under MirroredStrategy.
    steps = -(-NUM_ROWS // batch_size // 6) * 6
    per_call = "steps_per_epoch" if trains else "steps"
    whole = tf.data.Dataset.from_tensor_slices(values)
    if data in ("arrays", "dict"):
        return {**dict(zip(names, values, strict=False)), "batch_size": batch_size}
    if data == "dataset":
        return {"x": whole.batch(batch_size)}
    if data == "pydataset":
        return {"x": Batches(values, batch_size)}
    if data == "unknown size":
        return {"x": whole.batch(batch_size).filter(lambda *_: True)}
    if data == "repeated":
        return {"x": whole.batch(batch_size).repeat(), per_call: steps}
    if data in ("files", "not sharded"):
        policy = tf.data.experimental.AutoShardPolicy
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = policy.DATA if data == "files" else policy.AUTO
        return {"x": whole.batch(batch_size).prefetch(2).with_options(options)}

    def forever() -> Iterator[Any]:
        while True:
            for start in range(0, NUM_ROWS, batch_size):
                yield rows_between(values, start, start + batch_size)

    return {"x": forever(), per_call: steps}


# ---- What is done ----


class Training:
    """One loop under one strategy."""

    def __init__(self, loop: TrainingLoop, strategy: Any, folder: Path, num_workers: int) -> None:
        self._loop = loop
        self._strategy = strategy
        self._folder = folder
        self._rank = strategy.rank if num_workers > 1 else 0
        self._seen: list[Any] = []
        self._is_mirrored = isinstance(strategy, tf.distribute.MirroredStrategy)
        self._compiled = loop.compiled
        with strategy.scope():
            self._model = {"functional": functional, "subclassed": Subclassed, "own step": OwnStep}[
                loop.kind
            ](loop)
            self._compile()

    def run(self) -> list[Any]:
        for number, action in enumerate(self._loop.actions):
            what = f"{number} {action.kind}" if isinstance(action, Other) else f"{number} fit"
            found = self._fit(action, number) if isinstance(action, Fit) else self._do(action, number)
            self._see(what, found)
        return self._seen

    def _see(self, what: str, found: Any) -> None:
        variables: dict[str, Any] = {"found": found, "weights": self._model.get_weights()}
        optimizer = self._model.optimizer
        # Before the first step it may be built or not: a strategy builds it wherever it builds the model.
        if optimizer is not None and optimizer.built and int(optimizer.iterations.numpy()) > 0:
            store = self._states()
            variables["optimizer"] = store
        self._seen.append((what, variables))

    def _states(self) -> dict[str, Any]:
        names: dict[str, Any] = {}
        for variable in self._model.optimizer.variables:
            if "gradient_accumulator" not in variable.path:  # each worker's own
                names[f"{len(names)} {variable.path.rpartition('/')[2]}"] = np.asarray(variable.numpy())
        return names

    def _compile(self) -> None:
        loop, compiled = self._loop, self._compiled
        loss: Any = {
            "mse": "mse",
            "classes": "sparse_categorical_crossentropy",
            "huber": keras.losses.Huber(),
            "binary": "binary_crossentropy",
        }[loop.loss]
        metrics: Any = {
            "mse": ["mae"],
            "huber": [keras.metrics.RootMeanSquaredError(name="rmse"), keras.metrics.R2Score(name="r2")],
            "classes": ["accuracy", "sparse_categorical_crossentropy"],
            "binary": [keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision")],
        }[loop.loss]
        options: dict[str, Any] = {}
        if loop.num_outputs > 1:
            loss, metrics = {"first": loss, "second": "mae"}, {"first": metrics, "second": ["mse"]}
            options["loss_weights"] = {"first": 1.0, "second": 0.3}
        elif loop.kind != "own step":
            options["weighted_metrics"] = {"mse": ["mse"], "classes": ["accuracy"]}.get(loop.loss, [])
        self._model.compile(
            optimizer_of(compiled),
            loss,
            metrics=metrics,
            run_eagerly=compiled.runs_eagerly,
            # Graphs of several steps do not run under MirroredStrategy.
            steps_per_execution=1 if self._is_mirrored else compiled.steps_per_execution,
            jit_compile=False,
            **options,
        )

    def _values(self, weights: str, seed: int, rows: int = NUM_ROWS) -> tuple[Any, ...]:
        x, y = arrays(self._loop, rows, seed)
        if weights != "samples":
            return x, y
        own = np.random.default_rng(seed).uniform(0.2, 2.0, rows).round(2).astype("float32")
        return x, y, {"first": own, "second": own[::-1].copy()} if self._loop.num_outputs > 1 else own

    def _fit(self, fit: Fit, number: int) -> Any:
        values = self._values(fit.weights, number)
        options = source(fit.data, values, fit.batch_size, trains=True)
        are_taken = fit.data != "generator" and self._loop.loss == "classes" and self._loop.num_outputs == 1
        if fit.weights == "classes" and are_taken:
            options["class_weight"] = {each: 0.5 + each for each in range(CLASSES)}
        if fit.data == "arrays" and fit.shuffles:
            options["batch_size"] = NUM_ROWS  # so that what is shuffled does not matter
        if fit.validation == "split" and fit.data == "arrays":
            options["validation_split"] = 1 / 3
        elif fit.validation != "none":
            held_out = self._values(fit.weights, 100 + number, 21)
            if fit.validation == "dataset":
                options["validation_data"] = tf.data.Dataset.from_tensor_slices(held_out).batch(8)
            else:
                options["validation_data"] = held_out
                options["validation_batch_size"] = 8
        batches: list[Any] = []
        if fit.callbacks:
            told = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: batches.append((batch, dict(logs)))
            )
            options["callbacks"] = [self._callback(each, number) for each in fit.callbacks] + [told]
        history = self._model.fit(
            **options,
            shuffle=fit.data == "arrays" and fit.shuffles,
            epochs=fit.epochs,
            verbose=0,
        ).history
        path = self._folder / f"{number}.weights.h5"
        if "checkpoint" in fit.callbacks:
            self._model.load_weights(path)  # of the best epoch, as the first worker has written it
        return {"history": history, "batches": batches}

    def _callback(self, name: str, number: int) -> Any:
        known = keras.callbacks
        if name == "early stopping":
            return known.EarlyStopping("loss", patience=1, min_delta=0.01, restore_best_weights=True)
        has_schedule = isinstance(
            self._model.optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule
        )
        if has_schedule and name in ("plateau", "scheduler"):
            name = "nan"
        if name == "plateau":
            return known.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.02)
        if name == "scheduler":
            return known.LearningRateScheduler(lambda epoch, rate: rate * 0.7)
        if name == "checkpoint":
            path = str(self._folder / f"{number}.weights.h5")
            return known.ModelCheckpoint(path, "loss", save_best_only=True, save_weights_only=True)
        if name == "backup":
            return known.BackupAndRestore(str(self._folder / f"backup{number}"), save_freq=2)
        if name == "csv":
            return known.CSVLogger(str(self._folder / f"{number}.csv"))
        if name == "nan":
            return known.TerminateOnNaN()
        if name == "writes weights":

            def scale(*_: Any, **__: Any) -> None:
                self._scale_weights()

            return known.LambdaCallback(on_epoch_end=scale)

        def lower(*_: Any, **__: Any) -> None:
            self._set_rate()

        return known.LambdaCallback(on_train_batch_end=lower)

    def _scale_weights(self) -> None:
        self._model.set_weights(
            [weight if weight.dtype.kind in "ui" else 0.9 * weight for weight in self._model.get_weights()]
        )

    def _set_rate(self) -> None:
        optimizer = self._model.optimizer
        if not isinstance(optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            optimizer.learning_rate = 0.9 * float(keras.ops.convert_to_numpy(optimizer.learning_rate))

    def _do(self, action: Other, number: int) -> Any:
        kind = action.kind
        values = self._values("samples" if number % 2 else "none", number)
        model = self._model
        if kind == "evaluate":
            options = source(action.data, values, action.batch_size, trains=False)
            return model.evaluate(**options, verbose=0, return_dict=True)
        if kind == "predict":
            options = source(action.data, values[:1], action.batch_size, trains=False)
            if action.data not in ("arrays", "dict"):
                options = source(action.data, values[:2], action.batch_size, trains=False)
            return model.predict(**options, verbose=0)
        if kind in ("train_on_batch", "test_on_batch"):
            few = rows_between(values, 0, action.batch_size)
            return getattr(model, kind)(*few, return_dict=True)
        if kind == "predict_on_batch":
            return len(tf.nest.flatten(model.predict_on_batch(rows_between(values[0], 0, action.batch_size))))
        if kind == "keras file":
            return self._through_file(str(self._folder / f"{number}.keras"))
        if kind == "weights file":
            path = self._folder / f"{number}.weights.h5"
            model.save_weights(path)
            self._scale_weights()
            model.load_weights(path)
            return None
        if kind == "tf checkpoint":
            path = str(self._folder / f"{number}.checkpoint")
            checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
            if self._rank == 0:
                checkpoint.write(path)
            self._meet()
            self._scale_weights()
            checkpoint.read(path)
            self._meet()
            return None
        if kind == "recompile":
            self._compiled = self._loop.again
            with self._strategy.scope():
                self._compile()
            return None
        if kind == "freeze":
            part = model.layers[-1] if self._loop.kind == "functional" else model.heads[-1]
            part.trainable = not part.trainable
            with self._strategy.scope():
                self._compile()
            return None
        if kind == "scale weights":
            return self._scale_weights()
        if kind == "set lr":
            return self._set_rate()
        assert kind == "own loop"
        return self._own_loop(number, action)

    def _meet(self) -> None:
        self._strategy.reduce("SUM", tf.constant(1), axis=None)

    def _through_file(self, path: str) -> None:
        if self._loop.kind != "functional":
            return
        self._model.save(path)
        with self._strategy.scope():
            self._model = keras.models.load_model(path)
            compiled = self._compiled
            optimizer = self._model.optimizer
            if "decays but biases" in compiled.options:
                inner = getattr(optimizer, "inner_optimizer", optimizer)
                inner.exclude_from_weight_decay(var_names=["bias"])
            if compiled.offloads:
                offloaded(optimizer)

    def _own_loop(self, number: int, action: Other) -> Any:
        values = arrays(self._loop, NUM_ROWS, number)
        dataset = self._strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices(values).batch(WHOLE)
        )
        model, optimizer = self._model, self._model.optimizer

        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = model.compute_loss(x, y, model(x, training=True))
                scaled = optimizer.scale_loss(loss)
            optimizer.apply_gradients(
                zip(tape.gradient(scaled, model.trainable_variables), model.trainable_variables, strict=True)
            )
            return loss

        def train(batch: Any) -> Any:
            return self._strategy.reduce("SUM", self._strategy.run(step, args=batch), axis=None)

        if not self._compiled.runs_eagerly:
            train = tf.function(train)
        return [float(train(batch)) for batch in dataset]


def run(loop: TrainingLoop, strategy: Any, folder: Path, num_workers: int) -> list[Any]:
    keras.backend.clear_session()
    gc.collect()
    keras.backend.set_floatx(dtype_of(loop))
    keras.mixed_precision.set_global_policy(loop.policy)
    keras.utils.set_random_seed(7 + (100 * strategy.rank if num_workers > 1 else 0))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Training(loop, strategy, folder, num_workers).run()
    finally:
        keras.mixed_precision.set_global_policy("float32")
        keras.backend.set_floatx("float32")


def reference_of(loop: TrainingLoop) -> Any:
    """The strategy that workers are compared with."""
    if loop.reference == "one process":
        return tf.distribute.get_strategy()
    build_by_first_replica()
    # Its default for CPUs mixes up reductions of one process that are of unlike types.
    return tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


def build_by_first_replica() -> None:
    """Keras averages the first batches of replicas to build by their shapes: they may have unlike numbers of rows."""
    trainer = keras.src.backend.tensorflow.trainer.TensorFlowTrainer
    original = trainer._maybe_symbolic_build
    if original.__name__ != "_maybe_symbolic_build":
        return

    def of_first(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        if iterator is not None and isinstance(self._distribute_strategy, tf.distribute.MirroredStrategy):
            data_batch = first_batch(iterator, self._distribute_strategy)
            iterator = None
        return original(self, iterator, data_batch)

    trainer._maybe_symbolic_build = of_first


def first_batch(iterator: Any, strategy: Any) -> Any:
    known = getattr(
        iterator.data_adapter, "_first_batches", None
    )  # a generator would lose what is taken of it
    if known is not None:
        return known[0]
    batches = next(iter(iterator))[-1]
    return tf.nest.map_structure(lambda each: strategy.experimental_local_results(each)[0], next(batches))


def main() -> None:
    name, _, pipe = sys.argv[1:]
    num_workers = int(os.environ["WORLD_SIZE"])
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    logging.getLogger("coarse").setLevel(logging.ERROR)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    if name == REFERENCE:
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    connection = Connection(int(pipe))
    strategy = None if name == REFERENCE else coarse.tensorflow.Strategy()
    connection.send(("result", "ready"))
    while (what := connection.recv()) is not None:
        loop, folder = what
        folder = Path(folder, name)
        folder.mkdir(exist_ok=True)
        try:
            own = reference_of(loop) if strategy is None else strategy
            connection.send(("result", run(loop, own, folder, num_workers)))
        except Exception:
            connection.send(("error", traceback.format_exc()))
    connection.close()
    if strategy is not None:
        strategy.close()


if __name__ == "__main__":
    main()
