"""Device memory that spans several GPUs, for data that a node holds once (docs/design/gpu.md)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from coarse.kernels import _native
from coarse.proxy.memory.cuda import CudaMemory
from coarse.wire.segments import Segment


class SpreadCudaMemory:
    """Memory of GPUs that reach each other: one piece for each GPU, consecutive and of about equal length.

    The optimizer states of a parameter lie on the parameter's GPU: both have the same order and are cut at the same
    fractions of their lengths. Each GPU updates its own parameters. GPUs other than `own` are not used before the
    first allocation.

    Args:
        own: The memory device's GPU memory, which holds the first piece.
        others: Ordinals of the other GPUs.
    """

    kind = "cuda"
    is_mappable = False
    takes_pages_later = False
    message_bytes = _native.CUDA_MESSAGE_BYTES

    def __init__(self, own: CudaMemory, others: Sequence[int]) -> None:
        self.num_places = 1 + len(others)
        self.name = " and ".join(f"cuda:{device}" for device in (own.device, *others))
        self._own = own
        self._others = others
        self._opened: list[CudaMemory] = []
        self._tensor_memory: _native.CudaSpreadMemory | None = None

    def allocate(self, label: str, num_bytes: int) -> Segment:
        lengths = piece_lengths(num_bytes, self.num_places, self._own.page_bytes())
        pieces: list[Segment] = []
        try:
            for memory, length in zip(self._memories(), lengths, strict=True):
                if length:
                    pieces.append(memory.allocate(label, length))
        except BaseException:
            for piece in pieces:
                piece.close()
            raise
        return Segment.joined(pieces)

    def allocate_host(self, label: str, num_bytes: int) -> Segment:
        return self._own.allocate_host(label, num_bytes)

    def allocate_sparse(self, label: str, num_bytes: int) -> Segment:
        return self._own.allocate_sparse(label, num_bytes)

    def available_bytes(self) -> int:
        return self.num_places * min(memory.available_bytes() for memory in self._memories())

    def cores(self) -> tuple[int, ...]:
        return ()

    def tensor_memory(self) -> _native.CudaSpreadMemory:
        if self._tensor_memory is None:
            gpus = [memory.tensor_memory() for memory in self._memories()]
            self._tensor_memory = _native.CudaSpreadMemory(gpus)
        return self._tensor_memory

    def snapshot_pool(self, plan: _native.GroupPlan) -> _native.SnapshotPool:
        return self.tensor_memory().snapshot_pool(plan)

    def close(self) -> None:
        """Does nothing: memory is freed with its segments."""

    def _memories(self) -> list[CudaMemory]:
        if not self._opened:
            self._opened = [self._own, *map(CudaMemory, self._others)]
        return self._opened


def piece_lengths(num_bytes: int, count: int, page_bytes: int) -> list[int]:
    """Cuts memory at page ends into `count` pieces of about equal length; pieces after the end are empty."""
    num_pages = -(-num_bytes // page_bytes)
    cuts = [min(-(-number * num_pages // count) * page_bytes, num_bytes) for number in range(count + 1)]
    return [end - begin for begin, end in pairwise(cuts)]


def reachable_from(home: int, others: Sequence[int]) -> list[int]:
    """Those of `others` that reach `home` and each other; prefers the earlier GPUs in case of a choice."""
    chosen = [home]
    for device in others:
        if all(_reach_each_other(device, other) for other in chosen):
            chosen.append(device)
    return chosen[1:]


def _reach_each_other(one: int, other: int) -> bool:
    return _native.cuda_reaches_peer(one, other) and _native.cuda_reaches_peer(other, one)
