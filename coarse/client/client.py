"""The parameter client: a worker's end of the push and pull interface (COARSE paper, sections III-D and IV-B)."""

from __future__ import annotations

import contextlib
import mmap
import os
import selectors
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from coarse.client.connection import (
    DeviceConnection,
    OtherNodeLostError,
    SilentDeviceError,
    check_peers,
    collect_replies,
)
from coarse.client.link_probes import LinkProbes, probe_schema
from coarse.client.node_agreement import NodeAgreement
from coarse.client.optimizer_memory import OptimizerMemory
from coarse.client.own_path import Meeting
from coarse.client.pacing import LoggedTransfer, PacingReport, ServedTransfer
from coarse.client.schema import TensorSpec
from coarse.client.stored_value import StoredValue
from coarse.client.tensor_group import TensorGroup
from coarse.env import Settings
from coarse.errors import (
    CoarseError,
    ForkedSessionError,
    MemoryDeviceLostError,
    SessionClosedError,
    SyncTimeoutError,
    WorkerLostError,
)
from coarse.kernels import _native
from coarse.machine.emulation import Emulation
from coarse.machine.links import Bucket
from coarse.machine.partition_table import PartitionTable
from coarse.profiler.link_plan import DEFAULT_SHARD_BYTES
from coarse.profiler.partition import PartitionPlan
from coarse.profiler.routing import RoutingTable, route_shards
from coarse.proxy.job import HOME_DEVICE
from coarse.proxy.launch import Pace
from coarse.proxy.loss import AFTER_A_LOSS, silence
from coarse.proxy.protocol import Message, Received
from coarse.proxy.registration import CONTROL, DTYPE_NUMBERS, OP_NUMBERS, SLOTS, GroupSchema, slots_of

_STAGING_BUFFERS = 2
_STAGING_BYTES = 2 << 20
_ABORT_MESSAGE_TIMEOUT_S = 2.0
_PATIENCE = 1.5

FateOfDevice = Callable[[int], str]
_Read = TypeVar("_Read")


