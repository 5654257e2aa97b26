"""DistributedOptimizer: one of torch's optimizers, run by the memory devices."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from types import NoneType
from typing import Any

import torch

from coarse.client.memory.parameter_cache import CacheStatistics
from coarse.schema import UPDATABLE_DTYPES
from coarse.torch.ddp.distributed import DistributedDataParallel
from coarse.torch.gradients.gradient_parts import RemotePart
from coarse.torch.gradients.gradient_policy import GradientPolicy, OnNonFinite, total_norm
from coarse.torch.gradients.layout import DTYPE_NAMES, common_gpu
from coarse.torch.gradients.measures import changes_by_scaler, measure_gradient
from coarse.torch.gradients.sparse_gradients import find_renormalised
from coarse.torch.gradients.used_up_gradients import UsedUpGradient
from coarse.torch.optimizer.remote_optimizers import RemoteOptimizers, UpdateOptions
from coarse.torch.optimizer.remote_parameters import RemoteParameters
from coarse.torch.optimizer.state_broadcast import broadcast_state
from coarse.torch.optimizer.update_rules import KNOWN_OPTIMIZERS, UpdateRule, cannot_update_rows, find_rule
from coarse.torch.weak_calls import weakly

_STAND_INS: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[DistributedOptimizer]] = (
    weakref.WeakKeyDictionary()
)


def stand_in_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the DistributedOptimizer that replaces `optimizer`; `optimizer` itself if none does."""
    stand_in = _STAND_INS.get(optimizer)
    return (stand_in() if stand_in is not None else None) or optimizer


class DistributedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """Runs an optimizer's update in the memory devices, which store one copy of parameters and state for all workers.

    Replaces the optimizer: `step()`, `zero_grad()`, learning-rate schedulers, GradScaler, `state_dict()` and
    `load_state_dict()` work as before, and checkpoints have the optimizer's own format. Every worker must construct
    it with the same arguments, between two steps. Construction is collective. Training starts from the parameters of
    a node's first worker.

    Memory devices run torch's SGD, Adam, AdamW, Adagrad and SparseAdam and coarse.torch.optim.Lion. Parameters may be
    float32, bfloat16 or float16, in host memory or all on one GPU. The job may have one node or several, and must
    reduce gradients by `auto`, `direct` or `gather`. For sparse gradients, memory devices run SGD without momentum,
    Adagrad and SparseAdam, and update only the gradients' rows.
    Anything else runs on the workers as usual; a warning gives the reason, and `runs_in_memory_devices` is False.

    State is float32. A 16-bit parameter is the rounded copy of float32 master weights, which the update changes. A
    value written to the parameter becomes its master weight.

    Differences when the optimizer runs in memory devices:
        - Every parameter is a view of memory that the workers of the node share. A worker may write to it between
          two steps: by load_state_dict(), by swapping weights for an evaluation, or by `parameter.data = tensor` of
          the same shape and type. Only that worker sees the written values, which need additional memory, until the
          next step. If all workers wrote the same values, that step continues from them, as under torch's class. If
          they wrote different values, it raises an error. Values restored before the step count as not written.
          Detecting writes needs Linux 6.7 or newer. On older kernels, where userfaultfd is forbidden, and where all
          workers share parameters on one GPU, a write is visible to every worker of the node at once
          (docs/design/optimizer.md).
        - Parameters are complete and constant between the end of a worker's step() and the beginning of its next
          step() (with overlap=True: of its next backward()). Another thread that reads during step() may see a mix of
          old and new tensors, or of old and new parts of one tensor.
        - After a tensor is assigned to `parameter.data`, updates continue to overwrite the previous `parameter.data`.
        - If the model is on a GPU and its shared parameters are not, all workers have copies, which every update
          refreshes. Between two steps, all workers must write the same values to these copies. They must not write
          in place to `parameter.data`, because torch does not count such writes.
        - step() expects equal gradients on all workers, as backward() leaves them; it uses those of the first worker.
        - GradScaler's step() leaves unscaling to the update, so that float16 gradients can be scaled too.
        - `state` returns copies of the state, as state_dict() does. Writes to a copy from before the last step() are
          lost; a mapping that is assigned to `state` replaces the state.
        - add_param_group() is collective. So is the forward after requires_grad_(True) of a parameter that the
          optimizer holds. Both register parameters and state again; meanwhile the node's first worker holds a second
          copy of them.
        - Within DistributedDataParallel.join(), workers have their own parameters and state and run the updates, also
          with overlap=True. At its end, one of the workers with the most inputs provides the values for the memory
          devices.

    A model may have several DistributedOptimizers, each for some of its parameters, and other optimizers on the
    workers. With overlap=True, each backward updates every parameter that it reaches. Do not use overlap if one loss
    reaches the parameters of two optimizers but must update only one of them, as in a GAN of one model.

    Args:
        optimizer: Holds all or some of the trainable parameters of `model`. Use the DistributedOptimizer instead from
            now on, which also takes over the existing state. The original optimizer still provides the settings; its
            state dicts are those of the DistributedOptimizer, and its step() raises.
        model: The model whose gradients the optimizer uses.
        overlap: Whether each parameter is updated during backward(), as soon as all workers have its gradient,
            instead of in step(). This saves a pass over all gradients and overlaps the updates with computation. But
            no `.grad` remains after backward() to clip, unscale or read, and each step() needs exactly one averaging
            backward(). Settings are read at the beginning of backward(). Parameters that it does not use are not
            updated, even after zero_grad(set_to_none=False).
        max_grad_norm: Largest 2-norm of the averaged gradients over all of the optimizer's parameters. Longer
            gradients are scaled down to it, as by `torch.nn.utils.clip_grad_norm_`, but within the update. The
            reduction computes the norm without an additional pass over memory. After GradScaler it is the norm of the
            unscaled gradients. Write to the gradient itself: writes to its `.data` are not detected, because torch
            does not count them.
        on_nonfinite: Reaction to NaN or Inf in an averaged gradient. "ignore" updates regardless, as torch does.
            "raise" makes step() raise NonFiniteGradientError on every worker; it names the worker and the parameter.
            "skip" leaves parameters and state unchanged on every worker.
        staleness: Number of recent updates that the parameters of a forward may lack. With 0 they are exact.
            Otherwise every worker has copies, which it pulls again when they are older. With overlap=True, a worker
            waits for no update, and thus for no slower worker, before the end of its next forward. pull() and the
            model's state_dict() make copies exact; call one of them before evaluating.

    Raises:
        TypeError: If the model is not wrapped.
        ValueError: If memory devices cannot run an option of the optimizer, or it holds trainable parameters that
            are not the model's. Also if memory devices are to be kept and the optimizer lacks some of the
            model's trainable parameters or staleness is above 0, and if they have replicas and overlap is True.
        RuntimeError: If another DistributedOptimizer has some of its parameters.
        SchemaMismatchError: If workers construct different optimizers. A later step(), or backward() with
            overlap=True, raises it if workers differ in settings or have written different values to parameters.
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
                "max_grad_norm and on_nonfinite need all gradients before the first update, but overlap=True updates "
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
        self._part: RemotePart | None = None
        self._before_update: list[Callable[[], None]] = []
        self._has_warned = False
        self._refusal = -1  # number of the step pre-hook by which the given optimizer refuses step()
        self._share_groups()
        self._taken: dict[str, Any] = {}  # the state dict that is being loaded
        model.ensure_registered()
        rule = find_rule(optimizer)
        reason = _agreed_obstacle(optimizer, rule, model)
        if rule is None or reason:
            warnings.warn(
                f"{type(optimizer).__name__} runs on the workers, not in the memory devices: {reason}",
                stacklevel=2,
            )
            return
        _check_members(optimizer, model, self._remote.parts)
        _check_recovery(optimizer, model, self._remote, overlap=overlap, staleness=staleness)
        self._offload(rule)
        self._stand_in_for(optimizer)

    def _offload(self, rule: UpdateRule) -> None:
        """Moves all trainable parameters of the optimizer to the memory devices. Collective."""
        self._part = self._remote.offload(
            self._optimizer,
            rule,
            {parameter for _, parameter in _members(self._optimizer, self._model)},
            UpdateOptions(
                overlap=self._overlaps,
                measures=self._policy.needs_measures,
                staleness=self._staleness,
                before_backward=weakly(self._prepare_update),
            ),
            owner=weakref.ref(self),
            replaced=self._part,
        )
        self._not_held = _frozen_parameters(self._optimizer, self._model)

    def take_thawed(self) -> None:
        """Moves the optimizer's newly trainable parameters to the memory devices. Collective."""
        if self._part is None or len(_members(self._optimizer, self._model)) == len(self._part.named):
            return
        rule = find_rule(self._optimizer)
        reason = _agreed_obstacle(self._optimizer, rule, self._model)
        if rule is None or reason:
            raise ValueError(
                f"parameters were added to a {type(self._optimizer).__name__} that runs in the memory devices, but "
                f"these cannot update them: {reason}. Give them a separate optimizer"
            )
        _check_members(self._optimizer, self._model, self._remote.parts)
        _check_growth(self._remote)
        self._offload(rule)

    def run_on_workers(self) -> None:
        """Moves parameters and state from the memory devices back to the workers. Collective.

        Used by DistributedDataParallel.join(), because a worker without inputs makes no step.
        """
        if self._part is not None:
            part, self._part = self._part, None
            self._remote.take_back(part)

    def run_in_memory_devices_again(self, root: int) -> None:
        """Moves parameters and state to the memory devices again. Collective.

        Args:
            root: The worker that provides the state.
        """
        rule = find_rule(self._optimizer)
        assert self._model.session is not None
        assert rule is not None, "memory devices have run this optimizer"
        broadcast_state(self._model.session, self._optimizer, root=root)
        self._offload(rule)

    @property
    def _remote(self) -> RemoteOptimizers:
        """The model's optimizers in the memory devices, which run this one too."""
        remote = self._model.remote_optimizers
        assert remote is not None, "otherwise _obstacle() has a reason"
        return remote

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler passes scale and found_inf to step(); GradScaler reads it before it calls step()."""
        if self.overlaps:
            raise RuntimeError(
                "overlap=True has updated the parameters during backward() with gradients of the scaled loss, before "
                "GradScaler could unscale them. Pass overlap=False, or train in bfloat16 without a GradScaler"
            )
        return self._part is not None

    @property
    def runs_in_memory_devices(self) -> bool:
        """Whether memory devices run the update; False if the workers do, as usual."""
        return self._part is not None

    @property
    def remote_parameters(self) -> RemoteParameters | None:
        """Parameters and state in the memory devices; None if the optimizer runs on the workers."""
        return None if self._part is None else self._part.remote

    @property
    def offloaded(self) -> RemoteParameters | None:
        """The former name of remote_parameters."""
        return self.remote_parameters

    def keep_snapshots(self) -> None:
        """Makes snapshots copy their contents; called before any write to parameters or state except an update."""
        if self.remote_parameters is not None:
            self.remote_parameters.keep_snapshots()

    @property
    def state(self) -> MutableMapping[Any, Any]:
        """The state of each parameter, as torch's.

        If memory devices hold the state, this is a copy. The next update applies changes to it (assigning, removing,
        adding and writing in place) if every worker makes the same changes. Read `state` again after each step().

        Raises:
            RuntimeError: By the next update, if memory devices cannot store an added entry.
        """
        return self._optimizer.state if self.remote_parameters is None else self.remote_parameters.lend()

    @state.setter
    def state(self, state: MutableMapping[Any, Any]) -> None:
        if not hasattr(self, "_optimizer"):
            return  # torch's constructor is running: the state is that of the given optimizer
        if self.remote_parameters is None:
            self._optimizer.state = state
        else:
            self.remote_parameters.keep_snapshots()
            self.remote_parameters.adopt_state(state)

    def pull(self) -> None:
        """Waits for the last update and makes this worker's parameters exact; without staleness they always are."""
        if self._part is not None and self._part.cached is not None:
            self._part.cached.pull()

    @property
    def cache_statistics(self) -> CacheStatistics | None:
        """How often this worker could continue with its cached parameters; None without staleness."""
        cached = None if self._part is None else self._part.cached
        return None if cached is None else cached.statistics()

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        """The optimizer that was given."""
        return self._optimizer

    @property
    def gradient_norm(self) -> float | None:
        """2-norm of all gradients in the last step(), unscaled and before clipping; None if it was not requested."""
        return self._gradient_norm

    @property
    def remote_optimizers(self) -> RemoteOptimizers | None:
        """The optimizers of the model's memory devices; trainers may wrap the model itself. None without devices."""
        return self._model.remote_optimizers

    @property
    def is_kept(self) -> bool:
        """Whether parameters and state in the memory devices survive a crash of this worker."""
        return self._part is not None and self._remote.keeps_devices

    @property
    def recovered_step(self) -> int:
        """The last update that this restarted worker's parameters and state include; 0 if none were kept."""
        return 0 if self.remote_parameters is None else self.remote_parameters.recovered_step

    def before_update(self, callback: Callable[[], None]) -> None:
        """Registers a callback that runs in each step() that is not skipped, before memory devices begin the update.

        With overlap=True, it runs at the beginning of each backward() that averages.
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
            closure: Called once before the update, as torch's optimizers do. step() returns its result.

        Raises:
            RuntimeError: With overlap=True, if no averaging backward() has used some gradients; also if a parameter
                has a gradient but did not require one when the model was wrapped.
            NonFiniteGradientError: With on_nonfinite="raise", for NaN or Inf; nothing was updated on any worker.
        """
        if self._part is None:
            return self._step_on_worker(closure)
        # The given optimizer's hooks, because its step() is not called. torch calls the hooks of this one.
        for number, pre_hook in self._optimizer._optimizer_step_pre_hooks.items():
            if number != self._refusal:
                pre_hook(self._optimizer, (), {})
        loss = _called(closure)
        self._update(self._part)
        for post_hook in self._optimizer._optimizer_step_post_hooks.values():
            post_hook(self._optimizer, (), {})
        self._optimizer._opt_called = True  # otherwise schedulers warn about the order of calls
        return loss

    def _update(self, part: RemotePart) -> None:
        self._check_thawed()
        empty = part.remote.empty
        if self._overlaps:
            self._check_updated()
            self._remote.end_overlapped_step(part)
            empty.update()
            empty.drop_gradients()
            return
        self._warn_of_local_gradients(part)
        scale = self._gradient_scale(part)
        if scale is not None:
            part.remote.wait()
            self._prepare_update()
            self._remote.update(part, gradient_scale=scale)
            empty.update()

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state dict with a copy of the state; the bare optimizer can load it too.

        State is float32 for every parameter dtype. The state of a 16-bit parameter includes its master weights as
        "master", so that training continues with the same bits. torch's load_state_dict() rounds state to the
        parameter's dtype and does not use "master".
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = dict(self._optimizer.state_dict())
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = _replaced(state_dict, post_hook(self, state_dict))
        return state_dict

    def _stand_in_for(self, optimizer: torch.optim.Optimizer) -> None:
        """Redirects state dicts of the given optimizer to the state in the memory devices, for saving and loading.

        Its step() raises, because every worker would separately update the parameters that all share.
        """
        _STAND_INS[optimizer] = weakref.ref(self)
        refusal = _refusal_of_steps(self._remote)
        self._refusal = optimizer.register_step_pre_hook(refusal).id
        optimizer.register_state_dict_pre_hook(weakly(self._lend_state))
        optimizer.register_state_dict_post_hook(weakly(self._take_state_back))
        optimizer.register_load_state_dict_pre_hook(weakly(self._take_state))
        optimizer.register_load_state_dict_post_hook(weakly(self._adopt_state))

    def _lend_state(self, optimizer: torch.optim.Optimizer) -> None:
        if self.remote_parameters is not None:
            optimizer.state.update(self.remote_parameters.state())

    def _take_state_back(self, optimizer: torch.optim.Optimizer, _: dict[str, Any]) -> None:
        if self.remote_parameters is not None:
            optimizer.state.clear()

    def _take_state(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self.remote_parameters is None:
            return state_dict
        self._taken = state_dict
        return {**state_dict, "state": {}}  # torch would round state and copy it to the parameters' device

    def _adopt_state(self, optimizer: torch.optim.Optimizer) -> None:
        self._share_groups()
        if self.remote_parameters is not None:
            taken, self._taken = self._taken, {}
            self.remote_parameters.keep_snapshots()
            self.remote_parameters.adopt_state(_state_by_parameter(optimizer, taken))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this or of the bare optimizer. Every worker must load the same one.

        If it has no master weights for a 16-bit parameter, they are set to the parameter's value.
        """
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = _replaced(state_dict, pre_hook(self, state_dict))
        self._optimizer.load_state_dict(state_dict)
        self._share_groups()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters of the model, as torch's optimizers do. Collective if memory devices run the optimizer.

        Frozen parameters move to the memory devices in the first forward after requires_grad_(True).

        Raises:
            ValueError: If the parameters are not the model's, or memory devices cannot take them or are to be kept.
                Nothing was added.
            RuntimeError: If another DistributedOptimizer has the parameters. Nothing was added.
        """
        if not hasattr(self, "_optimizer"):  # torch's constructor is running
            super().add_param_group(param_group)
            return
        self._optimizer.add_param_group(param_group)
        if self._part is None:
            return
        try:
            self._model.average_thawed()
            _check_members(self._optimizer, self._model, self._remote.parts)
            self.take_thawed()
        except (ValueError, RuntimeError):
            if self._remote.runs(self._optimizer):  # nothing was moved
                self._optimizer.param_groups.pop()
            raise
        self._not_held = _frozen_parameters(self._optimizer, self._model)

    def _share_groups(self) -> None:
        # Both optimizers share the same objects, so that a scheduler works with either.
        self.param_groups = self._optimizer.param_groups

    def _gradient_scale(self, part: RemotePart) -> float | None:
        """The update's factor for gradients, equal on every worker; None if the update must be skipped."""
        # GradScaler sets both during step(). found_inf refers to averages, so it is equal on all workers.
        found_inf, loss_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and float(found_inf):
            self._gradient_norm = math.inf if self._policy.needs_measures else None
            return None
        unscale = 1.0 if loss_scale is None else 1.0 / float(loss_scale)
        if not self._policy.needs_measures:
            return unscale
        gradients = self._remote.measured_gradients(
            part,
            # GradScaler multiplies gradients by 1 when it searches for Inf.
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
                "overlap=True updates parameters in the backward() that averages gradients, but some gradients were "
                "not used by such a backward(). End each accumulation under no_sync() with a backward() outside of "
                "it, or pass overlap=False. torch.distributed.checkpoint, which takes a step with gradients of "
                "zeros, works once the training has taken a step."
            )

    def _warn_of_local_gradients(self, part: RemotePart) -> None:
        if part.gradients.has_local and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "the gradients come from a backward that did not average them: after a forward of the inner module, "
                "as the second backward of a forward (or of two), or under no_sync(). Memory devices update the "
                "parameters of all workers with the gradients of one. Add the losses and call backward() once, or "
                "call the model's average_gradients() before step(); if you average gradients yourself, ignore "
                "this warning",
                stacklevel=4,
            )

    def _check_thawed(self) -> None:
        for name, parameter in self._not_held:
            if parameter.grad is not None:
                raise RuntimeError(
                    f"parameter {name!r} has a gradient, but the wrapped model's forward has not run since "
                    "requires_grad_(True): the gradient was not averaged, and memory devices do not hold the "
                    "parameter yet. Call the model itself, not model.module"
                )


