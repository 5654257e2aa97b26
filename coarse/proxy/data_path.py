"""The data path of a memory device: the memory that all devices share, and the native proxy that uses it."""

from __future__ import annotations

import os
from collections.abc import Callable

from coarse.emulation.machine import Emulation
from coarse.emulation.paced_links import PacedLinks, write_link_table
from coarse.errors import ProtocolError
from coarse.kernels import _native
from coarse.metrics.reader import MetricsReader
from coarse.metrics.writer import MetricsWriter
from coarse.proxy.memory import DeviceMemory
from coarse.proxy.nccl_communicator import NcclCommunicator, write_nccl_id
from coarse.settings import SCHEDULING_CHOICES
from coarse.wire.device_job import (
    COLLECTIVE_LOGS,
    DOORBELLS,
    EPOCHS,
    EXCHANGE_LOGS,
    LINK_TABLE,
    METRICS,
    NCCL_ID,
    RING_LOGS,
    DeviceJob,
)
from coarse.wire.segments import Segment


class DataPath:
    """Collects the native proxy's resources, creates the proxy, and starts it when all workers have joined.

    Used from the control thread alone.

    Args:
        job: The device's place in the session.
        memory: The memory of this device's share.
        event_fd: The proxy writes to it when it has an event to report; the caller closes it.
        look_again: Requests a call of open(), from any thread.
    """

    def __init__(
        self, job: DeviceJob, memory: DeviceMemory, event_fd: int, look_again: Callable[[], None]
    ) -> None:
        self._job = job
        self._event_fd = event_fd
        self._look_again = look_again
        self._nccl: NcclCommunicator | None = None
        self.nccl_problem = ""
        """Why NCCL cannot be chosen although it was requested."""
        self._link_fds = [fd for fds in job.link_fds for fd in fds]
        self._client_segments: dict[int, Segment] = {}
        self._newcomers: dict[
            int, tuple[str, Segment]
        ] = {}  # segments to be mapped, by client, with the entry
        self._memory = memory
        self._shared: dict[str, Segment] = {}  # the memory that all devices map, by name
        self.proxy: _native.Proxy | None = None
        """Set when all devices' shared memory exists."""
        self.metrics = MetricsWriter()
        """This device's metrics; counts nothing before the proxy exists."""
        self._links: PacedLinks | None = None
        self._epochs: Segment | None = None  # to read
        self.is_started = False
        self._heartbeats: _native.HeartbeatWatch | None = None

    @property
    def running_proxy(self) -> _native.Proxy | None:
        """The proxy when it serves all workers; None before."""
        return self.proxy if self.is_started else None

    def share(self) -> dict[str, Segment]:
        """Allocates this device's part of the shared memory; returns it by name and keeps ownership."""
        for name, num_bytes in self._job.own_memory().items():
            self._shared[name] = self._memory.allocate_host(name, num_bytes)
        if name := self._job.own_messages():
            num_bytes = _native.ring_messages_bytes(self._memory.message_bytes)
            self._shared[name] = self._memory.allocate(name, num_bytes)
        if LINK_TABLE in self._shared:
            write_link_table(self._shared[LINK_TABLE].fd, Emulation.from_json(self._job.emulation))
        if NCCL_ID in self._shared:
            try:
                write_nccl_id(self._shared[NCCL_ID])
            except _native.NcclError as error:
                self._do_without_nccl(error)
        own = dict(self._shared)
        if self._job.link_table_fd >= 0:  # every device has it
            self._shared[LINK_TABLE] = Segment.received(self._job.link_table_fd)
        return own

    def add_newcomer(self, client: int, entry: str, segment: Segment) -> None:
        """Takes the segment of a newcomer in the place of a lost worker, which one of the devices has allocated."""
        if client in self._newcomers:
            self._newcomers[client][1].close()
        self._newcomers[client] = entry, segment

    def map_newcomer(self, client: int, entry: str) -> bool:
        """Starts to serve a newcomer; returns False if its segment has not arrived yet."""
        assert self.proxy is not None
        given, segment = self._newcomers.get(client, ("", None))
        if given != entry or segment is None:
            return False
        self._client_segments[client] = segment
        del self._newcomers[client]
        self.proxy.admit_newcomer(client, segment.fd)
        return True

    def member_since(self, client: int) -> int:
        """The first epoch of the worker in a place; _native.NO_EPOCH if it is no member yet."""
        return 0 if self.proxy is None else self.proxy.member_since(client)

    def take_shared(self, segments: dict[str, Segment]) -> None:
        """Takes shared memory that another device has allocated."""
        self._shared.update(segments)

    def new_client_segment(self) -> Segment:
        """Allocates the segment of one of this device's own workers."""
        return self._memory.allocate_host("client", _native.client_segment_bytes(self._job.num_devices))

    def allocate_client(self, client: int) -> int:
        """Allocates the segment of one of this device's own workers; returns its descriptor, which it keeps open."""
        segment = self.new_client_segment()
        self._client_segments[client] = segment
        return segment.fd

    def take_client(self, client: int, segment: Segment) -> None:
        """Takes a worker's segment that another device has allocated."""
        self._client_segments[client] = segment

    def open(self) -> None:
        """Joins the devices' communicator and creates the proxy, when all shared memory exists. Idempotent.

        Raises:
            NcclError, CudaError: If that fails.
        """
        if self.proxy is None and self._shared.keys() >= self._job.shared_memory() and self._has_joined():
            self.proxy = self._make_proxy()

    @property
    def has_nccl(self) -> bool:
        """Whether NCCL may be chosen."""
        return self._job.has_nccl and not self.nccl_problem

    def _do_without_nccl(self, error: _native.NcclError) -> None:
        if self._job.needs_nccl:
            raise error
        self.nccl_problem = str(error)

    def _has_joined(self) -> bool:
        if not self.has_nccl:
            return True
        if self._nccl is None:
            from coarse.proxy.memory.cuda import CudaMemory

            assert isinstance(self._memory, CudaMemory)
            self._nccl = NcclCommunicator(self._job, self._memory, self._shared[NCCL_ID], self._look_again)
        try:
            return self._nccl.result() is not None
        except _native.NcclError as error:
            self._do_without_nccl(error)
            return True

    @property
    def is_ready(self) -> bool:
        """Whether start() can be called: the proxy and the segments of all workers exist."""
        return self.proxy is not None and len(self._client_segments) == self._job.num_clients

    def start(self) -> None:
        """Starts the sync cores, which then serve all workers."""
        assert self.proxy is not None
        for client, segment in self._client_segments.items():
            self.proxy.add_client(client, segment.fd)
        self.proxy.start()
        self.is_started = True

    def silent_device(self) -> int | None:
        """A memory device that no longer works; call it a few times a second after start()."""
        if self._heartbeats is None:
            self._heartbeats = _native.HeartbeatWatch(
                doorbells_fd=self._shared[DOORBELLS].fd,
                num_devices=self._job.num_devices,
                limit_ms=round(self._job.heartbeat_s * 1000),
            )
        return self._heartbeats.look()

    def worker_fds(self, client: int) -> list[int]:
        """The descriptors that one of this device's own workers maps; the data path keeps them."""
        own = [self._client_segments[client].fd, self._shared[DOORBELLS].fd, self._shared[METRICS].fd]
        if not self._job.replaces_workers:
            return own
        if self._epochs is None:
            self._epochs = self._shared[EPOCHS].to_read()
        return [*own, self._epochs.fd]

    def metrics_reader(self) -> MetricsReader:
        """Reads the metrics of the node's processes. Call it after share() of the home device."""
        return MetricsReader.of_segment(self._shared[METRICS].fd, self._job.num_devices, self._job.ranks)

    def release_clients(self) -> None:
        """Closes this process's descriptors of client segments, when all workers have them."""
        for segment in self._client_segments.values():
            segment.close()

    @property
    def links(self) -> PacedLinks:
        """The links of an emulated session.

        Raises:
            ProtocolError: If they do not exist yet.
        """
        if self._links is None:
            raise ProtocolError("the links are not connected yet")
        return self._links

    def transfer_log_fd(self) -> int:
        """A read-only descriptor of the links' transfer log; the caller closes it.

        Raises:
            ProtocolError: If the links do not exist yet.
        """
        if self._links is None:
            raise ProtocolError("the links are not connected yet")
        return self._shared[LINK_TABLE].to_read().fd

    def stop(self) -> None:
        """Stops the sync cores, and closes connections that no proxy has taken."""
        if self.proxy is not None:
            self.proxy.stop()
        self._close_links()

    def close(self) -> None:
        """Unmaps and closes all memory, after stop()."""
        self.proxy = None
        self._links = None
        epochs = [] if self._epochs is None else [self._epochs]
        newcomers = [segment for _, segment in self._newcomers.values()]
        for segment in (*self._client_segments.values(), *self._shared.values(), *epochs, *newcomers):
            segment.close()

    def _rings(self) -> _native.RingMemory:
        return _native.RingMemory(
            logs_fd=self._shared[RING_LOGS].fd if self._job.has_rings else -1,
            buffer_fds=[self._shared[name].fd for name in self._job.ring_names()],
            messages=[self._shared[name].region for name in self._job.message_names()],
            message_bytes=self._memory.message_bytes,
            memory=self._memory.tensor_memory() if self._job.has_rings else None,
        )

    def _collectives(self) -> _native.CollectiveMemory:
        return _native.CollectiveMemory(
            logs_fd=self._shared[COLLECTIVE_LOGS].fd if self.has_nccl else -1,
            clients_of=self._job.clients_of,
            runner=self._nccl.result() if self._nccl is not None and self.has_nccl else None,
            memory=self._memory.tensor_memory() if self.has_nccl else None,
        )

    def _make_proxy(self) -> _native.Proxy:
        segment = _native.MetricsSegment(
            self._shared[METRICS].fd, self._job.num_devices, self._job.num_clients
        )
        self.metrics = MetricsWriter(segment.device(self._job.device))
        proxy = _native.Proxy(
            device=self._job.device,
            num_devices=self._job.num_devices,
            num_clients=self._job.num_clients,
            num_sync_cores=self._job.num_sync_cores,
            scheduling=SCHEDULING_CHOICES.index(self._job.scheduling),
            local_clients=list(self._job.local_clients),
            spin_us=self._job.spin_us,
            doorbells_fd=self._shared[DOORBELLS].fd,
            event_fd=self._event_fd,
            rings=self._rings(),
            collectives=self._collectives(),
            exchange_logs_fd=self._shared[EXCHANGE_LOGS].fd if self._job.has_exchange else -1,
            link_table_fd=self._shared[LINK_TABLE].fd if self._job.emulation else -1,
            node=self._job.node,
            num_nodes=self._job.num_nodes,
            node_patience_ms=self._job.node_patience_ms,
            resumes_links=self._job.reconnection is not None,
            node_compression=self._job.compression_number,
            may_lose_nodes=self._job.may_lose_nodes,
            metrics=self.metrics.native,
            epochs_fd=self._shared[EPOCHS].fd if self._job.replaces_workers else -1,
        )
        if self._job.emulation:
            self._links = PacedLinks(self._shared[LINK_TABLE].fd)
        if self._job.num_nodes > 1:
            proxy.join_nodes(self._job.node, self._job.nodes, self._job.link_fds)
            self._close_links()
        return proxy

    def _close_links(self) -> None:
        """Closes this process's connections to other nodes; the proxy has duplicates."""
        links, self._link_fds = self._link_fds, []
        for fd in links:
            os.close(fd)
