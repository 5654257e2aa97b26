"""Barrier, reduce and all-reduce by remote loads and stores in a global address space (sections 6.6 to 6.8).

Every GPU has one link: what it stores leaves one request after the other, and so does what arrives. A request takes
its data's cycles and some of its own. The barrier only stores: check-in flags to a master, check-out flags back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from coarse.simulator.events.engine import simulate
from coarse.simulator.events.tasks import Task
from coarse.simulator.studies.distributed_gpus.coalescing import (
    INT_BYTES,
    LONG_BYTES,
    PACKET_VALUES,
    Request,
    read_requests,
    write_requests,
)
from coarse.simulator.studies.distributed_gpus.machines import (
    BARRIER_KERNEL_US,
    BARRIER_US,
    COPY_TO_HOST_US,
    CYCLE_NS,
    GPU_REDUCTION_MBYTES_PER_S,
    LOAD_MBYTES_PER_S,
    LOAD_US,
    OUTSTANDING_LOADS,
    PUT_US,
    REQUEST_CYCLES,
    RMA_MBYTES_PER_S,
    RMA_PUT_US,
    STORE_US,
    WIDTH_BYTES,
)
from coarse.simulator.studies.distributed_gpus.transfers import MB, US

REQUEST_BYTES = PACKET_VALUES * LONG_BYTES
"""Of a coalesced access in the benchmarks, whose values are `long` (Listings 6.2 and 6.3)."""

Transfer = tuple[int, int, float]
"""One GPU, another, and bytes."""

_NS = 1e-3  # in us
_MANY = 4096


def request_us(request: Request) -> float:
    """Time of one request on the link."""
    data_cycles = -(-request.nbytes // WIDTH_BYTES.value)
    return (data_cycles + REQUEST_CYCLES.value) * CYCLE_NS.value * _NS


def store_mbytes_per_s(stride: int, values: int = _MANY) -> float:
    """Bandwidth of stores to every `stride`-th value."""
    requests = write_requests(range(0, values * stride * LONG_BYTES, stride * LONG_BYTES), LONG_BYTES)
    tasks = [
        Task(name=str(number), queue="link", order=number, overhead_s=request_us(request) * US)
        for number, request in enumerate(requests)
    ]
    return values * LONG_BYTES / MB / simulate(tasks, {}).end_s


def load_mbytes_per_s(stride: int, values: int = _MANY) -> float:
    """Bandwidth of loads of every `stride`-th value, at the peak rate of whole packets."""
    requests = read_requests(range(0, values * stride * LONG_BYTES, stride * LONG_BYTES), LONG_BYTES)
    packet_us = REQUEST_BYTES / LOAD_MBYTES_PER_S.value
    tasks = [
        Task(name=str(number), queue="link", order=number, overhead_s=packet_us * US)
        for number in range(len(requests))
    ]
    return values * LONG_BYTES / MB / simulate(tasks, {}).end_s


def loads_in_flight_mbytes_per_s() -> float:
    """Bandwidth of packets of which only some may be in flight, each for a load's latency alone."""
    tasks = [
        Task(name=str(number), queue="in flight", order=number, overhead_s=LOAD_US.value * US)
        for number in range(_MANY)
    ]
    end_s = simulate(tasks, {}, channels={"in flight": round(OUTSTANDING_LOADS.value)}).end_s
    return _MANY * REQUEST_BYTES / MB / end_s


