"""Checks memory that is freed for an optimizer, with the first model of a process: slots and own parameters.

    freed_memory_script.py [overlap]

Run by a launcher, with two workers. The wrapper touches no page of the slots. The garbage collector is off from the
start: the first wrapping imports modules that keep tracebacks, and with them the frames of their importers.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import coarse.torch


def slot_mappings() -> set[str]:
    """The lines of /proc/self/maps for models' gradients."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if "memfd:coarse-gradients of model" in line}


def slot_descriptors() -> list[int]:
    """Descriptors through which memory of models' gradients can still be reserved."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [int(link.name) for link in links if "memfd:coarse-gradients of model" in os.readlink(link)]


gc.disable()
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
expected = [parameter.detach().clone() for parameter in module.parameters()]
own = [StorageWeakRef(parameter.untyped_storage()) for parameter in module.parameters()]
model = coarse.torch.DistributedDataParallel(module)
wrapped = slot_mappings()
if not wrapped:
    sys.exit("the wrapper has no slots")
if [os.fstat(each).st_blocks for each in slot_descriptors()] != [0]:
    sys.exit("the wrapper has taken memory of slots before the first forward, or cannot any more")
adam = torch.optim.AdamW(model.parameters())
optimizer = coarse.torch.DistributedOptimizer(adam, model, overlap="overlap" in sys.argv)
if left := wrapped & slot_mappings():
    sys.exit(f"slots of the wrapper are still mapped: {left}")
if not all(storage.expired() for storage in own):
    sys.exit("this worker's own parameters are still there")
if not all(torch.equal(p.detach(), value) for p, value in zip(module.parameters(), expected, strict=True)):
    sys.exit("parameters have other values than before")
model(torch.ones(2, 512)).sum().backward()
optimizer.step()
