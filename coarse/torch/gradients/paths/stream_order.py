"""Orders GPU work of another thread behind the computing thread's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


class StreamOrder:
    """Records the work in the caller's current streams so far, so that another thread can order its work behind it.

    The other thread's current streams are otherwise unordered with the caller's. Create it when the caller's streams
    have all work that computes the tensors.

    Args:
        tensors: Their devices' streams are recorded; tensors in host memory need none.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._events = {device: torch.cuda.current_stream(device).record_event() for device in devices}

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Orders current streams behind the recorded work, not behind later work, which may wait for this thread."""
        with contextlib.ExitStack() as stack:
            for device, event in self._events.items():
                stream = torch.cuda.Stream(device)
                stream.wait_event(event)
                stack.enter_context(torch.cuda.stream(stream))
            yield
