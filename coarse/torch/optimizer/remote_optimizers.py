"""The optimizers of one model that run in the memory devices."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from coarse.client.tensor_group import TensorGroup
from coarse.errors import (
    CoarseError,
    OutOfDeviceMemoryError,
    SessionClosedError,
    WorkerLostError,
    is_refusal,
)
from coarse.session import Session
from coarse.torch.ddp.module_hooks import OwnHook
from coarse.torch.ddp.state.buffers import broadcast_tensors
from coarse.torch.gradients.averaging import GradientSynchroniser
from coarse.torch.gradients.gradient_parts import (
    DeviceOptimizer,
    GradientParts,
    NamedParameters,
    RemotePart,
)
from coarse.torch.gradients.gradient_policy import MeasuredGradient
from coarse.torch.gradients.layout import common_gpu, forget_values
from coarse.torch.gradients.registered_gradients import OffloadOptions
from coarse.torch.optimizer.remote_parameters import RemoteParameters
from coarse.torch.optimizer.update_rules import UpdateRule

logger = logging.getLogger(__name__)

_NARROWER = "Without it, COARSE_NODE_COMPRESSION=bf16, fp16 or int8 sends less between nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOptions:
    """How memory devices update the parameters of an optimizer.

    Args:
        overlap: Whether each parameter is updated during backward(), not by RemoteOptimizers.update().
        measures: Whether memory devices measure averaged gradients, for RemoteOptimizers.measured_gradients().
        staleness: Number of recent updates that a forward's parameters may lack. With 0 they are those in the memory
            devices, otherwise copies: RemotePart.cached.
        before_backward: With `overlap`, called at the beginning of each backward() that averages.
    """

    overlap: bool
    measures: bool
    staleness: int
    before_backward: Callable[[], object]


class RemoteOptimizers:
    """Moves parameters and optimizers of a model to the memory devices and back, and starts updates there.

    One caller at a time.

    Args:
        session: The session of the workers and their memory devices.
        name: Name of the model, the same on every worker.
        module: The model.
        gradients: Its registered gradients.
        receive_values: Copies worker 0's values, except of the given parameters, to workers that have none yet.
            Collective.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        module: torch.nn.Module,
        gradients: GradientParts,
        receive_values: Callable[[Collection[torch.nn.Parameter]], object],
    ) -> None:
        self._session = session
        self._name = name
        self._module = module
        self._gradients = gradients
        self._receive_values = receive_values
        self._provides_values = self._is_first()

    @property
    def parts(self) -> Sequence[RemotePart]:
        """The parts of the optimizers, in the order of their addition."""
        return self._gradients.remote_parts

    def runs(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the memory devices run this optimizer (the one given to DistributedOptimizer), until close()."""
        return not self._gradients.is_closed and any(part.optimizer is optimizer for part in self.parts)

    def cannot_offload(self, parameters: Sequence[torch.nn.Parameter]) -> str:
        """The reason why an optimizer of `parameters` cannot run in the memory devices; "" if it can."""
        options = self._gradients.options
        if options.travel_dtype is not None:
            return f"a communication hook sends gradients as {options.travel_dtype}, which rounds them. {_NARROWER}"
        if options.hook is not None:
            return f"a communication hook averages gradients instead of the memory devices. {_NARROWER}"
        gpu = common_gpu(parameters)
        if gpu and self._session.settings.gpu_transfers == "off":
            return "the model is on a GPU, and COARSE_GPU_TRANSFERS=off makes the processor copy gradients"
        return self._session.cannot_update(gpu)

    def agree_on_obstacle(self, reason: str) -> str:
        """The reason why some worker's optimizer cannot run in the memory devices; "" if all can. Collective.

        Args:
            reason: The reason why this worker's cannot; "" if it can.
        """
        if self._is_true_anywhere(bool(reason)):
            return reason or "another worker's cannot; its message gives the reason"
        return reason

    # Moving.

    def _is_first(self) -> bool:
        """Whether this worker is the first one of its node that is not lost: it provides the node's values."""
        members = {*self._session.node_workers} & {*self._session.members}
        return not self._session.is_newcomer and self._session.identity.rank == min(members)

    def offload(
        self,
        optimizer: torch.optim.Optimizer,
        rule: UpdateRule,
        parameters: set[torch.nn.Parameter],
        options: UpdateOptions,
        *,
        owner: Callable[[], DeviceOptimizer | None],
        replaced: RemotePart | None = None,
    ) -> RemotePart:
        """Moves parameters and the optimizer's state to memory that workers and memory devices share. Collective.

        Args:
            optimizer: Has the settings, and possibly state.
            rule: The optimizer's update rule.
            parameters: Parameters of the model that no other optimizer in the memory devices has. Gradients of the
                remaining parameters are averaged as before.
            options: How they are updated.
            owner: As for RemotePart.
            replaced: The optimizer's previous part; the new part has its parameters too.
        """
        self._provides_values = self._is_first()
        free = self._release(replaced, has_values=self._provides_values)
        moved = [(name, parameter) for name, parameter in free if parameter in parameters]
        self._prepare_values([parameter for _, parameter in moved])
        try:
            part = self._move(optimizer, rule, moved, options, owner)
        except CoarseError as error:
            if is_refusal(error):
                self._average_again(moved)
            raise
        self._gradients.remote_parts.append(part)
        self._hold_parameters(part, staleness=options.staleness)
        self._follow_module(part.remote)
        self._gradients.register_rest()
        return part

    def take_back(self, part: RemotePart) -> None:
        """Returns an optimizer's parameters and state to the workers; gradients are averaged. Collective."""
        self._release(part, has_values=True)
        self._gradients.register_rest()

    def _release(self, part: RemotePart | None, *, has_values: bool) -> NamedParameters:
        """Frees the memory of `part`, and of gradients in no optimizer's part; returns their parameters."""
        self._gradients.check_finished()
        if part is not None:
            part.remote.give_back(has_values=has_values)
        return self._gradients.release_rest(part)

    def _prepare_values(self, moved: Sequence[torch.nn.Parameter]) -> None:
        """Leaves the values of parameters on each node's first worker, which provides them. Collective."""
        self._receive_values(moved)
        if len(self._session.node_workers) < self._session.identity.world_size:
            # From now on, each node has the values of its own first worker.
            broadcast_tensors(self._session, moved, root=min(self._session.members))
            self._session.release_buffers()
        if not self._provides_values:
            forget_values(moved)

    def _move(
        self,
        optimizer: torch.optim.Optimizer,
        rule: UpdateRule,
        moved: NamedParameters,
        options: UpdateOptions,
        owner: Callable[[], DeviceOptimizer | None],
    ) -> RemotePart:
        """Registers parameters and moves their values and the optimizer's state to the memory devices. Collective.

        Raises:
            OutOfDeviceMemoryError: On all workers, if one cannot get the memory; parameters are then unchanged.
        """
        gradients = self._gradients.register(
            "parameters",
            moved,
            OffloadOptions(
                state_names=rule.state_names,
                measures=options.measures,
                # With shared slots, a worker would wait for slower ones.
                shares_slots=options.overlap and not options.staleness,
                moves=self._provides_values,
            ),
        )
        remote = RemoteParameters(
            _tensor_group(gradients),
            [parameter for _, parameter in moved],
            optimizer,
            rule,
            writes=self._provides_values,
            finish_update=gradients.finish_update,
            meet=functools.partial(_is_true_anywhere, self._session, False),
        )
        self._move_values(remote, gradients)
        remote.take_over()
        if self._session.settings.least_workers:
            if not self._session.is_newcomer:
                self._check_values_came()
            remote.writes = True  # all write the same values later, because any worker may be lost
        updates = gradients.update(
            remote,
            before_backward=options.before_backward if options.overlap else None,
            is_stale=bool(options.staleness),
        )
        return RemotePart(
            gradients=gradients, optimizer=optimizer, remote=remote, updates=updates, owner=owner
        )

    def _move_values(self, remote: RemoteParameters, gradients: GradientSynchroniser) -> None:
        """Moves parameters to the memory devices and allocates memory for the rest. Collective.

        Raises:
            OutOfDeviceMemoryError: As _move().
        """
        shortage: OutOfDeviceMemoryError | None = None
        try:
            remote.move()
            gradients.reserve()
        except OutOfDeviceMemoryError as error:
            shortage = error
        if self._is_true_anywhere(shortage is not None):
            gradients.release()
            raise shortage or OutOfDeviceMemoryError(
                f"{self._name}: another worker of the job cannot allocate the memory for its part, and reports how "
                "much it needs; use fewer workers on its node, or a smaller model"
            )

    def _check_values_came(self) -> None:
        """Raises WorkerLostError on all workers if the one that provides the values may be lost. Collective."""
        if not self._is_true_anywhere(self._provides_values):
            raise WorkerLostError(
                f"{self._name}: the worker that moved the parameters to the memory devices is lost; start the job "
                "again"
            )

    def _average_again(self, moved: NamedParameters) -> None:
        """Restores the model after memory devices refused to hold parameters, whose values only worker 0 has."""
        broadcast_tensors(self._session, [parameter for _, parameter in moved])
        self._session.release_buffers()
        self._gradients.register_rest()

    def _hold_parameters(self, part: RemotePart, *, staleness: int) -> None:
        """Makes this worker's parameters those of the memory devices, or copies of them. Collective."""
        group, remote = _tensor_group(part.gradients), part.remote
        # Views and copies must not be mixed: workers with copies would take writes to a view for an update's result.
        # After this call, the values of the writing worker are in place.
        has_copies = self._is_true_anywhere(group.are_parameters_elsewhere)
        if staleness:
            part.cached = remote.cache(staleness=staleness)
            part.cached.follow(self._module)
        elif has_copies:
            part.updates.mirror(remote.mirror(part.gradients.synchronize))
        elif self._is_true_anywhere(bool(reason := group.map_own_parameters())):
            logger.info(
                "workers see other workers' writes to parameters: %s", reason or "another worker needs this"
            )
            remote.share()
        else:
            remote.share(group.open_own_parameters(publishes=remote.writes))

    def _follow_module(self, remote: RemoteParameters) -> None:
        """Makes saving the module wait for updates, and snapshots keep contents before loading overwrites them."""
        reference = weakref.ref(remote)  # the module may outlive its wrapper
        self._module.register_load_state_dict_pre_hook(OwnHook(lambda: _keep_snapshots(reference)))
        self._module.register_state_dict_pre_hook(OwnHook(lambda: _wait_for_update(reference)))

    def _is_true_anywhere(self, condition: bool) -> bool:
        return _is_true_anywhere(self._session, condition)

    # Updating.

    def update(self, part: RemotePart, *, gradient_scale: float = 1.0) -> None:
        """Updates an optimizer's parameters by their gradients, which all workers share.

        Args:
            part: Its part.
            gradient_scale: Factor for the gradients, the same on every worker.
        """
        self._check_open(part)
        self._gradients.check_finished()
        part.updates.run(gradient_scale=gradient_scale)

    def end_overlapped_step(self, part: RemotePart) -> None:
        """Permits the next backward to update."""
        self._check_open(part)
        part.gradients.end_step()

    def measured_gradients(
        self, part: RemotePart, *, num_changes: int, are_unscaled: bool
    ) -> list[MeasuredGradient]:
        """The existing gradients as measured by the memory devices; arguments as for GradientSynchroniser."""
        self._check_open(part)
        return part.gradients.measured(num_changes=num_changes, are_unscaled=are_unscaled)

    def _check_open(self, part: RemotePart) -> None:
        if self._gradients.is_closed or part not in self.parts:
            raise SessionClosedError(
                "this model was closed, or parameters added later did not fit into device memory: its optimizer "
                "no longer runs in memory devices"
            )

    # Recovery.

    @property
    def goes_on_over_nodes(self) -> bool:
        """Whether the job has several nodes and goes on without lost workers."""
        session = self._session
        return session.settings.least_workers > 0 and len(session.node_workers) < session.num_places

    @property
    def keeps_devices(self) -> bool:
        """Whether the memory devices outlive crashed workers."""
        return self._session.settings.keep_devices > 0

    @property
    def replicates_devices(self) -> bool:
        """Whether the contents of a memory device survive the loss of that device."""
        return self._session.settings.replicas > 0

    def keep_state(self, step: int, state: bytes) -> None:
        """Stores this worker's own state in the memory devices, which keep the states of the last two steps.

        Args:
            step: The step that begins now.
            state: The state, not empty.
        """
        self._session.store(self._state_key(step), np.frombuffer(state, dtype=np.uint8))

    def kept_state(self, step: int) -> memoryview:
        """The last state from keep_state() for this step, or for another step of the same parity."""
        return self._session.load(self._state_key(step)).value

    def _state_key(self, step: int) -> str:
        return f"{self._name}/worker {self._session.identity.rank}/{step % 2}"


def _is_true_anywhere(session: Session, condition: bool) -> bool:
    flag = np.array([condition], dtype=np.int32)
    session.all_reduce(flag, op="max")
    return bool(flag[0])


def _tensor_group(gradients: GradientSynchroniser) -> TensorGroup:
    assert isinstance(gradients.group, TensorGroup)
    return gradients.group


def _keep_snapshots(reference: weakref.ref[RemoteParameters]) -> None:
    """Makes the snapshots of a model keep contents that are about to be overwritten, if the model still exists."""
    remote = reference()
    if remote is not None:
        remote.keep_snapshots()


def _wait_for_update(reference: weakref.ref[RemoteParameters]) -> None:
    """Waits for updates before parameters are saved; raises if an update has failed."""
    remote = reference()
    if remote is not None:
        remote.wait()
