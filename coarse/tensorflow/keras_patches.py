"""Patches for places where Keras 3 checks the class of a strategy, or ignores other workers.

Each patch applies only to models of coarse.tensorflow.Strategy, once per process, if Keras has the expected code.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from coarse.errors import CoarseError, WorkerLostError
from coarse.tensorflow.replacing import replaces
from coarse.tensorflow.saving import write_whole_files
from coarse.tensorflow.writing_callbacks import guard, share_restored
from coarse.timeline import recorder

logger = logging.getLogger(__name__)

_ERROR_OF_GRAPH = re.compile(
    rf"^((?:{'|'.join(each.__name__ for each in CoarseError.__subclasses__())}): .*?)\s*(?:\[\[|\[Op:|\Z)",
    re.DOTALL | re.MULTILINE,
)
"""COARSE's message within an error of TensorFlow, up to the names of nodes."""

_ADVICE = "Build the model and compile it within `with strategy.scope():`."


def apply(strategy_class: Any) -> None:
    """Patches Keras once.

    Args:
        strategy_class: Class of the affected strategies.

    Raises:
        ImportError: If this Keras lacks the expected code.
    """
    try:
        import keras
        from keras.src.backend.tensorflow import trainer
        from keras.src.callbacks.callback_list import CallbackList
        from keras.src.losses import loss
        from keras.src.trainers.trainer import Trainer
    except ImportError:  # tf.distribute works without Keras
        return
    if not hasattr(trainer, "reduce_per_replica"):
        raise ImportError(
            f"coarse.tensorflow does not support Keras {keras.__version__}: it was tested with 3.15. Install that"
        )
    _patch_outputs(trainer, strategy_class)
    _patch_metrics(Trainer, strategy_class)
    _patch_shuffling(trainer.TFEpochIterator, strategy_class)
    _patch_distribution(trainer.TFEpochIterator, strategy_class)
    for method in ("fit", "train_on_batch"):
        _patch_training(trainer.TensorFlowTrainer, method, strategy_class)
    _patch_steps(trainer.TensorFlowTrainer, strategy_class)
    for method in ("evaluate", "predict"):
        _patch_inference(trainer.TensorFlowTrainer, method, strategy_class)
    _patch_compile(Trainer, strategy_class)
    _patch_build(trainer.TensorFlowTrainer, strategy_class)
    _patch_gradients(keras.optimizers.Optimizer, strategy_class)
    _patch_loss_scale(keras.optimizers.LossScaleOptimizer, strategy_class)
    _patch_empty_losses(loss, strategy_class)
    _patch_loss_weights(loss, strategy_class)
    guard(keras.callbacks, strategy_class)
    share_restored(CallbackList, strategy_class)
    write_whole_files(strategy_class)


def _patch_outputs(trainer: Any, strategy_class: Any) -> None:
    """Merges predictions and logs of replicas, which Keras does only for MultiWorkerMirroredStrategy."""

    @replaces(trainer, "reduce_per_replica")
    def reduce_per_replica(original: Any, values: Any, strategy: Any, reduction: str) -> Any:
        if not isinstance(strategy, strategy_class) or strategy.num_replicas_in_sync == 1:
            return original(values, strategy, reduction)
        if reduction == "concat":
            return tf.nest.map_structure(lambda value: strategy.gather(value, axis=0), values)
        if reduction in ("auto", "mean"):
            return _averaged_numbers(values, strategy)
        return original(values, strategy, reduction)


def _averaged_numbers(logs: Any, strategy: Any) -> Any:
    """Replaces all floating-point numbers in `logs` by means over the workers, in one reduction."""
    flat = tf.nest.flatten(logs)
    numbers = [i for i, value in enumerate(flat) if _is_number(value)]
    if not numbers:
        return logs
    own = [tf.convert_to_tensor(flat[i]) for i in numbers]
    dtype = tf.float64 if any(value.dtype == tf.float64 for value in own) else tf.float32
    means = strategy.reduce("MEAN", tf.stack([tf.cast(value, dtype) for value in own]), axis=None)
    for place, (i, value) in enumerate(zip(numbers, own, strict=True)):
        flat[i] = tf.cast(means[place], value.dtype)
    return tf.nest.pack_sequence_as(logs, flat)


def _is_number(value: Any) -> bool:
    if isinstance(value, tf.Tensor):
        return bool(value.dtype.is_floating and value.shape.rank == 0)
    return isinstance(value, float)


