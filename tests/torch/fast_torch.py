"""PyTorch and the compiler that its optimizers import, without looking for garbage: that takes a quarter of it."""

from __future__ import annotations

import gc

gc.disable()
try:
    import torch._dynamo  # noqa: F401
finally:
    gc.enable()
