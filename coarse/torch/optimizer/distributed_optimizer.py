"""DistributedOptimizer: one of torch's optimizers, run by the memory devices."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, MutableMapping
from types import NoneType
from typing import Any

import torch

from coarse.client.memory.parameter_cache import CacheStatistics
from coarse.schema import UPDATABLE_DTYPES
from coarse.torch.ddp.distributed import DistributedDataParallel
from coarse.torch.gradients.gradient_parts import OffloadedPart
from coarse.torch.gradients.gradient_policy import GradientPolicy, OnNonFinite, total_norm
from coarse.torch.gradients.layout import DTYPE_NAMES, common_gpu
from coarse.torch.gradients.measures import changes_by_scaler, measure_gradient
from coarse.torch.gradients.sparse_gradients import find_renormalised
from coarse.torch.gradients.used_up_gradients import UsedUpGradient
from coarse.torch.optimizer.remote_parameters import RemoteParameters
from coarse.torch.optimizer.state_broadcast import broadcast_state
from coarse.torch.optimizer.update_rules import KNOWN_OPTIMIZERS, UpdateRule, cannot_update_rows, find_rule
from coarse.torch.weak_calls import weakly

_STAND_INS: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[DistributedOptimizer]] = (
    weakref.WeakKeyDictionary()
)


def stand_in_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The DistributedOptimizer that has taken an optimizer's place in memory devices; itself if none has."""
    stand_in = _STAND_INS.get(optimizer)
    return (stand_in() if stand_in is not None else None) or optimizer


class DistributedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """Runs an optimizer's update in the memory devices, where parameters and its state then live once for all.

    Takes the optimizer's place: `step()`, `zero_grad()`, learning-rate schedulers, GradScaler, `state_dict()` and
    `load_state_dict()` work as before, and checkpoints are the optimizer's own. Every worker must construct it
    alike, between two steps; that is collective. The parameters of a node's first worker win.

    Memory devices run torch's SGD, Adam, AdamW, Adagrad and SparseAdam and coarse.torch.optim.Lion, on parameters
    of float32, bfloat16 and float16 in host memory or all on one GPU, on one node or several, where gradients are
    reduced by `auto`, `direct` or `gather`; of sparse gradients SGD without momentum, Adagrad and SparseAdam, which
    update their rows alone.
    Anything else runs on the workers as usual; a warning says so and why, and `runs_in_memory_devices` is False.

    State is float32. A 16-bit parameter is the rounding of float32 master weights, which are what is updated; what
    somebody writes to the parameter becomes its master weight.

    What differs where it does run in memory devices:
        - Every parameter is a view of memory that the workers of the node share. What a worker writes to it between
          two steps (load_state_dict(), weights that are swapped for an evaluation, `parameter.data = tensor` of the
          same shape and type) it alone sees, until the next step goes on with what all workers have written
          alike, as they do under torch's class; until then it takes as much more memory. Where they have written
          unlike values, that step is refused; what was put back before it counts as not written. Linux tells what
          was written from 6.7 on. With older ones, where userfaultfd is forbidden, and where parameters lie on a GPU
          of all workers, every worker of the node sees at once what any of them writes (docs/design/optimizer.md).
        - Parameters are whole and constant between the end of a worker's step() and the beginning of its next one
          (with overlap=True: of its next backward()). A thread of its own that reads during step() may see some
          tensors, or parts of one, from before and some from after.
        - What `parameter.data` was before a tensor was assigned is not kept apart: updates go on writing to it.
        - Where a model is on a GPU, and parameters do not lie there, all workers have copies instead, which every
          update brings anew. What is written to them between two steps has to be written by all workers alike, and
          not in place to `parameter.data`, which torch does not count.
        - step() expects equal gradients on all workers, as backward() leaves them; it takes those of the first one.
        - GradScaler's step() leaves unscaling to the update, so that float16 gradients can be scaled too.
        - `state` has copies of the state, as state_dict() does; what is written to them is lost, and a mapping that
          is assigned to `state` takes its place.
        - add_param_group() is collective, and so is the forward after requires_grad_(True) of a parameter that the
          optimizer holds: parameters and state are registered anew. Until that is done, the node's first worker has
          them a second time.
        - Within DistributedDataParallel.join() workers have parameters and state of their own and make the updates,
          also with overlap=True. As it ends, those of a worker with the most inputs go to the memory devices.

    A model may have several, each of some of its parameters, and others that workers update. With overlap=True each
    backward then updates whatever it reaches: where one loss reaches the parameters of two optimizers and is for one
    of them, as in a GAN of one model, leave overlap out.

    Args:
        optimizer: Holds trainable parameters of `model`, all or some. From now on use this one instead: of the other
            one settings are read, state dicts are those of this one, and step() raises. State that it has is taken
            over.
        model: Whose gradients it is for.
        overlap: Whether each parameter is updated during backward(), as soon as all workers have its gradient,
            instead of in step(). Saves a pass over all gradients and hides the rest behind the computation, but
            no `.grad` remains after backward(), so that nothing can clip, unscale or look at it; and there must be
            one averaging backward() for each step(). Settings are those at the beginning of backward(). Parameters
            that it does not use are left alone, after zero_grad(set_to_none=False) too.
        max_grad_norm: Averaged gradients whose 2-norm over all of the optimizer's parameters is longer are scaled
            down to it, as by torch.nn.utils.clip_grad_norm_, but within the update; the norm comes from the
            reduction, and costs no pass over memory. After GradScaler it is that of the unscaled gradients. What is
            written to a gradient's `.data` is not seen, as torch does not count it; write to the gradient itself.
        on_nonfinite: What NaN or Inf in an averaged gradient leads to: "ignore" updates all the same, as torch does;
            "raise" has step() raise NonFiniteGradientError on every worker, which names the worker and parameter;
            "skip" leaves parameters and state as they are, on every worker.
        staleness: How many updates the parameters of a forward may not know of. With 0 they are exact. Else every
            worker has copies of its own, which it pulls again when they are older; with overlap=True it does not
            wait for an update before the end of its next forward, and so not for slower workers. pull() makes
            copies exact, as does state_dict() of the model; do so before evaluating.

    Raises:
        TypeError: If the model is not wrapped.
        ValueError: If an option of the optimizer cannot be offloaded, it holds trainable parameters that are not the
            model's, or memory devices are to be kept and it does not hold all that are, or staleness is above 0; or
            they have replicas and overlap is True.
        RuntimeError: If another DistributedOptimizer has some of its parameters.
        SchemaMismatchError: If workers construct different ones. By a later step(), or backward() with overlap=True:
            if they differ in settings, or have written unlike values to parameters.
        OutOfDeviceMemoryError: If parameters and state do not fit into device memory.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: DistributedDataParallel,
        *,
        overlap: bool = False,
        max_grad_norm: float | None = None,
        on_nonfinite: OnNonFinite = "ignore",
        staleness: int = 0,
    ) -> None:
        _check_kinds(optimizer, model)
        policy = GradientPolicy(max_norm=max_grad_norm, on_nonfinite=on_nonfinite)
        if overlap and policy.needs_measures:
            raise ValueError(
                "max_grad_norm and on_nonfinite need all gradients before the first update, which overlap=True makes "
                "during backward; pass overlap=False"
            )
        if staleness < 0:
            raise ValueError(f"staleness={staleness} must be at least 0; 0 trains with exact parameters")
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._optimizer = optimizer
        self._model = model
        self._policy = policy
        self._gradient_norm: float | None = None
        self._overlaps = overlap
        self._staleness = staleness
        self._part: OffloadedPart | None = None
        self._before_update: list[Callable[[], None]] = []
        self._has_warned = False
        self._refusal = -1  # which of the step pre-hooks of the optimizer that was given
        self._share_groups()
        self._taken: dict[str, Any] = {}  # of a state dict that is being loaded
        model.ensure_registered()
        rule = find_rule(optimizer)
        reason = model.agree_on_obstacle(_obstacle(optimizer, rule, model))
        if rule is None or reason:
            warnings.warn(
                f"{type(optimizer).__name__} runs on the workers, not in the memory devices: {reason}",
                stacklevel=2,
            )
            return
        _check_members(optimizer, model)
        _check_recovery(optimizer, model, overlap=overlap, staleness=staleness)
        self._offload(rule)
        self._stand_in_for(optimizer)

    def _offload(self, rule: UpdateRule) -> None:
        """Has the memory devices hold all trainable parameters of the optimizer. Collective."""
        self._part = self._model.offload(
            self._optimizer,
            rule,
            {parameter for _, parameter in _members(self._optimizer, self._model)},
            overlap=self._overlaps,
            measures=self._policy.needs_measures,
            staleness=self._staleness,
            before_backward=weakly(self._prepare_update),
            owner=weakref.ref(self),
            replaced=self._part,
        )
        self._not_held = _frozen_parameters(self._optimizer, self._model)

    def take_thawed(self) -> None:
        """Has the memory devices hold what the optimizer has and they do not, and is trained now. Collective."""
        if self._part is None or len(_members(self._optimizer, self._model)) == len(self._part.named):
            return
        rule = find_rule(self._optimizer)
        reason = self._model.agree_on_obstacle(_obstacle(self._optimizer, rule, self._model))
        if rule is None or reason:
            raise ValueError(
                f"parameters were added to a {type(self._optimizer).__name__} that runs in the memory devices, and "
                f"these cannot take them: {reason}. Give them an optimizer of their own"
            )
        _check_members(self._optimizer, self._model)
        _check_growth(self._model)
        self._offload(rule)

    def run_on_workers(self) -> None:
        """Takes parameters and state back from the memory devices. Collective.

        DistributedDataParallel.join() does: a worker without inputs makes no step.
        """
        if self._part is not None:
            part, self._part = self._part, None
            self._model.take_back(part)

    def run_in_memory_devices_again(self, root: int) -> None:
        """Moves them there again. Collective.

        Args:
            root: The worker that has the state that counts.
        """
        rule = find_rule(self._optimizer)
        assert self._model.session is not None
        assert rule is not None, "memory devices have run this optimizer"
        broadcast_state(self._model.session, self._optimizer, root=root)
        self._offload(rule)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by GradScaler before it calls step(); where this is true it hands scale and found_inf to it."""
        if self.overlaps:
            raise RuntimeError(
                "overlap=True has updated the parameters during backward(), by gradients of the scaled loss, which "
                "GradScaler could not unscale any more. Pass overlap=False, or train in bfloat16 without a GradScaler"
            )
        return self._part is not None

    @property
    def runs_in_memory_devices(self) -> bool:
        """Whether memory devices run the update, or the workers as usual."""
        return self._part is not None

    @property
    def offloaded(self) -> RemoteParameters | None:
        """What the memory devices hold; None if the optimizer runs on the workers."""
        return None if self._part is None else self._part.offloaded

    def keep_snapshots(self) -> None:
        """Has snapshots copy what they refer to, before anything but an update writes to parameters or state."""
        if self.offloaded is not None:
            self.offloaded.keep_snapshots()

    @property
    def state(self) -> MutableMapping[Any, Any]:
        """The state of each parameter, as torch's.

        Where memory devices have it, this is a copy, whose changes the next update takes over: assigning, taking out,
        putting in and writing in place count, if every worker does the same. Read it anew after each step().

        Raises:
            RuntimeError: By the next update, if something was put in that memory devices cannot keep.
        """
        return self._optimizer.state if self.offloaded is None else self.offloaded.lend()

    @state.setter
    def state(self, state: MutableMapping[Any, Any]) -> None:
        if not hasattr(self, "_optimizer"):
            return  # torch's constructor has begun: the state is that of the optimizer that was given
        if self.offloaded is None:
            self._optimizer.state = state
        else:
            self.offloaded.keep_snapshots()
            self.offloaded.adopt_state(state)

    def pull(self) -> None:
        """Makes this worker's parameters exact, once the last update is complete; without staleness they are."""
        if self._part is not None and self._part.cached is not None:
            self._part.cached.pull()

    @property
    def cache_statistics(self) -> CacheStatistics | None:
        """How often this worker could go on with the parameters it had; None without staleness."""
        cached = None if self._part is None else self._part.cached
        return None if cached is None else cached.statistics()

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        """The optimizer that was given."""
        return self._optimizer

    @property
    def gradient_norm(self) -> float | None:
        """2-norm of all gradients in the last step(), unscaled and before clipping; None if nobody asked for it."""
        return self._gradient_norm

    @property
    def is_kept(self) -> bool:
        """Whether parameters and state outlive this worker in the memory devices, if it crashes."""
        return self._part is not None and self._model.keeps_devices

    @property
    def recovered_step(self) -> int:
        """The update after which parameters and state were kept for this restarted worker; 0 if they were not."""
        return 0 if self.offloaded is None else self.offloaded.recovered_step

    def before_update(self, callback: Callable[[], None]) -> None:
        """Has `callback` called in each step() that is not skipped, before memory devices can begin the update.

        With overlap=True in each backward() that averages, as it begins.
        """
        self._before_update.append(callback)

    @property
    def overlaps(self) -> bool:
        """Whether memory devices update parameters during backward(), before step() is called."""
        return self._part is not None and self._overlaps

    def _prepare_update(self) -> None:
        for callback in self._before_update:
            callback()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters by their gradients; returns when this worker can read them. Collective.

        Args:
            closure: Called once before the update, as torch's optimizers do; what it returns is returned.

        Raises:
            RuntimeError: With overlap=True, if there are gradients that no averaging backward() has used; if a
                parameter has one that did not require it when the model was wrapped.
            NonFiniteGradientError: With on_nonfinite="raise", for NaN or Inf; nothing was updated on any worker.
        """
        if self._part is None:
            return self._step_on_worker(closure)
        # Of the optimizer itself, whose own step() is not called; torch calls those of this one.
        for number, pre_hook in self._optimizer._optimizer_step_pre_hooks.items():
            if number != self._refusal:
                pre_hook(self._optimizer, (), {})
        loss = _called(closure)
        self._update(self._part)
        for post_hook in self._optimizer._optimizer_step_post_hooks.values():
            post_hook(self._optimizer, (), {})
        self._optimizer._opt_called = True  # for schedulers, which warn of an order else
        return loss

    def _update(self, part: OffloadedPart) -> None:
        self._check_thawed()
        empty = part.offloaded.empty
        if self._overlaps:
            self._check_updated()
            self._model.end_overlapped_step(part)
            empty.update()
            empty.drop_gradients()
            return
        self._warn_of_local_gradients(part)
        scale = self._gradient_scale(part)
        if scale is not None:
            part.wait()
            self._prepare_update()
            self._model.update_parameters(part, gradient_scale=scale)
            empty.update()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own state dict, with a copy of the state; it loads into the bare optimizer too.

        State is float32 whatever the parameter's dtype, and that of a 16-bit parameter has its master weights as
        "master", so that training goes on with the same bits. torch's load_state_dict() rounds the one to the
        parameter's dtype, and leaves the other unused.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = dict(self._optimizer.state_dict())
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = _replaced(state_dict, post_hook(self, state_dict))
        return state_dict

    def _stand_in_for(self, optimizer: torch.optim.Optimizer) -> None:
        """Has state dicts of the optimizer that was given hold the state in the memory devices, and go there.

        Its step() raises: every worker would make an update of its own to the parameters that all share.
        """
        _STAND_INS[optimizer] = weakref.ref(self)
        refusal = _refusal_of_steps(self._model)
        self._refusal = optimizer.register_step_pre_hook(refusal).id
        optimizer.register_state_dict_pre_hook(weakly(self._lend_state))
        optimizer.register_state_dict_post_hook(weakly(self._take_state_back))
        optimizer.register_load_state_dict_pre_hook(weakly(self._take_state))
        optimizer.register_load_state_dict_post_hook(weakly(self._adopt_state))

    def _lend_state(self, optimizer: torch.optim.Optimizer) -> None:
        if self.offloaded is not None:
            optimizer.state.update(self.offloaded.state())

    def _take_state_back(self, optimizer: torch.optim.Optimizer, _: dict[str, Any]) -> None:
        if self.offloaded is not None:
            optimizer.state.clear()

    def _take_state(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self.offloaded is None:
            return state_dict
        self._taken = state_dict
        return {**state_dict, "state": {}}  # torch would round it, and copy it to the parameters' device

    def _adopt_state(self, optimizer: torch.optim.Optimizer) -> None:
        self._share_groups()
        if self.offloaded is not None:
            taken, self._taken = self._taken, {}
            self.offloaded.keep_snapshots()
            self.offloaded.adopt_state(_state_by_parameter(optimizer, taken))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this or of the bare optimizer. Every worker must load the same.

        Where it has no master weights for a 16-bit parameter, the parameter's value becomes them.
        """
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = _replaced(state_dict, pre_hook(self, state_dict))
        self._optimizer.load_state_dict(state_dict)
        self._share_groups()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters of the model, as torch's. Collective where memory devices run the optimizer.

        Those that are frozen come to the memory devices in the first forward after requires_grad_(True).

        Raises:
            ValueError: If they are not the model's, or memory devices cannot take them or are to be kept; nothing
                was added.
            RuntimeError: If another DistributedOptimizer has them; likewise.
        """
        if not hasattr(self, "_optimizer"):  # torch's constructor has begun
            super().add_param_group(param_group)
            return
        self._optimizer.add_param_group(param_group)
        if self._part is None:
            return
        try:
            self._model.average_thawed()
            _check_members(self._optimizer, self._model)
            self.take_thawed()
        except (ValueError, RuntimeError):
            if self._model.is_offloaded(self._optimizer):  # nothing was moved
                self._optimizer.param_groups.pop()
            raise
        self._not_held = _frozen_parameters(self._optimizer, self._model)

    def _share_groups(self) -> None:
        # The same objects, so that schedulers may be given either optimizer.
        self.param_groups = self._optimizer.param_groups

    def _gradient_scale(self, part: OffloadedPart) -> float | None:
        """What the update multiplies gradients with, the same on every worker; None if there is to be no update."""
        # GradScaler sets both for the time of step(); found_inf is of averages, and so alike on all workers.
        found_inf, loss_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and float(found_inf):
            self._gradient_norm = math.inf if self._policy.needs_measures else None
            return None
        unscale = 1.0 if loss_scale is None else 1.0 / float(loss_scale)
        if not self._policy.needs_measures:
            return unscale
        gradients = self._model.measured_gradients(
            part,
            # Looking for Inf, GradScaler multiplies gradients by 1.
            num_changes=0 if loss_scale is None else changes_by_scaler(loss_scale.device),
            are_unscaled=found_inf is not None and loss_scale is None,
        )
        self._gradient_norm = total_norm(gradients) * unscale
        if not self._policy.admits(gradients):
            return None
        return unscale * self._policy.scale(self._gradient_norm)

    def _step_on_worker(self, closure: Callable[[], Any] | None) -> Any:
        if not self._policy.needs_measures:
            return self._optimizer.step(closure)
        loss = _called(closure)
        members = _members(self._optimizer, self._model)
        named = [(name, p.grad) for name, p in members if p.grad is not None]
        measured = [measure_gradient(name, gradient) for name, gradient in named]
        self._gradient_norm = total_norm(measured)
        if self._policy.admits(measured):
            torch._foreach_mul_([gradient for _, gradient in named], self._policy.scale(self._gradient_norm))
            self._optimizer.step()
        return loss

    def _check_updated(self) -> None:
        held = (parameter for options in self.param_groups for parameter in options["params"])
        if any(not isinstance(each.grad, (UsedUpGradient, NoneType)) and each.numel() for each in held):
            raise RuntimeError(
                "overlap=True updates parameters in the backward() that averages gradients, but there are gradients "
                "that no such backward() has used. End each accumulation under no_sync() with a backward() outside "
                "of it; torch.distributed.checkpoint, which makes gradients of zeros for a step of its own, works "
                "once the training has taken a step; or pass overlap=False."
            )

    def _warn_of_local_gradients(self, part: OffloadedPart) -> None:
        if part.gradients.has_local and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "gradients came of a backward that did not average: of a forward of the inner module, the second one "
                "of a forward (or of two), or under no_sync(). Memory devices update the parameters of all workers "
                "by those of one. Sum losses up and call backward() once, or average_gradients() of the model "
                "before step(); if you average gradients yourself, all is well",
                stacklevel=4,
            )

    def _check_thawed(self) -> None:
        for name, parameter in self._not_held:
            if parameter.grad is not None:
                raise RuntimeError(
                    f"parameter {name!r} has a gradient that no forward of the wrapped model has come before since "
                    "requires_grad_(True): it was not averaged, and memory devices do not hold the parameter yet. "
                    "Call the model itself, not model.module"
                )


def _called(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _check_kinds(optimizer: object, model: object) -> None:
    """Raises TypeError if they are not what a DistributedOptimizer is made of."""
    if not isinstance(model, DistributedDataParallel):
        compiled = isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel)
        raise TypeError(
            "DistributedOptimizer needs the model as coarse.torch.DistributedDataParallel wrapped it, not a "
            f"{type(model).__name__}{'; give it the one that torch.compile was given' if compiled else ''}"
        )
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, DistributedOptimizer):
        raise TypeError(
            "DistributedOptimizer takes the place of one of torch's optimizers, not of a "
            f"{type(optimizer).__name__}"
        )


def _obstacle(
    optimizer: torch.optim.Optimizer, rule: UpdateRule | None, model: DistributedDataParallel
) -> str:
    """Why the optimizer has to run on the workers; "" if it does not."""
    if rule is None:
        return f"they know {KNOWN_OPTIMIZERS}, not {type(optimizer).__name__}"
    renormalised = find_renormalised(model.module)
    members = _members(optimizer, model)
    if not members:
        return "none of its parameters requires gradients yet"
    is_on_one_gpu = bool(common_gpu([parameter for _, parameter in members]))
    for name, parameter in members:
        if not parameter.is_cpu and not is_on_one_gpu:
            return f"parameter {name!r} is on {parameter.device}, neither in host memory nor all on one GPU"
        if parameter in renormalised:
            return f"the max_norm of parameter {name!r} has forward write to it, on each worker by itself"
        if parameter not in model.tables and isinstance(optimizer, torch.optim.SparseAdam):
            return f"parameter {name!r} is no table, and SparseAdam updates only tables"
        if parameter in model.tables and (reason := cannot_update_rows(optimizer)):
            return f"parameter {name!r}: {reason}"
        if parameter.is_complex() or DTYPE_NAMES[parameter.dtype] not in UPDATABLE_DTYPES:
            return f"parameter {name!r} is {parameter.dtype}, and they update {', '.join(UPDATABLE_DTYPES)}"
    return model.cannot_offload([parameter for _, parameter in members])


def _members(
    optimizer: torch.optim.Optimizer, model: DistributedDataParallel
) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters of the optimizer whose gradients the model averages."""
    held = {parameter for options in optimizer.param_groups for parameter in options["params"]}
    return [(name, parameter) for name, parameter in model.trained_parameters if parameter in held]


