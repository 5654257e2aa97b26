"""Copies parameters and buffers of one worker to all others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from coarse.client.schema import TensorSpec
from coarse.session import Session
from coarse.torch.layout import Packing, as_bytes, copy_all, num_bytes

_STAGING_BYTES = 32 << 20
_DIRECT_BYTES = 1 << 20


def broadcast_tensors(session: Session, tensors: Iterable[torch.Tensor], *, root: int = 0) -> None:
    """Overwrites `tensors` on every worker with those of worker `root`. Collective.

    Large contiguous tensors in host memory are broadcast where they are; all others go through staging memory
    of at most 32 MiB (or the size of the largest of them), many to a call.
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
        if session.identity.rank == root:
            copy_all(views, tensors)
        session.broadcast(staging.numpy(), root=root)
        if session.identity.rank != root:
            copy_all(tensors, views)


class BufferBroadcast:
    """Copies a model's buffers from one worker to the others before each forward, in one exchange.

    Args:
        session: Where to register; collective.
        name: Of the registration, the same on every worker.
        buffers: The model's buffers when it is wrapped. Later ones may be other tensors of the same shapes.
    """

    def __init__(self, session: Session, name: str, buffers: Sequence[torch.Tensor]) -> None:
        self._rank = session.identity.rank
        self._packing = Packing(buffers)
        spec = TensorSpec(name="buffers", dtype="uint8", num_elements=self._packing.num_bytes, op="sum")
        self.group = session.register(name, [spec], on_host=True)
        memory = torch.frombuffer(self.group.buffer(0), dtype=torch.uint8)
        self._views = self._packing.views(memory)

    def run(self, buffers: Sequence[torch.Tensor], *, root: int) -> None:
        """Overwrites `buffers` with those of worker `root`. Collective.

        The version counters of the buffers stay: as in torch's DDP, several forwards may come before a
            backward.

        Raises:
            ValueError: If number, shapes or dtypes of the buffers changed since the model was wrapped.
        """
        if not self._packing.fits(buffers):
            raise ValueError(
                "the module's buffers changed in number, shape or dtype after it was wrapped; "
                "wrap it again, or list those that change in _ddp_params_and_buffers_to_ignore"
            )
        present = self._rank == root
        with torch.no_grad():
            if present:
                copy_all(self._views, buffers)
            self.group.push(0, present=present)
            self.group.pull(0)
            if not present:
                with torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):
                    copy_all(buffers, self._views)
