"""DistributedDataParallel: torch's data parallelism with gradients averaged by COARSE's memory devices."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.utils import _to_kwargs

from coarse.env import WorkerIdentity
from coarse.errors import SessionClosedError, SyncTimeoutError
from coarse.session import AnyTensorGroup, Session, WorldChange
from coarse.settings import Settings
from coarse.torch.ddp.agreement import check_same_tensors, describe
from coarse.torch.ddp.ddp_compat import LoggerFacade, ReducerFacade
from coarse.torch.ddp.module_hooks import OwnHook
from coarse.torch.ddp.options import (
    Devices,
    check_module,
    check_unsupported,
    find_devices,
    trainable_parameters,
)
from coarse.torch.ddp.state.awaited_values import AwaitedValues
from coarse.torch.ddp.state.buffers import BufferBroadcast, broadcast_tensors
from coarse.torch.ddp.state.replacement import Replacement, check_replaceable
from coarse.torch.ddp.state.state_dict import with_wrapper_prefix
from coarse.torch.ddp.uneven_inputs import UnevenInputsHook, check_joinable
from coarse.torch.ddp.unsupported import UnsupportedFeatures
from coarse.torch.gradients.embeddings import EmbeddingGradients
from coarse.torch.gradients.gradient_parts import DeviceOptimizer, GradientParts
from coarse.torch.gradients.hooks.bucket_hooks import BucketHook
from coarse.torch.gradients.hooks.comm_hooks import rounds_only, travel_dtype
from coarse.torch.gradients.registered_gradients import AveragingOptions
from coarse.torch.gradients.sparse_gradients import check_sparse_parameters, find_sparse_parameters
from coarse.torch.operations import operation, record_optimizer_steps
from coarse.torch.optimizer.remote_optimizers import RemoteOptimizers
from coarse.torch.process_group import choose_process_group
from coarse.torch.session import leave_sessions, metrics_of_default_group, session_of_group
from coarse.torch.weak_calls import weakly

_MIB = 1 << 20
_NO_VALUES = "the module was built on the meta device, so it has no values"
_DEFAULT_BUCKET_MIB = 25
_COPIED_SETTINGS = (
    "dim",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
    "forward_sync_buffers",
)


class DistributedDataParallel(UnsupportedFeatures):
    """Trains replicas of `module` on all workers of a process group, averaging their gradients.

    Takes the arguments of torch.nn.parallel.DistributedDataParallel, keeps its semantics, and passes `isinstance`
    checks against it. torch's class fills buckets and all-reduces them. This class pushes each gradient to the
    memory devices separately, as soon as it is ready, and pulls the averages at the end of backward.

    A large torch.nn.Embedding never has a separate gradient: backward adds the rows directly to the slot. With
    sparse=True only the rows that were looked up are transferred, and `.grad` is sparse as under torch's class.

    If worker 0 has the module in host memory, the other workers may build it on the meta device
    (`with torch.device("meta")`, accelerate's init_empty_weights()) and then need no memory for it. They receive
    worker 0's values through the memory devices when DistributedOptimizer is constructed. Without a
    DistributedOptimizer they receive them in the first forward with gradients, which all workers must then call.
    Buffers are copied at construction.

    All workers must wrap the same models in the same order. Construction is collective. If no process group exists,
    construction creates one from the launcher's variables. With a single worker, nothing is registered and there is
    no overhead.

    Differences from torch's class:
        - `gradient_as_bucket_view` is True by default: after backward, `.grad` is memory shared with the
          memory devices, and the next averaging overwrites it. With False, each gradient is stored twice.
        - A parameter that is in the graph but receives no gradient counts as unused.
        - Under find_unused_parameters, gradients that a parameter accumulated under no_sync are averaged even if no
          worker uses the parameter in the iteration that averages.
        - A layer that is thawed after wrapping (requires_grad_(True), on all workers) is averaged from the next
          forward on; torch's class never averages it.
        - A copy, deep or pickled, is registered in its first forward with gradients. That forward is collective, as
          wrapping is. A copy without a forward is not registered: one worker alone may keep it.

    Args:
        module: The module to train. Parameters and buffers named in its attribute
            `_ddp_params_and_buffers_to_ignore` are ignored.
        device_ids: None, or the module's one accelerator; inputs are moved there.
        output_device: As in torch; stored, otherwise unused.
        dim: As in torch; only used by scatter() and gather().
        broadcast_buffers: Older name of `forward_sync_buffers`, which also applies to the initial broadcast.
        init_sync: Whether to compare the models of all workers and copy worker 0's to the others.
        process_group: Workers to average with; default all.
        bucket_cap_mb, bucket_cap_mb_list, batched_grad_copy: Accepted; COARSE plans its own shards. The first
            one still sets where torch.compile splits graphs.
        find_unused_parameters: Whether a backward may leave parameters unused, possibly different ones on each
            worker.
        check_reduction: Accepted; no effect, as in torch.
        gradient_as_bucket_view: Whether `.grad` is the registered memory itself.
        static_graph: Whether all iterations use the same parameters equally often. Allows re-entrant and
            repeated checkpointing.
        delay_all_reduce_named_params, param_to_hook_all_reduce: Accepted; no gradient delays another, so these
            are averaged like all others.
        mixed_precision: Refused; use torch.autocast.
        device_mesh: One-dimensional mesh of the workers to average with.
        skip_all_reduce_unused_params: Accepted; parameters that no worker used are never transferred.
        forward_sync_buffers: Whether each forward starts with worker 0's buffers; default True.
        on_change: Not of torch's class: is told the old and the new world when workers are lost, leave or join, as by
            session.on_change(). Never called in a job of one worker.

    Raises:
        SchemaMismatchError: If the models of the workers differ; names the first difference.
        RendezvousError: If workers cannot find each other.
        ValueError: For unsupported arguments and modules; suggests an alternative.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, torch.nn.Parameter]] | None = None,
        param_to_hook_all_reduce: torch.nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        on_change: Callable[[WorldChange], object] | None = None,
    ) -> None:
        # torch's constructor would build a Reducer, whose hooks would average a second time.
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        broadcast_initially = True
        if forward_sync_buffers is None:
            forward_sync_buffers = broadcast_initially = broadcast_buffers is None or bool(broadcast_buffers)
        self._take_module(module, may_await_values=device_ids is None)
        check_unsupported(
            mixed_precision=mixed_precision,
            delayed=delay_all_reduce_named_params,
            delay_trigger=param_to_hook_all_reduce,
            parameters=self._module_parameters,
        )
        self._take_settings(
            find_devices(self._module_parameters, device_ids, output_device),
            dim=dim,
            bucket_cap_mb=bucket_cap_mb or _DEFAULT_BUCKET_MIB,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            batched_grad_copy=batched_grad_copy,
            forward_sync_buffers=forward_sync_buffers,
        )
        self.process_group = choose_process_group(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self._begin()
        if self._world_size > 1:
            self._register(init_sync=init_sync, broadcast_buffers=broadcast_initially)
            if on_change is not None:
                self._session.on_change(on_change)
        elif self._awaited.are_missing:
            raise ValueError(f"{_NO_VALUES}; a job of one worker cannot copy them from another one")

    def _take_module(self, module: torch.nn.Module, *, may_await_values: bool = False) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"DistributedDataParallel wraps a torch.nn.Module, not a {type(module).__name__}")
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._module_parameters = [
            parameter
            for name, parameter in module.named_parameters()
            if name not in self.parameters_to_ignore
        ]
        self._awaited = AwaitedValues(module if may_await_values else None, self.parameters_to_ignore)
        check_module(module, self._module_parameters)
        self.module = module
        self._find_trainable()
        self._assign_buffers()

    def _find_trainable(self) -> None:
        self._trainable = list(trainable_parameters(self.module, self.parameters_to_ignore))
        self._frozen = [
            (name, parameter)
            for name, parameter in self.module.named_parameters()
            if not parameter.requires_grad and name not in self.parameters_to_ignore
        ]
        self.sparse_parameters = find_sparse_parameters(self.module)
        """Parameters whose gradients are sparse."""

    def _take_settings(
        self,
        devices: Devices,
        *,
        dim: int,
        bucket_cap_mb: float,
        find_unused_parameters: bool,
        gradient_as_bucket_view: bool,
        static_graph: bool,
        skip_all_reduce_unused_params: bool,
        batched_grad_copy: bool,
        forward_sync_buffers: bool,
    ) -> None:
        self.device = devices.first
        self.device_type = devices.first.type
        self.device_ids, self.output_device = devices.device_ids, devices.output_device
        self.is_multi_device_module = len({parameter.device for parameter in self._module_parameters}) > 1
        self.use_side_stream_for_tensor_copies = self.device_type != "cpu"
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.mixed_precision = None
        # torch.compile reads this size and splits graphs at it, so that averaging overlaps with backward.
        self.bucket_bytes_cap = int(max(bucket_cap_mb, 1) * _MIB)
        self.broadcast_bucket_size = 250 * _MIB
        self.forward_sync_buffers = forward_sync_buffers

    def _begin(self) -> None:
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._divide_by_initial_world_size = True
        self._closed = False
        self.reducer = ReducerFacade(self)
        self.logger = LoggerFacade(self)
        self._world_size = dist.get_world_size(self.process_group)
        self._gradients: GradientParts | None = None
        self._remote_optimizers: RemoteOptimizers | None = None
        self._embeddings: EmbeddingGradients | None = None
        self._buffers_broadcast: BufferBroadcast | None = None
        self._has_hook = False
        self._may_run_out = False  # whether some workers may run out of inputs before others
        self._suspended: list[DeviceOptimizer] = []
        self._awaits_values = False
        self._replacement: Replacement | None = None

    def _register(self, *, init_sync: bool, broadcast_buffers: bool) -> None:
        shared = session_of_group(self.process_group)
        self._session = shared.session
        record_optimizer_steps(metrics_of_default_group)
        name = shared.next_model_name()
        check_replaceable(
            self._session.settings,
            num_models=shared.num_models,
            has_sparse_gradients=bool(self.sparse_parameters),
        )
        check_sparse_parameters(self._session, self._trainable, self.sparse_parameters)
        if init_sync:
            check_same_tensors(self._session, [describe(n, t) for n, t in self._named_states(buffers=True)])
        self._check_awaited(init_sync=init_sync)
        self._gradients = GradientParts(self._session, name, self._trainable, self._averaging_options())
        self._gradients.register_rest()
        self._remote_optimizers = RemoteOptimizers(
            self._session, name, self.module, self._gradients, weakly(self._receive_values)
        )
        self._embeddings = EmbeddingGradients(self.module, self._gradients.slot_of)
        if self.forward_sync_buffers and sum(buffer.numel() for buffer in self.modules_buffers):
            self._buffers_broadcast = BufferBroadcast(self._session, f"{name}/buffers", self.modules_buffers)
        if init_sync:
            awaits = self._awaits_values
            states = self._named_states(buffers=broadcast_buffers or awaits, parameters=not awaits)
            broadcast_tensors(self._session, [tensor for _, tensor in states])
            self._session.release_buffers()
        others = [] if self._buffers_broadcast is None else [self._buffers_broadcast.group]
        # Holds no reference to this wrapper. The session ends at exit, with all its groups.
        weakref.finalize(self, _drop, self._gradients, others, shared.dropped).atexit = False
        if self._session.settings.replaces_workers:
            self._replacement = Replacement(self._session, self._gradients, weakly(self._states))
        if self._session.is_newcomer:
            self._session.on_entry(weakly(self._enter))
        self._watch_saves()

    def _averaging_options(self) -> AveragingOptions:
        return AveragingOptions(
            gradient_as_view=self.gradient_as_bucket_view,
            find_unused=self.find_unused_parameters,
            static_graph=self.static_graph,
            sparse_parameters=self.sparse_parameters,
        )

    @property
    def tables(self) -> set[torch.nn.Parameter]:
        """The former name of sparse_parameters."""
        return self.sparse_parameters

    @property
    def trained_parameters(self) -> Sequence[tuple[str, torch.nn.Parameter]]:
        """Parameters whose gradients are averaged, with their names in the module."""
        return self._trainable

    @property
    def remote_optimizers(self) -> RemoteOptimizers | None:
        """This model's optimizers in the memory devices; None for one worker, and for an unregistered copy."""
        return self._remote_optimizers

    def keep_snapshots(self) -> None:
        """Makes snapshots copy their contents; called before any write to parameters except an update."""
        if self._gradients is not None:
            self._gradients.keep_snapshots()

    def _check_awaited(self, *, init_sync: bool) -> None:
        """Records whether any worker awaits values from worker 0. Collective.

        Raises:
            ValueError: On all workers, if worker 0 cannot provide the values.
        """
        is_missing, is_first = self._awaited.are_missing, dist.get_rank(self.process_group) == 0
        is_on_gpu = self.device_type != "cpu"
        flags = np.array([is_missing, is_missing and is_first, is_on_gpu and is_first], dtype=np.int32)
        self._session.all_reduce(flags, op="max")
        self._awaits_values = bool(flags[0])
        if flags[1]:
            raise ValueError(
                f"{_NO_VALUES} on worker 0, which sends its values to the others; build it with values there"
            )
        if self._awaits_values and flags[2]:
            raise ValueError(
                f"{_NO_VALUES} on some worker, but worker 0 has it on a GPU; build it the same way on all workers"
            )
        if self._awaits_values and not init_sync:
            raise ValueError(
                f"{_NO_VALUES} on some worker, and init_sync=False prevents copying them from worker 0"
            )

    def _receive_values(self, but: Collection[torch.nn.Parameter] = ()) -> None:
        """Copies worker 0's parameters to workers that built theirs on the meta device. Collective if any did."""
        if not self._awaits_values:
            return
        there = set(but)
        states = self._named_states(buffers=False)
        broadcast_tensors(self._session, [parameter for _, parameter in states if parameter not in there])
        self._session.release_buffers()
        self._awaits_values = False
        self._awaited.release()

    def _watch_saves(self) -> None:
        """Blocks saving while parameters may contain unaveraged gradients, and loading that replaces parameters.

        A GPU may already have updated parameters with gradients that a lost memory device did not average.
        """
        reference = weakref.ref(self)  # the module may outlive this wrapper
        self.module.register_state_dict_pre_hook(OwnHook(lambda: _confirm_averages(reference)))
        self.module.register_load_state_dict_post_hook(OwnHook(lambda: _check_parameters(reference)))

    def check_parameters(self) -> None:
        """Raises RuntimeError if the module's parameters were replaced after wrapping: they would not be averaged."""
        if self._closed:
            return
        held = set(self.module.parameters())
        replaced = [name for name, parameter in self._trainable if parameter not in held]
        if replaced:
            raise RuntimeError(
                f"parameter {replaced[0]!r}{f' and {len(replaced) - 1} more' if replaced[1:] else ''} of the model "
                "changed to another tensor after wrapping, as by load_state_dict(assign=True): neither averages nor "
                "updates reach the new ones. Load without assign, or wrap the module again"
            )

    def ensure_registered(self) -> None:
        """Registers a copy of a wrapped model for averaging. Collective, as wrapping is. Idempotent."""
        if self._world_size > 1 and self._gradients is None:
            self._register(init_sync=True, broadcast_buffers=self.forward_sync_buffers)

    def _named_states(self, *, buffers: bool, parameters: bool = True) -> list[tuple[str, torch.Tensor]]:
        """Parameters and buffers that must be equal on all workers at the start."""
        states = list(self.module.named_parameters()) if parameters else []
        if buffers:
            states += self.module.named_buffers()
        return [(name, tensor) for name, tensor in states if name not in self.parameters_to_ignore]

    def close(self) -> None:
        """Stops averaging and releases the registered memory. Idempotent; all workers should call it.

        After the last reference is dropped, wrapping the next model has the same effect. The module remains usable.
        """
        self._closed = True
        if self._gradients is not None:
            self._gradients.close()
            if self._buffers_broadcast is not None:
                self._buffers_broadcast.group.close()

    def average_gradients(self) -> None:
        """Averages the parameters' current gradients in place, as the end of a backward does. Collective.

        Call it for gradients that did not trigger a hook: those of a replayed CUDA graph that was captured under
        no_sync(), and those that the caller writes to `.grad`. A parameter without a gradient on this worker
        contributes nothing; if other workers have a gradient for it, this worker receives their average.

        Raises:
            RuntimeError: If the optimizer updates during backward, or a backward is unfinished.
        """
        self.ensure_registered()
        if self._gradients is not None:
            self._gradients.average()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Rounds gradients before transfer, or replaces averaging by a user-defined hook. Collective.

        With torch's fp16_compress_hook and bf16_compress_hook, memory devices average rounded gradients. This halves
        the transferred bytes and the memory of slots. `.grad` then has separate memory, and the averages are rounded
        twice. torch's allreduce_hook changes nothing. Any other hook, such as torch's powerSGD_hook, receives buckets
        as under torch's class and averages them in place of the memory devices, with its own process group. Buckets
        contain parameters from the last to the first, in every iteration. With a hook, no optimizer runs in the
        memory devices; COARSE_NODE_COMPRESSION sends less between nodes with such an optimizer, too.

        Raises:
            TypeError: If `hook` is not callable.
            ValueError: If the model has sparse gradients and the hook averages.
            RuntimeError: If the model already has a hook or an optimizer in the memory devices, or a backward is
                unfinished.
        """
        if not callable(hook):
            raise TypeError(
                f"a communication hook is called with its state and a bucket; {hook!r} is not callable"
            )
        if rounds_only(hook):
            return self._use_comm_hook(dtype=travel_dtype(hook))
        if self.sparse_parameters:
            raise ValueError(
                "a communication hook receives dense gradients, but the model has layers with sparse=True; build "
                "them with sparse=False, or use fp16_compress_hook or bf16_compress_hook"
            )
        self._use_comm_hook(hook=BucketHook(call=hook, state=state, bucket_bytes=self.bucket_bytes_cap))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._use_comm_hook(dtype=travel_dtype(comm_hook_type))

    def _use_comm_hook(self, *, dtype: torch.dtype | None = None, hook: BucketHook | None = None) -> None:
        if self._has_hook:
            raise RuntimeError(
                "this model already has a communication hook; wrap the module again to use another one"
            )
        if self._gradients is not None and self._gradients.remote_parts:
            raise RuntimeError(
                "this model's optimizer runs in the memory devices, which need gradients in the dtype of the "
                "parameters. To send less between nodes, set COARSE_NODE_COMPRESSION to bf16, fp16 or int8, which "
                "works with such an optimizer. For another hook, register it first, and the optimizer runs on the "
                "workers"
            )
        self.ensure_registered()
        self._has_hook = True
        if (dtype or hook) is not None and self._gradients is not None:
            self._gradients.average_by(dtype=dtype, hook=hook)

    # Forward.

    @torch._disable_dynamo(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module; the backward of its output averages gradients."""
        if self._world_size == 1 and not self.device_ids and not self._join_config.enable:
            return self.module(*inputs, **kwargs)
        with operation("forward"):
            inputs, kwargs = self._before_forward(inputs, kwargs)
            with self._inside_ddp_forward(), self._gradients_in_place():
                output = self.module(*inputs, **kwargs)
            self._after_forward(output)
        return output

    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def _before_forward(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._closed:
            raise SessionClosedError(
                "this DistributedDataParallel was closed; use its .module, or wrap it again"
            )
        if torch.is_grad_enabled():
            self._receive_values()
        self._awaited.check()
        if torch.is_grad_enabled():
            self._leave_if_asked()
            if self.require_backward_grad_sync:
                self.ensure_registered()
                self.average_thawed()
            self._begin_step()
        if self._gradients is not None:
            self._gradients.check()
            if torch.is_grad_enabled():
                self._gradients.check_finished()
            self._gradients.read_cached()
        joining = self._join_config.enable
        pending = Join.notify_join_context(self)
        if pending is not None:
            pending.wait()
        if joining and not self._join_config.throw_on_early_termination:
            self.run_optimizers_on_workers()
        if self.will_sync_module_buffers():
            self.broadcast_module_buffers(self.agree_on_rank(candidate=True) if joining else 0)
        if joining:
            self.agree_on_averaging(wants=self.require_backward_grad_sync)
        if not self.device_ids:
            return inputs, kwargs
        device = torch.device(self.device_type, self.device_ids[0])
        moved, moved_kwargs = _to_kwargs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)
        return moved[0], moved_kwargs[0]

    def _leave_if_asked(self) -> None:
        """Ends this worker if it is asked to leave, and none of its gradients waits for the average.

        Raises:
            SystemExit: In that case, with code 0, for the script's handlers of its end.
        """
        if self._gradients is None or not self._session.is_asked_to_leave or self._gradients.is_expecting:
            return
        if self.require_forward_param_sync or not self._gradients.has_local:
            leave_sessions()
            raise SystemExit(0)

    def _begin_step(self) -> None:
        """Lets newcomers take part from now on, if the job allows it and the last step has updated."""
        if self._replacement is None:
            return
        if self._replacement.begin_step() and self._buffers_broadcast is not None:
            self._buffers_broadcast.note_members(self._session.members)

    def _enter(self) -> None:
        """Takes over the training from the members: this newcomer has become one. Collective."""
        assert self._replacement is not None, "only a session that replaces workers has newcomers"
        self._replacement.enter()
        self._awaits_values = False
        self._awaited.release()

    def _states(self) -> list[torch.Tensor]:
        """Parameters and buffers, without ignored ones."""
        return [tensor for _, tensor in self._named_states(buffers=True)]

    def average_thawed(self) -> None:
        """Registers the gradients of thawed layers, which were frozen before. Collective if any layer was thawed.

        Raises:
            RuntimeError: Within join(), where a worker without inputs would not participate.
            SchemaMismatchError: If workers have thawed different layers; names the first difference.
            SyncTimeoutError: If another worker has thawed none.
        """
        thawed = [name for name, parameter in self._frozen if parameter.requires_grad]
        if not thawed or self._gradients is None:
            return
        if self._join_config.enable and self._may_run_out:
            raise RuntimeError(
                f"parameter {thawed[0]!r} requires gradients now, but did not when the model was wrapped; within "
                "join() a worker without inputs could not register it. Call requires_grad_(True) and run a forward "
                "before join()"
            )
        self._find_trainable()
        try:
            check_sparse_parameters(self._session, self._trainable, self.sparse_parameters)
            check_same_tensors(self._session, [describe(n, t) for n, t in self._named_states(buffers=False)])
        except SyncTimeoutError as error:
            raise SyncTimeoutError(
                f"parameter {thawed[0]!r}{f' and {len(thawed) - 1} more' if thawed[1:] else ''} require gradients on "
                "this worker now, but did not before, and another worker did not register them. Call "
                f"requires_grad_(True) on all workers before the same forward: {error}"
            ) from error
        self._gradients.take_thawed(self._trainable, self.sparse_parameters)
        for optimizer in self._device_optimizers():
            optimizer.take_thawed()

    def _gradients_in_place(self) -> contextlib.AbstractContextManager[None]:
        averages = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self._embeddings is None or not averages:
            return contextlib.nullcontext()
        return self._embeddings.attached()

    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def _after_forward(self, output: Any) -> None:
        self.prepare_for_backward(output)

    def prepare_for_backward(self, output: Any) -> None:
        """Makes the next backward through `output` average gradients, unless under no_sync."""
        averages = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.require_forward_param_sync = averages
        if averages and self._gradients is not None:
            self._gradients.expect(output)

    # Buffers.

    @property
    def session(self) -> Session | None:
        """The session of the workers and their memory devices, with its decisions; None in a job of one worker."""
        self.ensure_registered()
        return self._session if self._world_size > 1 else None

    @property
    def broadcast_buffers(self) -> bool:
        """Whether each forward starts with worker 0's buffers."""
        return bool(self.forward_sync_buffers)

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward starts with a broadcast of buffers; False after a forward without averaging."""
        return (
            self.require_forward_param_sync
            and bool(self.forward_sync_buffers)
            and self._buffers_broadcast is not None
        )

    def broadcast_module_buffers(self, root: int) -> None:
        """Overwrites the buffers of all workers with those of worker `root`. Collective."""
        self._assign_buffers()
        if self._buffers_broadcast is not None and not self._session.is_newcomer:
            self._buffers_broadcast.run(self.modules_buffers, root=root)

    def _assign_buffers(self) -> None:
        # Buffers are looked up before each use, because modules may replace them.
        self.named_module_buffers = {
            name: buffer
            for name, buffer in self.module.named_buffers()
            if name not in self.parameters_to_ignore
        }
        self.modules_buffers = list(self.named_module_buffers.values())

    # Uneven inputs. `no_sync`, `join`, `scatter`, `gather` and `to_kwargs` are torch's.

    def join_hook(self, **kwargs: Any) -> UnevenInputsHook:
        """Returns the hook that torch.distributed.algorithms.join runs on a worker without further inputs."""
        if self._gradients is not None and self._gradients.options.hook is not None:
            raise ValueError(
                "join() cannot be combined with a communication hook that averages: a worker without inputs would "
                "not call it. Give all workers the same number of batches"
            )
        if (session := self.session) is not None and session.settings.least_workers:
            raise ValueError(
                "join() asks all workers through torch's own process group, which fails when one is lost, but "
                "COARSE_MIN_WORKERS lets the job go on then. Give all workers the same number of batches, or unset it"
            )
        remote = self._remote_optimizers
        check_joinable(
            remote_parameters=set() if self._gradients is None else self._gradients.updated_parameters,
            has_sparse_gradients=bool(self.sparse_parameters),
            keeps_devices=remote is not None and remote.keeps_devices,
        )
        self.ensure_registered()
        self._may_run_out = True
        if self._gradients is not None:
            self._gradients.expect_uneven_inputs()
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return UnevenInputsHook(self, divide_by_initial_world_size=self._divide_by_initial_world_size)

    def run_optimizers_on_workers(self) -> None:
        """Moves optimizers from the memory devices to the workers until resume_optimizers(). Collective; idempotent.

        Necessary within join(), because a worker without inputs makes no step.
        """
        if not self._may_run_out or self._gradients is None or self._suspended:
            return
        self._suspended = self._device_optimizers()
        for optimizer in self._suspended:
            optimizer.run_on_workers()
        self._gradients.expect_uneven_inputs()

    def resume_optimizers(self, root: int) -> None:
        """Moves the optimizers back to the memory devices, with the state of worker `root`. Collective."""
        self._may_run_out = False
        suspended, self._suspended = self._suspended, []
        for optimizer in suspended:
            optimizer.run_in_memory_devices_again(root)

    def _device_optimizers(self) -> list[DeviceOptimizer]:
        owners = [] if self._gradients is None else [part.owner() for part in self._gradients.remote_parts]
        return [owner for owner in owners if owner is not None]

    def agree_on_rank(self, *, candidate: bool) -> int:
        """Returns the highest rank that is a candidate. Collective."""
        vote = torch.tensor([dist.get_rank(self.process_group) if candidate else -1], device=self.device)
        self._vote(vote, dist.ReduceOp.MAX)
        return int(vote.item())

    def agree_on_averaging(self, *, wants: bool) -> bool:
        """Returns whether any worker averages gradients in this iteration. Collective."""
        vote = torch.tensor([float(wants)], device=self.device)
        self._vote(vote, dist.ReduceOp.SUM)
        return bool(vote.item())

    def _vote(self, vote: torch.Tensor, op: Any) -> None:
        """Reduces a vote in place. Its time-out is COARSE_TIMEOUT_S, not the process group's."""
        timeout_s = Settings.from_environment().timeout_s
        work = dist.all_reduce(vote, op=op, group=self.process_group, async_op=True)
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise SyncTimeoutError(
                f"worker {dist.get_rank(self.process_group)}: not all workers reported within {timeout_s:.1f} s "
                f"whether they have inputs left: {error}. Each must enter join(); one may be lost or stopped."
            ) from error

    def shadow_averaging(self, *, divide_by_initial_world_size: bool) -> None:
        """Participates in one averaging without gradients."""
        if self._gradients is not None:
            self._gradients.shadow(divide_by_initial_world_size=divide_by_initial_world_size)

    def broadcast_model(self, root: int) -> None:
        """Overwrites parameters and synchronised buffers with those of worker `root`. Collective."""
        if self._gradients is not None:
            self._gradients.finish_shadow()
            states = self._named_states(buffers=bool(self.forward_sync_buffers))
            broadcast_tensors(self._session, [tensor for _, tensor in states], root=root)

    # Saving, loading and copying.

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copies belong to the default process group, as with torch's class.

        Raises:
            RuntimeError: If this model belongs to another process group.
        """
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "a copy of a DistributedDataParallel would use the default process group, but this one uses "
                "another; copy or pickle model.module, and wrap the copy"
            )
        if self._awaited.are_missing:
            raise ValueError(f"{_NO_VALUES} yet, and cannot be copied")
        if self._gradients is not None:
            self._gradients.wait()
        settings = {name: getattr(self, name) for name in _COPIED_SETTINGS}
        settings["bucket_cap_mb"] = self.bucket_bytes_cap / _MIB
        devices = (self.device_ids, self.output_device)
        own = vars(torch.nn.Module()).keys() - {"_parameters", "_buffers", "_modules"}
        return (
            _copy_of,
            (type(self), self.module, devices, settings),
            {name: vars(self)[name] for name in own},
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads a state dict of this wrapper, or of the bare module (keys without "module.").

        Raises:
            ValueError: With assign=True, which would replace the registered parameters.
        """
        if assign:
            raise ValueError(
                "load_state_dict(assign=True) would replace the registered parameters; "
                "use assign=False, or load into the module before wrapping it"
            )
        state_dict = with_wrapper_prefix(state_dict, own_keys=self.state_dict().keys())
        return super().load_state_dict(state_dict, strict=strict)

    # Private methods of torch's class that libraries call.

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return self.logger.data()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise ValueError(f"the sample rate must be at least 1, not {sample_rate}")

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("static_graph is already set", stacklevel=2)
            return
        self.static_graph = True
        if self._gradients is not None:
            self._gradients.use_static_graph()

    def _check_reducer_finalized(self) -> None:
        if self._gradients is not None:
            self._gradients.check_finished()

    def _remove_autograd_hooks(self) -> None:
        if self._gradients is not None:
            self._gradients.remove_hooks()


