"""Tested versions of TensorFlow and Keras."""

from __future__ import annotations

SUPPORTED = ("2.21",)
"""Minor versions of TensorFlow whose private tf.distribute interfaces are known."""


def check_version(version: str) -> None:
    """Raises ImportError for an untested version of TensorFlow; names the tested ones.

    Args:
        version: tf.__version__.
    """
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        raise ImportError(
            f"coarse.tensorflow works with TensorFlow {', '.join(f'{each}.*' for each in SUPPORTED)}, but {version} "
            "is installed: a tf.distribute.Strategy uses interfaces that change between minor versions. Install "
            f"tensorflow=={SUPPORTED[-1]}.* (or tensorflow-cpu)"
        )
