"""Work on GPUs in another thread than that which computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


class StreamOrder:
    """What the caller's current streams have been given so far, for another thread to come behind it.

    That thread's own current streams know nothing of it. To be made where the tensors are known to be in order.

    Args:
        tensors: The streams of their devices; those in the host's memory need none.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._events = {device: torch.cuda.current_stream(device).record_event() for device in devices}

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Has current streams behind that, but not behind what the caller's are given later: it may wait for this."""
        with contextlib.ExitStack() as stack:
            for device, event in self._events.items():
                stream = torch.cuda.Stream(device)
                stream.wait_event(event)
                stack.enter_context(torch.cuda.stream(stream))
            yield
