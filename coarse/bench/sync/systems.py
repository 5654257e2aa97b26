"""The systems of `coarse bench sync`: one small class each, with the same four commands."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from coarse.bench.harness.commands import Commands, MakeCommands, WorkerJob, commands_of
from coarse.bench.harness.launchers import ucc_library
from coarse.bench.harness.rendezvous import join_process_group, join_session
from coarse.bench.sync import pattern
from coarse.bench.timing import timed
from coarse.machine.host import read_cpu
from coarse.schema import TensorSpec
from coarse.settings import Settings

Array = NDArray[Any]
LIMIT = "limit"
"""The machine's limit, by its name on the command line."""

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


class SyncCommands:
    """The commands of `coarse bench sync`, over any Collective."""

    def __init__(self, job: WorkerJob, collective: Callable[[WorkerJob], Collective]) -> None:
        self._num_workers = job.num_workers
        self._collective = collective(job)
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


class CoarseRegistered:
    """COARSE with the tensor in a registered slot: push and pull, as for gradients."""

    def __init__(self, job: WorkerJob) -> None:
        self._job = job
        self._session: Any = None
        self._group: Any = None
        self._generation = 0
        self.mean = True

    def setup(self) -> int:
        self._session = join_session(self._job, Settings.from_environment())
        return self._job.rank

    def allocate(self, num_elements: int, dtype: str) -> Array:
        self.mean = dtype in _FLOATS
        op = "mean" if self.mean else "sum"
        spec = TensorSpec(name="tensor", dtype=dtype, num_elements=num_elements, op=op)
        self._generation += 1
        self._group = self._session.register(f"bench-{self._generation}", [spec])
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
        if self._session is not None:
            self._session.close()


class _OwnArray:
    """A collective of arrays in the worker's own memory, which computes their sum."""

    mean = False

    def __init__(self, job: WorkerJob) -> None:
        self._job = job
        self._array: Any = None

    def allocate(self, num_elements: int, dtype: str) -> Array:
        self._array = np.empty(num_elements, dtype)
        return self._array  # type: ignore[no-any-return]

    def release(self) -> None:
        self._array = None


class CoarseUnregistered(_OwnArray):
    """COARSE with the tensor in the worker's own memory: copied in and out."""

    def setup(self) -> int:
        self._session = join_session(self._job, Settings.from_environment())
        return self._job.rank

    def reduce(self) -> None:
        self._session.all_reduce(self._array, op="sum")

    def release(self) -> None:
        super().release()
        self._session.release_buffers()

    def close(self) -> None:
        self._session.close()


class _TorchTensor(_OwnArray):
    """An array that torch shares as a tensor."""

    def allocate(self, num_elements: int, dtype: str) -> Array:
        array = super().allocate(num_elements, dtype)
        self._tensor = importlib.import_module("torch").from_numpy(array)
        return array

    def release(self) -> None:
        super().release()
        self._tensor = None


class Gloo(_TorchTensor):
    """torch.distributed over gloo."""

    def setup(self) -> int:
        self._distributed = join_process_group(self._job).distributed
        return self._job.rank

    def reduce(self) -> None:
        self._distributed.all_reduce(self._tensor)

    def close(self) -> None:
        self._distributed.destroy_process_group()


class Horovod(_TorchTensor):
    """Horovod's in-place allreduce of a torch tensor, over gloo."""

    def setup(self) -> int:
        self._hvd = importlib.import_module("horovod.torch")
        self._hvd.init()
        return int(self._hvd.rank())

    def reduce(self) -> None:
        self._hvd.allreduce_(self._tensor, op=self._hvd.Sum, name="tensor")

    def close(self) -> None:
        self._hvd.shutdown()


class Mpi(_OwnArray):
    """mpi4py's Allreduce in place, over the MPI that launched this process."""

    def setup(self) -> int:
        mpi4py = importlib.import_module("mpi4py")
        # The default, MPI_THREAD_MULTIPLE, takes locks in every call, which this process does not need.
        mpi4py.rc.thread_level = "funneled"
        self._mpi = importlib.import_module("mpi4py.MPI")
        return int(self._mpi.COMM_WORLD.Get_rank())

    def reduce(self) -> None:
        self._mpi.COMM_WORLD.Allreduce(self._mpi.IN_PLACE, self._array)

    def close(self) -> None:
        self._mpi.Finalize()


class Ucc(_OwnArray):
    """UCC's all-reduce in place, over UCX: one persistent collective for each array."""

    _DTYPES = ("float32", "float64", "int32", "int64")

    def setup(self) -> int:
        self._library = ctypes.CDLL(str(ucc_library()))
        self._library.coarse_ucc_words.restype = ctypes.c_char_p
        self._team = ctypes.c_void_p()
        directory, rank = str(self._job.directory).encode(), self._job.rank
        self._check(
            self._library.coarse_ucc_open(directory, rank, self._job.num_workers, ctypes.byref(self._team))
        )
        return rank

    def allocate(self, num_elements: int, dtype: str) -> Array:
        array = super().allocate(num_elements, dtype)
        address, length = ctypes.c_void_p(array.ctypes.data), ctypes.c_uint64(num_elements)
        self._check(self._library.coarse_ucc_prepare(self._team, address, length, self._DTYPES.index(dtype)))
        return array

    def reduce(self) -> None:
        self._check(self._library.coarse_ucc_all_reduce(self._team))

    def release(self) -> None:
        self._check(self._library.coarse_ucc_release(self._team))
        super().release()

    def close(self) -> None:
        self._check(self._library.coarse_ucc_close(self._team))

    def _check(self, status: int) -> None:
        if status < 0:
            raise RuntimeError(f"UCC: {self._library.coarse_ucc_words(status).decode()}")


class ReductionLimit:
    """The machine's limit: COARSE's kernels in place over shared memory, without queues or processes.

    One process represents all workers, with a thread for each core that they could use, and at least one thread for
    each worker. The native function owns their buffers and checks its own sums.
    """

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


_SYSTEMS: dict[str, MakeCommands] = {
    LIMIT: ReductionLimit,
    "coarse": partial(SyncCommands, collective=CoarseRegistered),
    "coarse-unregistered": partial(SyncCommands, collective=CoarseUnregistered),
    "gloo": partial(SyncCommands, collective=Gloo),
    "mpich": partial(SyncCommands, collective=Mpi),
    "openmpi": partial(SyncCommands, collective=Mpi),
    "impi": partial(SyncCommands, collective=Mpi),
    "ucc": partial(SyncCommands, collective=Ucc),
    "horovod": partial(SyncCommands, collective=Horovod),
}
"""Commands of each system, by its name on the command line."""


def sync_commands(job: WorkerJob) -> Commands:
    """The commands of one system, in its worker process."""
    return commands_of(job, _SYSTEMS)
