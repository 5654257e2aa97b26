"""COARSE under PyTorch: a DistributedDataParallel whose gradients are averaged by memory devices.

Example:
    >>> from coarse.torch import DistributedDataParallel
    >>> model = DistributedDataParallel(model)  # as torch.nn.parallel.DistributedDataParallel
    >>> optimizer = DistributedOptimizer(optimizer, model)  # if memory devices are to run it too
    >>> recovery = Recovery(model, optimizer)  # if restarted workers are to go on where memory devices are
"""

from coarse.launch import adopt_launcher as _adopt_launcher
from coarse.torch.ddp.distributed import DistributedDataParallel
from coarse.torch.optimizer.distributed_optimizer import DistributedOptimizer
from coarse.torch.process_group import init_process_group
from coarse.torch.recovery import Recovery
from coarse.torch_entry import register as _register

_adopt_launcher()
_register()  # where COARSE was not installed, so that torch did not do it

__all__ = ["DistributedDataParallel", "DistributedOptimizer", "Recovery", "init_process_group"]
