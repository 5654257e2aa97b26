"""Parameters that are part of several wrapped models."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from coarse.torch.gradients.averaging import GradientSynchroniser

_AVERAGERS = WeakTensorKeyDictionary()


def averagers_of(parameter: torch.nn.Parameter) -> WeakSet[GradientSynchroniser]:
    """Who averages the gradient of a parameter; whoever begins to adds itself."""
    if parameter not in _AVERAGERS:
        _AVERAGERS[parameter] = WeakSet()
    averagers: WeakSet[GradientSynchroniser] = _AVERAGERS[parameter]
    return averagers
