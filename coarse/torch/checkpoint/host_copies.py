"""Copies of a training state in host memory, made while training computes the next gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from coarse.checkpoint.source import ArraySource, SavedTensor
from coarse.errors import CheckpointError
from coarse.torch.checkpoint.training_state import described
from coarse.torch.gradients.layout import Packing, as_bytes
from coarse.torch.gradients.stream_order import StreamOrder


class HostCopies:
    """Memory for copies of a state: one block, kept from save to save.

    What only the optimizer changes is copied in the background; finish() must be called before it does. All else is
    copied at once. Use it from the training thread; one copy at a time.

    Args:
        waits_for_step: Whether finish() will be called before the optimizer's next update; else all is copied at
            once.
    """

    def __init__(self, *, waits_for_step: bool) -> None:
        self._memory = _host_memory(0)
        self._executor = ThreadPoolExecutor(1, "coarse-checkpoint-copy") if waits_for_step else None
        self._state: CopiedState | None = None
        self._has_begun = False

    def take(
        self, step: int, tensors: Mapping[str, torch.Tensor], *, only_optimizer_changes: Collection[str]
    ) -> CopiedState:
        """Takes hold of a state, for begin() to copy; the one before must have been written.

        Args:
            step: How many updates it has seen.
            tensors: The state by its names in the checkpoint.
            only_optimizer_changes: Names of what stays as it is until the optimizer's next update.
        """
        self.finish()
        later = () if self._executor is None else only_optimizer_changes
        self._state = CopiedState(step, tensors, later, self._block)
        self._has_begun = False
        return self._state

    def begin(self) -> None:
        """Begins to copy; to be called before training goes on."""
        assert self._state is not None
        self._has_begun = True
        order = self._state.order()
        if self._state.is_copied_beside and self._executor is not None:
            self._executor.submit(self._state.copy, order)
        else:
            self._state.copy(order)

    def finish(self) -> None:
        """Returns when what is being copied has been copied."""
        if self._state is not None and self._has_begun:
            self._state.wait()

    def close(self) -> None:
        """Ends the thread that copies. Idempotent."""
        if self._executor is not None:
            self._executor.shutdown()

    def _block(self, num_bytes: int) -> torch.Tensor:
        if self._memory.numel() < num_bytes:
            self._memory = _host_memory(0)  # the old block goes before the new one comes
            self._memory = _host_memory(num_bytes)
        return self._memory


def _host_memory(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


class CopiedState:
    """A CheckpointSource over copies, which may still be on their way. Made by HostCopies."""

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

    def read(self, tensor: SavedTensor) -> Iterator[memoryview]:
        return self._copied().read(tensor)

    def close(self) -> None:
        self.wait()
        self._copies = None

    def wait(self) -> None:
        """Returns when the copies are there, or could not be made."""
        self._is_copied.wait()

    def _copied(self) -> ArraySource:
        self.wait()
        if self._error is not None:
            raise self._error
        if self._copies is None:
            raise CheckpointError("the copy of the state was used after close()")
        return self._copies

    def order(self) -> StreamOrder:
        """Has the state as it is now, for copy(); to be called by the thread that computes."""
        return StreamOrder([*self._originals.values(), *self._early.values()])

    def copy(self, order: StreamOrder) -> None:
        """Makes the copies; to be called once, from any thread. Failures are told to who reads."""
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
                    f"{name} was changed by something else than the optimizer's step() just after a save had begun; "
                    "call checkpointer.step() after such changes"
                )
        return ArraySource(
            self.step, {described(name, copy): as_bytes(copy).numpy() for name, copy in copies.items()}
        )


def _differs(copy: torch.Tensor, original: torch.Tensor) -> bool:
    """Whether an original in the host's memory was changed since, or while, it was copied.

    What is written to `.data`, as moving averages often are, torch does not count.
    """
    return original.is_cpu and not torch.equal(as_bytes(copy), as_bytes(original))
