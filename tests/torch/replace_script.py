"""Trains a small model while workers are lost and replaced. Run by `coarse run --on-loss replace`.

    replace_script.py REPORT-FOLDER MODE LOST-RANK NUMBER-OF-ENTRIES [FATE...]

MODE says where the optimizers run: `backward` and `overlap` in the memory devices, `two` there in two parts, `plain`
on the workers, `split` in both places, `unnamed` on the workers without telling join_training(), and `odd` on the
workers beside a state that cannot be stored. With `plain`, workers other than the first build their model on the meta
device.

Worker LOST-RANK dies by SIGKILL in its fifth step. The n-th new worker has the n-th FATE: `start`, `built` or
`entered` kills it at once, when its model is built, or when it takes part; `read` kills it while it reads the state
of another worker, and `orphan` lets it live but kills that worker while it stores its state; `nameless` lets it name
no objects whose state it takes over; `step` kills it in its third step; `fail` lets it raise an error before it has a
model; `live` lets it live. The job ends a few steps after NUMBER-OF-ENTRIES workers have taken part in it.

Each worker that ends normally writes REPORT-FOLDER/end-RANK: a hash of parameters, buffers, optimizer state and
schedules, the members, their changes by step, and by step how far a parameter has moved whose gradient on worker r is
2**r.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fast_torch  # noqa: F401, before the next one
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import coarse.torch
from coarse.client.membership.members import WorldChange
from coarse.session import Session

BATCH, LAST_STEPS, MOST_STEPS = 4, 5, 6_000
FOLDER, MODE, LOST, NUM_ENTRIES = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
RANK, IS_NEW = int(os.environ["RANK"]), "COARSE_INVITATION" in os.environ
WORKERS_HOLD_SOME = MODE not in ("backward", "overlap")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moved = nn.Parameter(torch.zeros(1))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.without_optimizer = nn.Parameter(torch.randn(5), requires_grad=WORKERS_HOLD_SOME)
        self.layers = nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        loss = self.layers(inputs).square().mean() + self.without_optimizer.sum()
        return loss + 2**RANK * self.moved.sum()


class Odd:
    def state_dict(self) -> dict[str, object]:
        return {"value": object()}

    def load_state_dict(self, _: object) -> None: ...


def number_of(kind: str) -> int:
    """Counts a call, over all workers of the job, from 1."""
    (FOLDER / f"{kind}-{os.getpid()}").touch()
    return len(list(FOLDER.glob(f"{kind}-*")))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_storing(session: Session) -> None:
    """Kills this worker when it has stored a part of its state, if a newcomer asks for that; only the first one."""
    store = session.store

    def store_and_die(key: str, *arrays: Any) -> int:
        version = store(key, *arrays)
        if "state of a member" in key:
            for wish in FOLDER.glob("wish-*"):
                wish.unlink()
                die()
        return version

    session.store = store_and_die  # type: ignore[method-assign]


def die_while_reading(session: Session) -> None:
    """Kills this worker before it reads the second value of another worker's state."""
    load, num_values = session.load, 0

    def load_or_die(key: str) -> Any:
        nonlocal num_values
        num_values += 1
        if num_values == 2:
            number_of("entered")
            die()
        return load(key)

    session.load = load_or_die  # type: ignore[method-assign]


def build_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Of which one moves a parameter by its gradient."""
    moved, layers = [model.module.moved], list(model.module.layers.parameters())
    if not WORKERS_HOLD_SOME:
        groups = [{"params": moved, "momentum": 0.0}, {"params": layers, "lr": 0.01}]
        optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
        return [coarse.torch.DistributedOptimizer(optimizer, model, overlap=MODE == "overlap")]
    first: torch.optim.Optimizer = torch.optim.SGD(moved, lr=1.0)
    if MODE == "two":
        first = coarse.torch.DistributedOptimizer(first, model)
        return [first, coarse.torch.DistributedOptimizer(torch.optim.AdamW(layers, lr=0.01), model)]
    if MODE == "split":
        first.add_param_group({"params": layers[:4], "lr": 0.01, "momentum": 0.9})
        remote = torch.optim.AdamW(layers[4:], lr=0.01)
        return [first, coarse.torch.DistributedOptimizer(remote, model)]
    return [first, torch.optim.AdamW(layers, lr=0.01, amsgrad=True)]


def digest_of(model: Any, optimizers: Iterable[Any], schedules: Iterable[ExponentialLR]) -> str:
    """A hash of all that is equal on all workers."""
    digest = hashlib.sha256(json.dumps([each.get_last_lr() for each in schedules]).encode())
    states = [state for each in optimizers for _, state in sorted(each.state_dict()["state"].items())]
    values = [value for state in states for _, value in sorted(state.items())]
    for tensor in (*model.module.state_dict().values(), *filter(torch.is_tensor, values)):
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def main() -> None:
    fates = sys.argv[5:]
    fate = fates[min(number_of("started"), len(fates)) - 1] if IS_NEW and fates else ""
    if fate == "start":
        die()
    if fate == "fail":
        raise ValueError("a worker that cannot start")
    torch.manual_seed(os.getpid())
    with torch.device("meta" if MODE == "plain" and RANK else "cpu"):
        module = Model()
    model = coarse.torch.DistributedDataParallel(module)
    optimizers = build_optimizers(model)
    schedules = [ExponentialLR(each, 0.999) for each in optimizers[1:]]
    state: dict[str, Any] = {str(number): each for number, each in enumerate((*optimizers, *schedules))}
    if MODE == "odd":
        state["odd"] = Odd()
    session = model.session
    assert session is not None
    assert session.is_newcomer == IS_NEW
    if fate == "built":
        die()
    if fate == "orphan":
        (FOLDER / f"wish-{os.getpid()}").touch()
    if fate == "nameless":
        number_of("entered")
        state = {}
    if fate == "read":
        die_while_reading(session)
    die_while_storing(session)
    step = first = session.join_training(state=None if MODE == "unnamed" else state)
    last, num_entries = MOST_STEPS, 0
    changes: list[list[int]] = []

    def note_change(change: WorldChange) -> None:
        nonlocal last, num_entries
        changes.append([step, *change.new])
        num_entries += bool(change.joined)
        if num_entries == NUM_ENTRIES:
            last = step + LAST_STEPS

    session.on_change(note_change)
    if IS_NEW:
        num_entries = number_of("entered")
        if num_entries == NUM_ENTRIES:
            last = step + 1 + LAST_STEPS
    if fate == "entered":
        die()
    moves: dict[int, float] = {}
    while step < last:
        step += 1
        for each in optimizers:
            each.zero_grad()
        loss = model(torch.randn(BATCH, 8))
        before = model.module.moved.item()
        if (RANK == LOST and step == 5 and not IS_NEW) or (fate == "step" and step == first + 3):
            model.module.layers[1].weight.register_post_accumulate_grad_hook(lambda _: die())
        loss.backward()
        for each in (*optimizers, *schedules):
            each.step()
        moves[step] = before - model.module.moved.item()
        time.sleep(0.005)
    assert step < MOST_STEPS
    model.eval()(torch.randn(BATCH, 8))  # begins with the buffers of one worker, and leaves them so
    report = {
        "digest": digest_of(model, optimizers, schedules),
        "members": session.members,
        "changes": changes,
        "moves": moves,
    }
    (FOLDER / f"end-{RANK}").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
