"""A training step whose gradients have a given size, with little to compute: what is left is communication."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from coarse.bench.sync import pattern

_ROW = 256
_MOST_BYTES = 4 << 20
_ONE_BUCKET_MB = 1 << 20

Wrap = Callable[[torch.nn.Module], Any]


def _coarse(module: torch.nn.Module) -> Any:
    return importlib.import_module("coarse.torch").DistributedDataParallel(module, init_sync=False)


_ddp = partial(
    torch.nn.parallel.DistributedDataParallel,
    init_sync=False,
    gradient_as_bucket_view=True,
    static_graph=True,
)


def _with_hook(wrap: Wrap, hook: Any) -> Wrap:
    def wrap_with_hook(module: torch.nn.Module) -> Any:
        model = wrap(module)
        model.register_comm_hook(None, hook)
        return model

    return wrap_with_hook


COMPUTATION = "compute"
"""The step of a worker alone."""

WRAPPERS: dict[str, Wrap] = {
    COMPUTATION: lambda module: module,
    "coarse": _coarse,
    "gloo": _ddp,
    "gloo-one-bucket": partial(_ddp, bucket_cap_mb=_ONE_BUCKET_MB),
    "coarse-fp16": _with_hook(_coarse, default_hooks.fp16_compress_hook),
    "coarse-bf16": _with_hook(_coarse, default_hooks.bf16_compress_hook),
    "gloo-fp16": _with_hook(_ddp, default_hooks.fp16_compress_hook),
}


def rows_of_layers(nbytes: int) -> list[int]:
    """Rows of 1 KiB of each parameter: four parameters at least, of 4 MiB at most, the last one with the rest."""
    num_rows = nbytes // (4 * _ROW)
    layer_rows = min(_MOST_BYTES // (4 * _ROW), num_rows // 4)
    full, rest = divmod(num_rows, layer_rows)
    return [layer_rows] * full + ([rest] if rest else [])


class Layers(torch.nn.Module):
    """Parameters of `nbytes` bytes of float32, whose gradients are `scale` times 1, 2, ... 256 in each row.

    Args:
        nbytes: A multiple of 4 KiB.
        scale: Factor of the gradients.
    """

    def __init__(self, nbytes: int, scale: float) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.zeros(rows, _ROW) for rows in rows_of_layers(nbytes))
        self.gradient = _row(scale)

    def forward(self) -> torch.Tensor:
        return torch.stack([(layer @ self.gradient).sum() for layer in self.layers]).sum()


def _row(scale: float) -> torch.Tensor:
    return torch.arange(1, _ROW + 1, dtype=torch.float32) * scale


class Step:
    """A step of Layers under a wrapper: forward, backward and SGD. Collective, but for COMPUTATION."""

    def __init__(self, nbytes: int, wrapper: str, rank: int, num_workers: int) -> None:
        own_scale = pattern.contribution_scale(rank)
        is_alone = wrapper == COMPUTATION
        self._expected = _row(own_scale if is_alone else pattern.reduced_scale(num_workers, mean=True))
        self._module = Layers(nbytes, own_scale)
        self._model = WRAPPERS[wrapper](self._module)
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=1e-3)

    def take(self) -> None:
        """Takes one step."""
        self._optimizer.zero_grad()
        self._model().backward()
        self._optimizer.step()

    def largest_difference(self) -> float:
        """Largest difference of a gradient from its expected value, in parts of the largest expected value."""
        differences = [(layer.grad - self._expected).abs().max() for layer in self._module.layers]
        return float(torch.stack(differences).max() / self._expected[-1])
