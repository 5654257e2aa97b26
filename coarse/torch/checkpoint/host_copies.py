"""Copies of a training state in host memory, made while training computes the next gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from coarse.checkpoint.source import ArraySource, Reserve, SavedTensor, any_memory
from coarse.errors import CheckpointError
from coarse.torch.checkpoint.training_state import described
from coarse.torch.gradients.layout import Packing, as_bytes
from coarse.torch.gradients.paths.stream_order import StreamOrder


class HostCopies:
    """Memory for copies of a state: one block, reused by all saves.

    Tensors that only the optimizer changes are copied in the background; call finish() before the optimizer's next
    update. All others are copied at once. Use it from the training thread, for one copy at a time.

    Args:
        waits_for_step: Whether finish() will be called before the optimizer's next update; if not, all tensors are
            copied at once.
    """

    def __init__(self, *, waits_for_step: bool) -> None:
        self._memory = _host_memory(0)
        self._executor = ThreadPoolExecutor(1, "coarse-checkpoint-copy") if waits_for_step else None
        self._state: CopiedState | None = None
        self._has_begun = False

    def take(
        self, step: int, tensors: Mapping[str, torch.Tensor], *, only_optimizer_changes: Collection[str]
    ) -> CopiedState:
        """Prepares a state, which begin() copies; the previous state must have been written.

        Args:
            step: Number of updates that the state includes.
            tensors: The state by its names in the checkpoint.
            only_optimizer_changes: Names of tensors that do not change before the optimizer's next update.
        """
        self.finish()
        later = () if self._executor is None else only_optimizer_changes
        self._state = CopiedState(step, tensors, later, self._block)
        self._has_begun = False
        return self._state

    def begin(self) -> None:
        """Begins to copy. Call it before training continues."""
        assert self._state is not None
        self._has_begun = True
        order = self._state.order()
        if self._state.is_copied_beside and self._executor is not None:
            self._executor.submit(self._state.copy, order)
        else:
            self._state.copy(order)

    def finish(self) -> None:
        """Waits until the running copy is complete."""
        if self._state is not None and self._has_begun:
            self._state.wait()

    def close(self) -> None:
        """Ends the thread that copies. Idempotent."""
        if self._executor is not None:
            self._executor.shutdown()

    def _block(self, num_bytes: int) -> torch.Tensor:
        if self._memory.numel() < num_bytes:
            self._memory = _host_memory(0)  # frees the old block before the new one is allocated
            self._memory = _host_memory(num_bytes)
        return self._memory


def _host_memory(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


class CopiedState:
    """A CheckpointSource over copies, which may still be incomplete. Created by HostCopies."""

    def __init__(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        later: Collection[str],
        block: Callable[[int], torch.Tensor],
    ) -> None:
        self.step = step
        self.is_copied_beside = bool(later)
        self._block = block
        self._originals = {name: tensor.detach() for name, tensor in tensors.items()}
        self._versions = {name: self._originals[name]._version for name in later}
        self._early: dict[str, torch.Tensor] = {}
        self._copies: ArraySource | None = None
        self._error: Exception | None = None
        self._is_copied = threading.Event()
        if later:
            self._early = {
                n: tensor.clone() for n, tensor in self._originals.items() if n not in self._versions
            }

    @property
    def tensors(self) -> Sequence[SavedTensor]:
        return self._copied().tensors

    def read(self, tensor: SavedTensor, reserve: Reserve = any_memory) -> Iterator[memoryview]:
        return self._copied().read(tensor, reserve)

    def close(self) -> None:
        self.wait()
        self._copies = None

    def wait(self) -> None:
        """Waits until the copies are complete or have failed."""
        self._is_copied.wait()

    def _copied(self) -> ArraySource:
        self.wait()
        if self._error is not None:
            raise self._error
        if self._copies is None:
            raise CheckpointError("the copy of the state was used after close()")
        return self._copies

    def order(self) -> StreamOrder:
        """Returns the stream order of the current state, for copy(). Call it from the thread that computes."""
        return StreamOrder([*self._originals.values(), *self._early.values()])

    def copy(self, order: StreamOrder) -> None:
        """Makes the copies. Call it once, from any thread. Failures are reported to the reader."""
        try:
            with order.followed():
                self._copies = self._copy_all()
        except Exception as error:
            self._error = error
        finally:
            self._originals, self._early = {}, {}
            self._is_copied.set()

    def _copy_all(self) -> ArraySource:
        values = {name: self._early.get(name, tensor) for name, tensor in self._originals.items()}
        packing = Packing(list(values.values()))
        copies = dict(zip(values, packing.views(self._block(packing.num_bytes)), strict=True))
        with torch.no_grad():
            for name, copy in copies.items():
                copy.copy_(values[name])
        for name, version in self._versions.items():
            original = self._originals[name]
            if original._version != version or _differs(copies[name], original):
                raise CheckpointError(
                    f"{name} was changed outside of the optimizer's step() just after a save had begun; "
                    "call checkpointer.step() after such changes"
                )
        return ArraySource(
            self.step, {described(name, copy): as_bytes(copy).numpy() for name, copy in copies.items()}
        )


def _differs(copy: torch.Tensor, original: torch.Tensor) -> bool:
    """Whether an original in host memory was changed during or after the copy.

    Compares values, because torch does not count writes to `.data`, which are common for moving averages.
    """
    return original.is_cpu and not torch.equal(as_bytes(copy), as_bytes(original))
