"""The parts of a wrapped model in memory devices: registered gradients, and an optimizer's moved parameters."""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from coarse.client.tensor_group import TensorGroup
from coarse.errors import CoarseError, OutOfDeviceMemoryError, SessionClosedError, is_refusal
from coarse.session import AnyTensorGroup, Session
from coarse.torch.ddp.buffers import broadcast_tensors
from coarse.torch.ddp.module_hooks import OwnHook
from coarse.torch.ddp.unsupported import UnsupportedFeatures
from coarse.torch.gradients.averaging import GradientSynchroniser
from coarse.torch.gradients.bucket_hooks import BucketHook
from coarse.torch.gradients.embeddings import EmbeddingGradients
from coarse.torch.gradients.gradient_parts import (
    DeviceOptimizer,
    GradientPart,
    GradientParts,
    NamedParameters,
    OffloadedPart,
)
from coarse.torch.gradients.gradient_policy import MeasuredGradient
from coarse.torch.gradients.layout import common_gpu, forget_values
from coarse.torch.optimizer.remote_parameters import RemoteParameters
from coarse.torch.optimizer.update_rules import UpdateRule
from coarse.torch.optimizer.update_tracker import UpdateTracker

logger = logging.getLogger(__name__)


class RemoteOptimizer(UnsupportedFeatures):
    """The part of DistributedDataParallel that registers parameters and serves DistributedOptimizer."""

    _trainable: list[tuple[str, torch.nn.Parameter]]
    _gradients: GradientParts | None
    _session: Session
    _name: str
    _closed: bool
    _dropped: deque[Callable[[], object]]
    _embeddings: EmbeddingGradients | None
    tables: set[torch.nn.Parameter]
    _travel_dtype: torch.dtype | None
    _bucket_hook: BucketHook | None
    _num_registrations: Counter[str]

    @property
    def trained_parameters(self) -> Sequence[tuple[str, torch.nn.Parameter]]:
        """Parameters whose gradients are averaged, with their names in the module."""
        return self._trainable

    def _bring_values(self, *, but: Collection[torch.nn.Parameter] = ()) -> None:
        raise NotImplementedError

    def is_offloaded(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the memory devices run this optimizer (the one given to DistributedOptimizer), until close()."""
        return not self._closed and any(part.optimizer is optimizer for part in self.offloaded_parts)

    @property
    def offloaded_parts(self) -> list[OffloadedPart]:
        """The parts of optimizers in the memory devices, in the order of their addition."""
        return [] if self._gradients is None else self._gradients.offloaded

    @property
    def updated_parameters(self) -> set[torch.nn.Parameter]:
        """Parameters that optimizers in the memory devices update."""
        return {parameter for part in self.offloaded_parts for _, parameter in part.named}

    def cannot_offload(self, parameters: Sequence[torch.nn.Parameter]) -> str:
        """The reason why an optimizer of `parameters` cannot run in the memory devices; "" if it can."""
        if self._gradients is None:
            return "a job of one worker has no memory devices"
        if self._travel_dtype is not None:
            return f"a communication hook sends gradients as {self._travel_dtype}, which rounds them"
        if self._bucket_hook is not None:
            return "a communication hook averages gradients instead of the memory devices"
        gpu = common_gpu(parameters)
        if gpu and self._session.settings.gpu_transfers == "off":
            return "the model is on a GPU, and COARSE_GPU_TRANSFERS=off makes the processor copy gradients"
        return self._session.cannot_update(gpu)

    def offload(
        self,
        optimizer: torch.optim.Optimizer,
        rule: UpdateRule,
        parameters: set[torch.nn.Parameter],
        *,
        overlap: bool,
        measures: bool = False,
        staleness: int = 0,
        before_backward: Callable[[], object] = lambda: None,
        owner: Callable[[], DeviceOptimizer | None] = lambda: None,
        replaced: OffloadedPart | None = None,
    ) -> OffloadedPart:
        """Moves parameters and the optimizer's state to memory that workers and memory devices share. Collective.

        Args:
            optimizer: Has the settings, and possibly state.
            rule: The optimizer's update rule.
            parameters: Parameters of the model that no other optimizer in the memory devices has. Gradients of the
                remaining parameters are averaged as before.
            overlap: Whether parameters are updated during backward(), not by OffloadedPart.update().
            measures: Whether memory devices measure averaged gradients, for measured_gradients().
            staleness: Number of recent updates that a forward's parameters may lack. With 0 they are those in the
                memory devices, otherwise copies: `cached`.
            before_backward: With `overlap`, called at the beginning of each backward() that averages.
            owner: As for OffloadedPart.
            replaced: The optimizer's previous part; the new part has its parameters too.

        Raises:
            ValueError: If cannot_offload() has a reason.
        """
        if self._gradients is None:
            raise ValueError(self.cannot_offload(list(parameters)))
        self._gradients.check_finished()
        writes = self._session.identity.rank == self._session.node_workers[0]
        if replaced is not None:
            replaced.offloaded.give_back(has_values=writes)
        free = self._release_rest(replaced)
        moved = [(name, parameter) for name, parameter in free if parameter in parameters]
        tensors = [parameter for _, parameter in moved]
        self._bring_values(but=tensors)
        if len(self._session.node_workers) < self._session.identity.world_size:
            # From now on, each node has the values of its own first worker.
            broadcast_tensors(self._session, tensors)
            self._session.release_buffers()
        if not writes:
            forget_values(tensors)  # the writing worker provides the values
        try:
            gradients = self._register_part(
                self._new_name("parameters"),
                moved,
                rule.state_names,
                measures=measures,
                # With shared slots, a worker would wait for slower ones.
                shares_slots=overlap and not staleness,
                moves=writes,
            )
        except CoarseError as error:
            if is_refusal(error):
                self._average_again(free, tensors)
            raise
        offloaded = RemoteParameters(
            _tensor_group(gradients),
            tensors,
            optimizer,
            rule,
            writes=writes,
            finish_update=gradients.finish_update,
            meet=functools.partial(_is_true_anywhere, self._session, False),
        )
        if (shortage := self._move(offloaded, gradients)) is not None:
            gradients.release()
            self._average_again(free, tensors)
            raise shortage
        offloaded.take_over()
        updates = gradients.update(
            offloaded,
            before_backward=before_backward if overlap else None,
            waits=not (overlap and staleness),
            waits_here=bool(staleness),
        )
        part = OffloadedPart(
            named=moved,
            gradients=gradients,
            optimizer=optimizer,
            offloaded=offloaded,
            owner=owner,
        )
        self._gradients.add(part)
        self._hold_parameters(part, updates, staleness=staleness)
        self._follow_module(offloaded)
        self._average([each for each in free if each[1] not in parameters])
        return part

    def _move(
        self, offloaded: RemoteParameters, gradients: GradientSynchroniser
    ) -> OutOfDeviceMemoryError | None:
        """Moves parameters to the memory devices and allocates memory for the rest. Collective.

        Returns:
            On all workers, the reason if one cannot get the memory; parameters are then unchanged.
        """
        shortage: OutOfDeviceMemoryError | None = None
        try:
            offloaded.move()
            gradients.reserve()
        except OutOfDeviceMemoryError as error:
            shortage = error
        if not self._is_true_anywhere(shortage is not None):
            return None
        return shortage or OutOfDeviceMemoryError(
            f"{self._name}: another worker of the job cannot allocate the memory for its part, and reports how "
            "much it needs; use fewer workers on its node, or a smaller model"
        )

    def _average_again(self, free: NamedParameters, forgotten: Sequence[torch.nn.Parameter]) -> None:
        """Restores the model after memory devices refused to hold its parameters. Collective.

        Args:
            free: Parameters that are not registered.
            forgotten: Parameters whose values only worker 0 has.
        """
        broadcast_tensors(self._session, forgotten)
        self._session.release_buffers()
        self._average(free)

    def take_back(self, part: OffloadedPart) -> None:
        """Returns an optimizer's parameters and state to the workers; gradients are averaged. Collective."""
        assert self._gradients is not None
        self._gradients.check_finished()
        part.offloaded.give_back(has_values=True)
        self._average(self._release_rest(part))

    def _average_by_hook(self, *, dtype: torch.dtype | None = None, hook: BucketHook | None = None) -> None:
        """From now on, rounds gradients to `dtype` and averages them, or lets `hook` average them. Collective."""
        assert self._gradients is not None
        self._gradients.check_finished()
        self._travel_dtype, self._bucket_hook = dtype, hook
        self._average(self._release_rest())

    def _average_more(self) -> None:
        """Registers the gradients of all trainable parameters that are in no optimizer's part. Collective."""
        assert self._gradients is not None
        self._gradients.check_finished()
        has_local = self._gradients.has_local
        self._release_rest()
        held = self.updated_parameters
        self._average([each for each in self._trainable if each[1] not in held])
        if (rest := self._gradients.rest) is not None:
            rest.gradients.has_local = has_local

    def _average(self, named: NamedParameters) -> None:
        """Registers the gradients of parameters that no optimizer in the memory devices updates. Collective."""
        assert self._gradients is not None
        if named:
            gradients = self._register_part(self._new_name("gradients"), named)
            self._gradients.add(GradientPart(named=named, gradients=gradients))

    def _release_rest(self, more: OffloadedPart | None = None) -> list[tuple[str, torch.nn.Parameter]]:
        """Frees the memory of gradients in no optimizer's part and of `more`; returns their parameters."""
        assert self._gradients is not None
        parts = [part for part in (self._gradients.rest, more) if part is not None]
        freed = {parameter for part in parts for _, parameter in part.named}
        self._gradients.release(*parts)
        return [(name, parameter) for name, parameter in self._trainable if parameter in freed]

    def _new_name(self, kind: str) -> str:
        """Returns a new name, the same on every worker, because registering is collective."""
        self._num_registrations[kind] += 1
        number = self._num_registrations[kind]
        return f"{self._name}/{kind}" + (f" {number}" if number > 1 else "")

    def _hold_parameters(self, part: OffloadedPart, updates: UpdateTracker, *, staleness: int) -> None:
        """Makes this worker's parameters those of the memory devices, or copies of them. Collective."""
        gradients, offloaded = part.gradients, part.offloaded
        # Views and copies must not be mixed: workers with copies would take writes to a view for an update's result.
        # After this call, the values of the writing worker are in place.
        has_copies = self._is_true_anywhere(_tensor_group(gradients).are_parameters_elsewhere)
        if staleness:
            part.cached = offloaded.cache(staleness=staleness)
            part.cached.follow(self.module)
        elif has_copies:
            updates.mirror(offloaded.mirror(gradients.settle))
        elif self._is_true_anywhere(bool(reason := _tensor_group(gradients).map_own_parameters())):
            logger.info(
                "workers see other workers' writes to parameters: %s", reason or "another worker needs this"
            )
            offloaded.share()
        else:
            offloaded.share(_tensor_group(gradients).open_own_parameters(publishes=offloaded.writes))

    def _follow_module(self, offloaded: RemoteParameters) -> None:
        """Makes saving the module wait for updates, and snapshots keep contents before loading overwrites them."""
        reference = weakref.ref(offloaded)  # the module may outlive this wrapper
        self.module.register_load_state_dict_pre_hook(OwnHook(lambda: _keep_snapshots(reference)))
        self.module.register_state_dict_pre_hook(OwnHook(lambda: _wait_for_update(reference)))

    def keep_snapshots(self) -> None:
        """Makes snapshots copy their contents; called before any write to parameters except an update."""
        if self._gradients is not None:
            self._gradients.keep_snapshots()

    def agree_on_obstacle(self, reason: str) -> str:
        """The reason why some worker's optimizer cannot run in the memory devices; "" if all can. Collective.

        Args:
            reason: The reason why this worker's cannot; "" if it can.
        """
        if self._gradients is not None and self._is_true_anywhere(bool(reason)):
            return reason or "another worker's cannot; its message gives the reason"
        return reason

    def _is_true_anywhere(self, condition: bool) -> bool:
        return _is_true_anywhere(self._session, condition)

    def update_parameters(self, part: OffloadedPart, *, gradient_scale: float = 1.0) -> None:
        """Calls OffloadedPart.update() after checking that the previous backward is finished."""
        self._open_gradients(part).check_finished()
        part.update(gradient_scale=gradient_scale)

    def end_overlapped_step(self, part: OffloadedPart) -> None:
        """Permits the next backward to update."""
        self._open_gradients(part)
        part.gradients.end_step()

    def measured_gradients(
        self, part: OffloadedPart, *, num_changes: int, are_unscaled: bool
    ) -> list[MeasuredGradient]:
        """The existing gradients as measured by the memory devices; arguments as for GradientSynchroniser."""
        self._open_gradients(part)
        return part.gradients.measured(num_changes=num_changes, are_unscaled=are_unscaled)

    def _open_gradients(self, part: OffloadedPart) -> GradientParts:
        if self._gradients is None or self._closed or part not in self._gradients.offloaded:
            raise SessionClosedError(
                "this model was closed, or parameters added later did not fit into device memory: its optimizer "
                "no longer runs in memory devices"
            )
        return self._gradients

    @property
    def keeps_devices(self) -> bool:
        """Whether the memory devices outlive crashed workers."""
        return self._gradients is not None and self._session.settings.keep_devices > 0

    @property
    def replicates_devices(self) -> bool:
        """Whether the contents of a memory device survive the loss of that device."""
        return self._gradients is not None and self._session.settings.replicas > 0

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

    def _register_part(
        self,
        name: str,
        named: NamedParameters,
        state_names: Sequence[str] | None = None,
        *,
        measures: bool = False,
        shares_slots: bool = False,
        moves: bool = False,
    ) -> GradientSynchroniser:
        return GradientSynchroniser(
            self._session,
            name,
            named,
            gradient_as_view=self.gradient_as_bucket_view,
            find_unused=self.find_unused_parameters,
            static_graph=self.static_graph,
            state_names=state_names,
            measures=measures,
            shares_slots=shares_slots,
            tables={parameter for _, parameter in named if parameter in self.tables},
            travel_dtype=self._travel_dtype,
            moves=moves,
            hook=self._bucket_hook,
        )

    def _watch_end(self, others: Sequence[AnyTensorGroup]) -> None:
        """Registers the cleanup that runs when this wrapper is deleted.

        Args:
            others: Its registered groups in addition to gradients.
        """
        assert self._gradients is not None
        end = weakref.finalize(self, _drop, self._gradients, list(others), self._dropped)
        end.atexit = False  # the session ends at exit, with all its groups


def _is_true_anywhere(session: Session, condition: bool) -> bool:
    flag = np.array([condition], dtype=np.int32)
    session.all_reduce(flag, op="max")
    return bool(flag[0])


def _tensor_group(gradients: GradientSynchroniser) -> TensorGroup:
    assert isinstance(gradients.group, TensorGroup)
    return gradients.group


def _keep_snapshots(reference: weakref.ref[RemoteParameters]) -> None:
    """Makes the snapshots of a model keep contents that are about to be overwritten, if the model still exists."""
    offloaded = reference()
    if offloaded is not None:
        offloaded.keep_snapshots()


def _wait_for_update(reference: weakref.ref[RemoteParameters]) -> None:
    """Waits for updates before parameters are saved; raises if an update has failed."""
    offloaded = reference()
    if offloaded is not None:
        offloaded.wait()


def _drop(
    gradients: GradientParts,
    others: Sequence[AnyTensorGroup],
    dropped: deque[Callable[[], object]],
) -> None:
    """Runs when a wrapper is deleted, in any thread."""
    gradients.remove_hooks()
    gradients.release_parameters()
    # A worker must not leave before the update is complete, because workers that have not pushed yet still need it.
    dropped.extend([gradients.finish_updates, gradients.close_groups, *(group.close for group in others)])
