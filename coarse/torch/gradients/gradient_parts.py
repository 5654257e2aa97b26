"""The gradients of a wrapped model: one part for each optimizer in the memory devices, and one for the rest."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from coarse.errors import CoarseError
from coarse.session import Session
from coarse.torch.gradients import gradient_errors
from coarse.torch.gradients.averaging import GradientSynchroniser
from coarse.torch.gradients.hooks.bucket_hooks import BucketHook
from coarse.torch.gradients.registered_gradients import AveragingOptions, OffloadOptions
from coarse.torch.optimizer.cached_parameters import CachedParameters
from coarse.torch.optimizer.remote_parameters import RemoteParameters
from coarse.torch.optimizer.remote_updates import RemoteUpdates

NamedParameters = Sequence[tuple[str, torch.nn.Parameter]]


class DeviceOptimizer(Protocol):
    """The methods that a model calls on an optimizer in the memory devices. Every method is collective."""

    def take_thawed(self) -> None:
        """Moves the optimizer's newly trainable parameters to the memory devices."""

    def run_on_workers(self) -> None:
        """Moves parameters and state from the memory devices back to the workers."""

    def run_in_memory_devices_again(self, root: int) -> None:
        """Reverses run_on_workers(), with the state of worker `root`."""


@dataclass(eq=False, kw_only=True)
class RemotePart:
    """Parameters that an optimizer in the memory devices updates.

    Args:
        gradients: Their gradients.
        optimizer: The optimizer given to DistributedOptimizer.
        remote: The parameters and the optimizer's state.
        updates: The updates.
        owner: Returns the DistributedOptimizer; None if it was deleted.
        cached: Copies with which this worker trains, if parameters may be stale.
    """

    gradients: GradientSynchroniser
    optimizer: torch.optim.Optimizer
    remote: RemoteParameters
    updates: RemoteUpdates
    owner: Callable[[], DeviceOptimizer | None]
    cached: CachedParameters | None = None

    def catch_up(self) -> None:
        """Continues from the updates that other workers have made before this one took part."""
        self.updates.count = self.remote.catch_up()

    @property
    def named(self) -> NamedParameters:
        """The parameters with their names, in the order of the module."""
        return self.gradients.named