def _frozen_parameters(
    optimizer: torch.optim.Optimizer, model: DistributedDataParallel
) -> list[tuple[str, torch.nn.Parameter]]:
    """What the optimizer holds, and memory devices do not."""
    held = {parameter for options in optimizer.param_groups for parameter in options["params"]}
    trained = {parameter for _, parameter in model.trained_parameters}
    return [
        (name, parameter)
        for name, parameter in model.module.named_parameters()
        if parameter in held and parameter not in trained and parameter.numel()
    ]


def _replaced(given: dict[str, Any], by_hook: dict[str, Any] | None) -> dict[str, Any]:
    """What a hook has returned in place of a state dict, if it has."""
    return given if by_hook is None else by_hook


def _check_recovery(
    optimizer: torch.optim.Optimizer, model: DistributedDataParallel, *, overlap: bool, staleness: int
) -> None:
    """Refuses what could not be recovered, where the model's memory devices are kept or have replicas."""
    if model.keeps_devices and (left := len(model.trained_parameters) - len(_members(optimizer, model))):
        raise ValueError(
            f"COARSE_KEEP_DEVICES needs one DistributedOptimizer of all trainable parameters of the model, and this "
            f"one leaves {left} out: what others update would be of another step after a crash. Give it all of them "
            "(parameter groups may have settings of their own), freeze the others before wrapping, or unset "
            "COARSE_KEEP_DEVICES"
        )
    if overlap and model.replicates_devices:
        raise ValueError(
            "overlap=True does not go with COARSE_REPLICAS: it updates parameters while gradients of others are not "
            "complete yet, so that neither copy alone could finish a step; pass overlap=False, or unset "
            "COARSE_REPLICAS"
        )
    if overlap and model.keeps_devices and model.tables:
        raise ValueError(
            "overlap=True and COARSE_KEEP_DEVICES do not go with sparse gradients: updates of tables cannot be "
            "undone; pass overlap=False, or make the embeddings dense (sparse=False)"
        )
    if model.tables and model.replicates_devices:
        raise ValueError(
            "COARSE_REPLICAS does not go with sparse gradients: an update of a table changes few rows, and whole "
            "shards would be copied; make the embeddings dense (sparse=False), or unset COARSE_REPLICAS"
        )
    if staleness and model.keeps_devices:
        raise ValueError(
            f"staleness={staleness} does not go with COARSE_KEEP_DEVICES: copies on workers die with them; pass "
            "staleness=0, or unset COARSE_KEEP_DEVICES"
        )


