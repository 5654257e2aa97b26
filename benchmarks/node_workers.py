"""What the processes of `nodes.py` do on their nodes: all-reduces, training steps, and plain copies by sockets."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from node_network import INTERFACE, address_of, enter_namespace, mount_own_sysfs

from coarse.bench.harness.commands import Commands, WorkerJob, commands_of
from coarse.bench.harness.launchers import RANK_FROM_LAUNCHER
from coarse.bench.sync.systems import Gloo, Mpi, SyncCommands
from coarse.bench.timing import timed

LINK = "link"
_COPY_PORT = 29500
_CONNECTIONS = 8
"""As many together fill a cable whose length one connection's window does not."""

_PIECE_BYTES = 256 << 10
_PINGS = 30
_SOCKET_TIMEOUT_S = 60.0


class TorchBackend(Gloo):
    """A backend of torch.distributed in addition to gloo, which is the default group's."""

    def __init__(self, job: WorkerJob, backend: str) -> None:
        super().__init__(job)
        self._backend = backend
        self._group: Any = None

    def setup(self) -> int:
        torch = importlib.import_module("torch")
        importlib.import_module("coarse.torch_entry").register()  # needed if COARSE is not installed
        torch.set_num_threads(1)
        self._distributed = torch.distributed
        self._distributed.init_process_group("gloo")
        if self._backend != "gloo":
            self._group = self._distributed.new_group(backend=self._backend)
        return int(self._distributed.get_rank())

    def reduce(self) -> None:
        self._distributed.all_reduce(self._tensor, group=self._group)


class Mpich(Mpi):
    """MPICH's MPI_Allreduce in place, by its stable binary interface; float32 alone."""

    _WORLD, _FLOAT, _SUM, _IN_PLACE = 0x44000000, 0x4C00040A, 0x58000003, ctypes.c_void_p(-1)

    def setup(self) -> int:
        mount_own_sysfs()
        self._library = ctypes.CDLL(os.environ["MPI4PY_LIBMPI"], mode=ctypes.RTLD_GLOBAL)
        self._check(self._library.MPI_Init(None, None))
        rank = ctypes.c_int()
        self._check(self._library.MPI_Comm_rank(self._WORLD, ctypes.byref(rank)))
        return rank.value

    def reduce(self) -> None:
        array = ctypes.c_void_p(self._array.ctypes.data)
        self._check(
            self._library.MPI_Allreduce(
                self._IN_PLACE, array, self._array.size, self._FLOAT, self._SUM, self._WORLD
            )
        )

    def close(self) -> None:
        self._check(self._library.MPI_Finalize())

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"MPICH: error {status}")


class NodeCommands(SyncCommands):
    """The commands of a worker on its node; a training step's gradients have all of a size in bytes."""

    def __init__(self, job: WorkerJob, collective: Callable[[WorkerJob], Any]) -> None:
        super().__init__(job, collective)
        self._job = job
        self._step: Any = None

    def setup(self) -> int:
        _enter_node(self._job)
        return super().setup()

    def prepare_step(self, nbytes: int, wrapper: str) -> None:
        """Wraps a model of `nbytes` bytes, with a name of node_step.WRAPPERS. Collective."""
        node_step = importlib.import_module("node_step")
        self._step = node_step.Step(nbytes, wrapper, self._rank, self._num_workers)

    def verify_step(self, tolerance: float) -> None:
        """Takes a step, and compares every gradient with the closed form of the mean. Collective.

        Raises:
            ArithmeticError: If one differs by more than `tolerance` of the largest.
        """
        self._step.take()
        difference = self._step.largest_difference()
        if not difference <= tolerance:
            raise ArithmeticError(
                f"worker {self._rank}: gradients differ from the mean by up to {difference:.2g} of the largest"
            )

    def run_step(self, iterations: int) -> list[float]:
        """Returns the seconds of each of `iterations` steps, after one uncounted step. Collective."""
        return timed(self._step.take, iterations)

    def release_step(self) -> None:
        """Frees the model."""
        self._step = None


