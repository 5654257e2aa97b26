"""Starts and watches the memory devices of one node."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from coarse.emulation.machine import Emulation
from coarse.env import own_process_environment
from coarse.machine.out_of_memory import OutOfMemoryWatch
from coarse.machine.partition_table import PartitionTable
from coarse.process.scratch import Scratch
from coarse.rendezvous.workers import NodeMap
from coarse.security.local_sockets import short_address
from coarse.settings import Settings
from coarse.startup.node_links import NodeLinks
from coarse.wire.algorithms import EXCHANGE, NCCL, RING, algorithms_of
from coarse.wire.device_job import DeviceJob
from coarse.wire.pace import choose_pace, count_sync_cores
from coarse.wire.persistent_sessions import PersistentDevices
from coarse.wire.reconnection_plan import ReconnectionPlan
from coarse.wire.socket_directory import TOKEN_FILE, socket_path

_BACKLOG = 256
_END_TIMEOUT_S = 1.0  # after a device has closed its connection


class DeviceProcesses:
    """The memory device processes of one session on this node, started by one of its workers.

    They end by themselves when all workers have left or died. They leave no names in the file system: once the
    workers are connected, hide() removes the directory with the sockets, so that even SIGKILL leaves no files.

    Args:
        table: The devices to start, and the workers that each serves.
        settings: The session's settings.
        nodes: The nodes of the job.
        node: Number of this node.
        links: This node's connections to the other nodes.
        emulation: Emulated links; None without emulation.
        link_table_fd: The link table, if nodes share it; the caller closes it. -1 if the home device writes it.
        persistent_directory: An empty directory in which the workers of another attempt can find the devices. The
            devices then wait for that attempt if workers are lost. None if they end with the workers.
        replaces: Lost devices of `persistent_directory` that the new ones replace; None to start all.
        introduce: Gives a live device a connection to a new one. Receives both device numbers and a descriptor, which
            the caller closes.

    Raises:
        OSError: If a process or socket cannot be created; everything created before is undone.
    """

    def __init__(
        self,
        *,
        table: PartitionTable,
        settings: Settings,
        nodes: NodeMap,
        node: int,
        links: NodeLinks,
        emulation: Emulation | None,
        link_table_fd: int = -1,
        persistent_directory: Path | None = None,
        replaces: frozenset[int] | None = None,
        introduce: Callable[[int, int, int], None] | None = None,
    ) -> None:
        self._scratch = Scratch("session") if persistent_directory is None else None
        self.directory = str(persistent_directory if self._scratch is None else self._scratch.path)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._memory_watch = OutOfMemoryWatch()
        started = range(table.num_devices) if replaces is None else sorted(replaces)
        token_file = Path(self.directory) / TOKEN_FILE
        if replaces is None:
            _write_private(token_file, secrets.token_hex(32))
        peers = _socket_pairs(table.num_devices)
        try:
            for device in started:
                with _listen(socket_path(self.directory, device)) as listener:
                    job = _job_of(
                        device,
                        table,
                        settings,
                        node=node,
                        nodes=nodes.ranks,
                        vacant=nodes.vacant,
                        emulation="" if emulation is None else emulation.to_json(),
                        link_table_fd=link_table_fd,
                        directory=self.directory,
                        listen_fd=listener.fileno(),
                        peer_fds=tuple(-1 if peer is None else peer.fileno() for peer in peers[device]),
                        link_fds=links.fds_of_device(device),
                        reconnection=links.plan_of_device(device),
                        token=token_file.read_text(),
                        keep_s=0.0 if persistent_directory is None else settings.keep_devices,
                    )
                    self._processes[device] = _start(job)
            if persistent_directory is not None:
                self._note_in(persistent_directory, table)
            for new, old in itertools.product(started, range(table.num_devices)):
                peer = peers[old][new]
                if introduce is not None and old not in started and peer is not None:
                    introduce(old, new, peer.fileno())
        except BaseException:
            self.kill()
            raise
        finally:
            for peer in itertools.chain(*peers):
                if peer is not None:
                    peer.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the devices that this worker started, in the order of the devices."""
        return tuple(process.pid for process in self._processes.values())

    def _note_in(self, directory: Path, table: PartitionTable) -> None:
        """Lists the devices for the workers of another attempt; some devices may be older."""
        before = PersistentDevices.read(directory)
        pids = tuple(
            self._processes[device].pid
            if before is None or device in self._processes
            else before.pids[device]
            for device in range(table.num_devices)
        )
        workers = tuple(device.workers for device in table.devices)
        PersistentDevices(workers=workers, memories=table.memories, pids=pids).write(directory)

    def hide(self) -> None:
        """Removes the directory with the sockets. Idempotent."""
        if self._scratch is None:
            shutil.rmtree(self.directory, ignore_errors=True)
        else:
            self._scratch.remove()

    def fate(self, device: int) -> str:
        """How a device that closed its connection ended, in words."""
        process = self._processes.get(device)
        if process is None:  # started in an earlier attempt
            return "died"
        try:
            code = process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "stopped answering"
        if code >= 0:
            return f"ended with exit code {code}"
        evidence = self._memory_watch.evidence()
        return f"was killed by {signal.Signals(-code).name}{f': {evidence}' if evidence else ''}"

    def kill_silent(self, device: int) -> bool:
        """Kills a device that counts as lost, so that it does not continue abandoned work.

        Returns:
            Whether this worker started it.
        """
        if device not in self._processes:
            return False
        self._processes[device].kill()
        return True

    def reap(self, timeout_s: float) -> None:
        """Waits for the devices' end after the last worker has left; in the background after `timeout_s` seconds.

        An interpreter that exits starts no threads from Python 3.12 on; then it waits for `timeout_s` alone.
        """
        reaper = threading.Thread(target=self._wait, name="coarse-reaper", daemon=True)
        try:
            reaper.start()
        except RuntimeError:
            self._wait_until(time.monotonic() + timeout_s)
        else:
            reaper.join(timeout_s)

    def _wait(self) -> None:
        for process in self._processes.values():
            process.wait()

    def _wait_until(self, deadline: float) -> None:
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        """Kills the devices at once. Idempotent."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        self.hide()


def _job_of(
    device: int,
    table: PartitionTable,
    settings: Settings,
    *,
    node: int,
    nodes: tuple[tuple[int, ...], ...],
    vacant: tuple[int, ...],
    emulation: str,
    link_table_fd: int,
    directory: str,
    listen_fd: int,
    peer_fds: tuple[int, ...],
    link_fds: tuple[tuple[int, ...], ...],
    reconnection: ReconnectionPlan | None,
    token: str,
    keep_s: float,
) -> DeviceJob:
    algorithms = algorithms_of(settings, table, num_nodes=len(nodes))
    num_devices, num_clients = table.num_devices, table.num_workers
    return DeviceJob(
        device=device,
        num_devices=num_devices,
        num_clients=num_clients,
        node=node,
        nodes=nodes,
        local_clients=table.devices[device].workers,
        memories=table.memories,
        clients_in_memory=table.workers_in(table.memories[device]),
        num_sync_cores=count_sync_cores(settings, num_devices, num_clients),
        scheduling=settings.scheduling,
        spin_us=choose_pace(settings, num_devices, num_clients).spin_us,
        has_rings=RING in algorithms and num_devices > 1,
        has_exchange=EXCHANGE in algorithms or bool(emulation),
        has_nccl=NCCL in algorithms and num_devices > 1,
        snapshot_pool_bytes=settings.snapshot_pool_bytes,
        emulation=emulation,
        link_table_fd=link_table_fd,
        directory=directory,
        listen_fd=listen_fd,
        peer_fds=peer_fds,
        link_fds=link_fds,
        reconnection=reconnection,
        token=token,
        leader_pid=os.getpid(),
        join_timeout_s=settings.timeout_s,
        node_patience_ms=settings.node_patience_ms,
        node_compression=settings.node_compression,
        heartbeat_s=settings.heartbeat_s,
        keep_s=keep_s,
        replicas=settings.replicas,
        min_workers=settings.least_workers,
        replaces_workers=settings.replaces_workers,
        vacant=vacant,
        clients_of=tuple(each.workers for each in table.devices),
        metrics_address=settings.metrics_address,
        metrics_port=settings.metrics_port,
        timeline=settings.timeline,
        timeline_events=settings.timeline_events,
    )


def _start(job: DeviceJob) -> subprocess.Popen[bytes]:
    read_end, write_end = os.pipe()
    inherited = [
        read_end,
        job.listen_fd,
        *(fd for fd in (job.link_table_fd, *job.peer_fds) if fd >= 0),
        *itertools.chain(*job.link_fds),
        *([] if job.reconnection is None else [job.reconnection.held_fd]),
    ]
    # Own process group: the terminal's Ctrl-C is for workers, and the device ends after them. Not an own session:
    # Linux schedules a session as a unit (autogroup), so that yielding the processor would have no effect.
    process = subprocess.Popen(
        [sys.executable, "-m", "coarse", "device", "--job-fd", str(read_end)],
        pass_fds=inherited,
        env=own_process_environment(),
        stdin=subprocess.DEVNULL,
        preexec_fn=os.setpgrp,
    )
    os.close(read_end)
    with os.fdopen(write_end, "wb") as stream:
        stream.write(job.to_json())
    return process


def _listen(path: str) -> socket.socket:
    Path(path).unlink(missing_ok=True)  # left by a lost device
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with short_address(path) as address:
        listener.bind(address)
    listener.listen(_BACKLOG)
    return listener


def _socket_pairs(count: int) -> list[list[socket.socket | None]]:
    """A connected pair between every two devices: [a][b] is the end of `a` towards `b`."""
    table: list[list[socket.socket | None]] = [[None] * count for _ in range(count)]
    for a in range(count):
        for b in range(a):
            table[a][b], table[b][a] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return table


def _write_private(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as stream:
        stream.write(text)