def _called(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _check_kinds(optimizer: object, model: object) -> None:
    """Raises TypeError if a DistributedOptimizer cannot be constructed from these arguments."""
    if not isinstance(model, DistributedDataParallel):
        compiled = isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel)
        raise TypeError(
            "DistributedOptimizer needs a model wrapped by coarse.torch.DistributedDataParallel, not a "
            f"{type(model).__name__}{'; pass the model that torch.compile was given' if compiled else ''}"
        )
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, DistributedOptimizer):
        raise TypeError(
            f"DistributedOptimizer replaces one of torch's optimizers, not a {type(optimizer).__name__}"
        )


def _obstacle(
    optimizer: torch.optim.Optimizer, rule: UpdateRule | None, model: DistributedDataParallel
) -> str:
    """The reason why the optimizer must run on the workers; "" if there is none."""
    if rule is None:
        return f"they support {KNOWN_OPTIMIZERS}, not {type(optimizer).__name__}"
    renormalised = find_renormalised(model.module)
    members = _members(optimizer, model)
    if not members:
        return "none of its parameters requires gradients yet"
    is_on_one_gpu = bool(common_gpu([parameter for _, parameter in members]))
    for name, parameter in members:
        if not parameter.is_cpu and not is_on_one_gpu:
            return f"parameter {name!r} is on {parameter.device}, neither in host memory nor all on one GPU"
        if parameter in renormalised:
            return f"the max_norm of parameter {name!r} makes forward change it, on each worker separately"
        if parameter not in model.sparse_parameters and isinstance(optimizer, torch.optim.SparseAdam):
            return f"parameter {name!r} has dense gradients, and SparseAdam updates only sparse parameters"
        if parameter in model.sparse_parameters and (reason := cannot_update_rows(optimizer)):
            return f"parameter {name!r}: {reason}"
        if parameter.is_complex() or DTYPE_NAMES[parameter.dtype] not in UPDATABLE_DTYPES:
            return (
                f"parameter {name!r} is {parameter.dtype}, but they update only {', '.join(UPDATABLE_DTYPES)}"
            )
    if model.remote_optimizers is None:
        return "a job of one worker has no memory devices"
    return model.remote_optimizers.cannot_offload([parameter for _, parameter in members])


