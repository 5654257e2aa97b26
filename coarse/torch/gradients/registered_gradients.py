"""The registered memory of one wrapped model's gradients, and the path of gradients to it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from coarse.client.single_worker import SingleWorkerTensorGroup
from coarse.client.tensor_group import TensorGroup
from coarse.schema import TensorSpec
from coarse.session import AnyTensorGroup, Session
from coarse.torch.gradients.bucket_hooks import BucketHook, BucketHookGradients
from coarse.torch.gradients.compressed_gradients import CompressedGradients, stand_ins
from coarse.torch.gradients.gpu_gradients import try_gpu
from coarse.torch.gradients.gpu_slot_gradients import GpuSlotGradients
from coarse.torch.gradients.gradient_path import GradientPath
from coarse.torch.gradients.host_gradients import HostGradients
from coarse.torch.gradients.layout import DTYPE_NAMES, common_gpu, num_bytes
from coarse.torch.gradients.sparse_gradients import SparseGradients
from coarse.wire.registration import WorkerMemory

# Shared slots have 1/8 of the model's size, or the size of its largest tensor if that is more.
_WINDOWS_PER_MODEL = 8


class RegisteredGradients:
    """Slots for the gradients of some parameters, in the memory devices. Registering them is collective.

    Args:
        session, name, parameters: As for GradientSynchroniser.
        gradient_as_view, state_names, shares_slots, tables, travel_dtype, moves, hook: As for GradientSynchroniser.

    Raises:
        ValueError: As GradientSynchroniser.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        *,
        gradient_as_view: bool,
        state_names: Sequence[str] | None,
        shares_slots: bool,
        tables: Collection[torch.nn.Parameter],
        travel_dtype: torch.dtype | None,
        moves: bool,
        hook: BucketHook | None,
    ) -> None:
        self._names = [parameter_name for parameter_name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._sent = self._parameters  # the slots' layout
        if travel_dtype is not None:
            self._sent = stand_ins(self._parameters, travel_dtype, tables)
        self._may_use_streams = session.settings.gpu_transfers != "off"
        self._waits = session.settings.gpu_transfers == "wait"
        self._shares_slots = shares_slots
        in_host = [parameter for parameter in self._parameters if parameter.is_cpu]
        # Memory from which a GPU copies is pinned at once, which allocates its pages.
        self._memory = WorkerMemory(
            reserves=len(in_host) == len(self._parameters),
            moved_bytes=sum(map(num_bytes, in_host)) if moves else 0,
        )
        self.group: AnyTensorGroup
        """The slots; empty if a hook averages."""
        self.path: GradientPath
        """The path to the slots and back, or to a hook."""
        if hook is not None:
            self.group = SingleWorkerTensorGroup(name, ())
            self.tables = SparseGradients(session, self.group, parameters, gradient_as_view=gradient_as_view)
            self.path = BucketHookGradients(session, self._names, self._parameters, hook)
            return
        self.group = self._register(session, name, state_names, tables)
        if isinstance(self.group, TensorGroup):
            self.group.nccl.objection = _why_no_nccl
        self.tables = SparseGradients(session, self.group, parameters, gradient_as_view=gradient_as_view)
        """The sparse gradients."""
        self.path = self._choose_path(gradient_as_view=gradient_as_view)

    def _register(
        self,
        session: Session,
        name: str,
        state_names: Sequence[str] | None,
        tables: Collection[torch.nn.Parameter],
    ) -> AnyTensorGroup:
        specs = [
            _spec(parameter_name, parameter, is_table=parameter in tables)
            for parameter_name, parameter in zip(self._names, self._sent, strict=True)
        ]
        gpu = common_gpu(self._parameters) if self._may_use_streams else ""
        if state_names is None:
            return session.register(name, specs, gpu=gpu, memory=self._memory)
        window_bytes = max(1, sum(spec.nbytes for spec in specs) // _WINDOWS_PER_MODEL)
        return session.register_parameters(
            name,
            specs,
            state_names=state_names,
            window_bytes=window_bytes if self._shares_slots else 0,
            gpu=gpu,
            memory=self._memory,
        )

    def _choose_path(self, *, gradient_as_view: bool) -> GradientPath:
        if self._sent is self._parameters:
            return self._path_of_sent(gradient_as_view=gradient_as_view)
        return CompressedGradients(
            self._names, self._parameters, self._sent, self._path_of_sent(gradient_as_view=True)
        )

    def _path_of_sent(self, *, gradient_as_view: bool) -> GradientPath:
        on_gpu: GradientPath | None = None
        if isinstance(self.group, TensorGroup) and self.group.is_on_gpu:
            return GpuSlotGradients(
                self.group,
                self._names,
                self._sent,
                gradient_as_view=gradient_as_view,
                keeps_gradients=not self._shares_slots,
                waits=self._waits,
            )
        if isinstance(self.group, TensorGroup) and self._may_use_streams:
            on_gpu = try_gpu(self.group, self._names, self._sent, waits=self._waits)
        return on_gpu or HostGradients(
            self.group,
            self._names,
            self._sent,
            gradient_as_view=gradient_as_view,
            keeps_gradients=not self._shares_slots,
            tables=self.tables,
        )


def _why_no_nccl() -> str:
    if torch.are_deterministic_algorithms_enabled():
        return "torch.use_deterministic_algorithms() is on, and NCCL chooses its own order of additions"
    return ""


def _spec(name: str, parameter: torch.nn.Parameter, *, is_table: bool) -> TensorSpec:
    if parameter.dtype not in DTYPE_NAMES:
        raise ValueError(
            f"parameter {name!r}: gradients of {parameter.dtype} cannot be averaged; supported are "
            f"{', '.join(map(str, DTYPE_NAMES))}. Convert the parameter, freeze it, or list it in "
            "module._ddp_params_and_buffers_to_ignore."
        )
    return TensorSpec(
        name=name,
        dtype=DTYPE_NAMES[parameter.dtype],
        num_elements=parameter.numel() * (2 if parameter.is_complex() else 1),
        op="mean",
        row_elements=parameter.shape[1] if is_table else 0,
    )
