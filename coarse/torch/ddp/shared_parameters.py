"""Parameters that are part of several wrapped models."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_AVERAGERS = WeakTensorKeyDictionary()


def averagers_of(parameter: torch.nn.Parameter) -> WeakSet[Any]:
    """The synchronisers that average the gradient of a parameter; each adds itself."""
    if parameter not in _AVERAGERS:
        _AVERAGERS[parameter] = WeakSet()
    averagers: WeakSet[Any] = _AVERAGERS[parameter]
    return averagers