def _agreed_obstacle(
    optimizer: torch.optim.Optimizer, rule: UpdateRule | None, model: DistributedDataParallel
) -> str:
    """As _obstacle(), on any worker. Collective."""
    reason = _obstacle(optimizer, rule, model)
    remote = model.remote_optimizers
    return reason if remote is None else remote.agree_on_obstacle(reason)


def _members(
    optimizer: torch.optim.Optimizer, model: DistributedDataParallel
) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters of the optimizer whose gradients the model averages."""
    held = {parameter for options in optimizer.param_groups for parameter in options["params"]}
    return [(name, parameter) for name, parameter in model.trained_parameters if parameter in held]


def _frozen_parameters(
    optimizer: torch.optim.Optimizer, model: DistributedDataParallel
) -> list[tuple[str, torch.nn.Parameter]]:
    """The optimizer's frozen parameters, which memory devices do not hold."""
    held = {parameter for options in optimizer.param_groups for parameter in options["params"]}
    trained = {parameter for _, parameter in model.trained_parameters}
    return [
        (name, parameter)
        for name, parameter in model.module.named_parameters()
        if parameter in held and parameter not in trained and parameter.numel()
    ]


def _replaced(given: dict[str, Any], by_hook: dict[str, Any] | None) -> dict[str, Any]:
    """The state dict that a hook returned; the given one if the hook returned None."""
    return given if by_hook is None else by_hook


