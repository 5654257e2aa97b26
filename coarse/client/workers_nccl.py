"""How the workers of a node join a communicator of NCCL, each with its GPU (COARSE paper, section III-F)."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations

from coarse.client.tensor_bytes import gpu_context
from coarse.kernels import _native
from coarse.kernels.nccl import find_nccl
from coarse.proxy.registration import DTYPE_NUMBERS, OP_NUMBERS

Gather = Callable[[bytes], list[bytes]]
"""What each worker of the node gives, by client number; every worker calls it alike."""

_LOOK_S = 0.1
_FIRST_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """What a worker tells the others.

    Attributes:
        gpu: Its own, by UUID.
        reason: Why it cannot take part; "" if it can.
        unique_id: Of the communicator, in hexadecimal digits; of the first worker.
        may_share_gpu: Whether its NCCL was told to take several ranks on one GPU.
    """

    gpu: str
    reason: str
    unique_id: str
    may_share_gpu: bool = field(default_factory=lambda: os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1")


def join_workers(
    gather: Gather, *, number: int, gpu: str, timeout_s: float, check_others: Callable[[], None]
) -> _native.NcclCommunicator:
    """Joins with all workers of the node; every worker calls it alike, and it fails on all or on none.

    Args:
        gather: Reaches all of them.
        number: This worker's client number.
        gpu: Where its tensors are, by UUID.
        timeout_s: How long others may take.
        check_others: Raises if a worker or a memory device was lost.

    Raises:
        NcclError: If NCCL is missing on a worker, refuses or fails, two workers have one GPU, or one does not come.
        WorkerLostError, MemoryDeviceLostError: As `check_others`.
    """
    library, offer = _prepare(gpu, is_first=number == 0)
    offers = [_Offer(**json.loads(each)) for each in gather(json.dumps(asdict(offer)).encode())]
    if reason := _refusal(offers):
        raise _native.NcclError(reason)
    assert library is not None
    joining = _Joining(library, bytes.fromhex(offers[0].unique_id), number, len(offers), gpu)
    reason = joining.wait(timeout_s / 2, check_others)  # whoever fails at once waits for the others below
    reasons = [each.decode() for each in gather(reason.encode())]
    failed = [f"worker {each}: {why}" for each, why in enumerate(reasons) if why]
    if failed or joining.communicator is None:
        joining.give_up()
        raise _native.NcclError("; ".join(failed))
    return joining.communicator


def _prepare(gpu: str, *, is_first: bool) -> tuple[_native.NcclLibrary | None, _Offer]:
    try:
        library = find_nccl()
        unique_id = library.unique_id().hex() if is_first else ""
    except _native.NcclError as error:
        return None, _Offer(gpu=gpu, reason=str(error), unique_id="")
    return library, _Offer(gpu=gpu, reason="", unique_id=unique_id)


def _refusal(offers: Sequence[_Offer]) -> str:
    """Why these workers have no communicator; "" if they can have one."""
    for number, offer in enumerate(offers):
        if offer.reason:
            return f"worker {number}: {offer.reason}"
    if all(offer.may_share_gpu for offer in offers):
        return ""
    for (first, one), (second, other) in combinations(enumerate(offers), 2):
        if one.gpu == other.gpu:
            return f"workers {first} and {second} are on one GPU, {one.gpu}, which NCCL does not take"
    return ""


class _Joining:
    """Joins in a thread of its own: only the end of the process ends NCCL's wait for ranks that do not come."""

    def __init__(
        self, library: _native.NcclLibrary, unique_id: bytes, number: int, num_workers: int, gpu: str
    ) -> None:
        self._context = gpu_context(gpu)
        self._arguments = (library, unique_id, number, num_workers, self._context)
        self._reason = ""
        self._is_given_up = False
        self._has_ended = threading.Event()
        self.communicator: _native.NcclCommunicator | None = None
        threading.Thread(target=self._join, name="coarse-nccl", daemon=True).start()

    def wait(self, timeout_s: float, check_others: Callable[[], None]) -> str:
        """Waits for the end; returns what has gone wrong, "" if nothing has."""
        deadline_s = time.monotonic() + timeout_s
        while not self._has_ended.wait(_LOOK_S):
            try:
                check_others()
            except BaseException:
                self.give_up()
                raise
            if time.monotonic() > deadline_s:
                return f"NCCL has not joined all workers within {timeout_s:.0f} s; NCCL_DEBUG=INFO has it say more"
        return self._reason

    def give_up(self) -> None:
        """Gives the communicator back, now or when the thread gets it."""
        self._is_given_up = True
        if self.communicator is not None:
            self.communicator.abort()

    def _join(self) -> None:
        try:
            communicator = _native.NcclCommunicator(*self._arguments)
            self.communicator = communicator
            self._connect(communicator)
        except Exception as error:  # it is for the thread that waits
            self._reason = str(error)
        if self._is_given_up and self.communicator is not None:
            self.communicator.abort()
        self._has_ended.set()

    def _connect(self, communicator: _native.NcclCommunicator) -> None:
        """Has NCCL connect the workers, which takes a while, before anybody waits for a result."""
        number = _native.CudaMemory.allocate(self._context, _FIRST_BYTES)
        stream = _native.CudaStream(self._context)
        stream.fill(number.address, 0, number.num_bytes)
        communicator.all_reduce(
            number.address, number.address, 1, DTYPE_NUMBERS["float32"], OP_NUMBERS["sum"], stream.handle
        )
        stream.synchronize()
        communicator.check()
