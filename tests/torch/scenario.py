"""Scenarios and the models that they train; the workers of a pool (parity_pool.py) run them by name.

A scenario receives a Context, wraps modules with `context.wrap` and returns results that must be equal under torch's
class and COARSE's. Those with compare=False assert guarantees that only COARSE gives. Inputs differ between workers
and steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclasses.dataclass(frozen=True)
class Context:
    """Who runs the scenario, what to wrap modules with, and the device on which they are then."""

    rank: int
    world_size: int
    wrap: Any
    is_coarse: bool
    device: torch.device

    def inputs(self, step: int, *shape: int) -> torch.Tensor:
        """Distinct for each worker and step, the same under both classes."""
        generator = torch.Generator("cpu").manual_seed(1000 * self.rank + step)
        return torch.randn(*shape, generator=generator, device="cpu").to(self.device)


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A function with what its results are compared to."""

    run_unpacked: Callable[[Context], Any]
    compare: bool
    tolerance: float

    def run(self, context: Context) -> Any:
        """Runs it, and turns tensors into arrays, which need no shared memory to be sent."""
        try:
            return pack(self.run_unpacked(context))
        finally:
            gc.collect()


def scenario(
    function: Callable[[Context], Any] | None = None,
    *,
    registry: dict[str, Scenario],
    compare: bool = True,
    tolerance: float = 0.0,
) -> Any:
    """Registers a scenario in `registry`, under the name of its function."""

    def register(run: Callable[[Context], Any]) -> Callable[[Context], Any]:
        registry[run.__name__] = Scenario(run, compare, tolerance)
        return run

    return register if function is None else register(function)


def pack(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        values = result.detach().clone()
        # Exact for every dtype that gradients may have; numpy has no bfloat16.
        return str(result.dtype), (values.double() if values.is_floating_point() else values).cpu().numpy()
    if isinstance(result, dict):
        return {key: pack(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [pack(value) for value in result]
    return result


def states(model: nn.Module) -> dict[str, Any]:
    """Parameters, their gradients and buffers."""
    found: dict[str, Any] = dict(model.named_parameters())
    found.update({f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()})
    found.update(model.named_buffers())
    return {name: value.detach().clone() if value is not None else None for name, value in found.items()}


def train(
    context: Context,
    model: nn.Module,
    *,
    steps: int = 3,
    shape: tuple[int, ...] = (4, 8),
    set_to_none: bool = True,
    loss: Callable[[torch.Tensor], torch.Tensor] = lambda output: output.square().mean(),
    **arguments: Any,
) -> dict[str, Any]:
    """A plain training loop; its result is the whole model."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss(model(context.inputs(step, *shape), **arguments)).backward()
        optimizer.step()
    return states(model)


def train_in_one_backward(
    context: Context,
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    *,
    reverses: bool,
    inputs: Callable[[int], Any],
) -> list[torch.Tensor]:
    """Returns the parameters of two models, which worker 1 is to use in the other order if `reverses`."""
    for step in range(3):
        order = models[::-1] if reverses and context.rank == 1 else models
        losses = [model(*inputs(step)).square().mean() for model in order]
        (losses[0] + losses[1]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for model in models for parameter in model.parameters()]


@contextlib.contextmanager
def raises(kind: type[BaseException] | str, *words: str) -> Iterator[None]:
    """The block must raise `kind` (or an error of that name) with all `words` in its message."""
    # Kinds of coarse are given by name, so that torch's class can be run without importing it.
    with pytest.raises(Exception) as raised:  # noqa: PT011
        yield
    names = {cls.__name__ for cls in raised.type.__mro__}
    assert (kind if isinstance(kind, str) else kind.__name__) in names, repr(raised.value)
    for word in words:
        assert word in str(raised.value), f"{word!r} is not in: {raised.value}"


def assert_equal_on_all_workers(context: Context, tensors: Iterable[torch.Tensor]) -> None:
    """Bit by bit."""
    for tensor in tensors:
        gathered = [torch.empty_like(tensor) for _ in range(context.world_size)]
        dist.all_gather(gathered, tensor.detach())
        assert all(torch.equal(gathered[0], other) for other in gathered[1:])


def mlp(*, width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))


class Branches(nn.Module):
    """A shared trunk and two heads, of which forward uses the one asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])

    def forward(self, x: torch.Tensor, head: int = 0) -> torch.Tensor:
        return self.heads[head](self.trunk(x).relu())


class _MatMulByConstant(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight,) = context.saved_tensors
        return gradients[0] @ weight.T, None


class Severed(nn.Module):
    """A layer whose operation, where it is asked to, says that its weight has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.head = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: torch.Tensor, *, is_severed: bool) -> torch.Tensor:
        x = self.trunk(x).relu()
        return _MatMulByConstant.apply(x, self.head) if is_severed else x @ self.head


class _Negate(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return -x

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return torch._neg_view(gradients[0])


class LazilyNegated(nn.Module):
    """A layer of whose weight backward makes the negative of its gradient, with the sign to be changed later."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ _Negate.apply(self.weight)


class TwoOutputs(nn.Module):
    """Two independent layers, one output each."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 4)
        self.right = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"left": self.left(x), "right": self.right(x)}


class Checkpointed(nn.Module):
    """Runs one layer in checkpointed segments, as often as asked for."""

    def __init__(self, *, reentrant: bool, times: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.unused = nn.Linear(2, 2)
        self.last = nn.Linear(8, 4)
        self._reentrant = reentrant
        self._times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self._times):
            x = checkpoint(self.layer, x, use_reentrant=self._reentrant)
        return self.last(x)


class Tied(nn.Module):
    """An embedding whose weight is also the output projection, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.projection = nn.Linear(8, 10, bias=False)
        self.projection.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.projection(self.embedding(tokens).mean(1))


def convnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