class GradientParts:
    """All gradients of a model, registered with the memory devices in parts. One caller at a time.

    Args:
        session: The session to register with; registration is collective.
        name: Name of the model, the same on every worker.
        trainable: The model's trainable parameters, in the order of the module. register_rest() registers them.
        options: How gradients are averaged.
    """

    def __init__(
        self, session: Session, name: str, trainable: NamedParameters, options: AveragingOptions
    ) -> None:
        self._session = session
        self._name = name
        self._trainable = trainable
        self._rank = session.identity.rank
        self._num_registrations = Counter[str]()
        self.options = options
        """How gradients are averaged."""
        self.rest: GradientSynchroniser | None = None
        """The gradients of parameters without an optimizer in the memory devices; None if there are none."""
        self.remote_parts: list[RemotePart] = []
        """The parts of optimizers in the memory devices, in the order of their addition."""
        self.is_closed = False
        """Whether close() was called."""

    @property
    def updated_parameters(self) -> set[torch.nn.Parameter]:
        """Parameters that optimizers in the memory devices update."""
        return {parameter for part in self.remote_parts for _, parameter in part.named}

    @property
    def _all(self) -> list[GradientSynchroniser]:
        rest = [] if self.rest is None else [self.rest]
        return [part.gradients for part in self.remote_parts] + rest

    # Registering. Every method is collective.

    def register(
        self, kind: str, named: NamedParameters, offload: OffloadOptions | None = None
    ) -> GradientSynchroniser:
        """Registers gradients that are in no part yet.

        Args:
            kind: The registered tensors' kind, as a part of the name.
            named: Their parameters with names, in the order of the module.
            offload: How an optimizer in the memory devices uses them; None without one.
        """
        self._num_registrations[kind] += 1
        number = self._num_registrations[kind]
        # A new name, the same on every worker.
        name = f"{self._name}/{kind}" + (f" {number}" if number > 1 else "")
        return GradientSynchroniser(self._session, name, named, self.options, offload)

    def register_rest(self) -> None:
        """Registers the gradients of all trainable parameters that no optimizer in the memory devices updates."""
        held = self.updated_parameters
        if named := [each for each in self._trainable if each[1] not in held]:
            self.rest = self.register("gradients", named)

    def release_rest(self, part: RemotePart | None = None) -> NamedParameters:
        """Frees the memory of gradients in no optimizer's part and of `part`; returns their parameters."""
        released = [] if self.rest is None else [self.rest]
        self.rest = None
        if part is not None:
            self.remote_parts.remove(part)
            released.append(part.gradients)
        freed = {parameter for gradients in released for _, parameter in gradients.named}
        for gradients in released:
            gradients.release()
        return [each for each in self._trainable if each[1] in freed]

    def average_by(self, *, dtype: torch.dtype | None, hook: BucketHook | None) -> None:
        """From now on, rounds gradients to `dtype` and averages them, or lets `hook` average them."""
        self.check_finished()
        self.options = replace(self.options, travel_dtype=dtype, hook=hook)
        self.release_rest()
        self.register_rest()

    def take_thawed(
        self, trainable: NamedParameters, sparse_parameters: Collection[torch.nn.Parameter]
    ) -> None:
        """Registers the gradients of thawed parameters too.

        Args:
            trainable: All trainable parameters now.
            sparse_parameters: Those of them whose gradients are sparse.
        """
        self.check_finished()
        has_local = self.has_local
        self._trainable = trainable
        self.options = replace(self.options, sparse_parameters=sparse_parameters)
        self.release_rest()
        self.register_rest()
        if self.rest is not None:
            self.rest.has_local = has_local

    # Forward and backward.

    @property
    def has_local(self) -> bool:
        """Whether `.grad` holds local gradients: from a backward that did not average, with no averaging since."""
        return any(part.has_local for part in self._all)

    @property
    def is_expecting(self) -> bool:
        """Whether a forward has been made whose backward averages, and the averages are not there yet."""
        return any(part.is_expecting for part in self._all)

    def slot_of(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """As slot_of() of the GradientSynchroniser that averages the gradient of `parameter`."""
        slots = (part.slot_of(parameter) for part in self._all)
        return next((slot for slot in slots if slot is not None), None)

    def check(self) -> None:
        """Raises errors on a GPU since the last call; called before each forward."""
        for part in self._all:
            part.check()

    def confirm(self) -> None:
        """Raises if gradients that were not averaged have updated parameters since the last forward; may wait."""
        for part in self._all:
            part.confirm()

    def check_finished(self) -> None:
        """Called before a forward with gradients enabled.

        Raises:
            RuntimeError: If gradients of the previous backward are incomplete; names the parameters and the remedies.
        """
        if any(part.has_begun for part in self._all):
            missing = [name for part in self._all for name in part.missing()]
            if missing:
                num_parameters = sum(len(part.named) for part in self._all)
                raise gradient_errors.unfinished(self._rank, missing, num_parameters=num_parameters)

    def expect(self, outputs: object) -> None:
        """Prepares averaging in the next backward; called after its forward, with the forward's outputs.

        Raises:
            RuntimeError: As check_finished().
        """
        self.check_finished()
        for part in self._all:
            part.expect(outputs)

    def average(self) -> None:
        """Averages the current `.grad` of each parameter. Collective.

        Raises:
            RuntimeError: If an optimizer updates during backward, or as check_finished().
        """
        if any(part.updates_in_backward for part in self._all):
            raise gradient_errors.updated_in_backward(self._rank)
        self.check_finished()
        for part in self._all:
            part.average()

    def use_static_graph(self) -> None:
        """Counts each gradient's arrivals in the next iteration, and relies on the counts from then on."""
        self.options = replace(self.options, static_graph=True)
        for part in self._all:
            part.use_static_graph()

    def expect_uneven_inputs(self) -> None:
        """From now on, workers may run out of inputs: shadow(). Collective."""
        for part in self._all:
            part.expect_uneven_inputs()

    def shadow(self, *, divide_by_initial_world_size: bool) -> None:
        """Participates in one averaging without gradients, for a worker whose inputs are exhausted."""
        for part in self._all:
            part.shadow(divide_by_initial_world_size=divide_by_initial_world_size)

    def finish_shadow(self) -> None:
        """Waits for the averaging of shadow(); afterwards this worker may use the slots again."""
        for part in self._all:
            part.finish_shadow()

    def read_cached(self) -> None:
        """Called before a forward uses parameters; refreshes stale copies."""
        for part in self.remote_parts:
            if part.cached is not None:
                part.cached.read(part.updates.count)

    def keep_snapshots(self) -> None:
        """Makes snapshots copy contents before they are overwritten."""
        for part in self.remote_parts:
            part.remote.keep_snapshots()

    def wait(self) -> None:
        """Waits until the updates that this worker has pushed are complete, unless it holds the parameters itself."""
        for part in self.remote_parts:
            part.remote.wait()

    # The end.

    def close(self) -> None:
        """Stops averaging, gives every parameter memory of its own again, and releases the slots. Idempotent."""
        self.is_closed = True
        self.remove_hooks()
        # The other workers may be waiting for an update that has not started yet.
        with contextlib.suppress(CoarseError):
            self.finish_updates()
        for part in self.remote_parts:
            part.remote.finish_saves()
        self.release_parameters()
        self.close_groups()

    def remove_hooks(self) -> None:
        """Stops averaging; `.grad` of later backward passes stays local."""
        for part in self._all:
            part.remove_hooks()

    def finish_updates(self) -> None:
        """Waits for the updates that this worker has pushed, even if it holds the parameters itself again."""
        for part in self.remote_parts:
            part.updates.finish()

    def release_parameters(self) -> None:
        """Gives every parameter memory of its own again. Idempotent."""
        for part in self.remote_parts:
            part.remote.release()

    def close_groups(self) -> None:
        """Releases the registered memory."""
        for part in self._all:
            part.group.close()
