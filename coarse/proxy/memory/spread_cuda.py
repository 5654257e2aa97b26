"""Device memory on several GPUs at once, for what a node has once (docs/design/gpu.md)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from coarse.kernels import _native
from coarse.proxy.memory.cuda import CudaMemory
from coarse.wire.segments import Segment


class SpreadCudaMemory:
    """Memory of GPUs that reach each other, in as many pieces side by side, of about the same length.

    What an optimizer keeps for a parameter lies on the GPU of the parameter: both are laid out in the same order, and
    cut at the same parts of their lengths. Each GPU updates what it has. Other GPUs than `own` are first used when
    memory is asked for.

    Args:
        own: That of the memory device, which has the first piece.
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
        """Has nothing to give up: memory goes with its segments."""

    def _memories(self) -> list[CudaMemory]:
        if not self._opened:
            self._opened = [self._own, *map(CudaMemory, self._others)]
        return self._opened


def piece_lengths(num_bytes: int, count: int, page_bytes: int) -> list[int]:
    """Cuts memory into `count` pieces of about the same length, where pages end; those behind the end have none."""
    num_pages = -(-num_bytes // page_bytes)
    cuts = [min(-(-number * num_pages // count) * page_bytes, num_bytes) for number in range(count + 1)]
    return [end - begin for begin, end in pairwise(cuts)]


def reachable_from(home: int, others: Sequence[int]) -> list[int]:
    """Those of other GPUs that reach this one and each other; of several choices the one with the first of them."""
    chosen = [home]
    for device in others:
        if all(_reach_each_other(device, other) for other in chosen):
            chosen.append(device)
    return chosen[1:]


def _reach_each_other(one: int, other: int) -> bool:
    return _native.cuda_reaches_peer(one, other) and _native.cuda_reaches_peer(other, one)
