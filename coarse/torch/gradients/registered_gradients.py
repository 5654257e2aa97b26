"""The registered memory of one wrapped model's gradients, and the path of gradients to it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from coarse.client.single_worker import SingleWorkerTensorGroup
from coarse.client.tensor_group import TensorGroup
from coarse.schema import TensorSpec
from coarse.session import AnyTensorGroup, Session
from coarse.torch.gradients.hooks.bucket_hooks import BucketHook, BucketHookGradients
from coarse.torch.gradients.layout import DTYPE_NAMES, common_gpu, num_bytes
from coarse.torch.gradients.paths.compressed_gradients import CompressedGradients, stand_ins
from coarse.torch.gradients.paths.gpu_gradients import try_gpu
from coarse.torch.gradients.paths.gpu_slot_gradients import GpuSlotGradients
from coarse.torch.gradients.paths.gradient_path import GradientPath
from coarse.torch.gradients.paths.host_gradients import HostGradients
from coarse.torch.gradients.sparse_gradients import SparseGradients
from coarse.wire.registration import WorkerMemory

# Shared slots have 1/8 of the model's size, or the size of its largest tensor if that is more.
_WINDOWS_PER_MODEL = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingOptions:
    """How the gradients of a model are averaged.

    Args:
        gradient_as_view: Whether `.grad` becomes the registered slot itself. Otherwise, and always outside host
            memory, it keeps separate memory, and averages are copied back at the end of backward.
        find_unused: Whether parameters without a gradient at the end of a backward count as unused; otherwise they
            are waited for.
        static_graph: Whether every iteration uses the same parameters equally often; the first iteration counts.
        sparse_parameters: Parameters whose gradients are sparse.
        travel_dtype: Type to which wider gradients are rounded before averaging, if no optimizer is in the memory
            devices; None to keep their type.
        hook: Hook that averages in place of the memory devices; None if memory devices average.
    """

    gradient_as_view: bool
    find_unused: bool
    static_graph: bool
    sparse_parameters: Collection[torch.nn.Parameter]
    travel_dtype: torch.dtype | None = None
    hook: BucketHook | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptions:
    """How an optimizer in the memory devices uses the gradients of its parameters.

    Args:
        state_names: Names of its states for each parameter.
        measures: Whether memory devices measure the averages, for GradientSynchroniser.measured().
        shares_slots: Whether gradients take turns in fewer slots, because each is used up during backward.
        moves: Whether this worker's parameters in host memory move to the memory devices and are freed.
    """

    state_names: Sequence[str]
    measures: bool
    shares_slots: bool
    moves: bool


class RegisteredGradients:
    """Slots for the gradients of some parameters, in the memory devices. Registering them is collective.

    Args:
        session, name, parameters, options, offload: As for GradientSynchroniser.

    Raises:
        ValueError: As GradientSynchroniser.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        options: AveragingOptions,
        offload: OffloadOptions | None,
    ) -> None:
        self._names = [parameter_name for parameter_name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._sent = self._parameters  # the slots' layout
        if options.travel_dtype is not None:
            self._sent = stand_ins(self._parameters, options.travel_dtype, options.sparse_parameters)
        self._may_use_streams = session.settings.gpu_transfers != "off"
        self._waits = session.settings.gpu_transfers == "wait"
        self._gradient_as_view = options.gradient_as_view
        self._shares_slots = offload is not None and offload.shares_slots
        in_host = [parameter for parameter in self._parameters if parameter.is_cpu]
        # Memory from which a GPU copies is pinned at once, which allocates its pages.
        self._memory = WorkerMemory(
            reserves=len(in_host) == len(self._parameters),
            moved_bytes=sum(map(num_bytes, in_host)) if offload is not None and offload.moves else 0,
        )
        self.group: AnyTensorGroup = (
            self._register(session, name, options.sparse_parameters, offload)
            if options.hook is None
            else SingleWorkerTensorGroup(name, ())
        )
        """The slots; empty if a hook averages."""
        self.sparse = SparseGradients(
            session, self.group, parameters, gradient_as_view=self._gradient_as_view
        )
        """The sparse gradients."""
        self.path: GradientPath = (
            self._choose_path()
            if options.hook is None
            else BucketHookGradients(session, self._names, self._parameters, options.hook)
        )
        """The path to the slots and back, or to a hook."""

    def _register(
        self,
        session: Session,
        name: str,
        sparse_parameters: Collection[torch.nn.Parameter],
        offload: OffloadOptions | None,
    ) -> AnyTensorGroup:
        specs = [
            _spec(parameter_name, parameter, is_sparse=parameter in sparse_parameters)
            for parameter_name, parameter in zip(self._names, self._sent, strict=True)
        ]
        gpu = common_gpu(self._parameters) if self._may_use_streams else ""
        if offload is None:
            group = session.register(name, specs, are_gradients=True, gpu=gpu, memory=self._memory)
        else:
            window_bytes = max(1, sum(spec.nbytes for spec in specs) // _WINDOWS_PER_MODEL)
            group = session.register_parameters(
                name,
                specs,
                state_names=offload.state_names,
                window_bytes=window_bytes if offload.shares_slots else 0,
                gpu=gpu,
                memory=self._memory,
            )
        if isinstance(group, TensorGroup):
            group.nccl.objection = _why_no_nccl
        return group

    def _choose_path(self) -> GradientPath:
        if self._sent is self._parameters:
            return self._path_of_sent(gradient_as_view=self._gradient_as_view)
        return CompressedGradients(
            self._names, self._parameters, self._sent, self._path_of_sent(gradient_as_view=True)
        )

    def _path_of_sent(self, *, gradient_as_view: bool) -> GradientPath:
        assert isinstance(self.group, TensorGroup)
        on_gpu: GradientPath | None = None
        if self.group.is_on_gpu:
            return GpuSlotGradients(
                self.group,
                self._names,
                self._sent,
                gradient_as_view=gradient_as_view,
                keeps_gradients=not self._shares_slots,
                waits=self._waits,
            )
        if self._may_use_streams:
            on_gpu = try_gpu(self.group, self._names, self._sent, waits=self._waits)
        return on_gpu or HostGradients(
            self.group,
            self._names,
            self._sent,
            gradient_as_view=gradient_as_view,
            keeps_gradients=not self._shares_slots,
            sparse=self.sparse,
        )


def _why_no_nccl() -> str:
    if torch.are_deterministic_algorithms_enabled():
        return "torch.use_deterministic_algorithms() is on, and NCCL chooses its own order of additions"
    return ""


def _spec(name: str, parameter: torch.nn.Parameter, *, is_sparse: bool) -> TensorSpec:
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
        row_elements=parameter.shape[1] if is_sparse else 0,
    )
