"""The DistributedDataParallel in a model that a trainer or torch.compile() has wrapped again."""

from __future__ import annotations

import torch

from coarse.torch.ddp.distributed import DistributedDataParallel


def wrapped_in(model: torch.nn.Module, who: str) -> DistributedDataParallel:
    """The model itself, or that inside it.

    Args:
        model: A DistributedDataParallel, what Lightning Fabric has made of one, or a compiled one.
        who: Needs it; named in the error.

    Raises:
        TypeError: If there is none.
    """
    found = next((each for each in model.modules() if isinstance(each, DistributedDataParallel)), None)
    if found is None:
        raise TypeError(
            f"{who} needs a model wrapped by coarse.torch.DistributedDataParallel, not a {type(model).__name__}"
        )
    return found
