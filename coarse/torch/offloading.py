"""How a wrapped model registers its parameters, also so that memory devices can run their optimizer."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from coarse.client.tensor_group import TensorGroup
from coarse.errors import CoarseError, OutOfDeviceMemoryError, SessionClosedError, is_refusal
from coarse.session import AnyTensorGroup, Session
from coarse.torch.buffers import broadcast_tensors
from coarse.torch.cached_parameters import CachedParameters
from coarse.torch.device_updates import DeviceUpdates
from coarse.torch.embeddings import EmbeddingGradients
from coarse.torch.gradient_policy import MeasuredGradient
from coarse.torch.gradients import GradientSynchroniser
from coarse.torch.layout import common_gpu, forget_values
from coarse.torch.module_hooks import OwnHook
from coarse.torch.offloaded import OffloadedParameters
from coarse.torch.refusals import Refusals
from coarse.torch.update_rules import UpdateRule


class Offloading(Refusals):
    """The part of DistributedDataParallel that registers parameters, and what DistributedOptimizer asks of it."""

    _trainable: list[tuple[str, torch.nn.Parameter]]
    _gradients: GradientSynchroniser | None
    _offloaded: OffloadedParameters | None
    _groups: list[AnyTensorGroup]
    _session: Session
    _name: str
    _closed: bool
    _end: weakref.finalize[..., Offloading]
    _dropped: deque[Callable[[], object]]
    _embeddings: EmbeddingGradients | None
    tables: set[torch.nn.Parameter]
    cached_parameters: CachedParameters | None
    _travel_dtype: torch.dtype | None
    _num_registrations: int

    @property
    def trained_parameters(self) -> Sequence[tuple[str, torch.nn.Parameter]]:
        """Parameters whose gradients are averaged, with their names in the module."""
        return self._trainable

    @property
    def is_updated_by_memory_devices(self) -> bool:
        """Whether these have the parameters and run the optimizer, until close()."""
        return self._offloaded is not None and not self._closed

    def _bring_values(self, *, but: Collection[torch.nn.Parameter] = ()) -> None:
        raise NotImplementedError

    def cannot_offload(self) -> str:
        """Why this model's optimizer cannot run in the memory devices; "" if it can."""
        if self._gradients is None:
            return "a job of one worker has no memory devices"
        if self._travel_dtype is not None:
            return f"a communication hook has gradients travel in {self._travel_dtype}, which rounds them"
        gpu = common_gpu([parameter for _, parameter in self._trainable])
        if gpu and self._session.settings.gpu_transfers == "off":
            return "the model is on a GPU, and COARSE_GPU_TRANSFERS=off has the processor copy gradients"
        return self._session.cannot_update(gpu)

    def offload(
        self,
        optimizer: torch.optim.Optimizer,
        rule: UpdateRule,
        *,
        overlap: bool,
        measures: bool = False,
        staleness: int = 0,
        before_backward: Callable[[], object] = lambda: None,
    ) -> OffloadedParameters:
        """Moves parameters and the optimizer's state to memory that workers and memory devices share. Collective.

        Args:
            optimizer: Has the settings, and perhaps state.
            rule: What it does.
            overlap: Whether parameters are updated during backward(), not by update_parameters().
            measures: Whether memory devices measure averaged gradients, for measured_gradients().
            staleness: How many updates a forward's parameters may not know of; with 0 they are those in the memory
                devices, else copies: `cached_parameters`.
            before_backward: With `overlap`, called as each backward() begins that averages.

        Raises:
            RuntimeError: If this was done before.
            ValueError: If cannot_offload() has a reason.
        """
        if self._offloaded is not None:
            raise RuntimeError(
                "this model has a DistributedOptimizer already; wrap the module again for another one"
            )
        if self._gradients is None:
            raise ValueError(self.cannot_offload())
        self._gradients.check_finished()
        parameters = [parameter for _, parameter in self._trainable]
        self._bring_values(but=parameters)
        if len(self._session.node_workers) < self._session.identity.world_size:
            # Each node's are those of its own first worker from now on.
            broadcast_tensors(self._session, parameters)
            self._session.release_buffers()
        writes = self._session.identity.rank == self._session.node_workers[0]
        self._release_gradients()
        if not writes:
            forget_values(parameters)  # those of the worker that writes come
        try:
            gradients = self._register_gradients(
                f"{self._name}/parameters",
                rule.state_names,
                measures=measures,
                # Turns would have a worker wait for slower ones.
                shares_slots=overlap and not staleness,
                moves=writes,
            )
        except CoarseError as error:
            if is_refusal(error):
                self._average_again(parameters)
            raise
        assert isinstance(gradients.group, TensorGroup)
        offloaded = OffloadedParameters(
            gradients.group,
            parameters,
            optimizer,
            rule,
            writes=writes,
            finish_update=gradients.finish_update,
        )
        self._move(offloaded, gradients, parameters)
        self._take_gradients(gradients)
        offloaded.take_over()
        updates = gradients.update(
            offloaded,
            before_backward=before_backward if overlap else None,
            waits=not (overlap and staleness),
            waits_here=bool(staleness),
        )
        self._offloaded = offloaded
        self._hold_parameters(offloaded, gradients, updates, staleness=staleness)
        self._follow_module(offloaded)
        self._watch_end()
        return self._offloaded

    def _move(
        self,
        offloaded: OffloadedParameters,
        gradients: GradientSynchroniser,
        parameters: Sequence[torch.nn.Parameter],
    ) -> None:
        """Moves parameters to the memory devices and takes memory for the rest. Collective.

        Raises:
            OutOfDeviceMemoryError: On all workers, if one cannot have it; the model is as it was before.
        """
        shortage: OutOfDeviceMemoryError | None = None
        try:
            offloaded.move()
            gradients.reserve()
        except OutOfDeviceMemoryError as error:
            shortage = error
        if not self._is_true_anywhere(shortage is not None):
            return
        gradients.release()
        self._average_again(parameters)
        raise shortage or OutOfDeviceMemoryError(
            f"{self._name}: another worker of the job cannot have the memory that its part needs, and says how "
            "much; use fewer workers on its node, or a smaller model"
        )

    def _narrow_gradients(self, dtype: torch.dtype) -> None:
        """From now on gradients are rounded to `dtype` before they are averaged. Collective."""
        assert self._gradients is not None
        self._gradients.check_finished()
        self._travel_dtype = dtype
        self._release_gradients()
        self._take_gradients(self._register_gradients(f"{self._name}/gradients in {dtype}"))

    def _register_anew(self) -> None:
        """Averages the gradients of the parameters that are trainable now. Collective."""
        assert self._gradients is not None
        self._gradients.check_finished()
        has_local = self._gradients.has_local
        self._release_gradients()
        self._num_registrations += 1
        self._take_gradients(self._register_gradients(f"{self._name}/gradients {self._num_registrations}"))
        self._gradients.has_local = has_local
        self._watch_end()

    def _release_gradients(self) -> None:
        """Frees the memory of the gradients that were registered so far, before others take their place."""
        assert self._gradients is not None
        self._end.detach()
        self._embeddings = None
        self._gradients.release()

    def _take_gradients(self, gradients: GradientSynchroniser) -> None:
        """Has others take the place of those that were released."""
        self._groups[0] = gradients.group
        self._gradients = gradients

    def _average_again(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Has the model be as it was before memory devices refused to hold its parameters. Collective."""
        broadcast_tensors(self._session, parameters)
        self._session.release_buffers()
        self._take_gradients(self._register_gradients(f"{self._name}/gradients"))
        self._watch_end()

    def _hold_parameters(
        self,
        offloaded: OffloadedParameters,
        gradients: GradientSynchroniser,
        updates: DeviceUpdates,
        *,
        staleness: int,
    ) -> None:
        """Makes this worker's parameters those of the memory devices, or copies of them. Collective."""
        assert isinstance(gradients.group, TensorGroup)
        # Views and copies do not go together: what is written to a view, others would take for an update's result.
        # When this returns the values of the worker that writes are there.
        has_copies = self._is_true_anywhere(gradients.group.are_parameters_elsewhere)
        if staleness:
            self.cached_parameters = offloaded.cache(staleness=staleness)
            self.cached_parameters.follow(self.module)
        elif has_copies:
            updates.mirror(offloaded.mirror(gradients.settle))
        else:
            offloaded.share()

    def _follow_module(self, offloaded: OffloadedParameters) -> None:
        """Has whoever saves the module wait for updates, and snapshots keep what is loaded over."""
        reference = weakref.ref(offloaded)  # the module may outlive this wrapper
        self.module.register_load_state_dict_pre_hook(OwnHook(lambda: _keep_snapshots(reference)))
        self.module.register_state_dict_pre_hook(OwnHook(lambda: _wait_for_update(reference)))

    @property
    def offloaded(self) -> OffloadedParameters | None:
        """Parameters and state in the memory devices; None if this wrapper has them."""
        return self._offloaded

    @property
    def has_local_gradients(self) -> bool:
        """Whether there are gradients of this worker alone, that no averaging backward has taken in since."""
        return self._gradients is not None and self._world_size > 1 and self._gradients.has_local

    def agree_on_obstacle(self, reason: str) -> str:
        """Why no worker's optimizer is to run in the memory devices; "" if all can. Collective.

        Args:
            reason: Why this one's cannot; "" if it can.
        """
        if self._gradients is not None and self._is_true_anywhere(bool(reason)):
            return reason or "that of another worker cannot, and says why"
        return reason

    def _is_true_anywhere(self, condition: bool) -> bool:
        flag = np.array([condition], dtype=np.int32)
        self._session.all_reduce(flag, op="max")
        return bool(flag[0])

    def update_parameters(self, *, gradient_scale: float = 1.0) -> None:
        """Has the memory devices update the parameters by their gradients, which are the same on every worker.

        Args:
            gradient_scale: What gradients are multiplied with, the same on every worker.
        """
        gradients, offloaded = self._open_gradients(), self._offloaded
        assert offloaded is not None
        # All slots and all settings are written before the first push, so that memory devices that have begun a step
        # can finish it without any worker (docs/design/recovery.md).
        present = gradients.bring_to_slots()
        offloaded.begin(present, gradient_scale=gradient_scale)
        gradients.push_update(present)

    def end_overlapped_step(self) -> None:
        """Admits the next update during backward."""
        self._open_gradients().end_step()

    def measured_gradients(self, *, num_changes: int, are_unscaled: bool) -> list[MeasuredGradient]:
        """The gradients that there are, as the memory devices measured them; arguments as of GradientSynchroniser."""
        return self._open_gradients().measured(num_changes=num_changes, are_unscaled=are_unscaled)

    def _open_gradients(self) -> GradientSynchroniser:
        if self._gradients is None or self._closed:
            raise SessionClosedError(
                "this model was closed, and its optimizer no longer runs in memory devices"
            )
        return self._gradients

    @property
    def keeps_devices(self) -> bool:
        """Whether the memory devices outlive workers that crash."""
        return self._gradients is not None and self._session.settings.keep_devices > 0

    @property
    def replicates_devices(self) -> bool:
        """Whether what a memory device has outlives that device too."""
        return self._gradients is not None and self._session.settings.replicas > 0

    def keep_state(self, step: int, state: bytes) -> None:
        """Gives this worker's own state to the memory devices, which keep those of the last two steps.

        Args:
            step: That begins now.
            state: Not empty.
        """
        self._session.store(self._state_key(step), np.frombuffer(state, dtype=np.uint8))

    def kept_state(self, step: int) -> memoryview:
        """What was given to keep_state() last for this step, or one that is two away."""
        return self._session.load(self._state_key(step)).value

    def _state_key(self, step: int) -> str:
        return f"{self._name}/worker {self._session.identity.rank}/{step % 2}"

    def _register_gradients(
        self,
        name: str,
        state_names: Sequence[str] | None = None,
        *,
        measures: bool = False,
        shares_slots: bool = False,
        moves: bool = False,
    ) -> GradientSynchroniser:
        gradients = GradientSynchroniser(
            self._session,
            name,
            self._trainable,
            gradient_as_view=self.gradient_as_bucket_view,
            find_unused=self.find_unused_parameters,
            static_graph=self.static_graph,
            state_names=state_names,
            measures=measures,
            shares_slots=shares_slots,
            tables=self.tables,
            travel_dtype=self._travel_dtype,
            moves=moves,
        )
        self._embeddings = EmbeddingGradients(self.module, gradients.slot_of)
        return gradients

    def _watch_end(self) -> None:
        """Arranges for what is left to do when nobody refers to this wrapper any more."""
        assert self._gradients is not None
        # Whoever leaves before an update is complete would be missed by those who have not pushed theirs.
        finish_update = self._gradients.finish_update
        closing: list[Callable[[], object]] = [finish_update, *(group.close for group in self._groups)]
        self._end = weakref.finalize(self, _drop, self._gradients, self._offloaded, closing, self._dropped)
        self._end.atexit = False  # the session ends at exit, with all its groups


def _keep_snapshots(reference: weakref.ref[OffloadedParameters]) -> None:
    """Has the snapshots of a model keep what is going to be overwritten, if it still has any."""
    offloaded = reference()
    if offloaded is not None:
        offloaded.keep_snapshots()


def _wait_for_update(reference: weakref.ref[OffloadedParameters]) -> None:
    """Raises if the parameters that are going to be saved are those of no step."""
    offloaded = reference()
    if offloaded is not None:
        offloaded.wait()


def _drop(
    gradients: GradientSynchroniser,
    offloaded: OffloadedParameters | None,
    closing: list[Callable[[], object]],
    dropped: deque[Callable[[], object]],
) -> None:
    """Runs when a wrapper is gone, in whatever thread."""
    gradients.remove_hooks()
    if offloaded is not None:
        offloaded.release()
    dropped.extend(closing)