def _patch_metrics(trainer_class: Any, strategy_class: Any) -> None:
    """Logs compiled metrics of custom training steps, and ends epochs with statistics of all workers' rows.

    Custom steps written as in Keras's guide return compiled metrics under one name, which Keras does not recognise as
    one of its metrics. Epochs would then log the replicas' last results: means of each replica's own rows.

    The statistics are averaged before validation, and before callbacks save them.
    """

    @replaces(trainer_class, "_get_metrics_result_or_logs")
    def get_metrics_result_or_logs(original: Any, self: Any, logs: Any) -> Any:
        if getattr(self, "_averages_at_epochs", False):
            _average_statistics(self, strategy_class)
        if isinstance(self._distribute_strategy, strategy_class) and isinstance(logs, dict):
            compiled = logs.get("compile_metrics")
            if isinstance(compiled, dict):
                logs = {name: value for name, value in logs.items() if value is not compiled} | compiled
        return original(self, logs)


def _patch_shuffling(iterator_class: Any, strategy_class: Any) -> None:
    """Gives workers one seed for shuffling arrays, because arrays are shuffled before their rows are distributed."""

    @replaces(iterator_class, "__init__")
    def init(
        original: Any, self: Any, distribute_strategy: Any = None, *arguments: Any, **keywords: Any
    ) -> None:
        with contextlib.ExitStack() as stack:
            if isinstance(distribute_strategy, strategy_class) and keywords.get("shuffle"):
                stack.enter_context(distribute_strategy.extended._common_seed())
            original(self, distribute_strategy, *arguments, **keywords)


def _patch_distribution(iterator_class: Any, strategy_class: Any) -> None:
    """Distributes data among the workers that are left, whenever an epoch, evaluation or prediction begins."""

    @replaces(iterator_class, "__iter__")
    def begin(original: Any, self: Any) -> Any:
        strategy, before = self._distribute_strategy, self._distributed_dataset
        if isinstance(strategy, strategy_class):
            self._distributed_dataset = strategy.extended._redistributed(before)
        if self._distributed_dataset is not before and before.cardinality == tf.data.INFINITE_CARDINALITY:
            self._current_iterator = None  # which would last for all epochs
        return original(self)


def _patch_training(trainer_class: Any, method: str, strategy_class: Any) -> None:
    """In a scope, rejects models built outside of it; elsewhere warns that each worker trains a model of its own.

    Also makes fit() wait for all workers, so that all writes and removals by the first worker's callbacks are
    complete.
    """
    verbose_position = _verbose_position(getattr(trainer_class, method))

    @replaces(trainer_class, method)
    def train(original: Any, self: Any, *arguments: Any, **keywords: Any) -> Any:
        if self._distribute_strategy is None:
            _check_built_in_scope(self, tf.distribute.get_strategy(), strategy_class)
        elif isinstance(self._distribute_strategy, strategy_class):
            _check_compilable(self)
        if method == "train_on_batch":
            self._has_own_statistics = True
            with _shortened_errors():
                return original(self, *arguments, **keywords)
        self._averages_at_epochs = True
        try:
            if len(arguments) < verbose_position:
                keywords = _progress_on_first_worker(self, keywords, strategy_class)
            with _shortened_errors():
                returned = original(self, *arguments, **keywords)
        finally:
            self._averages_at_epochs = False
        if isinstance(self._distribute_strategy, strategy_class):
            self._distribute_strategy.extended._meet("ending fit()")
        return returned


def _patch_steps(trainer_class: Any, strategy_class: Any) -> None:
    """Records the steps of fit() in the timeline, if this process records one; follows lost workers."""

    @replaces(trainer_class, "make_train_function")
    def make_train_function(original: Any, self: Any, *arguments: Any, **keywords: Any) -> Any:
        before = self.train_function
        returned = original(self, *arguments, **keywords)
        if self.train_function is before:
            return returned
        if recorder.is_recording():
            self.train_function = _recorded(self.train_function)
        if isinstance(self._distribute_strategy, strategy_class):
            self.train_function = _with_membership_checks(self.train_function, self._distribute_strategy)
        return returned


