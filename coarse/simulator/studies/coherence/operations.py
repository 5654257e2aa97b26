"""Memory operations as generators of messages and waits, and the locks of lines in flight."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

LINE_BYTES, _ADDRESS_BYTES, _METADATA_BYTES, _ACK_BYTES = 64, 8, 4, 4  # section 4.2.7
TIMESTAMP_BYTES = 2


class Kind(Enum):
    """Kinds of messages, each with its bytes without timestamps (section 4.2.7)."""

    READ_REQUEST = ("read request", _ADDRESS_BYTES + _METADATA_BYTES)
    READ_RESPONSE = ("read response", LINE_BYTES + _ADDRESS_BYTES + _METADATA_BYTES + _ACK_BYTES)
    WRITE_REQUEST = ("write request", LINE_BYTES + _ADDRESS_BYTES + _METADATA_BYTES)
    WRITE_RESPONSE = ("write response", LINE_BYTES + _ADDRESS_BYTES + _ACK_BYTES)
    ACK = ("acknowledgement", _ADDRESS_BYTES + _ACK_BYTES)
    INVALIDATION = ("invalidation", _ADDRESS_BYTES + _METADATA_BYTES)
    SERVICE = ("access to memory", LINE_BYTES)

    def __init__(self, words: str, nbytes: int) -> None:
        self.words, self.nbytes = words, nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Hop:
    """A message over one part of the machine. A protocol makes each of its hops once.

    Args:
        part: The part that it crosses, e.g. ("memory up", 2); its driver knows the part's speed.
        kind: Its contents.
        nbytes: Size, with timestamps.
    """

    part: tuple[str, int]
    kind: Kind
    nbytes: int


class Waiting(list["Operation"]):
    """The operations that wait for a locked line."""


Operation: TypeAlias = Generator["Hop | Waiting", None, int]
"""A read or a write in progress. It returns the value that it read or wrote."""


class Locks(dict[int, Waiting]):
    """The lines that a cache or controller has in flight (its MSHR), and who waits for each.

    Args:
        released: Queues of lines that are free again; the driver empties it after each step.
    """

    def __init__(self, released: list[Waiting]) -> None:
        super().__init__()
        self._released = released

    def hold(self, line: int) -> None:
        self[line] = Waiting()

    def free(self, line: int) -> None:
        waiting = self.pop(line)
        if waiting:
            self._released.append(waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a machine. Lines count from 0.

    Args:
        num_gpus, cus_per_gpu: GPUs, and compute units (CUs) of each; a CU has its own L1 cache.
        banks: L2 banks of each GPU; line modulo banks chooses.
        l1_sets, l1_ways, l2_sets, l2_ways: Sizes of an L1 cache and of an L2 bank.
        controllers: Unified memory controllers; line modulo controllers chooses.
        page_lines: Lines of a page; pages go round the GPUs where each has memory of its own.
    """

    num_gpus: int = 1
    cus_per_gpu: int = 2
    banks: int = 1
    l1_sets: int = 16
    l1_ways: int = 4
    l2_sets: int = 16
    l2_ways: int = 16
    controllers: int = 1
    page_lines: int = 1

    @property
    def num_cus(self) -> int:
        return self.num_gpus * self.cus_per_gpu

    @property
    def pages(self) -> tuple[int, int]:
        """Lines of a page, and the number of memories that pages go round."""
        return self.page_lines, self.num_gpus

    def gpu_of(self, cu: int) -> int:
        return cu // self.cus_per_gpu

    def home_of(self, line: int) -> int:
        """The GPU in whose memory the line lies."""
        return line // self.page_lines % self.num_gpus

    def bank_of(self, gpu: int, line: int) -> int:
        return gpu * self.banks + line % self.banks

    def home_bank_of(self, gpu: int, line: int) -> int:
        """As bank_of, by the line's place in its home's memory."""
        place = line // (self.page_lines * self.num_gpus) * self.page_lines + line % self.page_lines
        return gpu * self.banks + place % self.banks


class CoherenceProtocol(Protocol):
    """Caches and memory of a machine."""

    shape: Shape
    released: list[Waiting]

    def read(self, cu: int, line: int) -> Operation: ...

    def write(self, cu: int, line: int, value: int) -> Operation: ...

    def end_kernel(self) -> list[Operation]:
        """All CUs have finished a kernel; returns the write-backs that the next one waits for."""
        ...

    def statistics(self) -> dict[str, int]:
        """Counted so far: hits and misses of L1 and L2, accesses to memory."""
        ...
