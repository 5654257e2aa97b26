"""Averages gradients while the backward pass runs: hooks push each one as soon as it is ready.

One backward goes through these states. A forward sets `expecting` if its gradients will be averaged:

    forward -> expecting -> (first gradient, or gradient of an output) armed -> ... hooks push ...
            -> end of backward: push the rest -> pull all, `.grad` holds averages -> not expecting

Gradients that arrive while not expecting (under no_sync, or from a second backward of one forward) accumulate
locally, as in torch's DDP.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from coarse.client.tensor_group import TensorGroup, UpdateKind
from coarse.session import Session
from coarse.timeline import recorder
from coarse.torch.ddp.outputs import find_tensors
from coarse.torch.ddp.shared_parameters import averagers_of
from coarse.torch.ddp.static_graph import StaticGraph
from coarse.torch.gradients import gradient_errors
from coarse.torch.gradients.gradient_policy import MeasuredGradient
from coarse.torch.gradients.hooks.autograd_callbacks import (
    at_end,
    current_backward,
    finish_in_order,
    may_accumulate,
)
from coarse.torch.gradients.layout import same_memory
from coarse.torch.gradients.measures import fingerprints, measure_gradient
from coarse.torch.gradients.paths.slot_window import SlotWindow
from coarse.torch.gradients.registered_gradients import AveragingOptions, OffloadOptions, RegisteredGradients
from coarse.torch.gradients.used_up_gradients import UsedUpGradient
from coarse.torch.operations import is_profiled, operation
from coarse.torch.optimizer.remote_parameters import RemoteParameters
from coarse.torch.optimizer.remote_updates import RemoteUpdates

_LEAST_WAITING_BYTES = 16 << 20  # smallest bound on the gradients that may wait for slots

# Registrations are collective, so workers create shared models in the same order.
_places = itertools.count()


class GradientSynchroniser:
    """The gradients of one wrapped model, registered with the memory devices.

    Gradients are matched between workers by parameter, never by order of arrival. Hooks may run in any autograd
    thread; a lock admits one at a time.

    Args:
        session: The session to register with; registration is collective.
        name: Name of the registration, the same on every worker.
        parameters: Trainable parameters with their names, none twice, none empty, in the same order on every
            worker.
        options: How they are averaged.
        offload: How an optimizer in the memory devices uses them; None without one.

    Raises:
        ValueError: If a parameter's dtype cannot be averaged, or gradients are sparse and rows cannot be transferred.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        options: AveragingOptions,
        offload: OffloadOptions | None = None,
    ) -> None:
        self._rank = session.identity.rank
        self.named = parameters
        """The parameters with their names."""
        self._names = [parameter_name for parameter_name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        registered = RegisteredGradients(session, name, parameters, options, offload)
        self.group, self._path, self._sparse = registered.group, registered.path, registered.sparse
        del registered  # tracebacks from imports by torch.compiler.disable() may keep this frame alive
        self._failpoints = session.failpoints
        self._recorded = (
            self.group if recorder.is_recording() and isinstance(self.group, TensorGroup) else None
        )
        self._is_profiled = False  # whether torch's profiler recorded the last forward
        self._backward_began_ns = 0
        self._has_failpoints = bool(session.failpoints)
        self._updates: RemoteUpdates | None = None
        self._updates_in_backward: RemoteUpdates | None = None  # the same object, if backward updates
        self._used_up: list[UsedUpGradient] = []  # one per parameter, in that case
        self._changes_in_backward = False  # whether this worker's own parameters change then
        self._kind = UpdateKind.MEASURE if offload is not None and offload.measures else UpdateKind.NONE
        self._delivered: list[tuple[int, int] | None] = []
        self._index_of = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        shares_slots = offload is not None and offload.shares_slots
        self._turns = self._open_window() if shares_slots else None
        self._find_unused = options.find_unused
        self._static = StaticGraph(len(parameters)) if options.static_graph else None
        self._lock = threading.Lock()
        self._expecting = False
        self._armed_in: int | None = None  # number of the armed backward
        self._is_shadowing = False
        self.has_local = False
        """Whether `.grad` holds local gradients: from a backward that did not average, with no averaging since."""
        self._restart()
        self._averagers = [averagers_of(parameter) for parameter in self._parameters]
        self.shares_parameters = False
        """Whether another object has averaged the gradient of one of these parameters while this one did."""
        self._join_averagers()
        self.handles = self._register_hooks()
        self._untraced_on_output = torch.compiler.disable(self._on_output)
        self._untraced_end = torch.compiler.disable(self._end_of_backward)
        self._untraced_finish = torch.compiler.disable(self._finish_backward)
        self._place = next(_places)

    def _open_window(self) -> SlotWindow:
        assert isinstance(self.group, TensorGroup)
        return SlotWindow(
            self.group,
            self._path,
            functools.partial(self._path.send, kind=UpdateKind.UPDATE),
            most_waiting_bytes=self._most_waiting_bytes(self.group),
        )

    def _most_waiting_bytes(self, group: TensorGroup) -> int | None:
        """Largest number of gradient bytes that may wait for slots: half the slots' size. On GPUs, streams wait."""
        if not all(parameter.is_cpu for parameter in self._parameters):
            return None
        window_bytes = max(end for _, end in map(group.slot, range(len(self._parameters))))
        return max(_LEAST_WAITING_BYTES, window_bytes // 2)

    def _join_averagers(self) -> None:
        for averagers in self._averagers:
            for other in averagers:
                other.shares_parameters = self.shares_parameters = True
            averagers.add(self)

    def _register_hooks(self) -> list[RemovableHandle]:
        return [
            # Not traced if a compiled user function calls backward().
            parameter.register_post_accumulate_grad_hook(
                torch.compiler.disable(functools.partial(self._on_gradient, index))
            )
            for index, parameter in enumerate(self._parameters)
        ]

    def update(
        self,
        remote: RemoteParameters,
        *,
        before_backward: Callable[[], object] | None,
        is_stale: bool,
    ) -> RemoteUpdates:
        """From now on, memory devices update these parameters by their gradients.

        Args:
            remote: The parameters.
            before_backward, is_stale: As for RemoteUpdates. If backward updates, no `.grad` remains.
        """
        self._updates = RemoteUpdates(
            remote,
            self._path,
            self._sparse,
            self._failpoints,
            before_backward=before_backward,
            is_stale=is_stale,
        )
        if before_backward is not None:
            self._updates_in_backward = self._updates
            self._changes_in_backward = not is_stale
            self._used_up = [UsedUpGradient(parameter) for parameter in self._parameters]
            self._kind = UpdateKind.UPDATE
        return self._updates

    def end_step(self) -> None:
        """Permits the next backward to update."""
        if self._updates_in_backward is not None:
            self._updates_in_backward.is_step_due = False
        self._drop_used_up()

    def reserve(self) -> None:
        """Allocates the memory of the slots before the first push. Later calls do nothing.

        Raises:
            OutOfDeviceMemoryError: If the memory is not available.
        """
        if isinstance(self.group, TensorGroup):
            self.group.reserve_slots()

    def synchronize(self) -> None:
        """Waits for the averages of all pushed gradients."""
        self._path.synchronize()

    @property
    def num_updates(self) -> int:
        """Number of updates of the optimizer in the memory devices, including a running one."""
        return 0 if self._updates is None else self._updates.count

    def finish_update(self) -> int:
        """Waits for the updates that this worker has pushed; returns their number."""
        return 0 if self._updates is None else self._updates.finish()

    def measured(self, *, num_changes: int = 0, are_unscaled: bool = False) -> list[MeasuredGradient]:
        """The existing averaged gradients of the last backward, as measured by the memory devices.

        Gradients that were replaced or changed since then are measured on this worker.

        Args:
            num_changes: Number of in-place changes that torch counts for a gradient with unchanged values.
            are_unscaled: Whether GradScaler has changed them; torch may not count this change.
        """
        assert isinstance(self.group, TensorGroup)
        self._path.synchronize()
        gradients = [parameter.grad for parameter in self._parameters]
        if not are_unscaled and fingerprints(gradients, num_changes) == self._delivered:
            return [
                MeasuredGradient(
                    name=name,
                    sum_of_squares=measure.sum_of_squares,
                    first_nonfinite=measure.first_nonfinite,
                )
                for name, gradient, measure in zip(self._names, gradients, self.group.measures(), strict=True)
                if gradient is not None
            ]
        return [
            measure_gradient(name, gradient)
            for name, gradient in zip(self._names, gradients, strict=True)
            if gradient is not None
        ]

    def slot_of(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """A new tensor over the slot of `parameter`, for a backward that writes the whole gradient there.

        None if the gradient will not be averaged, a part of it has arrived already, its slot is busy, or other code
        may keep a reference to it.
        """
        index = self._index_of.get(id(parameter), -1)
        if index < 0 or parameter.grad is not None or parameter._backward_hooks:
            return None
        if not self._path.can_write_in_place(index):
            return None
        with self._lock:
            if not self._expecting or self._is_shadowing or self._pushed[index] or self._handed_out[index]:
                return None
            if self._turns is not None and not self._turns.is_free(index):
                return None
            self._handed_out[index] = 1
        return same_memory(self._path.slot(index))

    def use_static_graph(self) -> None:
        """Counts each gradient's arrivals in the next iteration, and relies on the counts from then on."""
        if self._static is None:
            self._static = StaticGraph(len(self._parameters))

    def check(self) -> None:
        """Raises errors on a GPU since the last call; called before each forward."""
        self._path.check()

    def confirm(self) -> None:
        """Raises if gradients that were not averaged have updated parameters since the last forward; may wait."""
        self._path.confirm()

    def check_finished(self) -> None:
        """Called before gradients are averaged or used.

        Raises:
            RuntimeError: If gradients of the previous backward are incomplete; names the parameters and the
                remedies.
        """
        if self.has_begun and (missing := self.missing()):
            raise gradient_errors.unfinished(self._rank, missing, num_parameters=len(self._names))

    @property
    def has_begun(self) -> bool:
        """Whether a gradient has arrived since the last forward whose backward averages."""
        return self._num_pushed > 0

    def missing(self) -> list[str]:
        """Names of the parameters whose gradients have not arrived yet."""
        if not self._expecting:
            return []
        return [name for name, pushed in zip(self._names, self._pushed, strict=True) if not pushed]

    @property
    def is_expecting(self) -> bool:
        """Whether a forward has been made whose backward averages, and the averages are not there yet."""
        return self._expecting

    @property
    def updates_in_backward(self) -> bool:
        """Whether memory devices update the parameters during backward, so that no gradients remain."""
        return self._updates_in_backward is not None

    def expect(self, outputs: object) -> None:
        """Prepares averaging in the next backward; called after its forward.

        Args:
            outputs: Result of forward(). Its tensors serve to detect the end of the outermost backward, also if
                checkpointing runs nested ones.

        Raises:
            RuntimeError: As check_finished(). Possible without a forward before, as with accelerate's
                trigger_sync_in_backward().
        """
        self.check_finished()
        self.finish_update()
        self.reserve()
        self._restart()
        self._armed_in = None
        self._expecting = True
        self._is_profiled = is_profiled()
        self._put_hooks_last()
        if self._static is not None:
            self._static.start_iteration()
        for tensor in find_tensors(outputs):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._untraced_on_output)

    def average(self) -> None:
        """Averages the current `.grad` of each parameter in place; None contributes nothing. Collective.

        Raises:
            RuntimeError: If an optimizer updates during backward, or as check_finished().
        """
        if self._updates_in_backward is not None:
            raise gradient_errors.updated_in_backward(self._rank)
        self.check_finished()
        self.finish_update()
        self.reserve()
        gradients = [parameter.grad for parameter in self._parameters]
        with self._lock:
            self._restart()
            for index, gradient in enumerate(gradients):
                if gradient is None:
                    self._absent.add(index)
                if gradient is not None and index in self._sparse:
                    self._sparse.hold(index, gradient)
                else:
                    self._path.send(index, self._kind)
            self._path.flush()
            self._push_sparse_gradients()
            self._deliver_averages()
        self._keep_in_place(gradients)

    def _keep_in_place(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Restores the earlier `.grad` tensors with the current values, because a CUDA graph writes to them again."""
        for index, (parameter, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            if gradient is not None and parameter.grad is not gradient and index not in self._sparse:
                assert parameter.grad is not None
                gradient.detach().copy_(parameter.grad.detach())
                parameter.grad = gradient

    def expect_uneven_inputs(self) -> None:
        """From now on, workers may run out of inputs: shadow(). Collective."""
        if isinstance(self.group, TensorGroup):
            self._path.synchronize()
            self.group.nccl.stop("after join() a worker without inputs would not take part")

    def shadow(self, *, divide_by_initial_world_size: bool) -> None:
        """Participates in one averaging without gradients, for a worker whose inputs are exhausted.

        Does not wait for the result, so that a worker that shadows several models does not block the others.
        """
        self.finish_shadow()
        self._path.synchronize()
        self.reserve()
        self._is_shadowing = True
        for index in range(len(self._parameters)):
            if divide_by_initial_world_size:
                self.group.push(index, present=False)
            else:
                self.group.push(index, present=False, joined=True)
        self.group.flush()

    def finish_shadow(self) -> None:
        """Waits for the averaging of shadow(); afterwards this worker may use the slots again."""
        if self._is_shadowing:
            self.group.pull_all()
            self._is_shadowing = False

    def remove_hooks(self) -> None:
        """Stops averaging; `.grad` of later backward passes stays local."""
        self._expecting = False
        for handle in self.handles:
            handle.remove()
        for averagers in self._averagers:
            averagers.discard(self)
        self._drop_used_up()

    def _drop_used_up(self) -> None:
        """Removes the placeholders of gradients that an overlapped backward has used up."""
        for parameter, used_up in zip(self._parameters, self._used_up, strict=False):
            if parameter.grad is used_up:
                parameter.grad = None

    def release(self) -> None:
        """Releases its memory at once, without waiting for the garbage collector, except memory used by `.grad`.

        Only remove_hooks() may be called after that.
        """
        self.remove_hooks()
        self.group.close()
        # These own the slots. This object holds bound methods of itself, so only garbage collection would free it.
        del self._path, self._sparse, self._turns
        self._updates = self._updates_in_backward = None

    def _put_hooks_last(self) -> None:
        """Moves this object's hooks behind the user's, so that results of hooks registered later are averaged."""
        for parameter, handle in zip(self._parameters, self.handles, strict=True):
            hooks = parameter._post_accumulate_grad_hooks
            if len(hooks) > 1:
                hooks[handle.id] = hooks.pop(handle.id)

    def is_averaging(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the gradient of this parameter is being averaged."""
        return self._expecting and bool(self._pushed[self._index_of[id(parameter)]])

    def _restart(self) -> None:
        self._pushed = bytearray(len(self._parameters))
        self._handed_out = bytearray(len(self._parameters))
        self._absent: set[int] = set()
        self._num_pushed = 0
        self._is_prepared = False
        if self._turns is not None:
            self._turns.restart()

    # The methods below run inside backward.

    def _on_output(self, _: torch.Tensor) -> None:
        with self._lock:
            # A backward that failed before its first gradient can be repeated.
            if self._expecting and self._armed_in != current_backward() and may_accumulate(self._parameters):
                self._arm()

    def _on_gradient(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Handles a ready gradient; hot path, once per parameter and backward."""
        if not self._expecting:
            self.has_local = True
            return
        with self._lock:
            if self._armed_in is None:
                self._arm()
            if self._recorded is not None:
                self._recorded.note_ready(index)
            if self._static is None or self._static.is_last(index, self._names):
                self._push(index, parameter.grad)

    def _arm(self) -> None:
        self._armed_in = current_backward()
        self._backward_began_ns = time.monotonic_ns()
        if self._updates_in_backward is not None and not self._is_prepared:
            if self._updates_in_backward.is_step_due:
                raise gradient_errors.step_is_due(self._rank)
            self._is_prepared = True
            self._updates_in_backward.begin_backward()
        at_end(self._untraced_end)

    def _push(self, index: int, gradient: torch.Tensor | None) -> None:
        if self._has_failpoints:
            self._failpoints.reach("backward.push", step=self.num_updates + 1, count=self._num_pushed)
        if self._pushed[index]:
            raise gradient_errors.came_twice(self._rank, self._names[index])
        if gradient is None:
            gradient = self._replace_undefined(index)
        if self.shares_parameters:
            self._check_averaged_once(index)
        self._pushed[index] = 1
        self._num_pushed += 1
        if self._changes_in_backward:
            # Later parts of this backward that saved the parameter, detached from the graph, must not read it.
            torch.autograd.graph.increment_version(self._parameters[index])
        if gradient is not None and self._sparse.are_there and index in self._sparse:
            self._sparse.hold(index, gradient)
            return
        if gradient is not None and (gradient.is_neg() or gradient.is_conj()):
            self._parameters[index].grad = gradient.resolve_conj().resolve_neg()
        self._send(index)

    def _replace_undefined(self, index: int) -> torch.Tensor | None:
        """The replacement for a gradient that an operation returned as undefined.

        Zeros, as in torch's class; None with find_unused, so that the parameter counts as unused.
        """
        parameter = self._parameters[index]
        if len(parameter._post_accumulate_grad_hooks) > 1:
            raise gradient_errors.taken_away(self._rank, self._names[index])
        if self._find_unused or self._static is not None or index in self._sparse:
            self._absent.add(index)
        else:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def _check_averaged_once(self, index: int) -> None:
        parameter = self._parameters[index]
        if any(each is not self and each.is_averaging(parameter) for each in self._averagers[index]):
            raise gradient_errors.averaged_elsewhere(self._rank, self._names[index])

    def _send(self, index: int) -> None:
        """Contributes a parameter's `.grad` when its slot is free; nothing if it is None."""
        if self._is_profiled:
            with torch.profiler.record_function(f"coarse::push {self._names[index]}"):
                self._send_now(index)
        else:
            self._send_now(index)

    def _send_now(self, index: int) -> None:
        if self._turns is None:
            self._path.send(index, self._kind)
        else:
            self._turns.take(index)

    def _end_of_backward(self) -> None:
        """Runs at the end of the outermost backward; a second call in one iteration does nothing."""
        with self._lock:
            self._armed_in = None
            if not self._expecting:
                return
            if self._num_pushed < len(self._parameters):
                self._push_remaining()
            self._flush()  # another backward may add the remaining gradients; send the finished ones now
            if self._num_pushed == len(self._parameters):
                finish_in_order(self._place, self._untraced_finish)

    def _flush(self) -> None:
        try:
            self._path.flush()
        except BaseException:
            self._expecting = False  # until the next forward
            raise

    def _finish_backward(self) -> None:
        """Delivers the averages. All models of this backward have pushed, so waiting for other workers ends."""
        with self._lock:
            if not self._expecting:
                return
            self._expecting = False
            if self._turns is not None:
                self._turns.finish()
            self._push_sparse_gradients()
            if self._static is not None:
                self._static.finish_iteration()
            if self._updates_in_backward is None:
                self._deliver_averages()
            else:
                for parameter, used_up in zip(self._parameters, self._used_up, strict=True):
                    parameter.grad = used_up
                self._updates_in_backward.end_backward(is_whole=not self._absent)
        recorder.record("backward", self._backward_began_ns, time.monotonic_ns())

    def _push_sparse_gradients(self) -> None:
        for index in self._sparse.stage_rows(are_averaged=self._updates_in_backward is None):
            self._path.contribute(index, self._kind, present=True)

    def _deliver_averages(self) -> None:
        self.has_local = False
        with operation("pull"):
            contributors = self._path.collect(counts=bool(self._absent))
        with operation("deliver averages"):
            self._path.deliver(self._absent, contributors)
            self._sparse.deliver(contributors)
        if self._kind is UpdateKind.MEASURE:
            self._delivered = fingerprints([p.grad for p in self._parameters])

    def _push_remaining(self) -> None:
        """Pushes the remaining gradients: of unused parameters, and of a static graph's first iteration."""
        counted = self._static is not None and self._static.is_counting
        for index, parameter in enumerate(self._parameters):
            if self._pushed[index]:
                continue
            unused = self._find_unused or (self._static is not None and self._static.is_unused(index))
            if parameter.grad is not None and (counted or unused):
                # An unused parameter may still hold gradients accumulated under no_sync.
                self._push(index, parameter.grad)
            elif counted or unused:
                self._pushed[index] = 1
                self._num_pushed += 1
                self._absent.add(index)
                self._send(index)
