"""Averages gradients while the backward pass runs: hooks push each one as soon as it is ready.

One backward goes through these states; `expecting` is set by a forward under which gradients are to be
averaged:

    forward -> expecting -> (first gradient, or gradient of an output) armed -> ... hooks push ...
            -> end of backward: push what is left -> pull all, `.grad` holds averages -> not expecting

Gradients that come while not expecting (under no_sync, or from a second backward of one forward) accumulate
locally, as in torch's DDP.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Sequence

import torch

from coarse.client.tensor_group import TensorGroup, UpdateKind
from coarse.session import Session
from coarse.torch.ddp.outputs import find_tensors
from coarse.torch.ddp.shared_parameters import averagers_of
from coarse.torch.ddp.static_graph import StaticGraph
from coarse.torch.gradients import gradient_errors
from coarse.torch.gradients.autograd_callbacks import (
    at_end,
    current_backward,
    finish_in_order,
    may_accumulate,
)
from coarse.torch.gradients.bucket_hooks import BucketHook
from coarse.torch.gradients.gradient_path import is_lazy
from coarse.torch.gradients.gradient_policy import MeasuredGradient
from coarse.torch.gradients.layout import same_memory
from coarse.torch.gradients.measures import fingerprints, measure_gradient
from coarse.torch.gradients.registered_gradients import RegisteredGradients
from coarse.torch.gradients.slot_window import SlotWindow
from coarse.torch.gradients.used_up_gradients import UsedUpGradient
from coarse.torch.optimizer.remote_parameters import RemoteParameters
from coarse.torch.optimizer.update_tracker import UpdateTracker

_LEAST_WAITING_BYTES = 16 << 20  # of gradients that may wait for slots, however small the model is

# Registrations are collective, so that workers make what they share in the same order.
_places = itertools.count()


class GradientSynchroniser:
    """The gradients of one wrapped model, registered with the memory devices.

    Gradients are matched between workers by parameter, never by the order in which they come. Hooks may run
    in any autograd thread; a lock admits one at a time.

    Args:
        session: Where to register; collective.
        name: Of the registration, the same on every worker.
        parameters: Trainable parameters with their names, none twice, none empty, in the same order on every
            worker.
        gradient_as_view: Whether `.grad` becomes the registered slot itself; otherwise it keeps its own
            memory and averages are copied back at the end of backward, as always outside host memory.
        find_unused: Whether parameters without a gradient at the end of a backward count as unused, instead
            of being waited for.
        static_graph: Whether every iteration uses the same parameters equally often; the first one counts.
        state_names: Of what an optimizer in the memory devices keeps for each parameter; None without one.
        measures: Whether memory devices measure the averages, for measured(); only with an optimizer.
        shares_slots: Whether gradients take turns in fewer slots, because each is used up during backward; only with
            update_in_backward().
        tables: Parameters whose gradients are sparse.
        hook: What averages in place of the memory devices; None for these.
        moves: Whether this worker's parameters in host memory move to the memory devices, and are freed.
        travel_dtype: Type to which wider gradients are rounded before they are averaged, where no optimizer is in the
            memory devices; None for their own.

    Raises:
        ValueError: If a parameter's dtype cannot be averaged, or there are tables and rows cannot travel.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        *,
        gradient_as_view: bool,
        find_unused: bool,
        static_graph: bool,
        state_names: Sequence[str] | None = None,
        measures: bool = False,
        shares_slots: bool = False,
        tables: Collection[torch.nn.Parameter] = (),
        travel_dtype: torch.dtype | None = None,
        moves: bool = False,
        hook: BucketHook | None = None,
    ) -> None:
        self._rank = session.identity.rank
        self._names = [parameter_name for parameter_name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        registered = RegisteredGradients(
            session,
            name,
            parameters,
            gradient_as_view=gradient_as_view,
            state_names=state_names,
            shares_slots=shares_slots,
            tables=tables,
            travel_dtype=travel_dtype,
            moves=moves,
            hook=hook,
        )
        self.group, self._path, self._tables = registered.group, registered.path, registered.tables
        del (
            registered
        )  # this frame may live on: in tracebacks of what torch.compiler.disable() imports at first
        self._failpoints = session.failpoints
        self._updates: UpdateTracker | None = None
        self._updates_in_backward: UpdateTracker | None = None  # the same, if backward makes them
        self._used_up: list[UsedUpGradient] = []  # of each parameter, in that case
        self._kind = UpdateKind.MEASURE if measures else UpdateKind.NONE
        self._delivered: list[tuple[int, int] | None] = []
        self._index_of = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._turns: SlotWindow | None = None
        if shares_slots:
            assert isinstance(self.group, TensorGroup)
            self._turns = SlotWindow(
                self.group, self._path, self._send, most_waiting_bytes=self._most_waiting_bytes()
            )
        self._find_unused = find_unused
        self._static = StaticGraph(len(parameters)) if static_graph else None
        self._lock = threading.Lock()
        self._expecting = False
        self._armed_in: int | None = None  # which backward
        self._is_shadowing = False
        self.has_local = False
        """Whether `.grad` holds what came of a backward that did not average, and of none that did since."""
        self._restart()
        self._averagers = [averagers_of(parameter) for parameter in self._parameters]
        for averagers in self._averagers:
            averagers.add(self)
        self.handles = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(index))
            for index, parameter in enumerate(self._parameters)
        ]
        self._untraced_on_output = torch.compiler.disable(self._on_output)
        self._untraced_end = torch.compiler.disable(self._end_of_backward)
        self._untraced_finish = torch.compiler.disable(self._finish_backward)
        self._place = next(_places)

    def _most_waiting_bytes(self) -> int | None:
        """How many bytes of gradients may wait for slots: half of what slots have. On GPUs streams wait."""
        if not all(parameter.is_cpu for parameter in self._parameters):
            return None
        assert isinstance(self.group, TensorGroup)
        window_bytes = max(end for _, end in map(self.group.slot, range(len(self._parameters))))
        return max(_LEAST_WAITING_BYTES, window_bytes // 2)

    def update(
        self,
        offloaded: RemoteParameters,
        *,
        before_backward: Callable[[], object] | None,
        waits: bool,
        waits_here: bool,
    ) -> UpdateTracker:
        """From now on memory devices update these parameters by their gradients: push_update().

        Args:
            offloaded: The parameters.
            before_backward, waits, waits_here: Of UpdateTracker. Where backward updates, no `.grad` remains.
        """
        self._updates = UpdateTracker(
            offloaded,
            self._path,
            self._failpoints,
            before_backward=before_backward,
            waits=waits,
            waits_here=waits_here,
        )
        if before_backward is not None:
            self._updates_in_backward = self._updates
            self._used_up = [UsedUpGradient(parameter) for parameter in self._parameters]
            self._kind = UpdateKind.UPDATE
        return self._updates

    def end_step(self) -> None:
        """Admits the next update that a backward makes."""
        if self._updates_in_backward is not None:
            self._updates_in_backward.is_step_due = False
        self._drop_used_up()

    def reserve(self) -> None:
        """Takes the memory of the slots, before the first push. Later calls do nothing.

        Raises:
            OutOfDeviceMemoryError: If it is not to be had.
        """
        if isinstance(self.group, TensorGroup):
            self.group.reserve_slots()

    def settle(self) -> None:
        """Waits for the averages of what was pushed."""
        self._path.settle()

    @property
    def num_updates(self) -> int:
        """Of the optimizer in the memory devices, with the one under way."""
        return 0 if self._updates is None else self._updates.count

    def finish_update(self) -> int:
        """Waits for the updates that this worker has pushed; returns how many there were."""
        if self._updates is not None:
            self._updates.finish()
        return self.num_updates

    def measured(self, *, num_changes: int = 0, are_unscaled: bool = False) -> list[MeasuredGradient]:
        """The averaged gradients of the last backward, those that there are, as memory devices measured them.

        Gradients that were replaced or changed since then are measured here and now.

        Args:
            num_changes: How often torch counts each of them as changed in place where it has the values that it had.
            are_unscaled: Whether they were changed by GradScaler, which torch need not count.
        """
        assert isinstance(self.group, TensorGroup)
        self._path.settle()
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

    def bring_to_slots(self) -> list[bool]:
        """Begins an update: has the slots hold the `.grad` of every parameter; returns which parameters have one.

        Raises:
            RuntimeError: As check_finished().
        """
        self.check_finished()
        assert self._updates is not None
        self._updates.begin()
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                continue
            if index in self._tables:
                self._tables.replace_mean(index, parameter.grad)
            else:
                self._path.bring(index, parameter.grad)
        self._path.finish_bringing()
        return [parameter.grad is not None for parameter in self._parameters]

    def push_update(self, present: Sequence[bool]) -> None:
        """Has the memory devices update each parameter by its slot, which holds the same on every worker.

        Args:
            present: As bring_to_slots() returned it.
        """
        assert self._updates is not None
        for index, has_gradient in enumerate(present):
            if self._failpoints:
                self._path.flush()
                self._updates.reach("step.push", index)
            self._path.take_part(index, UpdateKind.UPDATE_BY_MEAN, present=has_gradient)
        self._updates.end(is_whole=all(present))

    def slot_of(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """A new tensor over the slot of `parameter`, for a backward that writes the whole gradient there.

        None unless this gradient will be averaged, and nothing else has come of it yet or may hold on to it.
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
        """Counts in the next iteration how often each gradient comes, and relies on it from then on."""
        if self._static is None:
            self._static = StaticGraph(len(self._parameters))

    def check(self) -> None:
        """Raises what has gone wrong since the last call, on a GPU; called before each forward."""
        self._path.check()

    def confirm(self) -> None:
        """Raises if what has updated the parameters since the last forward were no averages; may wait for them."""
        self._path.confirm()

    def check_finished(self) -> None:
        """Called before gradients are averaged or used.

        Raises:
            RuntimeError: If the previous backward left gradients waiting; names the parameters and the
                remedies.
        """
        if self.has_begun and (missing := self.missing()):
            raise gradient_errors.unfinished(self._rank, missing, num_parameters=len(self._names))

    @property
    def has_begun(self) -> bool:
        """Whether a gradient has come since the last forward whose backward averages."""
        return self._num_pushed > 0

    def missing(self) -> list[str]:
        """Names of the parameters whose gradients backward has yet to bring."""
        if not self._expecting:
            return []
        return [name for name, pushed in zip(self._names, self._pushed, strict=True) if not pushed]

    @property
    def updates_in_backward(self) -> bool:
        """Whether memory devices update the parameters during backward, which leaves no gradients."""
        return self._updates_in_backward is not None

    def expect(self, outputs: object) -> None:
        """Called after a forward whose backward shall average gradients.

        Args:
            outputs: What forward() returned. The end of a backward is noticed through the tensors found in
                it, so that it belongs to the outermost backward also where checkpointing runs others inside.

        Raises:
            RuntimeError: As check_finished(); no forward of the model need come before, as with accelerate's
                trigger_sync_in_backward().
        """
        self.check_finished()
        self.finish_update()
        self.reserve()
        self._restart()
        self._armed_in = None
        self._expecting = True
        self._put_hooks_last()
        if self._static is not None:
            self._static.start_iteration()
        for tensor in find_tensors(outputs):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._untraced_on_output)

    def average(self) -> None:
        """Averages what `.grad` of each parameter holds now, where it is; None takes no part. Collective.

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
                if gradient is not None and index in self._tables:
                    self._tables.hold(index, gradient)
                else:
                    self._send(index)
            self._path.flush()
            self._push_tables()
            self._deliver_averages()
        self._keep_in_place(gradients)

    def _keep_in_place(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Has `.grad` be the tensors that it was, with the values of now: a CUDA graph writes to these again."""
        for index, (parameter, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            if gradient is not None and parameter.grad is not gradient and index not in self._tables:
                assert parameter.grad is not None
                gradient.detach().copy_(parameter.grad.detach())
                parameter.grad = gradient

    def expect_uneven_inputs(self) -> None:
        """From now on workers may run out of inputs: shadow(). Collective."""
        if isinstance(self.group, TensorGroup):
            self._path.settle()
            self.group.nccl.stop("after join() a worker without inputs would not take part")

    def shadow(self, *, divide_by_initial_world_size: bool) -> None:
        """Takes part in one averaging without gradients, for a worker whose inputs are exhausted.

        Does not wait for the result, so that a worker that shadows several models blocks none of the others.
        """
        self.finish_shadow()
        self._path.settle()
        self.reserve()
        self._is_shadowing = True
        for index in range(len(self._parameters)):
            if divide_by_initial_world_size:
                self.group.push(index, present=False)
            else:
                self.group.push(index, present=False, joined=True)
        self.group.flush()

    def finish_shadow(self) -> None:
        """Waits for what shadow() took part in; the slots belong to this worker again."""
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
        """Takes away what stands in the place of gradients that an overlapped backward has used up."""
        for parameter, used_up in zip(self._parameters, self._used_up, strict=False):
            if parameter.grad is used_up:
                parameter.grad = None

    def release(self) -> None:
        """Gives its memory up, but for what `.grad` refers to, at once: nothing waits for the garbage collector.

        Only remove_hooks() may be called after that.
        """
        self.remove_hooks()
        self.group.close()
        # The slots are theirs, and methods of this object that it holds itself keep it alive until a collection.
        del self._path, self._tables, self._turns

    def _make_hook(self, index: int) -> Callable[[torch.nn.Parameter], None]:
        def on_gradient(_: torch.nn.Parameter) -> None:
            self._on_gradient(index)

        # Where a user compiles a function that calls backward(), hooks would be traced.
        hook: Callable[[torch.nn.Parameter], None] = torch.compiler.disable(on_gradient)
        return hook

    def _put_hooks_last(self) -> None:
        """What a user's hook makes of a gradient is averaged, also where it was registered after this one."""
        for parameter, handle in zip(self._parameters, self.handles, strict=True):
            hooks = parameter._post_accumulate_grad_hooks
            if len(hooks) > 1:
                hooks[handle.id] = hooks.pop(handle.id)

    def is_averaging(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the gradient of this parameter is under way."""
        return self._expecting and bool(self._pushed[self._index_of[id(parameter)]])

    def _restart(self) -> None:
        self._pushed = bytearray(len(self._parameters))
        self._handed_out = bytearray(len(self._parameters))
        self._absent: set[int] = set()
        self._num_pushed = 0
        self._is_prepared = False
        if self._turns is not None:
            self._turns.restart()

    # What follows runs inside backward.

    def _on_output(self, _: torch.Tensor) -> None:
        with self._lock:
            # One that failed before its first gradient can be repeated.
            if self._expecting and self._armed_in != current_backward() and may_accumulate(self._parameters):
                self._arm()

    def _on_gradient(self, index: int) -> None:
        """The hot path: runs once per parameter and backward."""
        if not self._expecting:
            self.has_local = True
            return
        with self._lock:
            if self._armed_in is None:
                self._arm()
            if self._static is None or self._static.is_last(index, self._names):
                self._push(index, self._parameters[index].grad)

    def _arm(self) -> None:
        self._armed_in = current_backward()
        if self._updates_in_backward is not None and not self._is_prepared:
            if self._updates_in_backward.is_step_due:
                raise gradient_errors.step_is_due(self._rank)
            self._is_prepared = True
            self._updates_in_backward.begin_backward()
        at_end(self._untraced_end)

    def _push(self, index: int, gradient: torch.Tensor | None) -> None:
        if self._failpoints:
            self._failpoints.reach("backward.push", step=self.num_updates + 1, count=self._num_pushed)
        if self._pushed[index]:
            raise gradient_errors.came_twice(self._rank, self._names[index])
        if gradient is None:
            gradient = self._replace_undefined(index)
        if len(self._averagers[index]) > 1:
            self._check_averaged_once(index)
        self._pushed[index] = 1
        self._num_pushed += 1
        if self._updates_in_backward is not None:
            self._updates_in_backward.expect_one(index)
        if gradient is not None and self._tables.are_there and index in self._tables:
            self._tables.hold(index, gradient)
        else:
            self._take_turn(index)

    def _replace_undefined(self, index: int) -> torch.Tensor | None:
        """What stands for a gradient of which an operation has said that there is none.

        Zeros, as in torch's class; or None, of a parameter that counts as unused where these are looked for.
        """
        parameter = self._parameters[index]
        if len(parameter._post_accumulate_grad_hooks) > 1:
            raise gradient_errors.taken_away(self._rank, self._names[index])
        if self._find_unused or self._static is not None or index in self._tables:
            self._absent.add(index)
        else:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def _check_averaged_once(self, index: int) -> None:
        parameter = self._parameters[index]
        if any(each is not self and each.is_averaging(parameter) for each in self._averagers[index]):
            raise gradient_errors.averaged_elsewhere(self._rank, self._names[index])

    def _take_turn(self, index: int) -> None:
        if self._turns is None:
            self._send(index)
        else:
            self._turns.take(index)

    def _send(self, index: int) -> None:
        if index in self._absent:
            self._path.take_part(index, self._kind, present=False)
        else:
            gradient = self._parameters[index].grad
            if is_lazy(gradient):
                gradient = self._parameters[index].grad = gradient.resolve_conj().resolve_neg()
            self._path.send(index, gradient, self._kind)

    def _end_of_backward(self) -> None:
        """Runs as the outermost backward ends; a second call in one iteration finds nothing left to do."""
        with self._lock:
            self._armed_in = None
            if not self._expecting:
                return
            if self._num_pushed < len(self._parameters):
                self._push_remaining()
            self._flush()  # of some another backward may bring the rest; meanwhile let others have these
            if self._num_pushed == len(self._parameters):
                finish_in_order(self._place, self._untraced_finish)

    def _flush(self) -> None:
        try:
            self._path.flush()
        except BaseException:
            self._expecting = False  # the next forward begins anew
            raise

    def _finish_backward(self) -> None:
        """Brings the averages. All models of this backward have pushed, so that waiting for other workers ends."""
        with self._lock:
            if not self._expecting:
                return
            self._expecting = False
            if self._turns is not None:
                self._turns.finish()
            self._push_tables()
            if self._static is not None:
                self._static.finish_iteration()
            if self._updates_in_backward is None:
                self._deliver_averages()
            else:
                for parameter, used_up in zip(self._parameters, self._used_up, strict=True):
                    parameter.grad = used_up
                self._updates_in_backward.end_backward(is_whole=not self._absent)

    def _push_tables(self) -> None:
        for index in self._tables.bring_rows(are_averaged=self._updates_in_backward is None):
            self._path.take_part(index, self._kind, present=True)

    def _deliver_averages(self) -> None:
        self.has_local = False
        contributors = self._path.collect(counts=bool(self._absent))
        self._path.deliver(self._absent, contributors)
        self._tables.deliver(contributors)
        if self._kind is UpdateKind.MEASURE:
            self._delivered = fingerprints([p.grad for p in self._parameters])

    def _push_remaining(self) -> None:
        """Pushes what may be left over: unused parameters, and a static graph's first iteration."""
        counted = self._static is not None and self._static.is_counting
        for index, parameter in enumerate(self._parameters):
            if self._pushed[index]:
                continue
            unused = self._find_unused or (self._static is not None and self._static.is_unused(index))
            if parameter.grad is not None and (counted or unused):
                # An unused one may still hold what accumulated under no_sync.
                self._push(index, parameter.grad)
            elif counted or unused:
                self._pushed[index] = 1
                self._num_pushed += 1
                self._absent.add(index)
                self._take_turn(index)
