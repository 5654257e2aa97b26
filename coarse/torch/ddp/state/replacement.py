"""New workers take the places of lost ones while a model trains (docs/guides/elastic.md)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from coarse.errors import CheckpointError, CoarseError
from coarse.session import Session
from coarse.settings import Settings
from coarse.torch.ddp.state.state_transfer import StateTransfer
from coarse.torch.ddp.state.stored_state import OwnState
from coarse.torch.gradients.gradient_parts import GradientParts
from coarse.torch.weak_calls import weakly
from coarse.worker_state import WorkerState


def check_replaceable(settings: Settings, *, num_models: int, has_sparse_gradients: bool) -> None:
    """Raises ValueError for a model with whose training a newcomer could not go on, if the settings ask for that.

    Args:
        settings: The session's settings.
        num_models: Models that were wrapped so far, with this one.
        has_sparse_gradients: Whether it has sparse gradients.
    """
    if not settings.replaces_workers:
        return
    if num_models > 1:
        raise _refusal("a second model was wrapped, and a newcomer joins the steps of one", "Wrap one model")
    if has_sparse_gradients:
        raise _refusal("the model has sparse gradients", "Build its embeddings with sparse=False")


class Replacement:
    """A model's part in it: newcomers begin between two of its steps, and get what workers hold themselves.

    A step is a forward after an update by an optimizer, in the memory devices or on this worker. Workers hold what
    join_training(state=...) names, and of the model the buffers and all parameters that no optimizer in the memory
    devices has.

    Args:
        session: The session of the workers.
        gradients: The model's gradients.
        read_model: Returns the model's parameters and buffers, in the same order on all workers.
    """

    def __init__(
        self, session: Session, gradients: GradientParts, read_model: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        self._session = session
        self._rank = session.identity.rank
        self._gradients = gradients
        self._read_model = read_model
        self._transfer = StateTransfer(session)
        self._optimizers = weakref.WeakSet[
            torch.optim.Optimizer
        ]()  # on this worker, that have updated the model
        self._num_updates = 0  # by these
        self._last_update = -1  # before which a step has begun
        hooks = (
            register_optimizer_step_pre_hook(torch.compiler.disable(weakly(self._check_optimizer))),
            register_optimizer_step_post_hook(torch.compiler.disable(weakly(self._note_update))),
        )
        for hook in hooks:
            weakref.finalize(self, hook.remove).atexit = False

    def begin_step(self) -> frozenset[int]:
        """Begins a step if the last one is complete; called before each forward whose gradients are averaged.

        Returns:
            Ranks of the workers that take part from now on, in places of lost ones.

        Raises:
            ValueError: If newcomers could not go on with the training.
        """
        _check_parts(self._gradients)
        step = self._session.join_training()
        update = self._num_updates + sum(part.updates.count for part in self._gradients.remote_parts)
        if update == self._last_update:
            return frozenset()
        if self._last_update < 0:
            self._check_state()
        self._last_update = update
        newcomers = self._session.begin_step()
        self._transfer.free()
        if newcomers and self._rank not in newcomers:
            self._transfer.give(self._own_state, newcomers, step=step)
        return newcomers

    def enter(self) -> None:
        """Takes over the training as the members have left it; called when this newcomer has become a member.

        Raises:
            CoarseError: If no member can provide its state, or this worker has not built the same objects.
        """
        for part in self._gradients.remote_parts:
            part.catch_up()
        values = self._transfer.take(self._held_tensors(), self._session.entering)
        self._check_names(values["state"])
        for group, settings in zip(self._remote_groups(), values["settings"], strict=True):
            group.update(settings)
        for name, each in self._held_objects().items():
            each.load_state_dict(values["state"][name])

    def _own_state(self) -> OwnState:
        state = {name: each.state_dict() for name, each in self._held_objects().items()}
        settings = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._remote_groups()
        ]
        return OwnState(tensors=self._held_tensors(), values={"state": state, "settings": settings})

    def _held_tensors(self) -> list[torch.Tensor]:
        """The parameters and buffers that each worker has for itself."""
        elsewhere = self._gradients.updated_parameters
        return [tensor for tensor in self._read_model() if tensor not in elsewhere]

    def _held_objects(self) -> dict[str, WorkerState]:
        """The objects of join_training(state=...), without optimizers in the memory devices."""
        elsewhere = self._gradients.updated_parameters
        named = self._session.worker_state.items()
        return {name: each for name, each in named if elsewhere.isdisjoint(_parameters_of(each))}

    def _remote_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers in the memory devices, with their settings."""
        return [group for part in self._gradients.remote_parts for group in part.optimizer.param_groups]

    def _local_parameters(self) -> Mapping[torch.nn.Parameter, str]:
        """The names of the trained parameters that no optimizer in the memory devices has."""
        rest = self._gradients.rest
        return {} if rest is None else {parameter: name for name, parameter in rest.named}

    def _check_names(self, state: Mapping[str, Any]) -> None:
        ours, theirs = sorted(self._held_objects()), sorted(state)
        if ours != theirs:
            raise CoarseError(
                f"worker {self._rank}: the others have called join_training(state=...) with {theirs}, and this "
                f"worker with {ours}; pass the same names on all workers"
            )

    def _check_state(self) -> None:
        """Raises ValueError if what this worker holds could not be given to a newcomer."""
        try:
            self._own_state().check()
        except CheckpointError as error:
            raise _refusal(str(error), "Change what join_training(state=...) names") from None

    def _check_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raises ValueError before an update by an optimizer on this worker whose state a newcomer would not get."""
        if optimizer in self._optimizers:
            return
        names = self._local_parameters()
        given = {each for held in self._session.worker_state.values() for each in _parameters_of(held)}
        lacking = [names[each] for each in _parameters_of(optimizer) if each in names and each not in given]
        if lacking:
            raise _refusal(
                f"{type(optimizer).__name__} updates parameter {lacking[0]!r} on the workers, and a newcomer does "
                "not get its state",
                'Name it on all workers before the first step, model.session.join_training(state={"optimizer": '
                "optimizer}). Or give all trainable parameters to one DistributedOptimizer that runs in the memory "
                "devices",
            )

    def _note_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Counts an update by an optimizer on this worker; checks its state after the first one."""
        is_new = optimizer not in self._optimizers
        if is_new and self._local_parameters().keys().isdisjoint(_parameters_of(optimizer)):
            return
        self._num_updates += 1
        if is_new:
            self._optimizers.add(optimizer)
            self._check_state()


def _check_parts(gradients: GradientParts) -> None:
    """Raises ValueError if a newcomer could not average these gradients, or not begin with exact parameters."""
    if any(part.cached is not None for part in gradients.remote_parts):
        raise _refusal("workers have copies of the parameters", "Pass staleness=0")
    if gradients.options.hook is not None:
        raise _refusal(
            "a communication hook averages gradients by torch's own process group, which newcomers lack",
            "Register none, or torch's fp16_compress_hook or bf16_compress_hook",
        )


def _parameters_of(holder: Any) -> list[torch.Tensor]:
    """The parameters of an optimizer, or of a wrapper of one; none of other objects."""
    return [parameter for group in getattr(holder, "param_groups", ()) for parameter in group["params"]]


def _refusal(reason: str, advice: str) -> ValueError:
    return ValueError(
        f"COARSE_ON_LOSS=replace, COARSE_MAX_WORKERS: new workers cannot join: {reason}. {advice}, or set "
        "COARSE_ON_LOSS=continue and no COARSE_MAX_WORKERS"
    )
