"""The interface of a session for measuring and planning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from coarse.client.link_probes import LinkProbes
from coarse.client.tensor_group import TensorGroup
from coarse.emulation.emulated_session import EmulatedSession
from coarse.env import WorkerIdentity
from coarse.machine.partition_table import PartitionTable
from coarse.metrics.writer import MetricsWriter
from coarse.profiler.routing import RoutingTable
from coarse.schema import TensorSpec
from coarse.settings import Settings

if TYPE_CHECKING:
    import numpy.typing as npt


class TunedSession(Protocol):
    """The part of Session for tuning. Methods are collective or local, as in Session."""

    identity: WorkerIdentity
    settings: Settings

    @property
    def node_workers(self) -> tuple[int, ...]:
        """Ranks of the workers of this node."""

    @property
    def most_workers_of_a_node(self) -> int:
        """The largest number of workers on any node."""

    @property
    def partition_table(self) -> PartitionTable | None:
        """The workers that each memory device serves; None in a job of one worker."""

    @property
    def emulation(self) -> EmulatedSession | None:
        """The emulated machine; None for real links."""

    @property
    def metrics_writer(self) -> MetricsWriter:
        """Counts events of this worker."""

    def all_reduce(self, array: npt.NDArray[Any], *, op: str = "sum") -> None:
        """Reduces an array in place."""

    def barrier(self) -> None:
        """Returns when every worker has called it."""

    def check_others(self) -> None:
        """Raises if a worker or memory device is lost."""

    def register_trial(self, name: str, specs: Sequence[TensorSpec], gpu: str) -> TensorGroup:
        """Registers tensors whose steps are not watched."""

    def cannot_move_slots(self, group: TensorGroup) -> str:
        """Why a group's slots cannot follow the links between GPUs; "" if they can."""

    def move_slots(self, group: TensorGroup, gpu: str) -> bool:
        """Moves a group's slots if the links between GPUs have changed; returns whether it did."""

    def open_probes(self, largest_bytes: int) -> LinkProbes:
        """Allocates memory for probes of up to `largest_bytes`."""

    def adopt_routing(self, table: RoutingTable) -> None:
        """Routes every shard by a table from its next push on."""

    def release_buffers(self) -> None:
        """Frees the memory that all_reduce() keeps."""
