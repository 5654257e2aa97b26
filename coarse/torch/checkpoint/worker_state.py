"""State of a worker that is saved and restored in addition to model and optimizer."""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist

from coarse.worker_state import WorkerState

logger = logging.getLogger(__name__)


@runtime_checkable
class _Reshards(Protocol):
    def load_state_dicts(self, states: list[Any]) -> Any: ...


class RandomState:
    """The state of the random number generators of torch, numpy and Python, for `Checkpointer(state=...)`.

    If a different number of workers continues, workers that existed before restore their generators; new workers
    keep their current ones.
    """

    def state_dict(self) -> dict[str, Any]:
        """The generators' states, including those of all CUDA devices if CUDA is in use."""
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
        """Sets the generators if this worker existed when the states were saved."""
        rank = rank_here()
        if rank < len(states):
            self.load_state_dict(states[rank])


class OwnTensors:
    """Tensors of a model that differ between workers: buffers that are not broadcast, and ignored tensors.

    Args:
        model: The wrapped model.
        names: Names of the tensors in the inner module.
    """

    NAME = "tensors of each worker"
    """Name of this entry among a worker's states."""

    def __init__(self, model: torch.nn.parallel.DistributedDataParallel, names: Collection[str]) -> None:
        self._module = model.module
        self._names = names

    @classmethod
    def of(cls, model: torch.nn.Module, world_size: int) -> dict[str, WorkerState]:
        """The state by name; empty if all workers have the same tensors."""
        if not isinstance(model, torch.nn.parallel.DistributedDataParallel) or world_size == 1:
            return {}
        are_broadcast = getattr(model, "forward_sync_buffers", getattr(model, "broadcast_buffers", True))
        own = set(getattr(model, "parameters_to_ignore", ()))
        if not are_broadcast:
            own |= {name for name, _ in model.module.named_buffers(remove_duplicate=False)}
        names = own & model.module.state_dict().keys()
        return {cls.NAME: cls(model, names)} if names else {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of the tensors, in host memory."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self._tensors()}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Restores the tensors that exist."""
        with torch.no_grad():
            for name, tensor in self._tensors():
                if name in state_dict:
                    tensor.copy_(state_dict[name])

    def load_state_dicts(self, states: list[Mapping[str, torch.Tensor]]) -> None:
        """Restores the tensors; workers that did not exist before use worker 0's."""
        rank = rank_here()
        if rank < len(states):
            self.load_state_dict(states[rank])

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for named in (self._module.named_parameters, self._module.named_buffers):
            yield from ((name, each) for name, each in named(remove_duplicate=False) if name in self._names)


def rank_here() -> int:
    """Rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def load_resharded(name: str, target: WorkerState, states: list[Any], *, rank: int, world_size: int) -> None:
    """Restores a worker's part of the state that `len(states)` workers saved."""
    if len(states) == world_size:
        target.load_state_dict(states[rank])
    elif isinstance(target, _Reshards):
        target.load_state_dicts(states)
    else:
        logger.warning(
            "%r was saved by %d workers, but this job has %d: all of them get the state of worker 0",
            name,
            len(states),
            world_size,
        )
        target.load_state_dict(states[0])
