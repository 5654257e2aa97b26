"""Recovery: a restarted worker continues after the last committed step."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from coarse.checkpoint.values import from_json, to_json
from coarse.env import invitation
from coarse.session import Session
from coarse.torch.checkpoint.data_position import DataPosition
from coarse.torch.checkpoint.training_state import as_small_tensor, from_small_tensor
from coarse.torch.checkpoint.worker_state import RandomState
from coarse.torch.ddp.wrapped import wrapped_in
from coarse.torch.elastic_sampler import ElasticSampler
from coarse.torch.optimizer.distributed_optimizer import DistributedOptimizer, stand_in_of
from coarse.torch.optimizer.trainers import bare_optimizer
from coarse.worker_state import WorkerState, checked

logger = logging.getLogger(__name__)

_generators = RandomState()

Batch = TypeVar("Batch")


class Recovery:
    """Restores a restarted worker to the last committed step of the memory devices (docs/design/recovery.md).

    Parameters and optimizer state are in the memory devices and survive there. In each step(), Recovery also stores
    the worker's own state in the memory devices, and restores it after a restart: the states of random number
    generators (torch, CUDA, numpy's global one, `random`), the model's buffers, the settings of the optimizer's
    parameter groups, the position in the data, and all objects in `state`. Construct Recovery last, on every worker;
    then loop over epochs() and batches().

    Recovery is also a WorkerState: Checkpointer can save and restore it if Checkpointer.step() directly follows the
    optimizer's step().

    The stored state is that at the call of step(), or of backward() with overlap=True. A restarted worker continues
    as if that step() had just returned, with the next batch. The loop calls `schedule.step()` after each step, as
    without Recovery; a restarted worker misses this call once, and `on_resume` makes up for it.

    With an ElasticSampler in `state`, epochs() and batches() go on with the samples that no step has used, without
    loading others again, and workers may be lost and replaced meanwhile. `COARSE_ON_LOSS=replace` needs it: a new
    worker has no position of its own.

    If memory devices are not kept (COARSE_KEEP_DEVICES) or do not run the optimizer, Recovery does nothing and `step`
    is 0.

    Example:
        >>> recovery = Recovery(model, optimizer, state={"schedule": schedule}, on_resume=schedule.step)
        >>> for epoch in recovery.epochs(num_epochs):
        ...     for batch in recovery.batches(loader):
        ...         optimizer.zero_grad()
        ...         loss_of(model(batch)).backward()
        ...         optimizer.step()
        ...         schedule.step()  # as without Recovery

    Args:
        model: A model wrapped by coarse.torch.DistributedDataParallel, or what a trainer has made of it.
        optimizer: A coarse.torch.DistributedOptimizer, or a trainer's wrapper around one.
        state: Further objects with state of this worker, by name.
        on_resume: Does what the loop does between step() and the next batch. Recovery calls it once, only in a
            restarted worker that continues from a step.

    Raises:
        TypeError: If the model is not wrapped, or an object in `state` has no state_dict() or load_state_dict().
        ValueError: If new workers take the places of lost ones, and `state` has no ElasticSampler.
        RuntimeError: If the names in the stored state differ from those in `state`.
        CoarseError: If the memory devices are lost.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: DistributedOptimizer,
        *,
        state: Mapping[str, WorkerState] | None = None,
        on_resume: Callable[[], object] | None = None,
    ) -> None:
        optimizer = stand_in_of(bare_optimizer(optimizer))
        if not isinstance(optimizer, DistributedOptimizer):
            raise TypeError(
                "Recovery resumes from the parameters and the optimizer in the memory devices: it needs a "
                f"coarse.torch.DistributedOptimizer, not a {type(optimizer).__name__}. Without one, resume "
                "restarted workers with a Checkpointer"
            )
        self._model = wrapped_in(model, "Recovery")
        self._optimizer = optimizer
        self._state = checked(state)
        self._on_resume = on_resume
        self._forgotten = _ForgottenSchedule(on_resume)
        self._position = DataPosition()
        self._sampler = _elastic_sampler(self._model.session, self._state)
        self._resumed_generators: dict[str, Any] | None = None
        self._num_steps = 0
        # Updates that the memory devices have received; those before a newcomer were not its own.
        self._num_updates = 0 if invitation() else optimizer.recovered_step
        self.step = 0
        """Number of steps before this worker started."""
        self._remote = optimizer.remote_optimizers
        if self._remote is not None and self._num_updates:
            own = bytes(self._remote.kept_state(self._num_updates))
            if not own:
                raise RuntimeError(
                    f"the memory devices hold step {self._num_updates}, but no state of this worker, because steps "
                    "were taken before Recovery was constructed. Construct it first, and start a new job"
                )
            kept = json.loads(own)
            if kept["update"] != self._num_updates:
                raise RuntimeError(
                    f"the memory devices hold step {self._num_updates}, but this worker's state of step "
                    f"{kept['update']}; construct Recovery before the first step"
                )
            self.load_state_dict(from_json(kept["state"], translate=from_small_tensor))
        optimizer.register_step_pre_hook(self._count_step)
        if optimizer.is_kept:
            optimizer.before_update(self._keep)

    def state_dict(self) -> dict[str, Any]:
        """This worker's state, for a checkpoint. Call it directly after step(), before the actions of `on_resume`."""
        return {
            "step": self._num_steps,
            "position": self._position.state_dict(),
            "generators": _generators.state_dict(),
            "buffers": dict(self._model.module.named_buffers()),
            "settings": [_settings(group) for group in self._optimizer.param_groups],
            "state": {name: each.state_dict() for name, each in self._state.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores the state from state_dict() and calls `on_resume`."""
        if saved["state"].keys() != self._state.keys():
            raise RuntimeError(
                f"the state of step {saved['step']} has {sorted(saved['state'])}, but Recovery was given "
                f"{sorted(self._state)}; restart the job with its original script"
            )
        self.step = self._num_steps = saved["step"]
        self._position.load_state_dict(saved["position"])
        for name, buffer in self._model.module.named_buffers():
            buffer.copy_(saved["buffers"][name])
        for group, settings in zip(self._optimizer.param_groups, saved["settings"], strict=True):
            group.update(settings)
        for name, each in self._state.items():
            each.load_state_dict(saved["state"][name])
        _generators.load_state_dict(saved["generators"])
        if self._on_resume is not None:
            self._on_resume()
        self._resumed_generators = _generators.state_dict()
        logger.info("resuming from step %d, epoch %d", self.step, self.epoch)

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._position.epoch if self._sampler is None else self._sampler.epoch

    def epochs(self, count: int) -> Iterator[int]:
        """Iterates over the unfinished epochs of `count` epochs."""
        return self._position.epochs(count) if self._sampler is None else self._sampler.epochs(count)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Iterates over the batches of this epoch that no committed step has used.

        Earlier batches are loaded again and discarded, so that loading draws the same random numbers; not so with an
        ElasticSampler.

        Raises:
            ValueError: If Recovery was given an ElasticSampler that is not the one of the loader.
        """
        resumed, self._resumed_generators = self._resumed_generators, None
        if resumed is not None:  # the script may have drawn random numbers since
            _generators.load_state_dict(resumed)
        if self._sampler is None:
            return self._position.batches(loader)
        if getattr(loader, "batch_sampler", None) is not self._sampler:
            raise ValueError(
                "the loader's batches are not those of the ElasticSampler that Recovery was given; build it as "
                "DataLoader(dataset, batch_sampler=sampler)"
            )
        return iter(loader)

    def _count_step(self, *_: object) -> None:
        self._num_steps += 1
        self._forgotten.look()

    def _keep(self) -> None:
        """Stores this worker's state in the memory devices, before any update of the step can begin."""
        self._num_updates += 1
        # With overlap=True, step() is called later and has not counted this step yet.
        num_steps = self._num_steps + self._optimizer.overlaps
        state = to_json({**self.state_dict(), "step": num_steps}, translate=as_small_tensor)
        kept = json.dumps({"update": self._num_updates, "state": state})
        assert self._remote is not None, "the optimizer is kept"
        self._remote.keep_state(self._num_updates, kept.encode())


class _ForgottenSchedule:
    """Warns if only `on_resume` steps a learning-rate schedule; the loop must do so after every step.

    Args:
        on_resume: As for Recovery.
    """

    _ENOUGH_STEPS = 3  # the loop may skip one or two, for example when GradScaler skips the optimizer's step

    def __init__(self, on_resume: Callable[[], object] | None) -> None:
        owner = getattr(on_resume, "__self__", None)
        self._schedule = owner if isinstance(owner, torch.optim.lr_scheduler.LRScheduler) else None
        self._begun_at = 0 if self._schedule is None else self._schedule.last_epoch
        self._num_looks = 0

    def look(self) -> None:
        """Checks the schedule; called in each step()."""
        self._num_looks += 1
        schedule = self._schedule
        if schedule is None or self._num_looks != self._ENOUGH_STEPS + 1:
            return
        if schedule.last_epoch == self._begun_at:
            warnings.warn(
                f"the {type(schedule).__name__} that Recovery steps on resuming was not stepped by the loop in "
                f"{self._ENOUGH_STEPS} steps of the optimizer: the learning rate does not change. Call "
                "schedule.step() after optimizer.step() as without Recovery; on_resume is called only after a "
                "restart",
                stacklevel=4,
            )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _elastic_sampler(session: Session | None, state: Mapping[str, WorkerState]) -> ElasticSampler | None:
    """The sampler whose position is the worker's."""
    sampler = next((each for each in state.values() if isinstance(each, ElasticSampler)), None)
    if sampler is None and session is not None and session.settings.replaces_workers:
        raise ValueError(
            "COARSE_ON_LOSS=replace, COARSE_MAX_WORKERS: Recovery knows no position in the data for a new worker, "
            "which the others have long passed. Pass batch_sampler=coarse.torch.ElasticSampler(...) to the loader, "
            "and state={'sampler': sampler} to Recovery, or set COARSE_ON_LOSS=continue and no COARSE_MAX_WORKERS"
        )
    return sampler
