"""Measures GPU links by size: to and from pinned host memory, within a GPU, and to its peers."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol

import numpy as np

from coarse.kernels import _native
from coarse.profiler.curve import Curve

SIZES = tuple((64 << 10) << power for power in range(13))
"""64 KiB to 256 MiB."""

REPEATS = 11
_WARM_UPS = 1


class Way(Enum):
    """One direction of copying."""

    TO_DEVICE = "host-to-device"
    TO_HOST = "device-to-host"
    TO_PEER = "device-to-device"
    FROM_PEER = "device-from-device"
    TO_DISTANT = "device-to-host-to-device"
    FROM_DISTANT = "device-from-host-from-device"


ONE_WAY = (Way.TO_DEVICE, Way.TO_HOST)
BOTH_WAYS = {
    "host, both": (Way.TO_DEVICE, Way.TO_HOST),
    "peers, both": (Way.TO_PEER, Way.FROM_PEER),
    "through the host, both": (Way.TO_DISTANT, Way.FROM_DISTANT),
}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class GpuPath:
    """Concurrent copies of one GPU.

    Args:
        kind: The value of a Way, or a key of BOTH_WAYS.
        gpu: Ordinal of the GPU whose streams copy.
        peer: The other GPU, or the same one; None for copies from and to the host.
    """

    kind: str
    gpu: int
    peer: int | None = None

    @property
    def ways(self) -> tuple[Way, ...]:
        """The directions that are copied at the same time."""
        return BOTH_WAYS.get(self.kind) or (Way(self.kind),)

    def __str__(self) -> str:
        return f"cuda:{self.gpu} {self.kind}" + ("" if self.peer is None else f" cuda:{self.peer}")


class GpuCopier(Protocol):
    """Copies, and returns the GPU's time."""

    def time_us(self, path: GpuPath, nbytes: int) -> float:
        """Time from the moment when all of a path's copies may start to the end of the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLinks:
    """The measured links of a machine's GPUs. Immutable.

    Args:
        gpus: Names of the GPUs, by ordinal.
        curves: Times by size; for paths with two directions, each direction has this size.
        unreachable: Pairs of GPUs that cannot access each other, and whose copies go through the host.
    """

    gpus: tuple[str, ...]
    curves: Mapping[GpuPath, Curve]
    unreachable: tuple[tuple[int, int], ...]

    def peak_gbytes_per_s(self, path: GpuPath) -> float:
        """The highest bandwidth of all copies of a path together."""
        return self.curves[path].peak_gbytes_per_s * len(path.ways)

    def to_json(self) -> str:
        """All figures as JSON; their kind is measured."""
        return json.dumps({**self._values(), "kind": "measured"}, indent=1)

    def _values(self) -> dict[str, Any]:
        paths = [
            {**asdict(path), "points": [asdict(point) for point in curve.points]}
            for path, curve in self.curves.items()
        ]
        return {"gpus": self.gpus, "unreachable": self.unreachable, "paths": paths}


def gpu_paths(num_gpus: int, can_access: Callable[[int, int], bool]) -> list[GpuPath]:
    """All paths to measure: each GPU with the host and within itself, and each pair, in the way that it can copy."""
    paths: list[GpuPath] = []
    for gpu in range(num_gpus):
        paths += [GpuPath(kind=way.value, gpu=gpu) for way in ONE_WAY]
        paths += [GpuPath(kind="host, both", gpu=gpu), GpuPath(kind=Way.TO_PEER.value, gpu=gpu, peer=gpu)]
        for peer in range(num_gpus):
            if peer == gpu:
                continue
            reaches = can_access(gpu, peer)
            way = Way.TO_PEER if reaches else Way.TO_DISTANT
            paths.append(GpuPath(kind=way.value, gpu=gpu, peer=peer))
            if peer > gpu and can_access(peer, gpu) == reaches:
                kind = "peers, both" if reaches else "through the host, both"
                paths.append(GpuPath(kind=kind, gpu=gpu, peer=peer))
    return paths


def measure_gpu_links(
    gpus: Sequence[str],
    can_access: Callable[[int, int], bool],
    copier: GpuCopier,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = REPEATS,
    progress: Callable[[float], None] = lambda done: None,
) -> GpuLinks:
    """Measures every path alone, while nothing else uses the GPUs.

    Args:
        gpus: Names by ordinal.
        can_access: Whether a GPU reaches the memory of another one.
        copier: Performs and times the copies.
        sizes: Sizes in bytes.
        repeats: Number of repeats of each path and size; the result is their median.
        progress: Receives the completed fraction, from 0 to 1.

    Raises:
        ValueError: If the numbers of GPUs, sizes or repeats are 0.
    """
    if not gpus or not sizes or repeats < 1:
        raise ValueError(
            f"{len(gpus)} GPUs, {len(sizes)} sizes, {repeats} repeats: at least one of each is needed"
        )
    paths = gpu_paths(len(gpus), can_access)
    curves: dict[GpuPath, Curve] = {}
    for number, path in enumerate(paths):
        times_us: dict[int, list[float]] = {}
        for nbytes in sizes:
            times = [copier.time_us(path, nbytes) for _ in range(_WARM_UPS + repeats)]
            times_us[nbytes] = times[_WARM_UPS:]
        curves[path] = Curve.from_repeats(times_us)
        progress((number + 1) / len(paths))
    pairs = [(one, other) for one in range(len(gpus)) for other in range(len(gpus)) if one != other]
    return GpuLinks(
        gpus=tuple(gpus),
        curves=curves,
        unreachable=tuple(pair for pair in pairs if not can_access(*pair)),
    )


class DriverCopier:
    """Copies with the CUDA driver, on its own streams, timed by CUDA events.

    Allocates four times `most_bytes` on each GPU and twice `most_bytes` of pinned host memory, until close().
    Thread safety: one caller at a time.

    Args:
        num_gpus: Number of GPUs, starting with the first; at least 1.
        most_bytes: The largest size to time.

    Raises:
        CudaError: If a GPU cannot be used, or has too little memory.
    """

    def __init__(self, num_gpus: int, most_bytes: int) -> None:
        # Touch pages before pinning, not during the copies.
        self._host = mmap.mmap(-1, 2 * most_bytes)
        self._host[:] = bytes(len(self._host))
        address = np.frombuffer(self._host, np.uint8).ctypes.data
        self._host_halves = (address, address + most_bytes)
        self._gpus = [_GpuEnds(gpu, most_bytes) for gpu in range(num_gpus)]
        # Only once, for all GPUs.
        context = self._gpus[0].context
        self._pinned = [_native.CudaHostRegistration(context, address, len(self._host))]
        self._peers: dict[tuple[int, int], list[_native.CudaMemory]] = {}

    def close(self) -> None:
        """Frees all memory. Idempotent."""
        self._peers.clear()
        self._pinned.clear()
        self._gpus.clear()
        self._host.close()

    def time_us(self, path: GpuPath, nbytes: int) -> float:
        copies = [partial(self._copy, way=way, path=path, nbytes=nbytes) for way in path.ways]
        return self._gpus[path.gpu].timer.time_us(copies)

    def _copy(self, stream: _native.CudaStream, way: Way, path: GpuPath, nbytes: int) -> None:
        own = [memory.address for memory in self._gpus[path.gpu].memories]
        if way is Way.TO_DEVICE:
            stream.copy_to_device(own[0], self._host_halves[0], nbytes)
        elif way is Way.TO_HOST:
            stream.copy_to_host(self._host_halves[1], own[1], nbytes)
        else:
            assert path.peer is not None
            self._copy_between(stream, way, path.gpu, path.peer, nbytes)

    def _copy_between(self, stream: _native.CudaStream, way: Way, gpu: int, peer: int, nbytes: int) -> None:
        own, other = self._gpus[gpu].memories, self._gpus[peer]
        if way is Way.TO_DISTANT:
            stream.copy_to(other.context, other.memories[2].address, own[0].address, nbytes)
        elif way is Way.FROM_DISTANT:
            stream.copy_from(other.context, own[1].address, other.memories[3].address, nbytes)
        elif way is Way.TO_PEER:
            stream.copy_on_device(self._memories_of(gpu, peer)[2].address, own[0].address, nbytes)
        else:
            stream.copy_on_device(own[1].address, self._memories_of(gpu, peer)[3].address, nbytes)

    def _memories_of(self, gpu: int, peer: int) -> list[_native.CudaMemory]:
        """The memories of a GPU, mapped for another one."""
        if gpu == peer:
            return self._gpus[gpu].memories
        if (gpu, peer) not in self._peers:
            self._peers[gpu, peer] = [
                _imported(self._gpus[gpu].context, memory) for memory in self._gpus[peer].memories
            ]
        return self._peers[gpu, peer]


class CopyTimer:
    """Times concurrent copies of one GPU, each on its own stream.

    Thread safety: one caller at a time.

    Args:
        context: Context of the GPU.

    Raises:
        CudaError: If the GPU cannot be used.
    """

    MOST_AT_ONCE = 2

    def __init__(self, context: _native.CudaContext) -> None:
        self._streams = [_native.CudaStream(context) for _ in range(self.MOST_AT_ONCE)]
        self._begin, self._joined, self._end = (_native.CudaEvent(context, is_timed=True) for _ in range(3))

    def time_us(self, copies: Sequence[Callable[[_native.CudaStream], None]]) -> float:
        """Time from the moment when all copies may start to the end of the last one.

        Args:
            copies: At most MOST_AT_ONCE functions; each submits a copy to a stream.
        """
        first, second = self._streams
        self._begin.record(first.handle)
        second.wait(self._begin)
        for stream, copy in zip(self._streams, copies, strict=False):
            copy(stream)
        self._joined.record(second.handle)
        first.wait(self._joined)
        self._end.record(first.handle)
        self._end.synchronize()
        return self._end.milliseconds_since(self._begin) * 1e3


class _GpuEnds:
    """The memories and streams of one GPU."""

    def __init__(self, gpu: int, most_bytes: int) -> None:
        self.context = _native.CudaContext(gpu)
        self.timer = CopyTimer(self.context)
        self.memories = [_native.CudaMemory.allocate(self.context, most_bytes) for _ in range(4)]


def _imported(context: _native.CudaContext, memory: _native.CudaMemory) -> _native.CudaMemory:
    fd = memory.export_fd()
    try:
        return _native.CudaMemory.import_region(context, _native.Region(fd, 0, memory.num_bytes))
    finally:
        os.close(fd)
