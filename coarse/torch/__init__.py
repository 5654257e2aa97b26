"""COARSE under PyTorch: a DistributedDataParallel whose gradients are averaged by memory devices.

Example:
    >>> from coarse.torch import DistributedDataParallel
    >>> model = DistributedDataParallel(model)  # as torch.nn.parallel.DistributedDataParallel
    >>> optimizer = DistributedOptimizer(optimizer, model)  # if memory devices are to run it too
"""

from coarse.torch.distributed import DistributedDataParallel
from coarse.torch.optimizer import DistributedOptimizer

__all__ = ["DistributedDataParallel", "DistributedOptimizer"]
