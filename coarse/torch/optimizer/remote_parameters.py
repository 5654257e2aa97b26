"""Parameters whose optimizer runs in the memory devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from coarse.client.memory.private_writes import PrivateWrites
from coarse.client.memory.snapshots import Snapshot
from coarse.client.tensor_group import TensorGroup
from coarse.client.update_settings import SETTINGS_DTYPE
from coarse.torch.gradients.layout import copy_all, forget_values, same_memory, slot_tensor
from coarse.torch.optimizer.cached_parameters import CachedParameters
from coarse.torch.optimizer.empty_parameters import EmptyParameters
from coarse.torch.optimizer.lent_state import LentState
from coarse.torch.optimizer.mirrored_parameters import MirroredParameters
from coarse.torch.optimizer.update_rules import UpdateRule

MASTER = "master"
"""What state dicts call the float32 weights of a 16-bit parameter; torch's optimizers do not look at it."""

LoadedState = Mapping[torch.nn.Parameter, Mapping[str, Any]]


class RemoteParameters:
    """The parameters of one model, in memory that all workers of the node and their memory devices share.

    Args:
        group: Registered with the rule's states.
        parameters: In the order of the group; move(), then share(), mirror() or cache() makes them what the memory
            devices have.
        optimizer: Its parameter groups have the settings, now and later. take_over() moves state that it has to the
            memory devices, unless these have kept a newer one.
        rule: What the optimizer does.
        writes: Whether this worker's values are those of the node: one worker's are. The others must not read
            parameters before it has returned from take_over().
        finish_update: Waits until the updates that this worker has pushed are complete; returns their number.
        meet: Returns when every worker has called it.
    """

    def __init__(
        self,
        group: TensorGroup,
        parameters: Sequence[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        rule: UpdateRule,
        *,
        writes: bool,
        finish_update: Callable[[], int],
        meet: Callable[[], object],
    ) -> None:
        self._group = group
        self._meet = meet
        self._parameters = parameters
        self._optimizer = optimizer
        self._rule = rule
        self.writes = writes
        """Whether this worker's values are those of its node."""
        self._num_updates = np.zeros(len(parameters), dtype=np.int64)
        self._are_states_zero = True
        self._is_shared = self._is_expected = False
        self._mirror: MirroredParameters | None = None
        self._cached: CachedParameters | None = None
        self._moved: list[int] = []
        self._before_leaving: list[Callable[[], object]] = []
        self._lent: LentState | None = None
        self._settle_gradients: Callable[[], None] = lambda: None
        self._finish_update = finish_update
        self.recovered_step = 0 if group.recovered is None else group.recovered.step
        """The step after which the memory devices have kept parameters and states for this worker; 0 for none."""
        self._settings = np.frombuffer(group.settings(), dtype=SETTINGS_DTYPE)
        positions = {parameter: index for index, parameter in enumerate(parameters)}
        self._members = [
            np.array([positions[p] for p in options["params"] if p in positions], dtype=np.int64)
            for options in optimizer.param_groups
        ]
        self._kept_names = [self._names_kept_of(parameter) for parameter in parameters]
        of_optimizer = [parameter for options in optimizer.param_groups for parameter in options["params"]]
        self.empty = EmptyParameters(of_optimizer, rule, [self._names_kept_of(each) for each in of_optimizer])
        """What the optimizer holds beside, of which memory devices have nothing."""
        self._originals = [slot_tensor(group.parameter(i), p) for i, p in enumerate(parameters)]
        self._own: PrivateWrites | None = None
        self._views: Sequence[torch.Tensor] = self._originals

    def move(self) -> None:
        """Takes memory for what is kept, and copies this worker's parameters there if it is the one that writes.

        One by one: memory of the host is taken for each and freed as its copy is there. Until share(), mirror() or
        cache() they are views of the shared memory where both are in the host's.

        Raises:
            OutOfDeviceMemoryError: If memory is not to be had. All parameters have their values still.
        """
        if not self.writes or self._group.recovered is not None:
            return
        for index, (parameter, view) in enumerate(zip(self._parameters, self._originals, strict=True)):
            self._group.reserve_parameter(index)
            with torch.no_grad():
                copy_all([view], [parameter])
            if parameter.is_cpu and view.is_cpu:
                parameter.data = same_memory(view)
        self._group.reserve_states()
        self._settle()

    def take_over(self) -> None:
        """Moves the optimizer's own state, or takes what the memory devices have kept. After move()."""
        if self._group.recovered is None:
            self.adopt_state()
            return
        self._num_updates[:] = self._group.recovered.num_updates
        self._are_states_zero = False
        self._optimizer.state.clear()

    def cache(self, *, staleness: int) -> CachedParameters:
        """Makes every parameter a copy that may be `staleness` updates old, instead of share()."""
        self._take_own_memory()
        self._cached = CachedParameters(
            self._parameters,
            self._originals,
            staleness=staleness,
            finish_update=self._finish_update,
            keep_snapshots=self._group.keep_snapshots,
        )
        self._is_shared = True
        return self._cached

    def _take_own_memory(self) -> None:
        """Has no parameter lie in shared memory, as those that _move() has moved do; copies of them are to come."""
        forget_values(self._parameters)

    def mirror(self, settle: Callable[[], None]) -> MirroredParameters:
        """Makes every parameter a copy on the model's GPU, where memory devices have theirs elsewhere; as share().

        Args:
            settle: Waits for what this worker has pushed: then the others have fetched what they pushed before.
        """
        self._settle_gradients = settle
        self._take_own_memory()
        self._mirror = MirroredParameters(self._parameters, self._originals, writes=self.writes)
        self._is_shared = True
        return self._mirror

    def share(self, own: PrivateWrites | None = None) -> None:
        """Makes every parameter a view of the shared memory. Call it when the worker that writes has written.

        Args:
            own: Through which this worker sees it; None where it sees what other workers write there.
        """
        if own is not None:
            self._own = own
            self._views = [slot_tensor(own.parameter(i), p) for i, p in enumerate(self._parameters)]
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.data = same_memory(view)
        self._is_shared = True

    def release(self) -> None:
        """Gives every parameter memory of its own again, with the values of now."""
        self._is_shared = False
        self._cached = self._own = None
        self._finish_update = lambda: 0  # it refers to this in turn; whoever releases waits by himself
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.data_ptr() == view.data_ptr():
                parameter.data = view.clone()

    def give_back(self, *, has_values: bool) -> None:
        """Gives the optimizer its state back, and the worker its parameters as release() does; between two updates.

        Args:
            has_values: Whether this worker gets values; else it has memory for parameters, and knows how often they
                were updated.
        """
        self._finish_update()
        self.finish_saves()
        self.take_assigned()
        self._publish()
        self._take_lent()
        if self._cached is not None:
            self._cached.pull()
        state = self.state() if has_values else self._state_without_values()
        if not has_values:
            forget_values(self._parameters)
        self.release()
        self._optimizer.state.clear()
        self._optimizer.state.update(state)

    def _state_without_values(self) -> dict[torch.nn.Parameter, dict[str, Any]]:
        """As state(), with tensors that have no memory."""
        return {
            parameter: {
                **self._rule.counted(int(self._num_updates[index])),
                **{
                    name: torch.empty_like(parameter, dtype=torch.float32, device="meta", requires_grad=False)
                    for name in self._kept_names[index]
                },
            }
            for index, parameter in enumerate(self._parameters)
            if self._has_state(index)
        } | dict(self.empty.state())

    def begin(self, present: Sequence[bool] | None = None, *, gradient_scale: float = 1.0) -> None:
        """Writes down how the next update is to be done, by the optimizer's settings of now.

        Args:
            present: For which parameters this worker has a gradient, if that is known.
            gradient_scale: What gradients are multiplied with, the same on every worker.

        Raises:
            RuntimeError: If a parameter has been given memory that the memory devices cannot take the values of.
        """
        self._publish()
        digests = self.take_over_writes()
        self._take_lent()
        self._are_states_zero = False
        for options, members in zip(self._optimizer.param_groups, self._members, strict=True):
            numbers = self._num_updates[members] + 1
            for number in np.unique(numbers):
                fields = self._rule.settings(options, int(number))
                record = np.zeros((), dtype=SETTINGS_DTYPE)
                for name, value in fields.items():
                    record[name] = value
                record["gradient_scale"] *= gradient_scale
                self._settings[members[numbers == number]] = record
        self._settings["written"] = digests
        if present is not None:
            self._settings["has_gradient"] = present

    def _values_elsewhere(self) -> list[int]:
        """Which parameters have been given other memory than the memory devices', as by `parameter.data = tensor`.

        Raises:
            RuntimeError: If their values cannot be taken over.
        """
        elsewhere = []
        for index, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            if parameter.data_ptr() == view.data_ptr():
                continue
            if not _can_be_taken_over(parameter, view):
                raise RuntimeError(
                    f"parameter {index} was {_described(view)} when DistributedOptimizer was made, and is "
                    f"{_described(parameter)} now, so that the memory devices cannot go on with its values. "
                    "Convert and move the model before it is wrapped; in place of share_memory(), and of what "
                    "torch.multiprocessing sends, take copies (parameter.detach().clone())"
                )
            elsewhere.append(index)
        return elsewhere

    def expect(self) -> None:
        """Notes that whatever the current stream is given next uses updated parameters; finish() comes later."""
        self._return_moved()
        self._note_update(range(len(self._parameters)))
        self._is_expected = True

    def expect_one(self, index: int) -> None:
        """Notes that one parameter may be updated from now on, while backward still runs."""
        if self._cached is None:
            # What comes later in this backward and has saved it, detached from the graph, must not read it.
            torch.autograd.graph.increment_version(self._parameters[index])

    def wait(self) -> None:
        """Waits until the updates that this worker has pushed are complete."""
        self._finish_update()

    def finish(self, contributors: Sequence[int]) -> None:
        """Notes that parameters with contributors were updated."""
        self._return_moved()
        updated = np.asarray(contributors) > 0
        self._num_updates += updated
        if not self._is_expected:
            self._note_update(np.flatnonzero(updated).tolist())
        self._is_expected = False
        self._check_unwritten()

    def _check_unwritten(self) -> None:
        """Raises if somebody has written to parameters while they were updated: the update would be lost there."""
        if self._own is None or (index := self._own.first_written()) is None:
            return
        raise RuntimeError(
            f"this worker has written to parameter {index} of shape {tuple(self._parameters[index].shape)}, or to "
            "one next to it, while memory devices updated it: a thread of its own, or with overlap=True a hook of "
            "backward(). Write to parameters between step() and the next backward()"
        )

    def _note_update(self, indices: Sequence[int]) -> None:
        if self._mirror is not None:
            self._mirror.note_update(indices)
        elif self._cached is None:
            # They changed in place: a graph that saved them before must not be run backward any more.
            torch.autograd.graph.increment_version([self._parameters[index] for index in indices])

    def _publish(self) -> None:
        """Gives what somebody has written to parameters elsewhere to the memory devices; no update is under way."""
        if self._cached is not None:
            self._cached.publish_changes()
        elif self._mirror is not None and (changed := self._mirror.changed()):
            self._settle_gradients()
            if self.writes:
                self._group.keep_snapshots()
            self._mirror.publish(changed)
            self._settle()

    def take_assigned(self) -> None:
        """Takes the values of parameters over that were given other memory. Collective if there are any.

        Nobody writes before all workers are here: one may still read what the others have assigned others for. Until
        the next update is complete, this worker goes on with that memory: the one that writes may not have written.

        Raises:
            RuntimeError: If a parameter has been given memory that the memory devices cannot take the values of.
        """
        if not self._is_shared or self._cached is not None or self._mirror is not None:
            return
        self._moved = self._values_elsewhere()
        if self._own is not None:  # nobody sees it before all have taken it over
            copy_all([self._views[i] for i in self._moved], [self._parameters[i] for i in self._moved])
            return self._return_moved()
        if self._moved:
            self._meet()
        if self._moved and self.writes:
            self._group.keep_snapshots()
            copy_all([self._views[i] for i in self._moved], [self._parameters[i] for i in self._moved])
            self._settle()

    def _return_moved(self) -> None:
        """Makes parameters whose values were taken over views of the shared memory again."""
        for index in self._moved:
            self._parameters[index].data = same_memory(self._views[index])
        self._moved = []

    def take_over_writes(self) -> npt.NDArray[np.uint32] | int:
        """Has all workers have what each of them has written alike since the last update. Collective; no update is
        under way. Where they have written unlike values, these stay their own, and the next update is refused.

        Returns:
            A digest of what this worker has written to each parameter; 0 for nothing.

        Raises:
            RuntimeError: If workers have written unlike values, and are on several nodes.
        """
        self.take_assigned()
        if self._own is None:
            return 0
        digests, is_alike = self._own.take_over(self._group.keep_snapshots)
        if not is_alike and self._group.spans_nodes:
            # Memory devices would notice it after their own node's update.
            index = int(np.flatnonzero(digests)[0])
            raise RuntimeError(
                f"this worker has written values to parameter {index} of shape "
                f"{tuple(self._parameters[index].shape)} since the last update that others have not: what is "
                "written to parameters between two steps (load_state_dict(), copy_(), an average of weights) every "
                "worker has to write alike, or put back what was there before the next step"
            )
        return digests

    def in_shared_memory(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same tensors, with those that are this worker's views of parameters as all workers see them."""
        pairs = zip(self._views, self._originals, strict=True)
        originals = {view.data_ptr(): original for view, original in pairs}
        return {name: originals.get(tensor.data_ptr(), tensor) for name, tensor in tensors.items()}

    def see_shared(self) -> None:
        """Has parameters be what is in the shared memory, whatever this worker has written to them itself."""
        if self._own is not None:
            self._own.give_back()
            torch.autograd.graph.increment_version(list(self._parameters))

    def adopt_state(self, loaded: LoadedState | None = None) -> None:
        """Moves the optimizer's own state, if it has any, to the memory devices.

        Args:
            loaded: What takes its place; None for nothing.
        """
        self._finish_update()
        self._lent = None
        state: LoadedState = self._optimizer.state if loaded is None else loaded
        for index, parameter in enumerate(self._parameters):
            mine: Mapping[str, Any] = state.get(parameter, {})
            self._num_updates[index] = self._rule.num_updates(mine)
            if self.writes:
                self._write_state(index, mine)
        self.empty.adopt(state)
        self._settle()
        if state:
            self._are_states_zero = False
        self._optimizer.state.clear()

    def lend(self) -> MutableMapping[torch.nn.Parameter, dict[str, Any]]:
        """The state as torch's mapping: a copy, whose changes the next update takes over. The same until then.

        Every worker has to make the same changes; those of each node's first worker count.
        """
        if self._lent is None:
            names = {name for kept in self._kept_names for name in kept}
            self._lent = LentState(self.state(), names | self._rule.counted(1).keys())
        return self._lent.mapping

    def _take_lent(self) -> None:
        """Has the memory devices hold what was changed in the state that was lent; no update is under way."""
        lent, self._lent = self._lent, None
        if lent is not None and lent.is_changed():
            self.keep_snapshots()
            self.adopt_state(lent.mapping)

    def state(self) -> dict[torch.nn.Parameter, dict[str, Any]]:
        """The state as torch's optimizer would have it: nothing for what was never updated.

        A copy, or what lend() has given away.
        """
        if self._lent is not None:
            return {parameter: values for parameter, values in self._lent.mapping.items() if values}
        self._finish_update()
        held = {
            parameter: {
                **self._rule.counted(int(self._num_updates[index])),
                **{
                    name: self._state_tensor(index, number).clone()
                    for number, name in enumerate(self._kept_names[index])
                },
            }
            for index, parameter in enumerate(self._parameters)
            if self._has_state(index)
        }
        held.update(self.empty.state())
        of_optimizer = (
            parameter for options in self._optimizer.param_groups for parameter in options["params"]
        )
        return {parameter: held[parameter] for parameter in of_optimizer if parameter in held}

    def keep_snapshots(self) -> None:
        """Has snapshots copy what they refer to: before anything but an update writes to parameters or state.

        Does nothing before share() and after release().
        """
        if self._is_shared:
            self._finish_update()
            self._group.keep_snapshots()

    def before_leaving(self, callback: Callable[[], object]) -> None:
        """Has `callback` called before parameters leave the memory devices: saves of them end before."""
        self._before_leaving.append(callback)

    def finish_saves(self) -> None:
        """Waits for the saves that are under way."""
        for callback in self._before_leaving:
            callback()

    def warm_snapshots(self) -> None:
        """Has memory for a snapshot taken ahead, in the background."""
        self._group.warm_snapshots()

    def snapshot(self) -> Snapshot:
        """Begins a snapshot of parameters and state; between the end of a step and the next backward.

        Of parameters that were assigned to `.data` it has the values if all workers have called take_assigned().

        Raises:
            SnapshotsBusyError: If as many as there can be are held.
        """
        self._finish_update()
        self._publish()
        self._take_lent()
        return self._group.snapshot()

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """The parameters, in the order of the group."""
        return self._parameters

    def places(self) -> Iterator[tuple[torch.nn.Parameter, str, int, int]]:
        """Where what lies: parameter, name of its state or "" for its value, number of the tensor, of its array."""
        self._finish_update()
        for index, parameter in enumerate(self._parameters):
            yield parameter, "", index, 0
            if self._has_state(index):
                for number, name in enumerate(self._kept_names[index]):
                    yield parameter, name, index, 1 + number

    def counts(self) -> Iterator[tuple[int, int]]:
        """The numbers of parameters that have state, and how often each was updated."""
        self._finish_update()
        for index, num_updates in enumerate(self._num_updates.tolist()):
            if self._has_state(index):
                yield index, num_updates

    def which_have_state(self) -> bytes:
        """Changes when a parameter gets its first state."""
        self._finish_update()
        return (self._num_updates > 0).tobytes() + self.empty.which_have_state()

    def counted(self, num_updates: int) -> Mapping[str, Any]:
        """What torch's state has beside what is in the memory devices, after so many updates."""
        return self._rule.counted(num_updates)

    def _names_kept_of(self, parameter: torch.nn.Parameter) -> tuple[str, ...]:
        """Names of the float32 tensors that are kept for a parameter, in their order."""
        return (*self._rule.state_names, *((MASTER,) if parameter.dtype != torch.float32 else ()))

    def _settle(self) -> None:
        """Returns when what was written to shared memory is there, if a GPU writes it: others read it next."""
        for device in {view.device for view in self._originals if view.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def _has_state(self, index: int) -> bool:
        return bool(self._kept_names[index]) and bool(
            self._num_updates[index] or self._rule.has_state_at_once
        )

    def _write_state(self, index: int, state: Mapping[str, Any]) -> None:
        for number, name in enumerate(self._kept_names[index]):
            value = state.get(name)
            if name == MASTER and value is not None and value.dtype != torch.float32:
                value = None  # rounded by whoever had it meanwhile: the parameter says as much
            if value is not None:
                copy_all([self._state_tensor(index, number)], [value])
            elif not self._are_states_zero:  # zeros as they came are not touched, and so take no memory
                self._state_tensor(index, number).zero_()

    def _state_tensor(self, index: int, number: int) -> torch.Tensor:
        return slot_tensor(self._group.state(index, number), self._parameters[index], torch.float32)


def _can_be_taken_over(parameter: torch.Tensor, view: torch.Tensor) -> bool:
    is_alike = (parameter.shape, parameter.dtype, parameter.device) == (view.shape, view.dtype, view.device)
    return is_alike and not _is_shared_by_torch(parameter)


def _is_shared_by_torch(tensor: torch.Tensor) -> bool:
    """Whether other processes may have it from torch.multiprocessing, and would not see what becomes of it."""
    return bool(tensor.is_cpu and tensor.is_shared())


def _described(tensor: torch.Tensor) -> str:
    place = "memory of share_memory()" if _is_shared_by_torch(tensor) else str(tensor.device)
    return f"{tensor.dtype} {list(tensor.shape)} in {place}"
