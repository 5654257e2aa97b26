"""Atomic model files: any worker may save alone, or several under one name at once; the last file is complete."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from coarse.tensorflow.replacing import replaces


def write_whole_files(strategy_class: Any) -> None:
    """Patches model.save(), save_weights() and keras.saving, once: they write a temporary file and then rename it.

    Args:
        strategy_class: Class of the affected strategies.
    """
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.saving import saving_lib

    for module, name in (
        (saving_lib, "save_model"),
        (saving_lib, "save_weights_only"),
        (legacy_h5_format, "save_model_to_hdf5"),
    ):
        _write_whole(module, name, strategy_class)


def _write_whole(module: Any, name: str, strategy_class: Any) -> None:
    @replaces(module, name)
    def save(original: Any, model: Any, filepath: Any, *arguments: Any, **keywords: Any) -> Any:
        strategy = getattr(model, "_distribute_strategy", None)
        if not isinstance(strategy, strategy_class):
            return original(model, filepath, *arguments, **keywords)
        with strategy.extended._alone():
            return save_whole(original, model, filepath, *arguments, **keywords)

    def save_whole(original: Any, model: Any, filepath: Any, *arguments: Any, **keywords: Any) -> Any:
        if not _is_file_of_folder(filepath, keywords):
            return original(model, filepath, *arguments, **keywords)
        folder, file = os.path.split(os.path.abspath(filepath))
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-", ignore_cleanup_errors=True) as beside:
            returned = original(model, os.path.join(beside, file), *arguments, **keywords)
            # Sharded weights have several files; the last one names the others.
            for name in sorted(os.listdir(beside), key=lambda each: (each.endswith(".json"), each)):
                os.replace(os.path.join(beside, name), os.path.join(folder, name))
        return returned


def _is_file_of_folder(path: Any, keywords: dict[str, Any]) -> bool:
    """Whether a single file is saved, in an existing folder."""
    if not isinstance(path, str | os.PathLike) or "://" in str(path) or keywords.get("zipped") is False:
        return False
    return os.path.isdir(os.path.dirname(os.path.abspath(path)))
