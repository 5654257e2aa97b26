"""Holds transfers of a GPU for as long as the links of an emulated machine take (docs/design/emulation.md).

The buckets are those of host arenas, but in a GPU's memory and time: transfers that one GPU issues share them, from
whatever streams and processes.
"""

from __future__ import annotations

import struct

from coarse.kernels.cuda_kernels import CudaKernels
from coarse.machine.emulation import MOST_BUCKETS_PER_PATH, Emulation

_WORD_BYTES = 8
_PATH = struct.Struct(f"={MOST_BUCKETS_PER_PATH}Q{MOST_BUCKETS_PER_PATH}ddII")
"""DelayPath of coarse/kernels/cuda/delay.cuh."""


class StreamDelays:
    """Emulated links for the streams of one GPU.

    A transfer is reserve(), then whatever copies it, then hold(), on one stream. The copy's own time is hidden in
    the link's if that is longer. Nothing waits on the host.

    Thread safety: one caller at a time; several objects, in several processes, may share the memory of buckets.

    Args:
        kernels: Of the GPU.
        emulation: The links, and how many times slower they are.
        address: Of `num_bytes()` of the GPU's memory, all zero before the first transfer.
        num_transfers: Transfers that are under way at once, at most.

    Raises:
        ValueError: If `num_transfers` is not at least 1.
    """

    def __init__(
        self, kernels: CudaKernels, emulation: Emulation, *, address: int, num_transfers: int = 1
    ) -> None:
        if num_transfers < 1:
            raise ValueError(f"num_transfers={num_transfers} must be at least 1")
        self._context = kernels.context
        self._reserve = kernels.function("reserve_transfer")
        self._hold = kernels.function("hold_until")
        self._emulation = emulation
        self._address = address
        self._num_transfers = num_transfers

    @staticmethod
    def num_bytes(emulation: Emulation, num_transfers: int = 1) -> int:
        """Memory that the buckets and so many transfers take."""
        return (len(emulation.links.buckets) + num_transfers) * _WORD_BYTES

    def reserve(self, source: int, target: int, nbytes: int, *, stream: int, transfer: int = 0) -> None:
        """Takes the time of a transfer on all links of its way, from the moment that the stream comes here.

        Args:
            source, target: Endpoints of the link table.
            nbytes: That are transferred.
            stream: A CUstream as an address.
            transfer: A number below `num_transfers`, free again when hold() has returned on the stream.

        Raises:
            ValueError: If there is no such endpoint or transfer.
            CudaError: If CUDA refuses.
        """
        path = delay_path(self._emulation, source, target, self._address)
        arguments = [path, struct.pack("=Q", nbytes), self._due(transfer)]
        self._context.launch(self._reserve, 1, 1, stream, arguments)

    def hold(self, *, stream: int, transfer: int = 0) -> None:
        """Has the stream go on when a transfer that was reserved is due.

        Raises:
            ValueError: If there is no such transfer.
            CudaError: If CUDA refuses.
        """
        self._context.launch(self._hold, 1, 1, stream, [self._due(transfer)])

    def _due(self, transfer: int) -> bytes:
        if not 0 <= transfer < self._num_transfers:
            raise ValueError(f"transfer {transfer} is none of the {self._num_transfers} transfers")
        number = len(self._emulation.links.buckets) + transfer
        return struct.pack("=Q", self._address + number * _WORD_BYTES)


def delay_path(emulation: Emulation, source: int, target: int, address: int) -> bytes:
    """The DelayPath from one endpoint to another, for native code that launches reserve_transfer itself.

    Args:
        emulation: The links, and how many times slower they are.
        source, target: Endpoints of the link table.
        address: Of a word for each bucket, in the GPU's memory.

    Raises:
        ValueError: If there is no such endpoint.
    """
    links, dilation = emulation.links, emulation.time_dilation
    path = links.path(source, target)
    rest = MOST_BUCKETS_PER_PATH - len(path.buckets)
    words = [address + bucket * _WORD_BYTES for bucket in path.buckets]
    # 1 GB/s is a byte in a nanosecond.
    ns_per_byte = [dilation / links.buckets[bucket].gbytes_per_s for bucket in path.buckets]
    latency_ns = path.latency_us * 1e3 * dilation
    return _PATH.pack(*words, *[0] * rest, *ns_per_byte, *[0.0] * rest, latency_ns, len(path.buckets), 0)