class Client:
    """Registers tensors with the memory devices, pushes and pulls them.

    Thread safety: one caller at a time, whichever thread it is.

    Args:
        ranks: The workers of this node, by client number.
        number: This worker's client number.
        table: Whom each memory device of this node serves. This worker's own takes its contributions until
            adopt_routing() is called.
        emulation: The links of another machine; None without.
        connections: One to each memory device; they have all welcomed this client.
        segment_fd, doorbells_fd: What the local device sent with its welcome; stay the caller's.
        settings: Of the session.
        pace: How this node shares its processors.
        agreement: Compares what is registered here with what other nodes have.
        fate_of_device: Tells in words how a memory device ended.
        kill_silent: Ends a memory device that does not work any more, on the worker that started it.
    """

    def __init__(
        self,
        *,
        ranks: Sequence[int],
        number: int,
        table: PartitionTable,
        emulation: Emulation | None,
        connections: Sequence[DeviceConnection],
        segment_fd: int,
        doorbells_fd: int,
        settings: Settings,
        pace: Pace,
        agreement: NodeAgreement,
        fate_of_device: FateOfDevice,
        kill_silent: Callable[[int], None],
    ) -> None:
        self.ranks = ranks
        self.rank = ranks[number]
        self._number = number
        self._agreement = agreement
        self._connections = connections
        self._settings = settings
        self._fate_of_device = fate_of_device
        self._kill_silent = kill_silent
        self.table = table
        self.emulation = emulation
        local_device = table.local_device(number)
        self._routing = RoutingTable(
            lat_proxy=local_device, bw_proxy=local_device, threshold_bytes=settings.routing_threshold_bytes
        )
        self._shard_bytes = settings.shard_bytes or DEFAULT_SHARD_BYTES
        self._next_group = 0
        self._groups: dict[int, TensorGroup] = {}
        self._partitions: dict[int, PartitionPlan] = {}
        self._staging: TensorGroup | None = None
        self._lost: CoarseError | None = None
        self._is_closed = False
        self._pid = os.getpid()
        # Later than the memory devices themselves, so that all workers are told the same.
        heartbeat_ms = round(_PATIENCE * settings.heartbeat_s * 1000)
        self._native = _native.Client(
            num_devices=len(connections),
            segment_fd=segment_fd,
            doorbells_fd=doorbells_fd,
            watch_fds=[connection.fileno() for connection in connections],
            spin_us=pace.spin_us,
            bytes_per_ring=pace.bytes_per_ring,
            is_emulated=emulation is not None,
            heartbeat_ms=heartbeat_ms,
        )
        self._heartbeats = _native.HeartbeatWatch(
            doorbells_fd=doorbells_fd,
            num_devices=len(connections),
            limit_ms=heartbeat_ms,
        )

    @property
    def timeout_s(self) -> float:
        """Longest wait before it is an error."""
        return self._settings.timeout_s

    @property
    def is_closed(self) -> bool:
        """Whether close() was called."""
        return self._is_closed

    @property
    def local_device(self) -> str:
        """The memory device that takes this worker's contributions, in words."""
        device = self._routing.bw_proxy
        return f"md{device} (pid {self._connections[device].pid})"

    def describe_progress(self) -> str:
        """What becomes of a tensor that all workers of this node have pushed, in words."""
        elsewhere = self._agreement.ranks_elsewhere
        if not elsewhere:
            return "being reduced"
        return f"pushed by worker(s) {_names(self.ranks)}; not pushed by, or not received from, {_names(elsewhere)}"

    def adopt_plan(self, table: RoutingTable, shard_bytes: int) -> None:
        """Routes and cuts tensors that are registered from now on.

        Args:
            table: This worker's own.
            shard_bytes: Partition threshold, the same on every worker.
        """
        self._routing = table
        self._shard_bytes = shard_bytes

    def register(
        self,
        name: str,
        specs: Sequence[TensorSpec],
        *,
        state_names: Sequence[str] | None = None,
        is_open: bool = False,
    ) -> TensorGroup:
        """Registers tensors; every worker must do so with the same arguments.

        Args:
            name, specs: What for.
            state_names: Of what an optimizer in the memory devices keeps for each parameter; None without one.
            is_open: Workers see each other's slots, so that TensorGroup.use_own_path() can be called.

        Raises:
            SchemaMismatchError: If another worker registered something else; names the first difference.
            OutOfDeviceMemoryError: If the memory devices cannot hold the tensors.
            ValueError: If the session cannot run an optimizer in its memory devices.
        """
        return self._register(
            GroupSchema(
                name=name,
                specs=tuple(specs),
                shard_bytes=self._shard_bytes,
                gather_bytes=self._settings.gather_bytes,
                algorithm=self._settings.sync_algorithm,
                state_names=None if state_names is None else tuple(state_names),
                is_open=is_open,
            )
        )

    def open_meeting(self, name: str, most_numbers: int) -> Meeting:
        """Makes a place where the workers of the node meet; every worker must do so alike.

        Args:
            name: Of what they meet over.
            most_numbers: How many they can compare at once.
        """
        numbers = TensorSpec(name="numbers", dtype="float64", num_elements=most_numbers, op="max")
        schema = GroupSchema(
            name=f"meeting over {name}",
            specs=(TensorSpec(name="byte", dtype="uint8", num_elements=1, op="max"), numbers),
            shard_bytes=numbers.nbytes,
            gather_bytes=numbers.nbytes,
            algorithm="gather" if self.emulation is None else "exchange",
        )
        return Meeting(self._register(schema))

    def all_reduce(
        self, address: int, num_elements: int, dtype: str, op: str, *, present: bool = True
    ) -> None:
        """Reduces a buffer that is not registered, in place.

        Args:
            address: Of the first element, in this process; the buffer is contiguous.
            num_elements: Its length, the same on every worker.
            dtype, op: As in TensorSpec.
            present: False contributes nothing but receives the result.
        """
        self._check_usable()
        if num_elements == 0:
            return
        group = self._staging_group()
        status = self._native.all_reduce(
            group.id, address, num_elements, DTYPE_NUMBERS[dtype], OP_NUMBERS[op], present, self.timeout_s
        )
        self.check(status, lambda: f"an all-reduce of {num_elements} x {dtype}")

    def store(self, key: str, value: memoryview[Any]) -> int:
        """Keeps a value in the parameter storage of the memory device that `key` belongs to; returns its version.

        Who has loaded the key before keeps what he has; who loads it from now on gets this value, whole.
        """
        self._check_usable()
        connection = self._keeper(key)
        connection.send({"type": "reserve", "key": key, "num_bytes": value.nbytes})
        reserved = self._ask(connection, "reserved", f"storage of {key!r}")
        with mmap.mmap(reserved.fds[0], value.nbytes) as target:
            target[:] = value
        reserved.close()
        connection.send({"type": "commit"})
        return int(self._ask(connection, "committed", f"storage of {key!r}").message["version"])

    def load(self, key: str) -> StoredValue:
        """The newest value of `key`, by any worker; version 0 and no bytes if there is none."""
        self._check_usable()
        connection = self._keeper(key)
        connection.send({"type": "lookup", "key": key})
        found = self._ask(connection, "found", f"storage of {key!r}")
        version = int(found.message["version"])
        if not found.fds:
            return StoredValue(version=version, value=memoryview(b""))
        mapping = mmap.mmap(found.fds[0], _native.sealed_bytes(found.fds[0]), prot=mmap.PROT_READ)
        found.close()
        return StoredValue(version=version, value=memoryview(mapping))

    def tell_home(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Sends a message to the home device; descriptors stay the caller's."""
        self._check_usable()
        self._connections[HOME_DEVICE].send(message, fds)

    def ask_home(self, message: Message, kind: str, about: str) -> Received:
        """Sends a message to the home device and waits for its answer.

        Args:
            message: What to send.
            kind: Type of the answer.
            about: What it is about, for errors.
        """
        self.tell_home(message)
        return self._ask(self._connections[HOME_DEVICE], kind, about)

    def open_probes(self, largest_bytes: int) -> LinkProbes:
        """Takes memory for probes of up to `largest_bytes`; every worker must do so alike.

        Raises:
            OutOfDeviceMemoryError: If the memory devices have too little.
        """
        group = self._register(probe_schema(largest_bytes))
        return LinkProbes(self, self._native, group, len(self._connections))

    def _keeper(self, key: str) -> DeviceConnection:
        return self._connections[zlib.crc32(key.encode()) % len(self._connections)]

    def _ask(self, connection: DeviceConnection, kind: str, about: str) -> Received:
        try:
            replies = collect_replies(
                [connection],
                kind=kind,
                group=None,
                timeout_s=self.timeout_s,
                what=f"worker {self.rank}: {about}",
                on_silence=self._check_heartbeats,
            )
        except SilentDeviceError as error:
            self._lost = self._silent_device_loss(self._connections[error.device])
            raise self._lost from error
        return replies[connection.device]

    @property
    def routing(self) -> RoutingTable:
        """Which memory device takes which shard."""
        return self._routing

    def adopt_routing(self, table: RoutingTable) -> None:
        """Routes every shard by `table` from its next push on; results do not change by it.

        Raises:
            ValueError: If the table names a memory device that does not exist.
        """
        self._check_usable()
        if max(table.lat_proxy, table.bw_proxy) >= self.table.num_devices:
            raise ValueError(f"{table} names more than the {self.table.num_devices} memory devices there are")
        self._routing = table
        for group, tensors in self._groups.items():
            self._native.set_routes(group, route_shards(table, self._partitions[group], tensors.specs))

    @property
    def time_dilation(self) -> float:
        """How many times longer transfers take than on the emulated machine; 1 where none is."""
        return 1.0 if self.emulation is None else self.emulation.time_dilation

    def set_bandwidth(self, bucket: str, gbytes_per_s: float) -> None:
        """Changes an emulated capacity for all transfers that begin from now on.

        Raises:
            ValueError: If there is no such bucket, or the bandwidth is not positive.
        """
        self._check_usable()
        if self.emulation is None:
            raise ValueError("only the links of an emulated session can be changed; set COARSE_MACHINE")
        number = self.emulation.bucket_number(bucket)
        Bucket(name=bucket, gbytes_per_s=gbytes_per_s)  # raises if it cannot be
        message = {"type": "set_bandwidth", "bucket": number, "gbytes_per_s": gbytes_per_s}
        self._connections[0].send(message)
        self._ask(self._connections[0], "bandwidth_set", f"a change of {bucket}")

    def pacing(self) -> PacingReport:
        """How exact emulated links were so far.

        Raises:
            ValueError: If the session is not emulated.
        """
        self._check_usable()
        if self.emulation is None:
            raise ValueError("only an emulated session paces its links; set COARSE_MACHINE")
        self._connections[0].send({"type": "pacing"})
        message = self._ask(self._connections[0], "pacing", "pacing of the links").message
        num_arrivals = int(message["num_arrivals"])
        return PacingReport(
            num_arrivals=num_arrivals, mean_lateness_us=message["lateness_ns"] / 1e3 / max(1, num_arrivals)
        )

    def transfers(self) -> list[LoggedTransfer]:
        """The first transfers over emulated links, as many as are written down.

        Raises:
            ValueError: If the session is not emulated.
        """
        return [LoggedTransfer(*row) for row in self._read_links(_native.read_transfers)]

    def served_transfers(self, since_us: float) -> tuple[float, list[ServedTransfer]]:
        """The newest transfers over emulated links that were through later than `since_us`.

        Returns:
            The time on the emulated machine, and a few transfers of each path and class of sizes.

        Raises:
            ValueError: If the session is not emulated.
        """
        now_us, rows = self._read_links(lambda fd: _native.read_served_transfers(fd, since_us))
        return now_us, [ServedTransfer(*row) for row in rows]

    def _read_links(self, read: Callable[[int], _Read]) -> _Read:
        self._check_usable()
        if self.emulation is None:
            raise ValueError("only an emulated session writes its transfers down; set COARSE_MACHINE")
        self._connections[0].send({"type": "transfers"})
        reply = self._ask(self._connections[0], "transfers", "the log of transfers")
        try:
            return read(reply.fds[0])
        finally:
            reply.close()

    def release_buffers(self) -> None:
        """Gives back the memory that all_reduce() keeps for its next call, once every worker has."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()

    def check(self, status: _native.WaitStatus, describe: Callable[[], str]) -> None:
        """Turns the end of a native call into an error, unless it was a good one.

        Args:
            status: What the native call returned.
            describe: Says what was waited for, if that is needed.
        """
        if status == _native.WaitStatus.DONE:
            return
        if status == _native.WaitStatus.FORKED:
            raise ForkedSessionError(
                f"worker {self.rank}: the session was opened by process {self._pid} and is used in its fork "
                f"{os.getpid()}. Load data there, train here; or start the process with the spawn method."
            )
        if status == _native.WaitStatus.TIMED_OUT:
            raise SyncTimeoutError(f"worker {self.rank}: waited {self.timeout_s:.1f} s for {describe()}")
        if self._lost is None and status == _native.WaitStatus.DEVICE_SILENT:
            self._lost = self._explain_loss(SilentDeviceError(self._native.lost_device))
        elif self._lost is None:
            self._lost = self._explain_loss()
        raise self._lost

    def close(self) -> None:
        """Says goodbye to the memory devices. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if os.getpid() == self._pid:
            self._send_to_all({"type": "bye"})
        for connection in self._connections:
            connection.close()
        for group in list(self._groups.values()):
            group.close()
        self._staging = None

    # ---- for tensor groups ----

    def release(self, group: int) -> None:
        """Gives a tensor group up; its memory is freed when every worker has."""
        released = self._groups.pop(group, None)
        if released is None:
            return
        del self._partitions[group]
        # Memory devices are still to read what was pushed and never pulled, as when an exception ended a backward
        # pass: they keep such a group until the session ends.
        is_in_use = any(self._native.is_late(group, index) for index in range(len(released.specs)))
        self._native.remove_group(group)
        if not is_in_use and not self._is_closed and os.getpid() == self._pid:
            self._send_to_all({"type": "unregister", "group": group})

    # ---- private ----

    def _register(self, schema: GroupSchema) -> TensorGroup:
        self._check_usable()
        group, self._next_group = self._next_group, self._next_group + 1
        try:
            for connection in self._connections:
                connection.send(schema.to_message(group))
            fds = self._collect_memory(group, schema)
        except (WorkerLostError, MemoryDeviceLostError) as error:
            self._lost = self._explain_loss(error)
            raise self._lost from error
        except CoarseError:
            self._send_to_all({"type": "unregister", "group": group})
            raise
        plan = schema.native_plan(group, len(self.ranks))
        partition = schema.partition()
        routes = route_shards(self._routing, partition, schema.specs)
        try:
            slots = self._native.add_group(plan, self._number, fds[CONTROL], fds[SLOTS], routes)
            if schema.is_open:
                self._native.add_peers(group, [fds[slots_of(client)] for client in range(len(self.ranks))])
            kept = None if schema.state_names is None else OptimizerMemory(plan, fds)
        finally:
            for fd in fds.values():
                os.close(fd)
        self._groups[group] = TensorGroup(
            self, self._native, group, schema, partition.tensor_offsets, slots, kept
        )
        self._partitions[group] = partition
        return self._groups[group]

    def _collect_memory(self, group: int, schema: GroupSchema) -> dict[str, int]:
        """Waits until all nodes have registered the same, so that no push can come to a device that has not."""
        try:
            replies = collect_replies(
                self._connections,
                kind="registered",
                group=group,
                timeout_s=self.timeout_s,
                what=f"worker {self.rank}: registering {schema.name}",
                on_silence=self._check_heartbeats,
            )
        except CoarseError as error:
            self._agreement.refuse(group, error)
            raise
        try:
            self._agreement.confirm(group, schema, self._departed)
        except BaseException:
            for reply in replies.values():
                reply.close()
            raise
        fds: dict[str, int] = {}
        for reply in replies.values():
            fds.update(zip(reply.message["fds"], reply.fds, strict=True))
        return fds

    def _departed(self) -> set[int]:
        """Workers of other nodes that have closed the session, if the memory devices still live."""
        check_peers(self._connections)
        self._connections[0].send({"type": "departures"})
        return set(self._ask(self._connections[0], "departures", "departures").message["ranks"])

    def _staging_group(self) -> TensorGroup:
        if self._staging is None:
            buffers = [
                TensorSpec(name=f"buffer{i}", dtype="uint8", num_elements=_STAGING_BYTES, op="sum")
                for i in range(_STAGING_BUFFERS)
            ]
            self._staging = self._register(
                GroupSchema(
                    name="staging buffers",
                    specs=tuple(buffers),
                    shard_bytes=_STAGING_BYTES,
                    gather_bytes=0,
                    algorithm="direct" if self.emulation is None else "exchange",
                    is_staging=True,
                )
            )
        return self._staging

    def _check_usable(self) -> None:
        if self._lost is not None:
            raise self._lost
        if self._is_closed:
            raise SessionClosedError(f"worker {self.rank}: the session is closed")
        if os.getpid() != self._pid:
            self.check(_native.WaitStatus.FORKED, str)

    def _send_to_all(self, message: Message) -> None:
        for connection in self._connections:
            # The loss of a device is told by what waits for its work.
            with contextlib.suppress(MemoryDeviceLostError):
                connection.send(message)

    def _explain_loss(self, told: CoarseError | None = None) -> CoarseError:
        """The reason of a loss, from what memory devices say of it and from which of them are gone."""
        deadline = time.monotonic() + _ABORT_MESSAGE_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            for connection in self._connections:
                selector.register(connection, selectors.EVENT_READ, connection)
            while told is None or type(told) is MemoryDeviceLostError:
                gone = [connection for connection in self._connections if connection.is_gone]
                if gone:
                    return self._device_loss(gone[0])
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    break
                for key, _ in ready:
                    complaint = _complaint(key.data)
                    if isinstance(complaint, SilentDeviceError):
                        # Its end comes next: the worker that started it kills it.
                        return self._silent_device_loss(self._connections[complaint.device])
                    told = complaint or told
        if isinstance(told, SilentDeviceError):
            return self._silent_device_loss(self._connections[told.device])
        if isinstance(told, WorkerLostError):
            return WorkerLostError(f"worker {self.rank}: {told}")
        if isinstance(told, OtherNodeLostError):
            return MemoryDeviceLostError(f"worker {self.rank}: {told}")
        return told or MemoryDeviceLostError(f"worker {self.rank}: the memory devices gave the session up")

    def _device_loss(self, connection: DeviceConnection) -> MemoryDeviceLostError:
        return MemoryDeviceLostError(
            f"worker {self.rank}: memory device md{connection.device} (pid {connection.pid}) "
            f"{self._fate_of_device(connection.device)}. {AFTER_A_LOSS}"
        )

    def _silent_device_loss(self, connection: DeviceConnection) -> MemoryDeviceLostError:
        self._kill_silent(connection.device)
        return MemoryDeviceLostError(
            f"worker {self.rank}: memory device md{connection.device} (pid {connection.pid}) "
            f"{silence(self._settings.heartbeat_s)}. {AFTER_A_LOSS}"
        )

    def _check_heartbeats(self) -> None:
        silent = self._heartbeats.look()
        if silent is not None:
            raise SilentDeviceError(silent)


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _complaint(connection: DeviceConnection) -> CoarseError | None:
    """What the memory device's next message says has gone wrong, if it does."""
    try:
        received = connection.receive()
    except CoarseError as error:
        return error
    if received is not None:
        received.close()
    return None
