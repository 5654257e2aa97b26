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
"""Name of a 16-bit parameter's float32 weights in state dicts; torch's optimizers ignore it."""

LoadedState = Mapping[torch.nn.Parameter, Mapping[str, Any]]


class RemoteParameters:
    """The parameters of one model, in memory that all workers of the node and their memory devices share.

    Args:
        group: Registered with the rule's states.
        parameters: In the order of the group. move(), then share(), mirror() or cache(), connects them with the
            memory devices' values.
        optimizer: Its parameter groups have the settings, now and later. take_over() moves its state to the memory
            devices, unless these have kept a newer one.
        rule: The optimizer's update rule.
        writes: Whether this worker provides the node's values; one worker per node does. The others must not read
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
        """Whether this worker provides its node's values."""
        self._num_updates = np.zeros(len(parameters), dtype=np.int64)
        self._are_states_zero = True
        self._is_shared = self._is_expected = False
        self._mirror: MirroredParameters | None = None
        self._cached: CachedParameters | None = None
        self._moved: list[int] = []
        self._before_leaving: list[Callable[[], object]] = []
        self._lent: LentState | None = None
        self._synchronize_gradients: Callable[[], None] = lambda: None
        self._finish_update = finish_update
        self.recovered_step = 0 if group.recovered is None else group.recovered.step
        """The last step in the parameters and states that the memory devices kept for this worker; 0 for none."""
        self._settings = np.frombuffer(group.settings(), dtype=SETTINGS_DTYPE)
        positions = {parameter: index for index, parameter in enumerate(parameters)}
        self._members = [
            np.array([positions[p] for p in options["params"] if p in positions], dtype=np.int64)
            for options in optimizer.param_groups
        ]
        self._kept_names = [self._names_kept_of(parameter) for parameter in parameters]
        of_optimizer = [parameter for options in optimizer.param_groups for parameter in options["params"]]
        self.empty = EmptyParameters(of_optimizer, rule, [self._names_kept_of(each) for each in of_optimizer])
        """The optimizer's parameters without elements, of which memory devices store nothing."""
        self._originals = [slot_tensor(group.parameter(i), p) for i, p in enumerate(parameters)]
        self._own: PrivateWrites | None = None
        self._views: Sequence[torch.Tensor] = self._originals

    def move(self) -> None:
        """Allocates memory in the memory devices, and copies this worker's parameters there if it `writes`.

        Parameters move one by one: the host memory of each is freed once its copy is complete. If both memories are
        in the host, a parameter is a view of the shared memory until share(), mirror() or cache().

        Raises:
            OutOfDeviceMemoryError: If the memory is not available. All parameters still have their values.
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
        """Moves the optimizer's own state, or uses the state kept by the memory devices. Call it after move()."""
        if self._group.recovered is None:
            self.adopt_state()
            return
        self._num_updates[:] = self._group.recovered.num_updates
        self._are_states_zero = False
        self._optimizer.state.clear()

    def catch_up(self) -> int:
        """Uses parameters and states as other workers' updates have left them; returns the last update's number."""
        step, num_updates = self._group.updates()
        self._num_updates[:] = num_updates
        self._are_states_zero = False
        self.see_shared()
        return step

    def cache(self, *, staleness: int) -> CachedParameters:
        """Makes every parameter a copy that may be `staleness` updates old; an alternative to share()."""
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
        """Moves parameters that _move() has moved to shared memory back to own memory, before they become copies."""
        forget_values(self._parameters)

    def mirror(self, synchronize: Callable[[], None]) -> MirroredParameters:
        """Makes every parameter a copy on the model's GPU, if memory devices store it elsewhere; see share().

        Args:
            synchronize: Waits for this worker's pushes; afterwards the others have fetched their earlier pushes.
        """
        self._synchronize_gradients = synchronize
        self._take_own_memory()
        self._mirror = MirroredParameters(self._parameters, self._originals, writes=self.writes)
        self._is_shared = True
        return self._mirror

    def share(self, own: PrivateWrites | None = None) -> None:
        """Makes every parameter a view of the shared memory. Call it after the writing worker has written.

        Args:
            own: This worker's private view; None if this worker sees other workers' writes.
        """
        if own is not None:
            self._own = own
            self._views = [slot_tensor(own.parameter(i), p) for i, p in enumerate(self._parameters)]
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.data = same_memory(view)
        self._is_shared = True

    def release(self) -> None:
        """Gives every parameter memory of its own again, with the current values."""
        self._is_shared = False
        self._cached = self._own = None
        self._finish_update = lambda: 0  # breaks a reference cycle; the caller of release() waits itself
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.data_ptr() == view.data_ptr():
                parameter.data = view.clone()

    def give_back(self, *, has_values: bool) -> None:
        """Returns the state to the optimizer and, as release(), the parameters to the worker; between two updates.

        Args:
            has_values: Whether this worker gets values; otherwise only memory for parameters and their update counts.
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
        """As state(), with tensors without memory."""
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
        """Writes the settings of the next update, from the optimizer's current settings.

        Args:
            present: Parameters for which this worker has a gradient, if known.
            gradient_scale: Factor for the gradients, the same on every worker.

        Raises:
            RuntimeError: If a parameter was assigned memory whose values the memory devices cannot read.
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
            self._group.continue_step()
            self._settings["has_gradient"] = present

    def _values_elsewhere(self) -> list[int]:
        """Parameters whose memory is no longer the memory devices', as after `parameter.data = tensor`.

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
                    f"{_described(parameter)} now, so the memory devices cannot use its values. Convert and move the "
                    "model before you wrap it; instead of share_memory(), and of tensors sent by "
                    "torch.multiprocessing, use copies (parameter.detach().clone())"
                )
            elsewhere.append(index)
        return elsewhere

    def expect(self) -> None:
        """Records that later work of the current stream uses updated parameters; finish() follows."""
        self._return_moved()
        self._note_update(range(len(self._parameters)))
        self._is_expected = True

    def wait(self) -> None:
        """Waits until the updates that this worker has pushed are complete."""
        self._finish_update()

    def finish(self, contributors: Sequence[int]) -> None:
        """Records that parameters with contributors were updated."""
        self._return_moved()
        updated = np.asarray(contributors) > 0
        self._num_updates += updated
        if not self._is_expected:
            self._note_update(np.flatnonzero(updated).tolist())
        self._is_expected = False
        self._check_unwritten()

    def _check_unwritten(self) -> None:
        """Raises if parameters were written to during their update, because the update would be lost there."""
        if self._own is None or (index := self._own.first_written()) is None:
            return
        raise RuntimeError(
            f"this worker has written to parameter {index} of shape {tuple(self._parameters[index].shape)}, or to "
            "one next to it, while memory devices updated it: from another thread or, with overlap=True, from a "
            "hook of backward(). Write to parameters only between step() and the next backward()"
        )

    def _note_update(self, indices: Sequence[int]) -> None:
        if self._mirror is not None:
            self._mirror.note_update(indices)
        elif self._cached is None:
            # They changed in place, so a graph that saved them before must not be run backward any more.
            torch.autograd.graph.increment_version([self._parameters[index] for index in indices])

    def _publish(self) -> None:
        """Copies writes to parameters in other memory to the memory devices; no update may be running."""
        if self._cached is not None:
            self._cached.publish_changes()
        elif self._mirror is not None and (changed := self._mirror.changed()):
            self._synchronize_gradients()
            if self.writes:
                self._group.keep_snapshots()
            self._mirror.publish(changed)
            self._settle()

    def take_assigned(self) -> None:
        """Takes over the values of parameters whose memory was replaced. Collective if there are any.

        No worker writes before all have arrived, because one may still read parameters that others have replaced.
        Until the next update is complete, this worker continues with the assigned memory, because the writing worker
        may not have written yet.

        Raises:
            RuntimeError: If a parameter was assigned memory whose values the memory devices cannot read.
        """
        if not self._is_shared or self._cached is not None or self._mirror is not None:
            return
        self._moved = self._values_elsewhere()
        if self._own is not None:  # no worker sees the values before all have taken them over
            copy_all([self._views[i] for i in self._moved], [self._parameters[i] for i in self._moved])
            return self._return_moved()
        if self._moved:
            self._meet()
        if self._moved and self.writes:
            self._group.keep_snapshots()
            copy_all([self._views[i] for i in self._moved], [self._parameters[i] for i in self._moved])
            self._settle()

    def _return_moved(self) -> None:
        """Restores the views of shared memory for parameters whose values were taken over."""
        for index in self._moved:
            self._parameters[index].data = same_memory(self._views[index])
        self._moved = []

    def take_over_writes(self) -> npt.NDArray[np.uint32] | int:
        """Publishes equal writes by all workers since the last update. Collective; no update may be running.

        Where workers have written different values, these stay private, and the next update is refused.

        Returns:
            A digest of this worker's writes to each parameter; 0 if none.

        Raises:
            RuntimeError: If workers on several nodes have written different values.
        """
        self.take_assigned()
        if self._own is None:
            return 0
        digests, is_alike = self._own.take_over(self._group.keep_snapshots)
        if not is_alike and self._group.spans_nodes:
            # Memory devices would detect it only after their own node's update.
            index = int(np.flatnonzero(digests)[0])
            raise RuntimeError(
                f"since the last update, this worker has written values to parameter {index} of shape "
                f"{tuple(self._parameters[index].shape)} that other workers have not. Every worker must write the "
                "same values to parameters between two steps (load_state_dict(), copy_(), an average of weights), "
                "or restore the old values before the next step"
            )
        return digests

    def in_shared_memory(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same tensors, with this worker's private views of parameters replaced by the shared values."""
        pairs = zip(self._views, self._originals, strict=True)
        originals = {view.data_ptr(): original for view, original in pairs}
        return {name: originals.get(tensor.data_ptr(), tensor) for name, tensor in tensors.items()}

    def see_shared(self) -> None:
        """Resets parameters to the values in shared memory and discards this worker's own writes."""
        if self._own is not None:
            self._own.give_back()
            torch.autograd.graph.increment_version(list(self._parameters))

    def adopt_state(self, loaded: LoadedState | None = None) -> None:
        """Moves the optimizer's own state, if it has any, to the memory devices.

        Args:
            loaded: State to use instead; None for the optimizer's own.
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
        """The state in torch's mapping type: a copy, whose changes the next update applies. Cached until then.

        Every worker must make the same changes; those of each node's first worker are used.
        """
        if self._lent is None:
            names = {name for kept in self._kept_names for name in kept}
            self._lent = LentState(self.state(), names | self._rule.counted(1).keys())
        return self._lent.mapping

    def _take_lent(self) -> None:
        """Copies changes of the lent state to the memory devices; no update may be running."""
        lent, self._lent = self._lent, None
        if lent is not None and lent.is_changed():
            self.keep_snapshots()
            self.adopt_state(lent.mapping)

    def state(self) -> dict[torch.nn.Parameter, dict[str, Any]]:
        """The state as in torch's optimizer: none for parameters that were never updated.

        A copy, or the contents of the mapping from lend().
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
        """Makes snapshots copy their contents; called before any write to parameters or state except an update.

        Does nothing before share() and after release().
        """
        if self._is_shared:
            self._finish_update()
            self._group.keep_snapshots()

    def before_leaving(self, callback: Callable[[], object]) -> None:
        """Registers a callback that runs before parameters leave the memory devices, to finish their saves."""
        self._before_leaving.append(callback)

    def finish_saves(self) -> None:
        """Waits for running saves."""
        for callback in self._before_leaving:
            callback()

    def warm_snapshots(self) -> None:
        """Allocates memory for a snapshot in advance, in the background."""
        self._group.warm_snapshots()

    def snapshot(self) -> Snapshot:
        """Begins a snapshot of parameters and state, between the end of a step and the next backward.

        It includes values assigned to `.data` if all workers have called take_assigned().

        Raises:
            SnapshotsBusyError: If the largest possible number of snapshots exists already.
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
        """Locations: parameter, name of its state or "" for its value, number of the tensor, number of its array."""
        self._finish_update()
        for index, parameter in enumerate(self._parameters):
            yield parameter, "", index, 0
            if self._has_state(index):
                for number, name in enumerate(self._kept_names[index]):
                    yield parameter, name, index, 1 + number

    def counts(self) -> Iterator[tuple[int, int]]:
        """The numbers of parameters that have state, and their update counts."""
        self._finish_update()
        for index, num_updates in enumerate(self._num_updates.tolist()):
            if self._has_state(index):
                yield index, num_updates

    def which_have_state(self) -> bytes:
        """A value that changes when a parameter gets its first state."""
        self._finish_update()
        return (self._num_updates > 0).tobytes() + self.empty.which_have_state()

    def counted(self, num_updates: int) -> Mapping[str, Any]:
        """The entries of torch's state that are not in the memory devices, after `num_updates` updates."""
        return self._rule.counted(num_updates)

    def _names_kept_of(self, parameter: torch.nn.Parameter) -> tuple[str, ...]:
        """Names of a parameter's float32 tensors in the memory devices, in their order."""
        return (*self._rule.state_names, *((MASTER,) if parameter.dtype != torch.float32 else ()))

    def _settle(self) -> None:
        """Waits for a GPU's writes to shared memory, because other workers read it next."""
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
                value = None  # rounded meanwhile, so it has no more precision than the parameter
            if value is not None:
                copy_all([self._state_tensor(index, number)], [value])
            elif not self._are_states_zero:  # initial zeros are not touched, so they take no memory
                self._state_tensor(index, number).zero_()

    def _state_tensor(self, index: int, number: int) -> torch.Tensor:
        return slot_tensor(self._group.state(index, number), self._parameters[index], torch.float32)


def _can_be_taken_over(parameter: torch.Tensor, view: torch.Tensor) -> bool:
    is_alike = (parameter.shape, parameter.dtype, parameter.device) == (view.shape, view.dtype, view.device)
    return is_alike and not _is_shared_by_torch(parameter)


def _is_shared_by_torch(tensor: torch.Tensor) -> bool:
    """Whether other processes may share it through torch.multiprocessing, which would not see later changes."""
    return bool(tensor.is_cpu and tensor.is_shared())


def _described(tensor: torch.Tensor) -> str:
    place = "memory of share_memory()" if _is_shared_by_torch(tensor) else str(tensor.device)
    return f"{tensor.dtype} {list(tensor.shape)} in {place}"