def _copy_of(
    kind: type[DistributedDataParallel],
    module: torch.nn.Module,
    devices: tuple[Sequence[Any] | None, Any],
    settings: dict[str, Any],
) -> DistributedDataParallel:
    """Returns a wrapper of a copied module; it is registered when it first averages.

    Raises:
        RuntimeError: In a job of several workers without a process group, because the process that unpickles may not
            be a worker.
    """
    if not dist.is_initialized() and WorkerIdentity.from_environment().world_size > 1:
        raise RuntimeError(
            "unpickling a DistributedDataParallel needs a process group: call "
            "torch.distributed.init_process_group() first; in processes without one, such as those of a "
            "DataLoader, pickle model.module instead"
        )
    model = kind.__new__(kind)
    torch.nn.Module.__init__(model)
    Joinable.__init__(model)
    model._take_module(module)
    model._take_settings(find_devices(model._module_parameters, *devices), **settings)
    model.process_group = choose_process_group(None, None)
    model._begin()
    return model


def _check_parameters(reference: weakref.ref[DistributedDataParallel]) -> None:
    """Raises if the module's parameters were replaced after wrapping."""
    if (model := reference()) is not None:
        model.check_parameters()


def _confirm_averages(reference: weakref.ref[DistributedDataParallel]) -> None:
    model = reference()
    if model is not None and model._gradients is not None and not model._closed:
        model._gradients.confirm()


def _drop(
    gradients: GradientParts,
    others: Sequence[AnyTensorGroup],
    dropped: deque[Callable[[], object]],
) -> None:
    """Runs when a wrapper is deleted, in any thread.

    Args:
        gradients: Its gradients.
        others: Its other registered groups.
        dropped: As for GroupSession.
    """
    gradients.remove_hooks()
    gradients.release_parameters()
    # A worker must not leave before the update is complete, because workers that have not pushed yet still need it.
    dropped.extend([gradients.finish_updates, gradients.close_groups, *(group.close for group in others)])
