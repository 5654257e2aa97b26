"""COARSE for TensorFlow and Keras: a tf.distribute.Strategy whose gradients are reduced by memory devices.

Example:
    >>> import coarse.tensorflow
    >>> strategy = coarse.tensorflow.Strategy()  # was tf.distribute.MultiWorkerMirroredStrategy()
    >>> with strategy.scope():
    ...     model = keras.Sequential([...])
    ...     model.compile(...)
"""

import tensorflow as _tensorflow

from coarse.tensorflow.versions import check_version as _check_version

_check_version(_tensorflow.__version__)

from coarse.tensorflow.metrics import MetricsCallback  # noqa: E402
from coarse.tensorflow.optimizer import DistributedOptimizer  # noqa: E402
from coarse.tensorflow.strategy import Strategy  # noqa: E402

__all__ = ["DistributedOptimizer", "MetricsCallback", "Strategy"]
