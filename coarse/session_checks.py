"""What a session refuses before anything is sent."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from coarse.errors import RendezvousError
from coarse.schema import ITEM_BYTES, TensorSpec
from coarse.settings import Settings


def check_specs(name: str, specs: Sequence[TensorSpec]) -> None:
    """Raises ValueError unless there are tensors to register, each of a name of its own."""
    if not specs:
        raise ValueError(f"{name}: no tensor to register")
    if len({spec.name for spec in specs}) < len(specs):
        raise ValueError(f"{name}: two tensors share a name")


def check_solo(settings: Settings) -> None:
    """Raises RendezvousError for settings that need several workers, in a job of one."""
    if settings.machine:
        raise RendezvousError(
            f"a job of one worker has no links, so it cannot emulate those of {settings.machine}; start two or "
            "more workers, or unset COARSE_MACHINE"
        )


def check_nodes(settings: Settings, num_nodes: int) -> None:
    """Raises RendezvousError for settings that work within one node, in a job of several."""
    if num_nodes == 1:
        return
    if settings.keep_devices:
        raise RendezvousError(
            f"memory devices are kept within one node only, but this job has {num_nodes} nodes; unset "
            "COARSE_KEEP_DEVICES"
        )
    if settings.machine or settings.algorithm in ("ring", "exchange", "nccl"):
        what = (
            f"the machine {settings.machine}" if settings.machine else f"the algorithm {settings.algorithm!r}"
        )
        how = "unset COARSE_MACHINE" if settings.machine else "set COARSE_ALGORITHM to auto, direct or gather"
        raise RendezvousError(f"{what} works only within one node, but this job has {num_nodes} nodes; {how}")


@functools.cache  # numpy takes longer to name a dtype than the memory devices to reduce a few numbers
def reducible(dtype: np.dtype[Any], op: str) -> str:
    """Returns the name of an array's dtype; raises ValueError unless memory devices can reduce it by `op`."""
    if dtype.name not in ITEM_BYTES or not dtype.isnative:
        raise ValueError(
            f"an array of {dtype} cannot be reduced; supported are {', '.join(ITEM_BYTES)}, where bfloat16 is "
            "ml_dtypes.bfloat16"
        )
    TensorSpec(name="array", dtype=dtype.name, num_elements=1, op=op)
    return str(dtype.name)
