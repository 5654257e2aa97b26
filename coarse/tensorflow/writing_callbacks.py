"""Keras callbacks that write files: only the chief writes, and all workers use the data that it reads.

The chief is the first worker; after its loss, the first one that is left, which continues the files.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coarse.tensorflow.operations import Operations
from coarse.tensorflow.replacing import replaces

_WRITERS = {
    "ModelCheckpoint": ("_save_model",),
    "BackupAndRestore": ("_save_model", "on_train_end"),
    "CSVLogger": ("on_train_begin", "on_epoch_end", "on_train_end"),
    "TensorBoard": ("set_model", "on_*"),
}
"""Writing methods of each of Keras's callbacks; "on_*" for all methods called while training."""


def guard(callback_classes: Any, strategy_class: Any) -> None:
    """Restricts Keras's writing callbacks to the chief, for models of a strategy.

    Args:
        callback_classes: The module keras.callbacks.
        strategy_class: Class of the affected strategies.
    """
    for name, methods in _WRITERS.items():
        callback_class = getattr(callback_classes, name)
        for method in _named(callback_class, methods):
            _guard(callback_class, method, strategy_class)


def _named(callback_class: Any, methods: Sequence[str]) -> list[str]:
    return [name for method in methods for name in fnmatch.filter(vars(callback_class), method)]


def _guard(callback_class: Any, method: str, strategy_class: Any) -> None:
    @replaces(callback_class, method)
    def on_chief(original: Any, self: Any, *arguments: Any, **keywords: Any) -> Any:
        model = arguments[0] if method == "set_model" and arguments else self.model
        strategy = getattr(model, "_distribute_strategy", None)
        if not isinstance(strategy, strategy_class):
            return original(self, *arguments, **keywords)
        if strategy.is_chief and _has_started(self, method):
            with strategy.extended._alone():
                return original(self, *arguments, **keywords)
        if method == "set_model":
            self._model = model
        elif method == "on_train_begin":
            self._has_missed_start = True
        elif method == "_save_model":
            _follow_best(self, *arguments, **keywords)
        return None


def _has_started(callback: Any, method: str) -> bool:
    """Whether a callback of the chief may write; starts it if this worker was not the chief when `fit` began."""
    if method in ("set_model", "on_train_begin"):
        callback._has_missed_start = False
    if not getattr(callback, "_has_missed_start", False):
        return True
    if method.startswith("on_test"):  # the validation has begun without it
        return False
    _continue(callback)
    return True


def _continue(callback: Any) -> None:
    """Starts a callback within `fit`, so that it continues the files of the former chief."""
    if hasattr(callback, "csv_file"):
        callback.append = True
        callback.on_train_begin()
        return
    callback.set_model(callback.model)
    callback.on_train_begin()
    callback._global_train_batch = int(callback.model.optimizer.iterations)
    callback.on_epoch_begin(0)


def _follow_best(callback: Any, epoch: int = 0, batch: Any = None, logs: Any = None) -> None:
    """Notes the best value that the chief has saved, for when this worker becomes the chief."""
    current = (logs or {}).get(getattr(callback, "monitor", None))
    if current is None or callback.monitor_op is None or np.ndim(current) > 0:
        return
    if callback._is_improvement(current, callback.best):
        callback.best = current


def share_restored(callback_list_class: Any, strategy_class: Any) -> None:
    """Makes all workers continue from BackupAndRestore's backup on the chief, the only worker that writes.

    Its folder may be on a disk that is invisible to other workers, or each worker may have its own.

    Args:
        callback_list_class: Keras's CallbackList.
        strategy_class: Class of the affected strategies.
    """

    @replaces(callback_list_class, "on_train_begin")
    def on_train_begin(original: Any, self: Any, logs: Any = None) -> None:
        original(self, logs)
        strategy = getattr(self._model, "_distribute_strategy", None)
        if isinstance(strategy, strategy_class) and strategy.num_replicas_in_sync > 1:
            _take_restored(
                self._model, strategy.extended._operations, has_weights=_has_backup(self.callbacks)
            )


def _has_backup(callbacks: Sequence[Any]) -> bool:
    """Whether a BackupAndRestore has found weights; an interrupted first backup has no epoch."""
    paths = [path for each in callbacks if (path := getattr(each, "_weights_path", None)) is not None]
    return any(tf.io.gfile.exists(path) for path in paths)


def _take_restored(model: Any, operations: Operations, *, has_weights: bool) -> None:
    """Takes the first worker's epoch and variables unless all workers restored the same ones."""
    epoch = -1 if model._initial_epoch is None else model._initial_epoch
    restored = operations.gather(np.array([[epoch, has_weights]])).numpy().tolist()
    if all(each == restored[0] for each in restored):
        return
    first_epoch, _ = restored[0]
    model._initial_epoch = None if first_epoch < 0 else first_epoch
    variables = [*model.variables, *getattr(model.optimizer, "variables", [])]
    # By number, because names of layers may contain different numbers on each worker.
    for number, variable in enumerate(variables):
        what = f"taking variable {number} of {len(variables)} as the first worker restored it"
        variable.assign(operations.broadcast(what, variable.numpy()))