def _check_recovery(
    optimizer: torch.optim.Optimizer,
    model: DistributedDataParallel,
    remote: RemoteOptimizers,
    *,
    overlap: bool,
    staleness: int,
) -> None:
    """Refuses what cannot go on where memory devices are kept, or have replicas, or several nodes lose workers."""
    if remote.keeps_devices and (left := len(model.trained_parameters) - len(_members(optimizer, model))):
        raise ValueError(
            "COARSE_KEEP_DEVICES needs one DistributedOptimizer of all trainable parameters of the model, but this "
            f"one lacks {left}: after a crash, parameters that others update would be of another step. Give it all "
            "of them (each parameter group may have its own settings), freeze the others before wrapping, or unset "
            "COARSE_KEEP_DEVICES"
        )
    if overlap and remote.replicates_devices:
        raise ValueError(
            "overlap=True cannot be combined with COARSE_REPLICAS: it updates parameters before the gradients of "
            "others are complete, so neither copy alone could finish a step; pass overlap=False, or unset "
            "COARSE_REPLICAS"
        )
    if overlap and remote.keeps_devices and model.sparse_parameters:
        raise ValueError(
            "overlap=True and COARSE_KEEP_DEVICES cannot be combined with sparse gradients: updates of tables cannot "
            "be undone; pass overlap=False, or make the embeddings dense (sparse=False)"
        )
    if model.sparse_parameters and remote.replicates_devices:
        raise ValueError(
            "COARSE_REPLICAS cannot be combined with sparse gradients: an update of a table changes few rows, but "
            "whole shards would be copied; make the embeddings dense (sparse=False), or unset COARSE_REPLICAS"
        )
    if staleness and remote.keeps_devices:
        raise ValueError(
            f"staleness={staleness} cannot be combined with COARSE_KEEP_DEVICES: the copies on workers are lost with "
            "them; pass staleness=0, or unset COARSE_KEEP_DEVICES"
        )
    if staleness and remote.goes_on_over_nodes:
        raise ValueError(
            f"staleness={staleness} cannot be combined with COARSE_MIN_WORKERS in a job of several nodes: no test "
            "shows that it works; pass staleness=0, or unset COARSE_MIN_WORKERS"
        )


