"""Serves workers' requests to read snapshots, write them to disk, and release them."""

from __future__ import annotations

import logging
import mmap
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from coarse.errors import CoarseError, ProtocolError
from coarse.kernels import _native
from coarse.metrics.writer import MetricsWriter
from coarse.process.scheduling import lower_priority
from coarse.proxy.memory import DeviceMemory
from coarse.proxy.outbox import SendToWorker
from coarse.proxy.snapshots.group_snapshots import GroupSnapshots, warm
from coarse.wire.device_job import DeviceJob
from coarse.wire.messages import Message, Received, int_field
from coarse.wire.segments import Segment

logger = logging.getLogger(__name__)

_MOST_SNAPSHOT_NUMBER = (1 << 32) - 1
_LONGEST_TIDYING_S = 1.0
_STATISTICS = ("limit_bytes", "taken_bytes", "peak_bytes", "kept_bytes", "num_waits", "waited_s", "num_lost")

Post = Callable[[Callable[[], None]], None]
"""Schedules a function on the control thread."""


class SnapshotService:
    """Serves the snapshot messages of docs/design/control-protocol.md, on the home device; warm() on all.

    Used from the control thread, which it never blocks: one thread copies memory, and each snapshot that is written
    to disk has its own thread. The device ends without waiting for these threads.

    Args:
        job: The device's place in the session.
        memory: Memory for workers' copies.
        send: Sends a reply to a worker.
        post: Passes replies of threads to the control thread.
    """

    def __init__(self, job: DeviceJob, memory: DeviceMemory, send: SendToWorker, post: Post) -> None:
        self._device = job.device
        self._num_devices = job.num_devices
        self._memory = memory
        self._send = send
        self._post = post
        self._groups: dict[int, GroupSnapshots] = {}
        self._past: list[_native.SnapshotStatistics] = []  # of removed groups: counters do not go back
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._writers: list[threading.Thread] = []
        self._is_closing = threading.Event()

    def add(self, group: int, snapshots: GroupSnapshots) -> None:
        """Starts to serve snapshots of a group."""
        self._groups[group] = snapshots

    def look(self, metrics: MetricsWriter) -> None:
        """Logs errors with snapshots since the last call, and renews their metrics."""
        for snapshots in self._groups.values():
            for incident in snapshots.incidents():
                logger.warning("[md%s] %s", self._device, incident)
        self._gauge(metrics)

    def _gauge(self, metrics: MetricsWriter) -> None:
        found = [snapshots.statistics() for snapshots in self._groups.values()]
        metrics.set("coarse_snapshot_pool_bytes", sum(each.taken_bytes for each in found))
        metrics.set("coarse_snapshot_pool_limit_bytes", sum(each.limit_bytes for each in found))
        ever = [*self._past, *found]
        metrics.set("coarse_snapshots_lost_total", sum(each.num_lost for each in ever))
        metrics.set("coarse_snapshot_waits_total", sum(each.num_waits for each in ever))
        metrics.set("coarse_snapshot_wait_seconds_total", round(sum(each.waited_s for each in ever) * 1e9))

    def remove(self, group: int) -> None:
        """Removes a released group; readers of its snapshots can finish."""
        removed = self._groups.pop(group, None)
        if removed is not None:
            self._past.append(removed.statistics())

    def release(self, message: Message) -> None:
        """Releases a snapshot for a worker."""
        group = self._groups.get(int_field(message, "group"))
        snapshot = _snapshot_field(message)
        if group is not None:
            self._run(lambda: group.release(snapshot))

    def read(self, client: int, message: Message) -> None:
        """Sends a worker a copy of one array of a snapshot."""
        group = self._group(message)
        snapshot, tensor = _snapshot_field(message), int_field(message, "tensor")
        array = int_field(message, "array")
        group.num_bytes(tensor, array)  # raises if the array does not exist
        self._run(lambda: self._answer(client, lambda: self._copy(group, snapshot, tensor, array)))

    def keep(self, client: int, message: Message) -> None:
        """Copies data that snapshots refer to, before a worker writes to parameters or states itself."""
        group = self._group(message)

        def keep_all() -> tuple[Message, Segment | None]:
            group.keep_all()
            return {"type": "snapshots_kept"}, None

        self._run(lambda: self._answer(client, keep_all))

    def warm(self, snapshots: _native.GroupSnapshots) -> None:
        """Allocates memory for a snapshot in advance, at low priority, because a worker will save regularly."""
        first = snapshots.num_shards * self._device // self._num_devices

        def run() -> None:
            lower_priority()
            warm(snapshots, first, self._is_closing.is_set)

        threading.Thread(target=run, name="coarse-snapshot-memory", daemon=True).start()

    def report(self, client: int, message: Message) -> None:
        """Sends the contents and cost of a group's pool."""
        group = self._group(message)

        def describe() -> tuple[Message, Segment | None]:
            found = group.statistics()
            values = {name: getattr(found, name) for name in _STATISTICS}
            return {"type": "snapshot_statistics", **values}, None

        self._run(lambda: self._answer(client, describe))

    def write(self, request: Received) -> None:
        """Starts to write a checkpoint; reports its progress over the connection that came with the request."""
        from coarse.proxy.snapshots.snapshot_source import SnapshotSource  # slow to import
        from coarse.proxy.snapshots.snapshot_writer import SnapshotWriter
        from coarse.wire.snapshots import SnapshotContents

        if len(request.fds) not in (1, 2):
            raise ProtocolError("a request to write a snapshot brings a connection, and at most one memory")
        contents = SnapshotContents.from_message(request.message)
        group = self._group(request.message)
        source = SnapshotSource(group, _snapshot_field(request.message), contents, _map(request.fds[1:]))
        connection = _connection(request.fds[0])
        try:
            writer = SnapshotWriter(source, request.message, connection, self._is_closing)
        except BaseException:
            connection.close()
            raise
        thread = threading.Thread(target=writer.run, name="coarse-snapshot-writer", daemon=True)
        thread.start()
        self._writers = [each for each in self._writers if each.is_alive()] + [thread]

    def close(self) -> None:
        """Stops all work, and gives writers a short time to clean up. Idempotent."""
        self._is_closing.set()
        self._groups.clear()
        self._tasks.put(lambda: None)  # wakes the thread to check whether it must end
        deadline_s = time.monotonic() + _LONGEST_TIDYING_S
        for thread in self._writers:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _group(self, message: Message) -> GroupSnapshots:
        group = self._groups.get(int_field(message, "group"))
        if group is None:
            raise ProtocolError(f"there are no snapshots of tensor group {message['group']}")
        return group

    def _copy(
        self, group: GroupSnapshots, snapshot: int, tensor: int, array: int
    ) -> tuple[Message, Segment | None]:
        copy = self._memory.allocate_host(f"snapshot of {group.name}", group.num_bytes(tensor, array))
        try:
            left = memoryview(mmap.mmap(copy.fd, copy.num_bytes))

            def reserve(num_bytes: int) -> memoryview[Any]:
                nonlocal left
                piece, left = left[:num_bytes], left[num_bytes:]
                return piece

            for _ in group.read(snapshot, tensor, array, lets_go=False, reserve=reserve):
                pass
        except BaseException:
            copy.close()
            raise
        return {"type": "snapshot_read"}, copy

    def _answer(self, client: int, work: Callable[[], tuple[Message, Segment | None]]) -> None:
        """Runs `work` on the task thread; the control thread sends the result."""
        copy: Segment | None = None
        try:
            message, copy = work()
        except (CoarseError, OSError, _native.CudaError) as error:
            message = {"type": "refused", "error": type(error).__name__, "text": str(error)}

        def send() -> None:
            self._send(client, message, () if copy is None else (copy.fd,))
            if copy is not None:
                copy.close()

        self._post(send)

    def _run(self, task: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_tasks, name="coarse-snapshots", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def _run_tasks(self) -> None:
        while not self._is_closing.is_set():
            task = self._tasks.get()
            try:
                task()
            except Exception:
                logger.exception("a snapshot could not be served")  # the next one may succeed


def _snapshot_field(message: Message) -> int:
    return int_field(message, "snapshot", high=_MOST_SNAPSHOT_NUMBER)


def _connection(fd: int) -> socket.socket:
    duplicate = os.dup(fd)
    try:
        return socket.socket(fileno=duplicate)
    except OSError as error:
        os.close(duplicate)
        raise ProtocolError(f"a request to write a snapshot brings no connection: {error}") from None


def _map(fds: list[int]) -> memoryview[Any]:
    """Data sent by a worker. A later write by that worker would only damage its own checkpoint."""
    if not fds:
        return memoryview(b"")
    try:
        return memoryview(mmap.mmap(fds[0], _native.sealed_bytes(fds[0]), prot=mmap.PROT_READ))
    except (OSError, ValueError) as error:
        raise ProtocolError(f"the memory that came with a request cannot be used: {error}") from None