def _refusal_of_steps(model: DistributedDataParallel) -> Callable[..., None]:
    """A hook that has an optimizer's own step() raise as long as memory devices update the model's parameters."""
    reference = weakref.ref(model)  # whose parameters may outlive it

    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        alive = reference()
        if alive is not None and alive.is_offloaded(optimizer):
            raise RuntimeError(
                f"this {type(optimizer).__name__} runs in the memory devices; call step() of what "
                "DistributedOptimizer has made of it: optimizer = coarse.torch.DistributedOptimizer(optimizer, model)"
            )

    return refuse


def _state_by_parameter(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> dict[torch.nn.Parameter, dict[str, Any]]:
    """The state of a state dict of which `optimizer` has just loaded the rest."""
    numbers = [number for options in state_dict["param_groups"] for number in options["params"]]
    parameters = [parameter for options in optimizer.param_groups for parameter in options["params"]]
    state = state_dict["state"]
    return {p: state[number] for number, p in zip(numbers, parameters, strict=True) if number in state}


def _check_members(optimizer: torch.optim.Optimizer, model: DistributedDataParallel) -> None:
    """Refuses parameters that this model, or memory devices for another optimizer of it, do not leave to this one."""
    held = {
        p for options in optimizer.param_groups for p in options["params"] if p.requires_grad and p.numel()
    }
    members = _members(optimizer, model)
    for part in model.offloaded_parts:
        taken = {parameter for _, parameter in part.named} if part.optimizer is not optimizer else set()
        if names := [name for name, parameter in members if parameter in taken]:
            raise RuntimeError(
                f"parameter {names[0]!r}{f' and {len(names) - 1} more' if names[1:] else ''} of the model has a "
                f"DistributedOptimizer already, of a {type(part.optimizer).__name__}. Give each parameter to one "
                "optimizer, or wrap the module again for another one"
            )
    if foreign := len(held - {parameter for _, parameter in members}):
        raise ValueError(
            f"the optimizer holds {foreign} trainable parameter(s) whose gradients this model does not average: they "
            "are not in the module that was wrapped. Give them an optimizer of their own"
        )


def _check_growth(model: DistributedDataParallel) -> None:
    """Refuses parameters that come later, where restarted workers would not know of them."""
    if model.keeps_devices:
        raise ValueError(
            "COARSE_KEEP_DEVICES does not go with parameters that come to an optimizer in the memory devices later: "
            "a restarted worker looks for those that there were at first. Have all that will be trained require "
            "gradients when the model is wrapped, and be in the optimizer; or unset COARSE_KEEP_DEVICES"
        )