def _enter_node(job: WorkerJob) -> None:
    """Moves this process to its node, and says so as a launcher would, and to MPICH."""
    rank = int(os.environ["PMI_RANK"]) if job.rank == RANK_FROM_LAUNCHER else job.rank
    workers, names = job.options["workers"], job.options["namespaces"]
    node, local_rank = divmod(rank, workers)
    enter_namespace(names[node])
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.num_workers),
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(workers),
        MASTER_ADDR=address_of(0),
        MASTER_PORT=str(job.options["port"]),
        GLOO_SOCKET_IFNAME=INTERFACE,
        MPIR_CVAR_NUM_CLIQUES=str(len(names)),
        MPIR_CVAR_CLIQUES_BY_BLOCK="1",
        COARSE_NODE=str(node),
        COARSE_NODE_ADDRESS=address_of(node),
        **job.options["environment"],
    )


class LinkCommands:
    """Copies by plain sockets, from each node to the next one, on all nodes at once."""

    def __init__(self, job: WorkerJob) -> None:
        self._job = job
        self._next = address_of((job.rank + 1) % job.num_workers)

    def setup(self) -> int:
        enter_namespace(self._job.options["namespaces"][self._job.rank])
        self._server = socket.create_server((address_of(self._job.rank), _COPY_PORT), backlog=_CONNECTIONS)
        self._server.settimeout(_SOCKET_TIMEOUT_S)
        return self._job.rank

    def close(self) -> None:
        self._server.close()

    def round_trip_s(self) -> float:
        """Seconds in which a byte reaches the next node and comes back; the median of some."""
        with self._connect() as to_next, self._accept() as from_previous:
            answers = threading.Thread(target=_echo, args=(from_previous,))
            answers.start()
            seconds = [_ping(to_next) for _ in range(_PINGS)]
            to_next.shutdown(socket.SHUT_WR)
            answers.join()
        return statistics.median(seconds)

    def bytes_per_s(self, seconds: float) -> float:
        """Rate at which this node receives in the second half of `seconds`."""
        outgoing = [self._connect() for _ in range(_CONNECTIONS)]
        incoming = [self._accept() for _ in range(_CONNECTIONS)]
        until_s = time.monotonic() + seconds
        received = [0] * _CONNECTIONS
        threads = [threading.Thread(target=_send_until, args=(each, until_s)) for each in outgoing]
        for index, connection in enumerate(incoming):
            threads.append(threading.Thread(target=_receive, args=(connection, received, index)))
        for thread in threads:
            thread.start()
        time.sleep(seconds / 2)
        begin_s, begin_bytes = time.monotonic(), sum(received)
        time.sleep(max(0.0, until_s - begin_s))
        rate = (sum(received) - begin_bytes) / (time.monotonic() - begin_s)
        for connection in incoming:
            with contextlib.suppress(OSError):  # its other end may have reset it
                connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        return rate

    def _connect(self) -> socket.socket:
        connection = socket.create_connection((self._next, _COPY_PORT), _SOCKET_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _accept(self) -> socket.socket:
        connection, _ = self._server.accept()
        connection.settimeout(_SOCKET_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


def _ping(connection: socket.socket) -> float:
    begin_s = time.perf_counter()
    connection.sendall(b"1")
    connection.recv(1)
    return time.perf_counter() - begin_s


def _echo(connection: socket.socket) -> None:
    while received := connection.recv(1):
        connection.sendall(received)


def _send_until(connection: socket.socket, until_s: float) -> None:
    """Sends until the time has come; what has not left then is dropped."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    piece = bytes(_PIECE_BYTES)
    with connection, contextlib.suppress(OSError):
        while time.monotonic() < until_s:
            connection.sendall(piece)


def _receive(connection: socket.socket, received: list[int], index: int) -> None:
    piece = bytearray(_PIECE_BYTES)
    with connection, contextlib.suppress(OSError):
        while count := connection.recv_into(piece):
            received[index] += count


POOLS: dict[str, Callable[[WorkerJob], Commands]] = {
    LINK: LinkCommands,
    "coarse": partial(NodeCommands, collective=partial(TorchBackend, backend="coarse")),
    "gloo": partial(NodeCommands, collective=partial(TorchBackend, backend="gloo")),
    "mpich": partial(NodeCommands, collective=Mpich),
}
"""Commands of each kind of processes."""


def node_commands(job: WorkerJob) -> Commands:
    """The commands of one process."""
    return commands_of(job, POOLS)