def _refusal_of_steps(remote: RemoteOptimizers) -> Callable[..., None]:
    """Returns a hook that makes the given optimizer's step() raise while memory devices update its parameters."""
    reference = weakref.ref(remote)  # parameters may outlive the model

    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        alive = reference()
        if alive is not None and alive.runs(optimizer):
            raise RuntimeError(
                f"this {type(optimizer).__name__} runs in the memory devices; call step() of its "
                "DistributedOptimizer: optimizer = coarse.torch.DistributedOptimizer(optimizer, model)"
            )

    return refuse


def _state_by_parameter(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> dict[torch.nn.Parameter, dict[str, Any]]:
    """The state in `state_dict`, by parameter; `optimizer` has just loaded the other entries of `state_dict`."""
    numbers = [number for options in state_dict["param_groups"] for number in options["params"]]
    parameters = [parameter for options in optimizer.param_groups for parameter in options["params"]]
    state = state_dict["state"]
    return {p: state[number] for number, p in zip(numbers, parameters, strict=True) if number in state}


def _check_members(
    optimizer: torch.optim.Optimizer, model: DistributedDataParallel, parts: Sequence[RemotePart]
) -> None:
    """Refuses parameters that are not the model's, or that memory devices update for another optimizer."""
    held = {
        p for options in optimizer.param_groups for p in options["params"] if p.requires_grad and p.numel()
    }
    members = _members(optimizer, model)
    for part in parts:
        taken = {parameter for _, parameter in part.named} if part.optimizer is not optimizer else set()
        if names := [name for name, parameter in members if parameter in taken]:
            raise RuntimeError(
                f"parameter {names[0]!r}{f' and {len(names) - 1} more' if names[1:] else ''} of the model cannot "
                f"get a second DistributedOptimizer; the first one runs {type(part.optimizer).__name__}. Give each "
                "parameter to only one optimizer, or wrap the module again for another one"
            )
    if foreign := len(held - {parameter for _, parameter in members}):
        raise ValueError(
            f"the optimizer has {foreign} trainable parameter(s) whose gradients this model does not average: they "
            "are not in the module that was wrapped. Give them a separate optimizer"
        )


def _check_growth(remote: RemoteOptimizers) -> None:
    """Refuses later additions of parameters if memory devices are kept: restarted workers would not expect them."""
    if remote.keeps_devices:
        raise ValueError(
            "COARSE_KEEP_DEVICES cannot be combined with parameters added later to an optimizer in the memory "
            "devices: a restarted worker looks for the original ones. Wrap the model when all parameters to train "
            "require gradients, and give all of them to the optimizer; or unset COARSE_KEEP_DEVICES"
        )
