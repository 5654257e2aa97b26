"""Training loops as data: models and steps of random parts, under torch's classes or COARSE's.

Strategies (`training_loops()`) create them in the test process; workers of a pool run them (`run`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any

import hypothesis.strategies as st
import torch
import torch.distributed as dist
from checkpoint_scenarios import shared_folder
from optimizer_scenarios import offload
from scenario import Context, pack, states
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8
BATCH = 4

# ---- What is trained ----


class Scaled(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Strided(nn.Module):
    """A parameter that is the transpose of what its memory holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).mul(0.3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Narrow(nn.Module):
    """A layer of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.bfloat16()).float()


class Recomputed(nn.Module):
    """A layer whose forward runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


class LookedUp(nn.Module):
    """A table of which the inputs choose rows."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH, sparse=sparse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table((x.detach().abs() * 10).long() % 50).mean(1)


class Reentrant(nn.Module):
    """A layer whose forward and backward run in a backward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=True) if x.requires_grad else self.layer(x)


class Frozen(nn.Module):
    """A layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class WithUnused(nn.Module):
    """A layer, and another one that forward never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


PIECES = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "wide": lambda: nn.Sequential(nn.Linear(WIDTH, 600), nn.ReLU(), nn.Linear(600, WIDTH)),
    "several shards": lambda: nn.Sequential(nn.Linear(WIDTH, 40_000), nn.ReLU(), nn.Linear(40_000, WIDTH)),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
    "scaled": Scaled,
    "strided": Strided,
    "narrow": Narrow,
    "recomputed": Recomputed,
    "reentrant": Reentrant,
    "looked up": LookedUp,
    "rows looked up": lambda: LookedUp(sparse=True),
    "frozen": Frozen,
    "with unused": WithUnused,
}
TWICE = "first again"  # the first piece once more: a module that is used twice


class Model(nn.Module):
    """Pieces one after the other, and one of two heads."""

    def __init__(self, pieces: Iterable[str], *, has_heads: bool) -> None:
        super().__init__()
        self.pieces = nn.ModuleList()
        for name in pieces:
            self.pieces.append(self.pieces[0] if name == TWICE else PIECES[name]())
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 4) for _ in range(1 + has_heads)])

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        for piece in self.pieces:
            x = piece(x)
        return self.heads[head % len(self.heads)](x)


# ---- How it is trained ----


@dataclasses.dataclass(frozen=True)
class Pass:
    """A forward with its backward."""

    synchronises: bool
    head: int  # added to the worker's rank where workers use different ones
    by_rank: bool
    num_forwards: int
    penalises_inputs: bool


@dataclasses.dataclass(frozen=True)
class Step:
    """Passes, and what is done around them."""

    zeroes: str
    evaluates_before: bool
    passes: tuple[Pass, ...]
    evaluates_between: bool
    changes: tuple[str, ...]
    steps: bool
    writes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class TrainingLoop:
    """A model, an optimizer and its steps."""

    pieces: tuple[str, ...]
    has_heads: bool
    options: tuple[tuple[str, bool], ...]
    optimizer: str
    offloads: str
    scales: bool
    steps: tuple[Step, ...]

    @property
    def tolerance(self) -> float:
        """How far results may be from torch's: where memory devices update, operations are fused in another way."""
        return 0.0 if self.offloads == "no" else 1e-4


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "adamw, two groups": lambda parameters: torch.optim.AdamW(
        [
            {"params": parameters[::2], "lr": 1e-3},
            {"params": parameters[1::2], "lr": 3e-3, "weight_decay": 0.0},
        ]
    ),
}
TAKE_ROWS = ("sgd", "adagrad")
CHANGES = ("clip norm", "clip values", "scale", "own copies", "drop one")
CHANGES_OF_ROWS = ("scale", "drop one")
WRITES = ("clamp", "lr", "load model", "load optimizer", "data", "look at state", "resume")


