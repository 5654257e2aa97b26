"""A session as what is tuned: the side of it that measuring and planning use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from coarse.client.link_probes import LinkProbes
from coarse.client.pacing import ServedTransfer
from coarse.client.tensor_group import TensorGroup
from coarse.env import WorkerIdentity
from coarse.machine.emulation import Emulation
from coarse.machine.partition_table import PartitionTable
from coarse.profiler.routing import RoutingTable
from coarse.schema import TensorSpec
from coarse.settings import Settings

if TYPE_CHECKING:
    import numpy.typing as npt


class TunedSession(Protocol):
    """Every method is collective or local as Session has it."""

    identity: WorkerIdentity
    settings: Settings

    @property
    def node_workers(self) -> tuple[int, ...]:
        """Ranks of the workers of this node."""

    @property
    def most_workers_of_a_node(self) -> int:
        """Of the node that has the most."""

    @property
    def partition_table(self) -> PartitionTable | None:
        """Which memory device serves which workers; None for one worker."""

    @property
    def emulation(self) -> Emulation | None:
        """The links that are emulated; None for those that are there."""

    @property
    def is_emulated(self) -> bool:
        """Whether there are any."""

    @property
    def time_dilation(self) -> float:
        """How many times longer transfers take than on the emulated machine; 1 where none is."""

    def all_reduce(self, array: npt.NDArray[Any], *, op: str = "sum") -> None:
        """Reduces an array in place."""

    def barrier(self) -> None:
        """Returns when every worker has called it."""

    def check_others(self) -> None:
        """Raises what is known of lost workers and memory devices."""

    def register_trial(self, name: str, specs: Sequence[TensorSpec], gpu: str) -> TensorGroup:
        """Registers tensors whose steps nobody watches."""

    def open_probes(self, largest_bytes: int) -> LinkProbes:
        """Takes memory for probes of up to so many bytes."""

    def adopt_routing(self, table: RoutingTable) -> None:
        """Routes every shard by a table from its next push on."""

    def served_transfers(self, since_us: float = 0.0) -> tuple[float, list[ServedTransfer]]:
        """Transfers of an emulated session."""

    def release_buffers(self) -> None:
        """Gives back the memory that all_reduce() keeps."""
