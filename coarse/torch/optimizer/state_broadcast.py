"""Broadcasts the state of one worker's optimizer to all workers."""

from __future__ import annotations

import json
from typing import Any

import torch

from coarse.session import Session
from coarse.torch.ddp.agreement import broadcast_text
from coarse.torch.ddp.state.buffers import broadcast_tensors


def broadcast_state(session: Session, optimizer: torch.optim.Optimizer, *, root: int) -> None:
    """Overwrites the optimizer's state of all workers with that of worker `root`. Collective.

    Args:
        session: Session of the workers.
        optimizer: Has the same parameters on every worker, with a state of tensors and numbers.
        root: Worker that provides the state.
    """
    parameters = [parameter for options in optimizer.param_groups for parameter in options["params"]]
    states = [optimizer.state.get(parameter, {}) for parameter in parameters]
    described = json.dumps([{name: _described(value) for name, value in state.items()} for state in states])
    wanted = json.loads(broadcast_text(session, described, root=root))
    if session.identity.rank != root:
        states = [
            {name: _made(each, parameter) for name, each in state.items()}
            for parameter, state in zip(parameters, wanted, strict=True)
        ]
    tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    broadcast_tensors(session, tensors, root=root)
    session.release_buffers()
    optimizer.state.clear()
    optimizer.state.update({p: state for p, state in zip(parameters, states, strict=True) if state})


def _described(value: Any) -> Any:
    """A value as JSON: a number, or a tensor's type, shape and place (host or the parameter's device)."""
    if not isinstance(value, torch.Tensor):
        return value
    place = "host" if value.is_cpu else "parameter's"
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "place": place}


def _made(described: Any, parameter: torch.nn.Parameter) -> Any:
    """The described value; a tensor has arbitrary values."""
    if not isinstance(described, dict):
        return described
    dtype = getattr(torch, described["dtype"])
    device = torch.device("cpu") if described["place"] == "host" else parameter.device
    if described["shape"] == list(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
    return torch.empty(described["shape"], dtype=dtype, device=device)
