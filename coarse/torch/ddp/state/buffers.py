"""Copies parameters and buffers of one worker to all others."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable, Sequence

import torch

from coarse.client.tensor_group import TensorGroup
from coarse.errors import SyncTimeoutError
from coarse.kernels import _native
from coarse.schema import TensorSpec
from coarse.session import AnyTensorGroup, Session
from coarse.torch.gradients.layout import Packing, as_bytes, copy_all, num_bytes
from coarse.torch.gradients.paths import gpu_gradients

logger = logging.getLogger(__name__)

_STAGING_BYTES = 32 << 20
_DIRECT_BYTES = 1 << 20


def broadcast_tensors(session: Session, tensors: Iterable[torch.Tensor], *, root: int = 0) -> None:
    """Overwrites `tensors` on every worker with those of worker `root`. Collective.

    Large contiguous tensors in host memory are broadcast in place. All others go through staging memory, many per
    call; it has at most 32 MiB, or the size of the largest of these tensors.
    """
    batch: list[torch.Tensor] = []
    batch_bytes = 0
    for tensor in tensors:
        if _broadcasts_in_place(tensor):
            session.broadcast(as_bytes(tensor).numpy(), root=root)
            continue
        if batch and batch_bytes + num_bytes(tensor) > _STAGING_BYTES:
            _broadcast_batch(session, batch, root)
            batch, batch_bytes = [], 0
        batch.append(tensor)
        batch_bytes += num_bytes(tensor)
    if batch_bytes:
        _broadcast_batch(session, batch, root)


def _broadcasts_in_place(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_cpu and tensor.is_contiguous() and num_bytes(tensor) >= _DIRECT_BYTES)


def _broadcast_batch(session: Session, tensors: list[torch.Tensor], root: int) -> None:
    packing = Packing(tensors)
    staging = torch.empty(packing.num_bytes, dtype=torch.uint8, device="cpu")
    with torch.no_grad():
        views = packing.views(staging)
        if session.identity.rank == root or session.is_newcomer:  # a newcomer keeps its own
            copy_all(views, tensors)
        session.broadcast(staging.numpy(), root=root)
        if session.identity.rank != root:
            copy_all(tensors, views)


class BufferBroadcast:
    """Copies a model's buffers from one worker to the others before each forward, in one exchange.

    Streams copy buffers on a GPU after the work that computes them, and the forward's stream waits for the copies.

    Args:
        session: The session to register with; registration is collective.
        name: Name of the registration, the same on every worker.
        buffers: The model's buffers when it is wrapped. Later calls may pass other tensors of the same shapes.
    """

    def __init__(self, session: Session, name: str, buffers: Sequence[torch.Tensor]) -> None:
        self._rank = session.identity.rank
        self._num_workers = session.num_places
        self._lost: set[int] = set()
        self._packing = Packing(buffers)
        spec = TensorSpec(name="buffers", dtype="uint8", num_elements=self._packing.num_bytes, op="sum")
        self.group = session.register(name, [spec], on_host=True)
        self._exchange = self._by_gpu(session, buffers) or HostExchange(self.group)
        self._views = self._packing.views(self._exchange.memory)

    def run(self, buffers: Sequence[torch.Tensor], *, root: int) -> None:
        """Overwrites `buffers` with those of worker `root`, or of the first other one if that is lost. Collective.

        The version counters of the buffers do not change: as in torch's DDP, several forwards may precede a
        backward.

        Raises:
            SyncTimeoutError: If another worker does not participate in time.
            ValueError: If number, shapes or dtypes of the buffers changed since the model was wrapped.
        """
        if not self._packing.fits(buffers):
            raise ValueError(
                "the module's buffers changed in number, shape or dtype after it was wrapped; "
                "wrap it again, or list those that change in _ddp_params_and_buffers_to_ignore"
            )
        for each in itertools.chain((root,), range(self._num_workers)):
            if each in self._lost:
                continue
            if self._copy_from(each, buffers):
                break
            self._lost.add(each)  # all workers have seen that it contributed nothing

    def note_members(self, members: Collection[int]) -> None:
        """Notes the ranks of all members after newcomers. Every worker calls it before the same run()."""
        self._lost = set(range(self._num_workers)) - set(members)

    def _copy_from(self, root: int, buffers: Sequence[torch.Tensor]) -> bool:
        """Overwrites buffers with those of worker `root`; returns False if it is lost."""
        is_root = self._rank == root
        with torch.no_grad():
            if is_root:
                copy_all(self._views, buffers)
            try:
                is_there = self._exchange.run(is_root=is_root)
            except SyncTimeoutError as error:
                raise SyncTimeoutError(
                    f"{error}. Each forward of a wrapped model first broadcasts one worker's buffers, so all workers "
                    "must call it. To evaluate on one worker, call model.module, or wrap with broadcast_buffers=False"
                ) from error
            if is_there and not is_root:
                with torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):
                    copy_all(buffers, self._views)
        return is_there

    def _by_gpu(self, session: Session, buffers: Sequence[torch.Tensor]) -> GpuExchange | None:
        if not isinstance(self.group, TensorGroup) or session.settings.gpu_transfers == "off":
            return None
        try:
            gpu = gpu_gradients.find_gpu(buffers)
            return None if gpu is None else GpuExchange(self.group, gpu)
        except _native.CudaError as error:
            logger.warning("%s are copied synchronously, which is slower: %s", self.group.name, error)
            return None


class HostExchange:
    """Broadcasts a group's only tensor; `memory` is in its slot."""

    def __init__(self, group: AnyTensorGroup) -> None:
        self._group = group
        self.memory = torch.frombuffer(group.buffer(0), dtype=torch.uint8)

    def run(self, *, is_root: bool) -> bool:
        """Overwrites `memory` with the root's; returns False if the root is lost."""
        self._group.push(0, present=is_root)
        return self._group.pull(0) > 0


class GpuExchange:
    """Broadcasts a group's only tensor on a GPU, by its streams.

    Raises:
        CudaError: If the GPU does not support it.
    """

    def __init__(self, group: TensorGroup, gpu: gpu_gradients.Gpu) -> None:
        self._group = group
        self._gpu = gpu
        self._transfers = group.open_gpu_transfers(gpu.context)
        self.memory = torch.empty(group.specs[0].nbytes, dtype=torch.uint8, device=gpu.device)

    def run(self, *, is_root: bool) -> bool:
        """Makes the current stream wait until `memory` contains the root's values; returns True."""
        stream, address = self._gpu.current_stream(), self.memory.data_ptr()
        tensor = (0, _native.PRESENT, address, 0, 0) if is_root else (0, 0, 0, address, 0)
        self._transfers.push([tensor], stream)
        self._transfers.join(stream)
        if self._group.is_watched:
            self._group.pull_all()
        return True