class Program:
    """Tasks of some GPUs, phase after phase. GPU 0 is the master and root."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self.tasks: list[Task] = []
        self._awaited: dict[int, tuple[str, ...]] = dict.fromkeys(range(gpus), ())
        self._number = 0

    def store(self, transfers: Sequence[Transfer]) -> None:
        """Stores bytes: (from, to, bytes), all at once. A flag that the source sets later arrives behind them."""
        seconds_per_byte = request_us(Request(0, REQUEST_BYTES)) * US / REQUEST_BYTES
        names = [self._transfer(each, self._awaited[each[0]], seconds_per_byte, 0.0) for each in transfers]
        for (source, _, _), name in zip(transfers, names, strict=True):
            self._awaited[source] = (*self._awaited[source], name)

    def load(self, transfers: Sequence[Transfer]) -> None:
        """Loads bytes of one GPU by another: (from, by, bytes)."""
        seconds_per_byte = 1 / (LOAD_MBYTES_PER_S.value * MB)
        names = [
            self._transfer(each, self._awaited[each[1]], seconds_per_byte, LOAD_US.value)
            for each in transfers
        ]
        for (_, loader, _), name in zip(transfers, names, strict=True):
            self._awaited[loader] = (*self._awaited[loader], name)

    def reduce(self, gpus: Iterable[int], nbytes: float) -> None:
        """Reads that many bytes of local memory and adds them up."""
        for gpu in gpus:
            seconds = nbytes / (GPU_REDUCTION_MBYTES_PER_S.value * MB)
            self._then(gpu, Task(name=self._name("reduce"), after=self._awaited[gpu], overhead_s=seconds))

    def barrier(self) -> None:
        """Check-in at the master, its own work, check-out. Flags of a target's link follow each other."""
        check_ins = [self._flag(gpu, 0) for gpu in range(1, self.gpus)]
        work = Task(
            name=self._name("barrier"),
            after=(*self._awaited[0], *(task.name for task in check_ins)),
            overhead_s=BARRIER_US.value * US,
        )
        self._then(0, work)
        for gpu in range(1, self.gpus):
            self._then(gpu, self._flag(0, gpu))

    def flag(self, source: int, target: int) -> None:
        """One GPU tells another, which then synchronises its own blocks."""
        flag = self._flag(source, target)
        work = Task(
            name=self._name("seen"),
            after=(flag.name, *self._awaited[target]),
            overhead_s=BARRIER_US.value * US,
        )
        self._then(target, work)

    def run_us(self) -> float:
        """Time until all GPUs are done."""
        capacities = {f"{way} {gpu}": 1.0 for way in ("out", "in") for gpu in range(self.gpus)}
        return simulate(self.tasks, capacities).end_s / US

    def _transfer(
        self,
        transfer: Transfer,
        after: tuple[str, ...],
        seconds_per_byte: float,
        latency_us: float,
    ) -> str:
        """Crosses a link out and a link in, each of one second per second."""
        source, target, nbytes = transfer
        task = Task(
            name=self._name("transfer"),
            after=after,
            nbytes=nbytes,
            usage=((f"out {source}", seconds_per_byte), (f"in {target}", seconds_per_byte)),
            latency_s=latency_us * US,
        )
        self.tasks.append(task)
        return task.name

    def _flag(self, source: int, target: int) -> Task:
        task = Task(
            name=self._name("flag"),
            after=self._awaited[source],
            queue="flags of the master" if 0 in (source, target) else f"flags of {target}",
            overhead_s=request_us(Request(0, INT_BYTES)) * US,
            latency_s=STORE_US.value * US,
        )
        self.tasks.append(task)
        return task

    def _then(self, gpu: int, task: Task) -> None:
        if task not in self.tasks:
            self.tasks.append(task)
        self._awaited[gpu] = (task.name,)

    def _name(self, kind: str) -> str:
        self._number += 1
        return f"{kind} {self._number}"


def barrier_us(gpus: int, *, is_kernel: bool = False) -> float:
    """A GGAS barrier, by a device function or by a kernel that a kernel starts."""
    program = Program(gpus)
    program.barrier()
    return program.run_us() + (BARRIER_KERNEL_US.value if is_kernel else 0.0)


def _others(gpus: int, nbytes: float) -> list[Transfer]:
    return [(one, other, nbytes) for one in range(gpus) for other in range(gpus) if one != other]


def _to_root(gpus: int, nbytes: float) -> list[Transfer]:
    return [(gpu, 0, nbytes) for gpu in range(1, gpus)]


def _from_root(gpus: int, nbytes: float) -> list[Transfer]:
    return [(0, gpu, nbytes) for gpu in range(1, gpus)]


def _remote_read(program: Program, nbytes: float, *, is_all: bool) -> None:
    program.barrier()
    program.load(_others(program.gpus, nbytes) if is_all else _to_root(program.gpus, nbytes))
    program.reduce(range(program.gpus) if is_all else (0,), program.gpus * nbytes)


