"""The gradients of a wrapped model: one part for each optimizer in the memory devices, and one for the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from coarse.torch.gradients import gradient_errors
from coarse.torch.gradients.averaging import GradientSynchroniser
from coarse.torch.optimizer.cached_parameters import CachedParameters
from coarse.torch.optimizer.remote_parameters import RemoteParameters

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
class GradientPart:
    """Parameters whose gradients are registered together and that workers update.

    Args:
        named: The parameters with their names, in the order of the module.
        gradients: Averages them.
    """

    named: NamedParameters
    gradients: GradientSynchroniser

    def keep_snapshots(self) -> None:
        """Makes snapshots copy contents before they are overwritten."""

    def wait(self) -> None:
        """Waits until the updates that this worker has pushed are complete."""

    def finish_saves(self) -> None:
        """Waits for running saves of the parameters."""

    def read_cached(self) -> None:
        """Called before a forward uses the parameters."""

    def close(self) -> None:
        """Gives every parameter memory of its own again. Idempotent."""

    def release(self) -> None:
        """Releases its memory at once; nothing else may be called afterwards."""
        self.gradients.release()


@dataclass(eq=False, kw_only=True)
class OffloadedPart(GradientPart):
    """Parameters that an optimizer in the memory devices updates.

    Args:
        optimizer: The optimizer given to DistributedOptimizer.
        offloaded: The parameters and the optimizer's state.
        owner: Returns the DistributedOptimizer; None if it was deleted.
        cached: Copies with which this worker trains, if parameters may be stale.
    """

    optimizer: torch.optim.Optimizer
    offloaded: RemoteParameters
    owner: Callable[[], DeviceOptimizer | None]
    cached: CachedParameters | None = None

    def update(self, *, gradient_scale: float = 1.0) -> None:
        """Starts the memory devices' update of the parameters by their gradients, which all workers share.

        Args:
            gradient_scale: Factor for the gradients, the same on every worker.
        """
        # All slots and all settings are written before the first push, so that memory devices that have begun a step
        # can finish it without any worker (docs/design/recovery.md).
        present = self.gradients.bring_to_slots()
        self.offloaded.begin(present, gradient_scale=gradient_scale)
        self.gradients.push_update(present)

    def keep_snapshots(self) -> None:
        self.offloaded.keep_snapshots()

    def wait(self) -> None:
        self.offloaded.wait()

    def finish_saves(self) -> None:
        self.offloaded.finish_saves()

    def read_cached(self) -> None:
        if self.cached is not None:
            self.cached.read(self.gradients.num_updates)

    def close(self) -> None:
        self.offloaded.release()


class GradientParts:
    """All parts of a model, for its forward and backward. One caller at a time.

    Args:
        rank: This worker's rank, for messages.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._parts: list[GradientPart] = []

    @property
    def rest(self) -> GradientPart | None:
        """The parameters without an optimizer in the memory devices; None if there are none."""
        return next((part for part in self._parts if not isinstance(part, OffloadedPart)), None)

    @property
    def offloaded(self) -> list[OffloadedPart]:
        """The parts of optimizers in the memory devices, in the order of their addition."""
        return [part for part in self._parts if isinstance(part, OffloadedPart)]

    def add(self, part: GradientPart) -> None:
        """Adds a part, which is averaged from now on."""
        self._parts.append(part)

    def release(self, *parts: GradientPart | None) -> None:
        """Releases registered parts before others replace them."""
        for part in parts:
            if part is not None:
                self._parts.remove(part)
                part.release()

    @property
    def has_local(self) -> bool:
        """Whether `.grad` holds local gradients: from a backward that did not average, with no averaging since."""
        return any(part.gradients.has_local for part in self._parts)

    def slot_of(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """As slot_of() of the GradientSynchroniser that averages the gradient of `parameter`."""
        slots = (part.gradients.slot_of(parameter) for part in self._parts)
        return next((slot for slot in slots if slot is not None), None)

    def check(self) -> None:
        """Raises errors on a GPU since the last call; called before each forward."""
        for part in self._parts:
            part.gradients.check()

    def confirm(self) -> None:
        """Raises if gradients that were not averaged have updated parameters since the last forward; may wait."""
        for part in self._parts:
            part.gradients.confirm()

    def check_finished(self) -> None:
        """Called before a forward with gradients enabled.

        Raises:
            RuntimeError: If gradients of the previous backward are incomplete; names the parameters and the remedies.
        """
        if any(part.gradients.has_begun for part in self._parts):
            missing = [name for part in self._parts for name in part.gradients.missing()]
            if missing:
                num_parameters = sum(len(part.named) for part in self._parts)
                raise gradient_errors.unfinished(self._rank, missing, num_parameters=num_parameters)

    def expect(self, outputs: object) -> None:
        """Prepares averaging in the next backward; called after its forward, with the forward's outputs.

        Raises:
            RuntimeError: As check_finished().
        """
        self.check_finished()
        for part in self._parts:
            part.gradients.expect(outputs)

    def average(self) -> None:
        """Averages the current `.grad` of each parameter. Collective.

        Raises:
            RuntimeError: If an optimizer updates during backward, or as check_finished().
        """
        if any(part.gradients.updates_in_backward for part in self._parts):
            raise gradient_errors.updated_in_backward(self._rank)
        self.check_finished()
        for part in self._parts:
            part.gradients.average()

    def use_static_graph(self) -> None:
        """Counts each gradient's arrivals in the next iteration, and relies on the counts from then on."""
        for part in self._parts:
            part.gradients.use_static_graph()

    def expect_uneven_inputs(self) -> None:
        """From now on, workers may run out of inputs: shadow(). Collective."""
        for part in self._parts:
            part.gradients.expect_uneven_inputs()

    def shadow(self, *, divide_by_initial_world_size: bool) -> None:
        """Participates in one averaging without gradients, for a worker whose inputs are exhausted."""
        for part in self._parts:
            part.gradients.shadow(divide_by_initial_world_size=divide_by_initial_world_size)

    def finish_shadow(self) -> None:
        """Waits for the averaging of shadow(); afterwards this worker may use the slots again."""
        for part in self._parts:
            part.gradients.finish_shadow()

    def keep_snapshots(self) -> None:
        """Makes snapshots copy contents before they are overwritten."""
        for part in self._parts:
            part.keep_snapshots()

    def wait(self) -> None:
        """Waits until the updates that this worker has pushed are complete."""
        for part in self._parts:
            part.wait()

    def read_cached(self) -> None:
        """Called before a forward uses parameters; refreshes stale copies."""
        for part in self._parts:
            part.read_cached()

    def finish_updates(self) -> None:
        """Waits for the updates that this worker has pushed, even if it holds the parameters itself again."""
        for part in self._parts:
            part.gradients.finish_update()

    def finish_saves(self) -> None:
        """Waits for running saves of parameters."""
        for part in self._parts:
            part.finish_saves()

    def remove_hooks(self) -> None:
        """Stops averaging; `.grad` of later backward passes stays local."""
        for part in self._parts:
            part.gradients.remove_hooks()

    def release_parameters(self) -> None:
        """Gives every parameter memory of its own again. Idempotent."""
        for part in self._parts:
            part.close()

    def close_groups(self) -> None:
        """Releases the registered memory."""
        for part in self._parts:
            part.gradients.group.close()
