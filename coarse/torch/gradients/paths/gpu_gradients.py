"""Gradients in the memory of one GPU: they are copied to their slots and back while the GPU computes.

Only streams wait, not the processor. So the next call reports a failure. By then the running update has used
gradients that were not averaged, and parameters must be restored from a checkpoint (docs/design/gpu-workers.md).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Sequence

import torch

from coarse.client.gpu.gpu_transfers import GpuTensor, GpuTransfers
from coarse.client.tensor_group import TensorGroup, UpdateKind
from coarse.kernels import _native
from coarse.torch.gradients.layout import slot_tensor
from coarse.torch.gradients.paths.gradient_path import GradientLayout
from coarse.torch.optimizer.mirrored_parameters import MirroredParameters

logger = logging.getLogger(__name__)

_PRESENT = _native.PRESENT


class Gpu:
    """A CUDA device, as torch uses it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.context = _native.CudaContext(device.index)

    def current_stream(self) -> int:
        """Handle of torch's current stream of the device in this thread."""
        return int(torch._C._cuda_getCurrentRawStream(self.device.index))


def find_gpu(tensors: Sequence[torch.Tensor]) -> Gpu | None:
    """The GPU that holds all tensors; None if no single GPU does."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1 or not tensors[0].is_cuda or torch.version.hip is not None:
        return None
    return Gpu(tensors[0].device)


class GpuGradients:
    """A GradientPath whose collect() makes the current stream wait.

    Args:
        group: Has a slot for each parameter; slots in host memory are pinned.
        names: Names of the parameters.
        parameters: In the order of the group, all on `gpu`.
        gpu: The GPU of the gradients.
        waits: Whether collect() waits for the results, or raises, so that no update uses unaveraged gradients.

    Raises:
        CudaError: If the GPU does not support it.
    """

    def __init__(
        self,
        group: TensorGroup,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        gpu: Gpu,
        *,
        waits: bool,
    ) -> None:
        self._group = group
        group.open_gpu_transfers(gpu.context)
        self._parameters = parameters
        self._gpu = gpu
        self._waits = waits
        self._layout = GradientLayout(names, parameters)
        self._nbytes = [spec.nbytes for spec in group.specs]
        self._batch: list[GpuTensor] = []
        self._batch_bytes = 0
        self._wanted_bytes = self._transfers.batch_bytes
        self._batch_stream = 0
        self._mirror: MirroredParameters | None = None
        self._updated: list[int] = []
        # References keep the allocator from reusing memory in transfer. Only held tensors receive averages.
        self._held: list[torch.Tensor] = []
        self._next_to_leave: list[torch.Tensor] = []
        self._leaving: deque[tuple[int, list[torch.Tensor]]] = deque()
        self._to_stage: list[GpuTensor] = []
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._others: dict[int, torch.Tensor] = {}  # averages of gradients that this worker lacks

    @property
    def _transfers(self) -> GpuTransfers:
        assert self._group.gpu is not None
        return self._group.gpu  # another one when the slots have moved

    def can_write_in_place(self, index: int) -> bool:
        return False

    def slot(self, index: int) -> torch.Tensor:
        return slot_tensor(self._group.buffer(index), self._parameters[index])

    def mirror(self, parameters: MirroredParameters) -> bool:
        self._updated = [self._group.updated_parameter(index) for index in range(len(self._parameters))]
        if not all(self._updated):
            return False
        self._mirror = parameters
        return True

    def send(self, index: int, kind: UpdateKind) -> None:
        gradient = self._parameters[index].grad
        if gradient is None:
            return self.contribute(index, kind, present=False)
        plain = self._plain(index, gradient)
        address = plain.data_ptr()
        if kind is UpdateKind.UPDATE:
            self._parameters[index].grad = None
            tensor = (index, _PRESENT | kind, address, *self._mirrored(index))
            return self._add(tensor, self._nbytes[index], leaves=plain)
        if plain is not gradient:
            self._staged.append((gradient, plain))  # the average is copied back to the gradient itself
        self._held.append(plain)
        self._add((index, _PRESENT | kind, address, address, 0), self._nbytes[index])

    def contribute(self, index: int, kind: UpdateKind, *, present: bool) -> None:
        flags = kind | (_PRESENT if present else 0)
        if kind & UpdateKind.UPDATE:
            return self._add((index, flags, 0, *self._mirrored(index)), self._nbytes[index])
        if present:
            return self._add((index, flags, 0, 0, 0), 0)
        # Other workers may have this gradient; then .grad becomes the average.
        self._others[index] = average = self._layout.empty(index, self._gpu.device)
        self._add((index, flags, 0, average.data_ptr(), 0), self._nbytes[index])

    def flush(self) -> None:
        if self._batch:
            batch, self._batch, self._batch_bytes = self._batch, [], 0
            self._transfers.push(batch, self._batch_stream)
            self._wanted_bytes = self._transfers.batch_bytes
            self._let_go()

    def is_late(self, index: int) -> bool:
        if any(tensor[0] == index for tensor in self._batch):
            self.flush()
        return self._group.is_late(index)

    def stage(self, index: int, gradient: torch.Tensor) -> None:
        plain = self._plain(index, gradient)
        self._next_to_leave.append(plain)
        self._to_stage.append((index, 0, plain.data_ptr(), 0, 0))

    def finish_staging(self) -> None:
        if self._to_stage:
            self._transfers.stage(self._to_stage, self._gpu.current_stream())
            self._to_stage = []

    def collect(self, *, counts: bool) -> Sequence[int]:
        self.flush()
        self._transfers.join(self._gpu.current_stream())
        self._wanted_bytes = self._transfers.batch_bytes
        self._leaving.clear()  # later users of their memory are ordered behind the copies
        contributors = self._group.pull_all() if counts or self._pulls_each_step else ()
        if self._waits:
            self._group.nccl.synchronize()
        return contributors

    def deliver(self, absent: Collection[int], contributors: Sequence[int]) -> None:
        if self._staged:
            gradients, averages = zip(*self._staged, strict=True)
            torch._foreach_copy_([gradient.detach() for gradient in gradients], list(averages))
        for index in absent:
            if contributors[index]:
                self._parameters[index].grad = self._others[index]
        self._others.clear()
        self._staged.clear()
        self._held.clear()

    def synchronize(self) -> None:
        if not self._pulls_each_step:  # otherwise collect() has waited
            self._group.pull_all()

    def check(self) -> None:
        self._transfers.check()

    def confirm(self) -> None:
        self._group.pull_all()
        self._group.nccl.synchronize()
        self._transfers.check()

    @property
    def _pulls_each_step(self) -> bool:
        return self._waits or self._group.is_watched

    def _add(self, tensor: GpuTensor, num_bytes: int, *, leaves: torch.Tensor | None = None) -> None:
        stream = self._gpu.current_stream()
        if stream != self._batch_stream:
            self.flush()
            self._batch_stream = stream
        self._batch.append(tensor)
        if leaves is not None:
            self._next_to_leave.append(leaves)
        self._batch_bytes += num_bytes
        if self._batch_bytes >= self._wanted_bytes:
            self.flush()

    def _plain(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient in the layout of its slot: the same tensor or a copy."""
        if self._layout.is_plain(index, gradient) and gradient.device == self._gpu.device:
            return gradient
        self._layout.check(index, gradient)
        return self._layout.empty(index, self._gpu.device).copy_(gradient.detach())

    def _let_go(self) -> None:
        """Releases gradients whose transfer is complete."""
        if self._next_to_leave:
            self._leaving.append((self._transfers.num_pushed, self._next_to_leave))
            self._next_to_leave = []
        while self._leaving and self._transfers.has_left(self._leaving[0][0]):
            self._leaving.popleft()

    def _mirrored(self, index: int) -> tuple[int, int]:
        """Addresses to and from which an update's result is copied; zeros if parameters are not mirrored."""
        if self._mirror is None:
            return 0, 0
        return self._mirror.address(index), self._updated[index]


def try_gpu(
    group: TensorGroup, names: Sequence[str], parameters: Sequence[torch.nn.Parameter], *, waits: bool
) -> GpuGradients | None:
    """The path, if all parameters are on one GPU that can wait for host memory; otherwise None."""
    try:
        gpu = find_gpu(parameters)
        return None if gpu is None else GpuGradients(group, names, parameters, gpu, waits=waits)
    except _native.CudaError as error:
        logger.warning("gradients of %s are copied synchronously, which is slower: %s", group.name, error)
        return None
