"""What else than model and optimizer belongs to a worker, and is saved and restored with them."""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

_METHODS = ("state_dict", "load_state_dict")


class WorkerState(Protocol):
    """Something of a worker that belongs to a checkpoint: torch's schedulers, GradScaler and stateful loaders fit.

    If it also has `load_state_dicts(states)`, that is called instead where another number of workers goes on, with
    the states of all workers that there were.
    """

    def state_dict(self) -> Mapping[str, Any]:
        """Numbers, strings, bytes, lists, tuples, dictionaries, tensors and arrays."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Takes what state_dict() returned."""


@runtime_checkable
class _Reshards(Protocol):
    def load_state_dicts(self, states: list[Any]) -> Any: ...


class RandomState:
    """The state of the random number generators of torch, numpy and Python, for `Checkpointer(state=...)`.

    Where another number of workers goes on, those that there were keep their generators; new ones keep what they
    have.
    """

    def state_dict(self) -> dict[str, Any]:
        """The generators' states; those of all CUDA devices if there are any in use."""
        state = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets the generators."""
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"])
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state_dict["cuda"])

    def load_state_dicts(self, states: list[Mapping[str, Any]]) -> None:
        """Sets the generators where this worker was there before."""
        rank = rank_here()
        if rank < len(states):
            self.load_state_dict(states[rank])


class OwnTensors:
    """What of a model each worker has of its own: buffers that are not broadcast, and what is left alone.

    Args:
        model: Wrapped.
        names: Of the tensors, in the module that it wraps.
    """

    NAME = "tensors of each worker"
    """Among the states of a worker."""

    def __init__(self, model: torch.nn.parallel.DistributedDataParallel, names: Collection[str]) -> None:
        self._module = model.module
        self._names = names

    @classmethod
    def of(cls, model: torch.nn.Module, world_size: int) -> dict[str, WorkerState]:
        """By name; nothing where all workers have the same."""
        if not isinstance(model, torch.nn.parallel.DistributedDataParallel) or world_size == 1:
            return {}
        are_broadcast = getattr(model, "forward_sync_buffers", getattr(model, "broadcast_buffers", True))
        own = set(getattr(model, "parameters_to_ignore", ()))
        if not are_broadcast:
            own |= {name for name, _ in model.module.named_buffers(remove_duplicate=False)}
        names = own & model.module.state_dict().keys()
        return {cls.NAME: cls(model, names)} if names else {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of them, in the host's memory."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self._tensors()}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Writes to those that there are."""
        with torch.no_grad():
            for name, tensor in self._tensors():
                if name in state_dict:
                    tensor.copy_(state_dict[name])

    def load_state_dicts(self, states: list[Mapping[str, torch.Tensor]]) -> None:
        """Writes to them where this worker was there before; new workers have worker 0's."""
        rank = rank_here()
        if rank < len(states):
            self.load_state_dict(states[rank])

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for named in (self._module.named_parameters, self._module.named_buffers):
            yield from ((name, each) for name, each in named(remove_duplicate=False) if name in self._names)


def rank_here() -> int:
    """Rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def checked(state: Mapping[str, WorkerState] | None) -> dict[str, WorkerState]:
    """Returns what a user handed over as state, by names.

    Raises:
        TypeError: If something of it has no state to save.
    """
    for name, each in (state or {}).items():
        lacking = [f"{method}()" for method in _METHODS if not callable(getattr(each, method, None))]
        if lacking:
            raise TypeError(
                f"state[{name!r}] is a {type(each).__name__}, which has no {' and no '.join(lacking)}; hand over "
                f"what has both, as schedulers and GradScaler do, or wrap it"
            )
    return dict(state or {})


def load_resharded(name: str, target: WorkerState, states: list[Any], *, rank: int, world_size: int) -> None:
    """Gives a worker its part of the state that `len(states)` workers saved."""
    if len(states) == world_size:
        target.load_state_dict(states[rank])
    elif isinstance(target, _Reshards):
        target.load_state_dicts(states)
    else:
        logger.warning(
            "%r was saved by %d workers, and now there are %d: all of them get the state of worker 0",
            name,
            len(states),
            world_size,
        )
        target.load_state_dict(states[0])