def _recorded(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def recorded(*arguments: Any) -> Any:
        with recorder.span("train step"):
            return step(*arguments)

    return recorded


def _with_membership_checks(step: Callable[..., Any], strategy: Any) -> Callable[..., Any]:
    """Wraps the step: before it this worker leaves if asked to; after it all workers agree on lost ones."""

    @functools.wraps(step)
    def followed(*arguments: Any) -> Any:
        strategy.begin_step()
        returned = step(*arguments)
        strategy.extended._note_losses()
        return returned

    return followed


@contextlib.contextmanager
def _shortened_errors() -> Iterator[None]:
    """Removes TensorFlow's traceback of the graph from an error of COARSE, so that COARSE's message is first."""
    try:
        yield
    except tf.errors.OpError as error:
        said = _ERROR_OF_GRAPH.search(str(error.message))
        if said is None:
            raise
        raise type(error)(error.node_def, error.op, said.group(1)) from None


def _verbose_position(method: Any) -> int:
    """Number of positional arguments that include `verbose`; of all arguments if it has none."""
    names = list(inspect.signature(method).parameters)
    return names.index("verbose") if "verbose" in names else len(names)


def _patch_inference(trainer_class: Any, method: str, strategy_class: Any) -> None:
    """Evaluates and predicts with statistics of all workers' rows, also after train_on_batch().

    Also makes predict() return all rows if a worker is lost meanwhile.
    """
    verbose_position = _verbose_position(getattr(trainer_class, method))

    @replaces(trainer_class, method)
    def infer(original: Any, self: Any, *arguments: Any, **keywords: Any) -> Any:
        if getattr(self, "_has_own_statistics", False):
            _average_statistics(self, strategy_class)
            self._has_own_statistics = False
        if len(arguments) < verbose_position:
            keywords = _progress_on_first_worker(self, keywords, strategy_class)
        averages, self._averages_at_epochs = getattr(self, "_averages_at_epochs", False), False
        try:
            with _shortened_errors():
                if method == "evaluate" or not isinstance(self._distribute_strategy, strategy_class):
                    return original(self, *arguments, **keywords)
                predict = functools.partial(original, self, *arguments, **keywords)
                inputs = arguments[0] if arguments else keywords.get("x")
                return _predicted(predict, inputs, self._distribute_strategy)
        finally:
            self._averages_at_epochs = averages


def _predicted(predict: Callable[[], Any], inputs: Any, strategy: Any) -> Any:
    """The predictions; predicts again if a worker was lost meanwhile, because its rows are missing.

    Raises:
        WorkerLostError: If the inputs are an iterator, which cannot begin anew.
    """
    if not strategy.extended._may_lose_workers:
        return predict()
    strategy.extended._meet("beginning predict()")
    while True:
        members = strategy.session.members
        predictions = predict()
        strategy.extended._meet("ending predict()")
        if strategy.session.members == members:
            return predictions
        if isinstance(inputs, Iterator):
            raise WorkerLostError(
                f"worker {strategy.rank}: predictions lack the rows of workers that were lost in predict(), and an "
                "iterator cannot begin anew. Predict from arrays or a tf.data.Dataset"
            )


def _average_statistics(model: Any, strategy_class: Any) -> None:
    """Averages the layers' statistics of their rows over the workers. Collective.

    Sums are in double precision, so equal weights do not change.
    """
    strategy = model._distribute_strategy
    if not isinstance(strategy, strategy_class) or strategy.num_replicas_in_sync == 1:
        return
    averaged = _statistics_weights(model)
    if not averaged:
        return
    own = [tf.cast(tf.convert_to_tensor(weight.value), tf.float64) for weight in averaged]
    for weight, mean in zip(averaged, strategy.reduce("MEAN", own, axis=None), strict=True):
        weight.assign(tf.cast(mean, weight.dtype))


def _statistics_weights(model: Any) -> list[Any]:
    """Weights that layers change without training, such as BatchNormalization's statistics; not frozen weights.

    Frozen weights, possibly a whole pretrained model, are equal on all workers and need no transfer.
    """
    found = {
        id(weight): weight
        for layer in model._flatten_layers()
        for weight in layer._non_trainable_variables
        if tf.as_dtype(weight.dtype).is_floating
    }
    return list(found.values())


def _progress_on_first_worker(model: Any, keywords: dict[str, Any], strategy_class: Any) -> dict[str, Any]:
    """Keywords that restrict progress output to the first worker, unless the caller passes `verbose`."""
    strategy = model._distribute_strategy
    is_first = not isinstance(strategy, strategy_class) or strategy.is_chief
    if is_first or keywords.get("verbose", "auto") != "auto":
        return keywords
    return keywords | {"verbose": 0}


def _check_built_in_scope(model: Any, current: Any, strategy_class: Any) -> None:
    """Warns that each worker trains a model of its own.

    Raises:
        ValueError: If `current` is a strategy of several workers.
    """
    if isinstance(current, strategy_class) and current.num_replicas_in_sync > 1:
        raise ValueError(
            f"model {model.name!r} was built outside of strategy.scope(): its variables have other values on each "
            f"worker. {_ADVICE}"
        )
    if strategy_class.has_workers():
        logger.warning(
            "coarse.tensorflow: model %r was built outside of strategy.scope(): each worker trains one of its own. "
            "%s",
            model.name,
            _ADVICE,
        )


def _check_compilable(model: Any) -> None:
    if model.jit_compile and model.distribute_strategy.num_replicas_in_sync > 1:
        raise ValueError(
            f"model {model.name!r} was compiled with jit_compile=True, and XLA cannot compile what is reduced with "
            "other workers. Compile it with jit_compile=False"
        )


def _patch_compile(trainer_class: Any, strategy_class: Any) -> None:
    """Runs compile() in the model's strategy: outside of scope(), its loss metrics would have no strategy.

    Args:
        trainer_class: The class that defines compile(); in any other class, Keras would treat it as the user's.
        strategy_class: As for apply().
    """

    @replaces(trainer_class, "compile")
    def compile_in_scope(original: Any, self: Any, *arguments: Any, **keywords: Any) -> Any:
        if not isinstance(self._distribute_strategy, strategy_class):
            return original(self, *arguments, **keywords)
        with self._distribute_strategy.scope():
            original(self, *arguments, **keywords)
        strategy_of_optimizer = getattr(self.optimizer, "_distribution_strategy", self._distribute_strategy)
        if strategy_of_optimizer is not self._distribute_strategy:
            raise ValueError(
                f"optimizer {self.optimizer.name!r} of model {self.name!r} was made outside of strategy.scope(). "
                f"{_ADVICE}"
            )


def _patch_build(trainer_class: Any, strategy_class: Any) -> None:
    """Prevents Keras from taking the first batch in each call, even for built models, and averaging it over workers.

    Workers may have different numbers of rows. Also, a generator loses this batch and those prefetched by tf.data,
    whose number differs between workers. Workers would continue with different batches, or end after fewer.
    """

    @replaces(trainer_class, "_maybe_symbolic_build")
    def maybe_symbolic_build(original: Any, self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        strategy = self._distribute_strategy
        if not isinstance(strategy, strategy_class):
            return original(self, iterator, data_batch)
        if _has_no_call(self):
            return None  # its train_step() builds the parts, as without a strategy
        with strategy.scope():
            self._symbolic_build(_one_batch(self.name, iterator, strategy), data_batch)
        _check_metrics(self, strategy)


def _has_no_call(model: Any) -> bool:
    """Whether the model has no call(), as if its train_step() calls its parts."""
    import keras

    return type(model).call is keras.Model.call


def _one_batch(model: str, epoch_iterator: Any, strategy: Any) -> Iterator[tuple[int, int, list[Any]]]:
    """Yields one batch for building a model, on request. Keras already has the first batches of a generator."""
    known = getattr(epoch_iterator.data_adapter, "_first_batches", None)
    if known is not None:
        yield 0, 0, known
        return
    first, last, batches = next(iter(epoch_iterator))
    batch = next(batches, None)
    if batch is None:
        raise ValueError(f"the data for model {model!r} has no batches, whose shapes are needed to build it")
    yield (
        first,
        last,
        [tf.nest.map_structure(lambda each: strategy.experimental_local_results(each)[0], batch)],
    )


def _check_metrics(model: Any, strategy: Any) -> None:
    if strategy.num_replicas_in_sync == 1:
        return
    metrics = [each for metric in model.metrics for each in getattr(metric, "metrics", [metric])]
    for metric in metrics:
        if not all(strategy.extended.variable_created_in_scope(v.value) for v in metric.variables):
            raise ValueError(
                f"metric {metric.name!r} of model {model.name!r} was made outside of strategy.scope(): each worker "
                f"would count only its own rows. {_ADVICE}"
            )


def _patch_empty_losses(losses: Any, strategy_class: Any) -> None:
    """Fixes eager losses without rows, whose mean is NaN in Keras; a worker may have no rows of a small batch."""

    @replaces(losses, "reduce_values")
    def reduce_values(
        original: Any, values: Any, sample_weight: Any = None, reduction: str = "sum_over_batch_size"
    ) -> Any:
        has_none = isinstance(tf.distribute.get_strategy(), strategy_class) and tuple(values.shape) == (0,)
        if has_none and reduction not in (None, "none"):
            return tf.reduce_sum(values)
        return original(values, sample_weight, reduction)


def _patch_loss_weights(losses: Any, strategy_class: Any) -> None:
    """Weights each worker's mean loss by its rows; Keras weights all workers equally, even with different rows."""

    @replaces(losses, "scale_loss_for_distribution")
    def scale_loss_for_distribution(original: Any, value: Any) -> Any:
        context = _step_of_several(strategy_class)
        if context is None:
            return original(value)
        value = tf.convert_to_tensor(value)
        return tf.math.multiply_no_nan(value, tf.cast(context.row_fraction(), value.dtype))

    @replaces(losses, "unscale_loss_for_distribution")
    def unscale_loss_for_distribution(original: Any, value: Any) -> Any:
        context = _step_of_several(strategy_class)
        if context is None:
            return original(value)
        value = tf.convert_to_tensor(value)
        return tf.math.divide_no_nan(value, tf.cast(context.row_fraction(), value.dtype))


def _step_of_several(strategy_class: Any) -> Any:
    """The replica context within a step of a strategy with several workers; otherwise None."""
    context = tf.distribute.get_replica_context()
    if context is None or not isinstance(context.strategy, strategy_class):
        return None
    return context if context.num_replicas_in_sync > 1 else None


def _patch_gradients(optimizer_class: Any, strategy_class: Any) -> None:
    """Sets unknown shapes of gradients, common in graphs for any batch size, to those of the variables.

    Also warns once per optimizer that nothing is reduced outside of strategy.run().
    """

    @replaces(optimizer_class, "_all_reduce_sum_gradients")
    def all_reduce_sum_gradients(original: Any, self: Any, grads_and_vars: Any) -> Any:
        grads_and_vars = list(grads_and_vars)
        if isinstance(tf.distribute.get_strategy(), strategy_class):
            for gradient, variable in grads_and_vars:
                if isinstance(gradient, tf.Tensor):
                    gradient.set_shape(variable.shape)
        context = tf.distribute.get_replica_context()
        if context is None or not isinstance(context.strategy, strategy_class):
            _warn_outside_run(self, strategy_class)
            return original(self, grads_and_vars)
        if context.num_replicas_in_sync > 1:
            _warn_of_summed_gradients(self, context)
        with context.reducing_for_updates():
            return original(self, grads_and_vars)


def _warn_of_summed_gradients(optimizer: Any, context: Any) -> None:
    """Warns that gradients are summed over the workers if no Keras loss was scaled in this step.

    Checked in an optimizer's first step, because losses of later steps may be in functions traced earlier.
    """
    if getattr(optimizer, "_is_checked_for_sums_by_coarse", False):
        return
    optimizer._is_checked_for_sums_by_coarse = True
    if context.has_weighed_a_loss:
        return
    num_workers = context.num_replicas_in_sync
    logger.warning(
        "coarse.tensorflow: optimizer %r adds up the gradients of %d workers, and the loss was not divided among "
        "them, as under Keras's own strategies: a loss that is the mean of a worker's rows counts %d times. Use "
        "model.compute_loss() or a loss of keras.losses, or divide the loss by strategy.num_replicas_in_sync; a loss "
        "that is a sum over rows is right.",
        optimizer.name,
        num_workers,
        num_workers,
    )


def _warn_outside_run(optimizer: Any, strategy_class: Any) -> None:
    strategy = getattr(optimizer, "_distribution_strategy", None)
    is_told = getattr(optimizer, "_is_told_of_run_by_coarse", False)
    if is_told or not isinstance(strategy, strategy_class) or strategy.num_replicas_in_sync == 1:
        return
    optimizer._is_told_of_run_by_coarse = True
    logger.warning(
        "coarse.tensorflow: optimizer %r applies gradients outside of strategy.run(), where they are not reduced: "
        "each worker uses only its own rows. Call the step by strategy.run(step, args=...).",
        optimizer.name,
    )


def _patch_loss_scale(optimizer_class: Any, strategy_class: Any) -> None:
    """Lets workers agree on infinite gradients; if only one worker skipped the step, the others would wait for it."""

    @replaces(optimizer_class, "check_finite")
    def check_finite(original: Any, self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        context = tf.distribute.get_replica_context()
        if context is None or not isinstance(context.strategy, strategy_class):
            return finite
        num_infinite = context.all_reduce(
            tf.distribute.ReduceOp.SUM, tf.cast(tf.logical_not(finite), tf.int32)
        )
        return tf.equal(num_infinite, 0)
