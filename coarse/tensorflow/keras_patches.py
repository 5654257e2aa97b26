"""Places where Keras 3 looks at the class of a strategy, or not at other workers at all.

Each is changed for models of coarse.tensorflow.Strategy only, once per process, where Keras has what is known.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import tensorflow as tf

from coarse.tensorflow.callbacks import guard

logger = logging.getLogger(__name__)

_MARK = "_is_patched_by_coarse"


def apply(strategy_class: Any) -> None:
    """Changes Keras, unless that was done.

    Args:
        strategy_class: Of the strategies that it is changed for.

    Raises:
        ImportError: If this Keras has no such places.
    """
    try:
        import keras
        from keras.src.backend.tensorflow import trainer
    except ImportError:  # tf.distribute works without Keras
        return
    if not hasattr(trainer, "reduce_per_replica"):
        raise ImportError(
            f"coarse.tensorflow does not know Keras {keras.__version__}: it was tested with 3.15. Install that"
        )
    _patch_predict(trainer, strategy_class)
    for method in ("fit", "train_on_batch"):
        _patch_training(trainer.TensorFlowTrainer, method, strategy_class)
    _patch_build(trainer.TensorFlowTrainer, strategy_class)
    _patch_gradients(keras.optimizers.Optimizer, strategy_class)
    _patch_loss_scale(keras.optimizers.LossScaleOptimizer, strategy_class)
    guard(keras.callbacks, strategy_class)


def _patch_predict(trainer: Any, strategy_class: Any) -> None:
    """Keras concatenates what replicas predict over processes for MultiWorkerMirroredStrategy only."""
    original = trainer.reduce_per_replica
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        if (
            reduction == "concat"
            and isinstance(strategy, strategy_class)
            and strategy.num_replicas_in_sync > 1
        ):
            return tf.nest.map_structure(lambda value: strategy.gather(value, axis=0), values)
        return original(values, strategy, reduction)

    setattr(reduce_per_replica, _MARK, True)
    trainer.reduce_per_replica = reduce_per_replica


def _patch_training(trainer_class: Any, method: str, strategy_class: Any) -> None:
    """Models that were built outside of scope() belong to no strategy: Keras trains them on each worker alone."""
    original = getattr(trainer_class, method)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def train(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if self._distribute_strategy is None:
            _tell_of_scope(self, tf.distribute.get_strategy(), strategy_class)
        elif isinstance(self._distribute_strategy, strategy_class):
            _check_compilable(self)
        return original(self, *arguments, **keywords)

    setattr(train, _MARK, True)
    setattr(trainer_class, method, train)


def _tell_of_scope(model: Any, current: Any, strategy_class: Any) -> None:
    advice = "Build and compile it within `with strategy.scope():`."
    if isinstance(current, strategy_class) and current.num_replicas_in_sync > 1:
        raise ValueError(
            f"model {model.name!r} was built outside of strategy.scope(): its variables have other values on each "
            f"worker. {advice}"
        )
    if strategy_class.has_workers():
        logger.warning(
            "coarse.tensorflow: model %r was built outside of strategy.scope(): each worker trains one of its own. "
            "%s",
            model.name,
            advice,
        )


def _check_compilable(model: Any) -> None:
    if model.jit_compile and model.distribute_strategy.num_replicas_in_sync > 1:
        raise ValueError(
            f"model {model.name!r} was compiled with jit_compile=True, and XLA cannot compile what is reduced with "
            "other workers. Compile it with jit_compile=False"
        )


def _patch_build(trainer_class: Any, strategy_class: Any) -> None:
    """Keras averages the first batch over workers to build by its shapes: they may have unlike numbers of rows."""
    original = trainer_class._maybe_symbolic_build
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        strategy = self._distribute_strategy
        if iterator is None or not isinstance(strategy, strategy_class):
            return original(self, iterator, data_batch)
        batches = next(iter(iterator))[-1]
        batch = tf.nest.map_structure(
            lambda each: strategy.experimental_local_results(each)[0], next(batches)
        )
        return original(self, data_batch=batch)

    setattr(maybe_symbolic_build, _MARK, True)
    trainer_class._maybe_symbolic_build = maybe_symbolic_build


def _patch_gradients(optimizer_class: Any, strategy_class: Any) -> None:
    """Shapes of gradients are often not known in graphs whose batches have any size: they are those of variables."""
    original = optimizer_class._all_reduce_sum_gradients
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def all_reduce_sum_gradients(self: Any, grads_and_vars: Any) -> Any:
        grads_and_vars = list(grads_and_vars)
        if isinstance(tf.distribute.get_strategy(), strategy_class):
            for gradient, variable in grads_and_vars:
                if isinstance(gradient, tf.Tensor):
                    gradient.set_shape(variable.shape)
        return original(self, grads_and_vars)

    setattr(all_reduce_sum_gradients, _MARK, True)
    optimizer_class._all_reduce_sum_gradients = all_reduce_sum_gradients


def _patch_loss_scale(optimizer_class: Any, strategy_class: Any) -> None:
    """Each worker looks at its own gradients: if one has an infinity, and skips the step, the others wait for it."""
    original = optimizer_class.check_finite
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def check_finite(self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        context = tf.distribute.get_replica_context()
        if context is None or not isinstance(context.strategy, strategy_class):
            return finite
        num_infinite = context.all_reduce(
            tf.distribute.ReduceOp.SUM, tf.cast(tf.logical_not(finite), tf.int32)
        )
        return tf.equal(num_infinite, 0)

    setattr(check_finite, _MARK, True)
    optimizer_class.check_finite = check_finite