@st.composite
def training_loops(draw: st.DrawFn, *, has_rows: bool = True, writes_data: bool = True) -> TrainingLoop:
    """Loops that torch DDP takes.

    Args:
        draw: Hypothesis gives it.
        has_rows: Whether some have sparse gradients.
        writes_data: Whether some write to `parameter.data`, which torch does not count.
    """
    offloads = draw(st.sampled_from(["no", "in step", "overlapped"]))
    # Memory devices have float32 copies of narrow parameters, torch's optimizers have none.
    known = [name for name in PIECES if name != "narrow" or offloads == "no"]
    if not has_rows:
        known.remove("rows looked up")
    pieces = draw(st.lists(st.sampled_from([*known, TWICE]), max_size=4))
    if TWICE in pieces and pieces[0] in (TWICE, "with unused", "reentrant"):
        pieces = ["linear", *pieces]
    has_rows, is_reentrant = "rows looked up" in pieces, "reentrant" in pieces
    if is_reentrant:  # torch takes these for parameters that are ready twice
        pieces = [name for name in pieces if name != "with unused"]
    optimizers = TAKE_ROWS if has_rows else tuple(OPTIMIZERS)
    if "batch norm" in pieces and offloads != "no":
        # The gradient of a bias before it is rounding alone, which Adam and Adagrad make as large as any other.
        optimizers = tuple(name for name in optimizers if name in ("sgd", "momentum"))
    has_heads = draw(st.booleans()) and not is_reentrant
    finds_unused = has_heads or "with unused" in pieces or (not is_reentrant and draw(st.booleans()))
    options = {"find_unused_parameters": finds_unused}
    for name in ("gradient_as_bucket_view", "broadcast_buffers"):
        options[name] = draw(st.booleans())
    is_overlapped = offloads == "overlapped"
    passes = st.builds(
        Pass,
        synchronises=st.booleans() if not is_overlapped else st.just(False),
        head=st.integers(0, 1),
        by_rank=st.booleans(),
        num_forwards=st.just(1) if has_heads or is_reentrant else st.sampled_from([1, 1, 1, 2]),
        penalises_inputs=st.just(False)
        if has_rows or is_reentrant
        else st.sampled_from([False, False, True]),
    )
    last = passes.map(lambda each: dataclasses.replace(each, synchronises=True))
    scales = not is_overlapped and draw(st.booleans())
    zeroes = ["to none", "in place", "not"]
    if (
        scales and offloads != "no"
    ):  # memory devices unscale in the update, torch in step(): what stays differs
        zeroes.remove("not")
    if is_overlapped:  # nothing stays
        zeroes = ["to none"]
    writes = [name for name in WRITES if name != "data" or writes_data or offloads == "no"]
    some_changes = st.lists(st.sampled_from(CHANGES_OF_ROWS if has_rows else CHANGES), max_size=2).map(tuple)
    step = st.builds(
        Step,
        zeroes=st.sampled_from(zeroes),
        evaluates_before=st.booleans(),
        passes=st.builds(lambda first, end: (*first, end), st.lists(passes, max_size=2), last),
        evaluates_between=st.just(False) if is_overlapped else st.booleans(),
        changes=st.just(()) if is_overlapped else some_changes,
        steps=st.just(True) if is_overlapped else st.sampled_from([True, True, True, False]),
        writes=st.lists(st.sampled_from(writes), max_size=2).map(tuple),
    )
    return TrainingLoop(
        pieces=tuple(pieces),
        has_heads=has_heads,
        options=tuple(options.items()),
        optimizer=draw(st.sampled_from(optimizers)),
        offloads=offloads,
        scales=scales,
        steps=tuple(draw(st.lists(step, min_size=1, max_size=6))),
    )


# ---- Training ----


def run(context: Context, loop: TrainingLoop) -> Any:
    """Losses of each pass, gradients of each step, and in the end the model and the optimizer's state."""
    return pack(_Training(context, loop).run())


