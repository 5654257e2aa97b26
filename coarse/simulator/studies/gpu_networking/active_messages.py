"""XTQ's coordinated indices: a put that names a queue and a kernel of the target by number (slides 10 to 14).

The target registers addresses once. A put carries indices, never addresses of the target, so that the interface
there can write the command packet without its processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

_Row = TypeVar("_Row")


class Put(NamedTuple):
    """An XTQ put: payload, and indices agreed at set-up."""

    payload: bytes
    queue_index: int
    kernel_index: int
    arguments: tuple[int, ...] = ()


class Kernel(NamedTuple):
    """A registered kernel: where it is, and where its payload goes."""

    address: int
    buffer_address: int
    num_arguments: int


class CommandPacket(NamedTuple):
    """A command that the target's GPU reads from its queue."""

    kernel_address: int
    buffer_address: int
    arguments: tuple[int, ...]


@dataclass(slots=True)
class Target:
    """The lookup tables, memory and queues of a target, by their addresses."""

    queue_addresses: list[int] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    memory: dict[int, bytes] = field(default_factory=dict)
    queues: dict[int, list[CommandPacket]] = field(default_factory=dict)
    doorbells: list[int] = field(default_factory=list)

    def register_queue(self, address: int) -> int:
        """Returns the queue's index."""
        self.queue_addresses.append(address)
        self.queues[address] = []
        return len(self.queue_addresses) - 1

    def register_kernel(self, kernel: Kernel) -> int:
        """Returns the kernel's index."""
        self.kernels.append(kernel)
        return len(self.kernels) - 1

    def receive(self, put: Put) -> CommandPacket:
        """Writes the payload, then the command packet, then rings the doorbell.

        Raises:
            ValueError: If an index was not registered, or the number of arguments differs. Nothing is written then.
        """
        queue = _looked_up(self.queue_addresses, put.queue_index, "queue")
        kernel = _looked_up(self.kernels, put.kernel_index, "kernel")
        if len(put.arguments) != kernel.num_arguments:
            raise ValueError(
                f"kernel {put.kernel_index} takes {kernel.num_arguments} arguments; the put has {len(put.arguments)}"
            )
        packet = CommandPacket(kernel.address, kernel.buffer_address, put.arguments)
        self.memory[kernel.buffer_address] = put.payload
        self.queues[queue].append(packet)
        self.doorbells.append(queue)
        return packet


def _looked_up(table: Sequence[_Row], index: int, what: str) -> _Row:
    if not 0 <= index < len(table):
        raise ValueError(f"{what} {index} is not registered; the target has {len(table)}")
    return table[index]
