"""One worker's view of a remote optimizer's parameters and states, shared by all workers of a node."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from coarse.client.direct_allreduce import NodeBarrier
from coarse.client.gpu.gpu_transfers import NOTHING, MappedMemory
from coarse.client.memory.tensor_bytes import GpuBytes, TensorBytes, gpu_context, map_tensors
from coarse.kernels import _native
from coarse.wire.registration import PARAMETERS, SETTINGS, SNAPSHOT_CONTROL, SNAPSHOT_REQUEST, STATES
from coarse.wire.segments import Segment

if TYPE_CHECKING:
    from coarse.client.memory.private_writes import PrivateWrites


class OptimizerMemory:
    """Parameters, and float32 arrays for each of them.

    Parameters are mapped as long as this object or a view of them lives; the arrays are mapped on request.

    Args:
        plan: The group's plan.
        shared: Segments by name; the caller closes them.
        client: This worker's client number.
        gpu: UUID of the GPU that holds this worker's model; "" for the host.
    """

    def __init__(
        self, plan: _native.GroupPlan, shared: Mapping[str, Segment], client: int, gpu: str = ""
    ) -> None:
        self.settings = shared[SETTINGS].map()
        """This worker's settings: a SETTINGS_DTYPE of coarse.client.update_settings for each tensor."""
        self._gpu = gpu
        self._parameters, self._mapped_for = map_tensors(shared[PARAMETERS], gpu)
        self.are_parameters_elsewhere = set(shared[PARAMETERS].gpus) != ({gpu} - {""})
        """Whether parameters lie in another memory than the model."""
        self._parameter_offsets = plan.parameter_offsets()
        self._kept_arrays = plan.kept_arrays()
        request_fd, control_fd = shared[SNAPSHOT_REQUEST].fd, shared[SNAPSHOT_CONTROL].fd
        self.snapshots = _native.SnapshotTrigger(request_fd, control_fd, client)
        self._parameter_segment = shared[PARAMETERS].duplicate()
        self._own_view: _native.PrivateView | None = None
        self._states = shared[STATES].duplicate() if STATES in shared else None
        self._states_on_gpu: TensorBytes | None = None

    def parameter_offset(self, tensor: int) -> int:
        """Offset of a parameter in bytes from the first parameter."""
        return self._parameter_offsets[tensor]

    def parameter(self, tensor: int, num_bytes: int) -> TensorBytes:
        """The parameter of a tensor."""
        start = self._parameter_offsets[tensor]
        return self._parameters[start : start + num_bytes]

    def map_own_parameters(self) -> str:
        """Maps parameters for open_own_parameters(); returns why it cannot, "" on success."""
        segment = self._parameter_segment
        if segment.gpus:
            return "parameters lie in the memory of GPUs"
        try:
            self._own_view = _native.PrivateView(segment.region, segment.num_bytes)
        except OSError as error:
            return f"this kernel does not tell which pages a process has written ({error})"
        return ""

    def open_own_parameters(
        self, lengths: Sequence[int], barrier: NodeBarrier, *, publishes: bool
    ) -> PrivateWrites:
        """This worker's own view of the parameters; lengths in bytes, other arguments as for PrivateWrites.

        Raises:
            ValueError: Unless map_own_parameters() has mapped them.
        """
        view, self._own_view = self._own_view, None
        if view is None or isinstance(self._parameters, GpuBytes):
            raise ValueError("the parameters were not mapped for this worker alone")
        from coarse.client.memory.private_writes import PrivateWrites  # needs numpy

        return PrivateWrites(
            view, self._parameters, self._parameter_offsets, lengths, barrier, publishes=publishes
        )

    def results(self) -> MappedMemory:
        """Memory from which the model's GPU copies parameters; zeros if no GPU does."""
        if not self._gpu:
            return NOTHING
        if isinstance(self._parameters, GpuBytes):
            return self._parameters.address, self._parameters.nbytes, gpu_context(self._mapped_for)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._parameters))
        return address, self._parameters.nbytes, None

    def result(self, tensor: int) -> int:
        """Address from which the model's GPU copies one parameter; 0 if no GPU does."""
        address, *_ = self.results()
        return address and address + self._parameter_offsets[tensor]

    def kept_array(self, tensor: int, number: int) -> TensorBytes:
        """The `number`-th float32 array kept for a tensor: its states, then its master weights.

        Maps arrays in the host's memory at each call.

        Raises:
            ValueError: If the tensor has fewer arrays.
        """
        start, array_bytes, num_arrays = self._kept_arrays[tensor]
        if self._states is None or number >= num_arrays:
            raise ValueError(
                f"this optimizer keeps no state of number {number} for tensor {tensor}, only {num_arrays}"
            )
        start += number * array_bytes
        return self._map_states(self._states)[start : start + array_bytes]

    def _map_states(self, segment: Segment) -> TensorBytes:
        if not segment.gpus:
            return segment.map()
        if self._states_on_gpu is None:  # mapping, and waiting before unmapping, is slow
            self._states_on_gpu, _ = map_tensors(segment, self._gpu)
        return self._states_on_gpu

    def __del__(self) -> None:
        for name in ("_states", "_parameter_segment"):
            if (segment := getattr(self, name, None)) is not None:
                segment.close()