def _gather(program: Program, nbytes: float, *, is_all: bool) -> None:
    program.store(_to_root(program.gpus, nbytes))
    program.barrier()
    program.reduce((0,), program.gpus * nbytes)
    if is_all:
        program.store(_from_root(program.gpus, nbytes))
        program.barrier()


def _all_gather(program: Program, nbytes: float, *, is_all: bool) -> None:
    assert is_all, "every GPU has the result"
    program.store(_others(program.gpus, nbytes))
    program.barrier()
    program.reduce(range(program.gpus), program.gpus * nbytes)


def _all_to_all(program: Program, nbytes: float, *, is_all: bool) -> None:
    part = nbytes / program.gpus
    program.store(_others(program.gpus, part))
    program.barrier()
    program.reduce(range(program.gpus), nbytes)
    program.store(_others(program.gpus, part) if is_all else _to_root(program.gpus, part))
    program.barrier()


def _tree(program: Program, nbytes: float, *, is_all: bool) -> None:
    """A binomial tree; the number of GPUs is a power of two."""
    distances = [1 << level for level in range((program.gpus - 1).bit_length())]
    for distance in distances:
        for gpu in range(0, program.gpus, 2 * distance):
            program.store([(gpu + distance, gpu, nbytes)])
            program.flag(gpu + distance, gpu)
            program.reduce((gpu,), 2 * nbytes)
    for distance in reversed(distances) if is_all else ():
        for gpu in range(0, program.gpus, 2 * distance):
            program.store([(gpu, gpu + distance, nbytes)])
            program.flag(gpu, gpu + distance)


METHODS: Mapping[str, Callable[..., None]] = {
    "remote read": _remote_read,
    "gather": _gather,
    "all-gather": _all_gather,
    "all-to-all": _all_to_all,
    "tree": _tree,
}
"""Section 6.8, by name; "gather" of an all-reduce casts the result back."""

REDUCE_METHODS = ("remote read", "gather", "all-to-all", "tree")


def reduction_us(method: str, *, nbytes: float, gpus: int = 8, is_all: bool = True) -> float:
    """Time of an all-reduce, or of a reduce to GPU 0."""
    program = Program(gpus)
    METHODS[method](program, nbytes, is_all=is_all)
    return program.run_us()


def fastest(methods: Sequence[str], *, nbytes: float, is_all: bool = True) -> str:
    """The method with the least time on eight GPUs."""
    return min(methods, key=lambda method: reduction_us(method, nbytes=nbytes, is_all=is_all))


def switch_bytes(gpus: int = 8) -> int:
    """The size from which an all-reduce by all-to-all is faster than by all-gather."""
    below, above = INT_BYTES * gpus, 1 << 24
    while above - below > 1:
        middle = (below + above) // 2
        if reduction_us("all-gather", nbytes=middle, gpus=gpus) <= reduction_us(
            "all-to-all", nbytes=middle, gpus=gpus
        ):
            below = middle
        else:
            above = middle
    return above


def _recursive_doubling_us(gpus: int, message_us: float) -> float:
    rounds = (gpus - 1).bit_length()
    tasks = [
        Task(name=str(number), after=(str(number - 1),) if number else (), latency_s=message_us * US)
        for number in range(rounds)
    ]
    return simulate(tasks, {}).end_s / US


def mpi_us(*, nbytes: float, gpus: int = 8) -> float:
    """All-reduce by MPI over Extoll: copied to the host, reduced there by recursive doubling, copied back."""
    message_us = RMA_PUT_US.value + nbytes / RMA_MBYTES_PER_S.value
    return 2 * COPY_TO_HOST_US.value + _recursive_doubling_us(gpus, message_us)


def gaspi_us(gpus: int, *, has_gpu_buffers: bool) -> float:
    """GASPI's all-reduce of few values; buffers of GPUs are copied to the host and back (section 4.3.7)."""
    copies_us = 2 * COPY_TO_HOST_US.value if has_gpu_buffers else 0.0
    return copies_us + _recursive_doubling_us(gpus, PUT_US.value)
