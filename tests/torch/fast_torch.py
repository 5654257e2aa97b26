"""PyTorch and the compiler that its optimizers import, without looking for garbage: then, or among it at the end.

That takes a third of the time of a process that does little.
"""

from __future__ import annotations

import gc

gc.disable()
try:
    import torch._dynamo  # noqa: F401
finally:
    gc.freeze()
    gc.enable()
