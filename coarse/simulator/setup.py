"""The subject of a simulation: a machine by its name, file or kind, its numbers of endpoints, and the workload."""

from __future__ import annotations

from dataclasses import dataclass

from coarse.bench.replay.trace import ComputeTrace
from coarse.machine.catalogue import load_machine
from coarse.machine.cci import LoadStore, dense_links
from coarse.machine.partition_table import PartitionTable
from coarse.machine.wiring import link_table
from coarse.simulator.events.first_come import FAIR, SERVICES
from coarse.simulator.faults.disturbances import UNDISTURBED, Disturbances
from coarse.simulator.job import Job, SyncCores
from coarse.simulator.machines.dense import DenseMachine
from coarse.simulator.machines.generated import KINDS, GeneratedMachine
from coarse.simulator.machines.network import LinkNetwork, Network

MOST_ENDPOINTS = 256
"""Most workers and memory devices of a machine file, which is wired pair by pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A machine with workers that train a model.

    Args:
        machine: A name in KINDS, or a machine's name or file as for `coarse machine`.
        trace: Computation of a worker.
        num_workers: Number of workers.
        workers_per_device: Workers of each memory device.
        oversubscription, workers_per_switch: Of generated machines.
        is_folded: Whether equal endpoints of a generated machine are folded, if none is disturbed and links are fair.
        sync_cores, host_overhead_us, disturbances: As in Job.
        service: FAIR or FIRST_COME, how links serve transfers.

    Raises:
        ValueError: If memory devices cannot have equal numbers of workers, or the service is unknown.
    """

    machine: str
    trace: ComputeTrace
    num_workers: int
    workers_per_device: int = 1
    oversubscription: float = 1.0
    workers_per_switch: int = 8
    is_folded: bool = True
    sync_cores: SyncCores | None = None
    host_overhead_us: float = 0.0
    disturbances: Disturbances = UNDISTURBED
    service: str = FAIR

    def __post_init__(self) -> None:
        if self.service not in SERVICES:
            raise ValueError(f"no service {self.service!r}; known: {', '.join(SERVICES)}")
        if min(self.num_workers, self.workers_per_device) < 1 or self.num_workers % self.workers_per_device:
            raise ValueError(
                f"{self.num_workers} workers cannot be divided among memory devices of {self.workers_per_device}"
            )

    @property
    def is_generated(self) -> bool:
        """Whether the machine is generated."""
        return self.machine in KINDS

    def job(self, dense: LoadStore | None = None) -> Job:
        """The job; with `dense`, on one memory device through loads and stores of that speed.

        Raises:
            ValueError: If the machine does not exist, or is too small.
        """
        return Job(
            network=self._generated(dense) if self.is_generated else self._from_file(dense),
            trace=self.trace,
            sync_cores=self.sync_cores,
            host_overhead_us=self.host_overhead_us,
            disturbances=self.disturbances,
        )

    def _generated(self, dense: LoadStore | None) -> Network:
        machine = GeneratedMachine(
            kind=self.machine,
            num_workers=self.num_workers,
            workers_per_device=self.workers_per_device,
            workers_per_switch=self.workers_per_switch,
            oversubscription=self.oversubscription,
            has_one_device=dense is not None,
            is_folded=self.is_folded and not self.disturbances and self.service == FAIR,
        )
        return machine if dense is None else DenseMachine(base=machine, access=dense)

    def _from_file(self, dense: LoadStore | None) -> Network:
        num_devices = 1 if dense is not None else self.num_workers // self.workers_per_device
        if self.num_workers + num_devices > MOST_ENDPOINTS:
            raise ValueError(
                f"{self.num_workers} workers and {num_devices} memory devices on {self.machine}: machine files have "
                f"at most {MOST_ENDPOINTS} endpoints; larger machines are generated: {', '.join(KINDS)}"
            )
        table = PartitionTable.even(num_workers=self.num_workers, num_devices=num_devices)
        links = link_table(load_machine(self.machine), table)
        return LinkNetwork(
            links=links if dense is None else dense_links(links, dense),
            local_devices=tuple(table.local_device(worker) for worker in range(self.num_workers)),
        )
