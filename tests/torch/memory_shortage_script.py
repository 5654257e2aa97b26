"""An optimizer for which one worker cannot reserve memory: both get an error, and the model averages as before.

Run by a launcher, with two workers.
"""

from __future__ import annotations

import os

import torch
from torch import nn

import coarse.torch
from coarse.errors import OutOfDeviceMemoryError
from coarse.wire import host_memory

rank = int(os.environ["RANK"])
torch.manual_seed(0)
module = nn.Linear(512, 512)
expected = [parameter.detach().clone() for parameter in module.parameters()]
model = coarse.torch.DistributedDataParallel(module)
adam = torch.optim.AdamW(model.parameters())
if rank == 0:
    available_bytes = host_memory.available_bytes
    host_memory.available_bytes = lambda: 1 << 20  # that of parameters, and not that of states
try:
    coarse.torch.DistributedOptimizer(adam, model)
except OutOfDeviceMemoryError as error:
    print(f"raised {error}", flush=True)
if rank == 0:
    host_memory.available_bytes = available_bytes
assert all(torch.equal(p.detach(), value) for p, value in zip(module.parameters(), expected, strict=True))
model(torch.full((1, 512), rank + 1.0)).sum().backward()
assert torch.equal(module.weight.grad, torch.full((512, 512), 1.5))
adam.step()
print("averages as before", flush=True)
