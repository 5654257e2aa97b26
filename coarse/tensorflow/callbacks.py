"""Keras callbacks that write files: on all workers but the first they write nothing."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Sequence
from typing import Any

_WRITERS = {
    "ModelCheckpoint": ("_save_model",),
    "BackupAndRestore": ("_save_model", "on_train_end"),
    "CSVLogger": ("on_train_begin", "on_epoch_end", "on_train_end"),
    "TensorBoard": ("set_model", "on_*"),
}
"""Methods of each of Keras's callbacks that write; "on_*" for all that are called while training."""

_MARK = "_is_guarded_by_coarse"


def guard(callback_classes: Any, strategy_class: Any) -> None:
    """Has Keras's callbacks that write do so on the first worker alone, for models of a strategy.

    Args:
        callback_classes: The module keras.callbacks.
        strategy_class: Of the strategies that it is done for.
    """
    for name, methods in _WRITERS.items():
        callback_class = getattr(callback_classes, name)
        for method in _named(callback_class, methods):
            original = getattr(callback_class, method)
            if not hasattr(original, _MARK):
                setattr(callback_class, method, _guarded(original, strategy_class))


def _named(callback_class: Any, methods: Sequence[str]) -> list[str]:
    return [name for method in methods for name in fnmatch.filter(vars(callback_class), method)]


def _guarded(original: Any, strategy_class: Any) -> Any:
    @functools.wraps(original)
    def on_first_worker(self: Any, *arguments: Any, **keywords: Any) -> Any:
        model = arguments[0] if original.__name__ == "set_model" and arguments else self.model
        strategy = getattr(model, "_distribute_strategy", None)
        if isinstance(strategy, strategy_class) and strategy.rank != 0:
            if original.__name__ == "set_model":
                self._model = model
            return None
        return original(self, *arguments, **keywords)

    setattr(on_first_worker, _MARK, True)
    return on_first_worker
