"""COARSE under PyTorch: a DistributedDataParallel whose gradients are averaged by memory devices.

Example:
    >>> from coarse.torch import DistributedDataParallel
    >>> model = DistributedDataParallel(model)  # as torch.nn.parallel.DistributedDataParallel
"""

from coarse.torch.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