class _Training:
    def __init__(self, context: Context, loop: TrainingLoop) -> None:
        self._context = context
        self._loop = loop
        self._begin()
        self._scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2, enabled=loop.scales)
        self._first_state = {name: value.clone() for name, value in self._model.state_dict().items()}
        self._num_batches = 0
        self._seen: list[Any] = []

    def _begin(self) -> None:
        loop = self._loop
        self._module = Model(loop.pieces, has_heads=loop.has_heads)
        self._model = self._context.wrap(self._module, **dict(loop.options))
        trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        self._optimizer: Any = OPTIMIZERS[loop.optimizer](trained)
        if loop.offloads != "no":
            self._optimizer = offload(
                self._context, self._optimizer, self._model, overlap=loop.offloads == "overlapped"
            )

    def _resume(self) -> None:
        """Under COARSE, what is trained ends, and comes back from a checkpoint, without gradients.

        Buffers that are worker 0's in each forward come back as these on all.
        """
        if not self._context.is_coarse:
            self._optimizer.zero_grad()
            for buffer in self._module.buffers() if dict(self._loop.options)["broadcast_buffers"] else ():
                dist.broadcast(buffer, 0)
            return
        from coarse.torch.checkpoint import Checkpointer, RandomState

        with shared_folder(self._context) as folder:
            with Checkpointer(
                folder, self._model, self._optimizer, state={"random": RandomState()}
            ) as saving:
                saving.save()
            self._model.close()
            self._begin()
            with Checkpointer(
                folder, self._model, self._optimizer, state={"random": RandomState()}
            ) as loading:
                loading.restore()

    def run(self) -> Any:
        for step in self._loop.steps:
            self._step(step)
        state = self._optimizer.state_dict()["state"]
        return {
            "seen": self._seen,
            "model": dict(self._module.state_dict()),
            "optimizer": {str(key): dict(value) for key, value in state.items()},
            "random": torch.rand(1),
        }

    def _step(self, step: Step) -> None:
        if step.zeroes != "not":
            self._optimizer.zero_grad(set_to_none=step.zeroes == "to none")
        if step.evaluates_before:
            self._evaluate()
        for each in step.passes:
            self._pass(each)
            if step.evaluates_between:
                self._evaluate()
        if step.steps and step.changes:
            self._scaler.unscale_(self._optimizer)
        for change in step.changes:
            self._change_gradients(change)
        if self._loop.offloads != "overlapped":  # there gradients are undefined after backward
            self._seen.append({k: v if v is None else v.to_dense() for k, v in states(self._module).items()})
        if step.steps:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        for write in step.writes:
            self._write(write)

    def _batch(self) -> torch.Tensor:
        self._num_batches += 1
        return self._context.inputs(self._num_batches, BATCH, WIDTH)

    def _pass(self, each: Pass) -> None:
        head = each.head + each.by_rank * self._context.rank
        with contextlib.nullcontext() if each.synchronises else self._model.no_sync():
            loss = torch.zeros(())
            for _ in range(each.num_forwards):
                inputs = self._batch().requires_grad_(each.penalises_inputs)
                loss = loss + self._model(inputs, head).square().mean()
                if each.penalises_inputs:
                    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
                    loss = loss + 0.1 * slope.square().sum()
            self._scaler.scale(loss).backward()
        self._seen.append(loss.detach())

    def _evaluate(self) -> None:
        self._model.eval()
        with torch.no_grad():
            self._seen.append(self._model(self._batch(), 0).square().mean())
        self._model.train()

    def _gradients(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._module.parameters() if parameter.grad is not None]

    def _change_gradients(self, change: str) -> None:
        having = self._gradients()
        if change == "clip norm":
            self._seen.append(torch.nn.utils.clip_grad_norm_(self._module.parameters(), 0.1))
        elif change == "clip values":
            torch.nn.utils.clip_grad_value_(self._module.parameters(), 0.01)
        elif change == "scale":
            for parameter in having:
                parameter.grad.mul_(0.5)
        elif change == "own copies":
            for parameter in having:
                parameter.grad = parameter.grad.clone()
        elif change == "drop one" and having:
            having[-1].grad = None

    def _write(self, write: str) -> None:
        """Changes what workers may share: where memory devices have parameters. So all meet before and after."""
        dist.barrier()
        self._write_alone(write)
        dist.barrier()

    def _write_alone(self, write: str) -> None:
        if write == "clamp":
            with torch.no_grad():
                for parameter in self._module.parameters():
                    parameter.clamp_(-0.2, 0.2)
        elif write == "lr":
            for group in self._optimizer.param_groups:
                group["lr"] *= 0.5
        elif write == "load model":
            self._model.load_state_dict(self._first_state)
        elif write == "load optimizer":
            self._optimizer.load_state_dict(self._optimizer.state_dict())
        elif write == "data":
            for parameter in self._module.parameters():
                parameter.data.fill_(0.1)
        elif write == "look at state":
            self._seen.append(len(self._optimizer.state_dict()["state"]))
        elif write == "resume":
            self._resume()
