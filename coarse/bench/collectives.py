"""The systems of `coarse bench sync`: one small class each, with the same four commands."""

from __future__ import annotations

import ctypes
import gc
import importlib
import time
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from coarse.bench import pattern
from coarse.bench.adapter import Adapter, WorkerJob
from coarse.machine.host import read_cpu

Array = NDArray[Any]
_COMMANDS = frozenset({"prepare", "verify", "run", "release"})
_FLOATS = ("float32", "float64")


class Collective(Protocol):
    """An in-place all-reduce of one array."""

    mean: bool
    """Whether reduce() computes the mean of all workers' arrays; otherwise their sum."""

    def setup(self) -> int:
        """Joins the other workers; returns this worker's rank."""

    def allocate(self, num_elements: int, dtype: str) -> Array:
        """Creates the flat array for reduce(). Collective; called again only after release()."""

    def reduce(self) -> None:
        """Replaces the array's contents by the reduction over all workers."""

    def release(self) -> None:
        """Frees the array; the caller must no longer refer to it."""

    def close(self) -> None:
        """Leaves the system."""


class SyncAdapter:
    """The commands of `coarse bench sync`, over any Collective."""

    commands = _COMMANDS

    def __init__(self, job: WorkerJob, collective: Collective) -> None:
        self._num_workers = job.num_workers
        self._collective = collective
        self._rank = -1
        self._buffer: Array | None = None

    def setup(self) -> int:
        self._rank = self._collective.setup()
        return self._rank

    def prepare(self, nbytes: int, dtype: str) -> None:
        """Allocates a tensor of `nbytes` bytes. Collective."""
        self._buffer = self._collective.allocate(nbytes // np.dtype(dtype).itemsize, dtype)

    def verify(self) -> None:
        """Reduces known contributions and compares every element with the closed form. Collective.

        Sets the tensor to zeros, whose sums stay zero in all later reductions.

        Raises:
            ArithmeticError: If an element is wrong.
        """
        buffer = self._tensor()
        pattern.fill(buffer, pattern.contribution_scale(self._rank))
        self._collective.reduce()
        expected = pattern.reduced_scale(self._num_workers, mean=self._collective.mean)
        difference = pattern.first_difference(buffer, expected)
        if difference is not None:
            raise ArithmeticError(f"worker {self._rank}: wrong result: {difference}")
        buffer[...] = 0

    def run(self, iterations: int) -> list[float]:
        """Returns the seconds of each of `iterations` reductions, after one uncounted reduction. Collective."""
        return timed(self._collective.reduce, iterations)

    def release(self) -> None:
        """Frees the tensor."""
        self._buffer = None
        self._collective.release()

    def close(self) -> None:
        self._buffer = None
        self._collective.close()

    def _tensor(self) -> Array:
        if self._buffer is None:
            raise RuntimeError("no tensor: prepare comes first")
        return self._buffer


def timed(action: Callable[[], object], iterations: int) -> list[float]:
    """Returns the seconds of each call of `action`, after one uncounted call, without garbage collection."""
    clock = time.perf_counter
    seconds = [0.0] * iterations
    gc.collect()
    gc.disable()
    try:
        action()  # synchronises the workers, which received the command at different times
        for index in range(iterations):
            started = clock()
            action()
            seconds[index] = clock() - started
    finally:
        gc.enable()
    return seconds


class CoarseRegistered:
    """COARSE with the tensor in a registered slot: push and pull, as for gradients."""

    def __init__(self, job: WorkerJob) -> None:
        self._session = CoarseSession(job)
        self._group: Any = None
        self._generation = 0
        self.mean = True

    def setup(self) -> int:
        return self._session.join()

    def allocate(self, num_elements: int, dtype: str) -> Array:
        from coarse.schema import TensorSpec

        self.mean = dtype in _FLOATS
        op = "mean" if self.mean else "sum"
        spec = TensorSpec(name="tensor", dtype=dtype, num_elements=num_elements, op=op)
        self._generation += 1
        self._group = self._session.value.register(f"bench-{self._generation}", [spec])
        return np.frombuffer(self._group.buffer(0), dtype=dtype)

    def reduce(self) -> None:
        self._group.push(0)
        self._group.pull(0)

    def release(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def close(self) -> None:
        self.release()
        self._session.close()


class CoarseUnregistered:
    """COARSE with the tensor in the worker's own memory: copied in and out."""

    mean = False

    def __init__(self, job: WorkerJob) -> None:
        self._session = CoarseSession(job)
        self._array: Array | None = None

    def setup(self) -> int:
        return self._session.join()

    def allocate(self, num_elements: int, dtype: str) -> Array:
        self._array = np.empty(num_elements, dtype)
        return self._array

    def reduce(self) -> None:
        self._session.value.all_reduce(self._array, op="sum")

    def release(self) -> None:
        self._array = None
        self._session.value.release_buffers()

    def close(self) -> None:
        self._session.close()


class CoarseSession:
    """The session of a benchmark's worker; the rendezvous is in the system's private directory."""

    def __init__(self, job: WorkerJob) -> None:
        self._job = job
        self.value: Any = None

    def join(self) -> int:
        """Joins the session with the settings of the environment; the job's options override them."""
        from coarse.env import WorkerIdentity
        from coarse.machine.memory_name import parse_memory_devices
        from coarse.session import Session
        from coarse.settings import Settings
        from coarse.store import DirectoryStore

        rank, num_workers = self._job.rank, self._job.num_workers
        identity = WorkerIdentity(
            rank=rank, world_size=num_workers, local_rank=rank, local_world_size=num_workers
        )
        chosen = dict(self._job.options)
        if "memory_devices" in chosen:
            chosen["memory_devices"] = parse_memory_devices(chosen["memory_devices"])
        settings = replace(Settings.from_environment(), **chosen)
        self.value = Session.join(
            identity=identity, store=DirectoryStore(self._job.directory), settings=settings
        )
        return rank

    def close(self) -> None:
        """Leaves the session. Idempotent."""
        if self.value is not None:
            self.value.close()


class Gloo:
    """torch.distributed over gloo."""

    mean = False

    def __init__(self, job: WorkerJob) -> None:
        self._job = job
        self._torch: Any = None
        self._tensor: Any = None

    def setup(self) -> int:
        self._torch = join_gloo(self._job)
        return self._job.rank

    def allocate(self, num_elements: int, dtype: str) -> Array:
        array = np.empty(num_elements, dtype)
        self._tensor = self._torch.from_numpy(array)
        return array

    def reduce(self) -> None:
        self._torch.distributed.all_reduce(self._tensor)

    def release(self) -> None:
        self._tensor = None

    def close(self) -> None:
        self._torch.distributed.destroy_process_group()


def join_gloo(job: WorkerJob) -> Any:
    """Makes gloo the default process group; returns torch."""
    return join_group(job, "gloo")


def join_group(job: WorkerJob, backend: str) -> Any:
    """Makes one of torch's backends the default process group, by a file in the job's directory; returns torch."""
    torch = importlib.import_module("torch")
    torch.distributed.init_process_group(
        backend, init_method=f"file://{job.directory}/gloo", rank=job.rank, world_size=job.num_workers
    )
    return torch


class Mpi:
    """mpi4py's Allreduce in place, over the MPI that launched this process."""

    mean = False

    def __init__(self, job: WorkerJob) -> None:
        self._mpi: Any = None
        self._array: Array | None = None

    def setup(self) -> int:
        mpi4py = importlib.import_module("mpi4py")
        # The default, MPI_THREAD_MULTIPLE, takes locks in every call, which this process does not need.
        mpi4py.rc.thread_level = "funneled"
        self._mpi = importlib.import_module("mpi4py.MPI")
        return int(self._mpi.COMM_WORLD.Get_rank())

    def allocate(self, num_elements: int, dtype: str) -> Array:
        self._array = np.empty(num_elements, dtype)
        return self._array

    def reduce(self) -> None:
        self._mpi.COMM_WORLD.Allreduce(self._mpi.IN_PLACE, self._array)

    def release(self) -> None:
        self._array = None

    def close(self) -> None:
        self._mpi.Finalize()


class Ucc:
    """UCC's all-reduce in place, over UCX: one persistent collective for each array."""

    mean = False
    _DTYPES = ("float32", "float64", "int32", "int64")

    def __init__(self, job: WorkerJob) -> None:
        self._job = job
        self._library: Any = None
        self._team = ctypes.c_void_p()
        self._array: Array | None = None

    def setup(self) -> int:
        path = importlib.import_module("coarse.bench.systems").ucc_library()
        self._library = ctypes.CDLL(str(path))
        self._library.coarse_ucc_words.restype = ctypes.c_char_p
        directory, rank = str(self._job.directory).encode(), self._job.rank
        self._check(
            self._library.coarse_ucc_open(directory, rank, self._job.num_workers, ctypes.byref(self._team))
        )
        return rank

    def allocate(self, num_elements: int, dtype: str) -> Array:
        self._array = np.empty(num_elements, dtype)
        self._check(
            self._library.coarse_ucc_prepare(
                self._team,
                ctypes.c_void_p(self._array.ctypes.data),
                ctypes.c_uint64(num_elements),
                self._DTYPES.index(dtype),
            )
        )
        return self._array

    def reduce(self) -> None:
        self._check(self._library.coarse_ucc_all_reduce(self._team))

    def release(self) -> None:
        self._check(self._library.coarse_ucc_release(self._team))
        self._array = None

    def close(self) -> None:
        self._check(self._library.coarse_ucc_close(self._team))

    def _check(self, status: int) -> None:
        if status < 0:
            raise RuntimeError(f"UCC: {self._library.coarse_ucc_words(status).decode()}")


class Horovod:
    """Horovod's in-place allreduce of a torch tensor, over gloo."""

    mean = False

    def __init__(self, job: WorkerJob) -> None:
        self._hvd: Any = None
        self._tensor: Any = None

    def setup(self) -> int:
        self._hvd = importlib.import_module("horovod.torch")
        self._hvd.init()
        return int(self._hvd.rank())

    def allocate(self, num_elements: int, dtype: str) -> Array:
        array = np.empty(num_elements, dtype)
        self._tensor = importlib.import_module("torch").from_numpy(array)
        return array

    def reduce(self) -> None:
        self._hvd.allreduce_(self._tensor, op=self._hvd.Sum, name="tensor")

    def release(self) -> None:
        self._tensor = None

    def close(self) -> None:
        self._hvd.shutdown()


class ReductionLimit:
    """The machine's limit: COARSE's kernels in place over shared memory, without queues or processes.

    One process represents all workers, with a thread for each core that they could use, and at least one thread for
    each worker. The native function owns their buffers and checks its own sums.
    """

    commands = _COMMANDS

    def __init__(self, job: WorkerJob) -> None:
        self._num_workers = int(job.options["num_workers"])
        self._num_threads = max(self._num_workers, read_cpu().num_cores_granted)
        self._native: ModuleType | None = None
        self._nbytes = 0

    def setup(self) -> int:
        self._native = importlib.import_module("coarse.kernels._native")
        return 0

    def prepare(self, nbytes: int, dtype: str) -> None:
        """Records the length; the native function allocates."""
        if dtype != "float32":
            raise ValueError(f"the limit is measured in float32 only, not {dtype}")
        self._nbytes = nbytes

    def verify(self) -> None:
        """Runs once; the native function raises on a wrong sum."""
        self.run(1)

    def run(self, iterations: int) -> list[float]:
        """Seconds of each iteration."""
        assert self._native is not None
        seconds = self._native.measure_reduction_limit(
            self._num_workers, self._nbytes, iterations, self._num_threads
        )
        return [float(each) for each in seconds]

    def release(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def _over(collective: Callable[[WorkerJob], Collective]) -> Callable[[WorkerJob], Adapter]:
    return lambda job: SyncAdapter(job, collective(job))


SYNC_SYSTEMS: dict[str, Callable[[WorkerJob], Adapter]] = {
    "limit": ReductionLimit,
    "coarse": _over(CoarseRegistered),
    "coarse-unregistered": _over(CoarseUnregistered),
    "gloo": _over(Gloo),
    "mpich": _over(Mpi),
    "openmpi": _over(Mpi),
    "impi": _over(Mpi),
    "ucc": _over(Ucc),
    "horovod": _over(Horovod),
}
"""Adapter of each system, by its name on the command line."""
