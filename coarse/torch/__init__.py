"""COARSE for PyTorch: a DistributedDataParallel whose gradients are averaged by memory devices.

Example:
    >>> from coarse.torch import DistributedDataParallel
    >>> model = DistributedDataParallel(model)  # as torch.nn.parallel.DistributedDataParallel
    >>> optimizer = DistributedOptimizer(optimizer, model)  # to run the optimizer in the memory devices
    >>> recovery = Recovery(model, optimizer)  # so that restarted workers continue from the memory devices
"""

from coarse.rendezvous.launcher_environment import adopt_launcher as _adopt_launcher
from coarse.torch.ddp.distributed import DistributedDataParallel
from coarse.torch.elastic_sampler import ElasticSampler
from coarse.torch.optimizer.distributed_optimizer import DistributedOptimizer
from coarse.torch.process_group import init_process_group
from coarse.torch.recovery import Recovery
from coarse.torch_entry import register as _register

_adopt_launcher()
_register()  # needed if COARSE is not installed, because torch has then not done it

__all__ = [
    "DistributedDataParallel",
    "DistributedOptimizer",
    "ElasticSampler",
    "Recovery",
    "init_process_group",
]
