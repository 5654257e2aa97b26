"""A training step to simulate: a network, a workload, and the costs of host and sync cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from coarse.bench.replay.trace import ComputeTrace
from coarse.simulator.faults.disturbances import UNDISTURBED, Disturbances
from coarse.simulator.machines.network import Network

_BYTES_PER_S = 1e9  # for one GB/s


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCores:
    """The cores of a memory device that reduce.

    Args:
        num_cores: Cores of each memory device.
        gbytes_per_s: Bytes of contributions that one core reads per second, by operation and dtype.

    Raises:
        ValueError: If a number is not positive.
    """

    num_cores: int
    gbytes_per_s: Mapping[tuple[str, str], float]

    def __post_init__(self) -> None:
        if self.num_cores < 1 or not all(rate > 0 for rate in self.gbytes_per_s.values()):
            raise ValueError(f"sync cores and their rates must be above 0: {self}")

    def seconds_per_byte(self, operation: str, dtype: str) -> float:
        """Time of one core for a byte of a contribution.

        Raises:
            ValueError: If the rate is unknown.
        """
        if (operation, dtype) not in self.gbytes_per_s:
            raise ValueError(f"the rate of a sync core for {operation} of {dtype} is unknown")
        return 1 / (self.gbytes_per_s[operation, dtype] * _BYTES_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One step of data-parallel training.

    Args:
        network: Workers, memory devices and links.
        trace: Computation of an undisturbed worker, the same for all.
        sync_cores: Cores of each memory device; None if reductions never limit the speed, as in the emulator.
        host_overhead_us: The host's time for each message that a worker or memory device sends.
        bucket_bytes: Least size of the buckets in which all-reduce and sharding take gradients, as torch DDP's.
        num_states: Optimizer states of the size of the parameters; 2 for Adam.
        disturbances: Slow workers and links.

    Raises:
        ValueError: If a number is negative, the buckets are empty, or a slow worker does not exist.
    """

    network: Network
    trace: ComputeTrace
    sync_cores: SyncCores | None = None
    host_overhead_us: float = 0.0
    bucket_bytes: int = 25 << 20
    num_states: int = field(default=2)
    disturbances: Disturbances = UNDISTURBED

    def __post_init__(self) -> None:
        if self.host_overhead_us < 0 or self.bucket_bytes < 1 or self.num_states < 0:
            raise ValueError(f"overhead and states start at 0, bytes of a bucket at 1: {self}")
        self.disturbances.slowest(self.network.num_workers)

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward pass."""
        return self.trace.forward_s + self.trace.backward_s

    @property
    def slowest(self) -> float:
        """How many times longer the slowest worker computes than an undisturbed one."""
        return self.disturbances.slowest(self.network.num_workers)

    @property
    def overhead_s(self) -> float:
        """Seconds of the host for one message."""
        return self.host_overhead_us * 1e-6

    def ready_s(self, tensor: int) -> float:
        """When an undisturbed worker has a gradient ready, in seconds of the step."""
        return self.trace.forward_s + self.trace.events[tensor].ready * self.trace.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientBucket:
    """Gradients that are synchronised together: their bytes, and when an undisturbed worker has all of them ready."""

    nbytes: int
    ready_s: float


def gradient_buckets(job: Job) -> Sequence[GradientBucket]:
    """Buckets of at least `bucket_bytes` in the order of readiness, but for the last one."""
    buckets, nbytes = list[GradientBucket](), 0
    for tensor, event in enumerate(job.trace.events):
        nbytes += event.nbytes
        is_last = tensor == len(job.trace.events) - 1
        if nbytes >= job.bucket_bytes or is_last:
            buckets.append(GradientBucket(nbytes=nbytes, ready_s=job.ready_s(tensor)))
            nbytes = 0
    return buckets


DEFAULT_RATES: Mapping[tuple[str, str], float] = MappingProxyType(
    {
        ("mean", "float32"): 10.0,
        ("mean", "float16"): 5.0,
        ("mean", "bfloat16"): 5.0,
        ("mean", "float64"): 10.0,
    }
)
"""GB/s of contributions that one sync core reads; assumed, of the order of one core's memory bandwidth."""
