"""Imports PyTorch and the compiler that its optimizers import, and excludes them from garbage collection.

In a short process that collection takes a third of the time.
"""

from __future__ import annotations

import gc

gc.disable()
try:
    import torch._dynamo  # noqa: F401
finally:
    gc.freeze()
    gc.enable()
