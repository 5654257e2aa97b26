"""Measures the links of a running session with all of its workers (COARSE paper, section III-E).

Method and reasons: docs/design/profiling.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from coarse.client.link_probes import LinkProbes, Probe
from coarse.errors import OutOfDeviceMemoryError
from coarse.kernels._native import ProbeKind
from coarse.machine.host import read_host
from coarse.profiler.curve import Curve, CurvePoint
from coarse.profiler.linked import paths_share_links
from coarse.profiler.profile import (
    BOTH,
    DEVICES,
    EMULATED,
    MEASURED,
    PULL,
    PUSH,
    WORKERS,
    PathId,
    Profile,
    host_key,
    profile_key,
)
from coarse.profiler.routing import sizes_in_doubt
from coarse.startup.device_checks import least_available_bytes
from coarse.tuning.tuned_session import TunedSession

if TYPE_CHECKING:
    from coarse.emulation.emulated_session import EmulatedSession
    from coarse.machine.partition_table import PartitionTable

SIZES = tuple(4096 << power for power in range(15))
"""4 KiB to 64 MiB."""

DEFAULT_BUDGET_S = 2.5
MOST_REPEATS = 31
"""Most repeats: more would not improve a median reproducibly."""

_LEAST_REPEATS = 2
"""Least repeats of the paths from which routes are planned: one repeat shows no spread."""

_FEW_REPEATS = 3
"""Repeats of a path that is timed during training: enough to exclude one that the scheduler delayed."""

_MEMORY_FRACTION = 0.5
"""Share of the available memory for probes; the rest is left for other users."""

Progress = Callable[[float], None]
"""Receives the completed fraction of the measurement, from 0 to 1."""

Repeats = dict[PathId, dict[int, list[float]]]
"""Times in microseconds, by path and size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurePlan:
    """The sizes and time of a measurement, the same on every worker.

    Args:
        sizes: Sizes in bytes.
        budget_s: Time limit of the measurement. One repeat of each path and size, and a second one of both directions
            at once, ignore the limit. If repeats leave a route in doubt, at most the same time again is added.

    Raises:
        ValueError: If `sizes` is empty, a size is out of range or given twice, or the budget is negative.
    """

    sizes: tuple[int, ...] = SIZES
    budget_s: float = DEFAULT_BUDGET_S

    def __post_init__(self) -> None:
        if not self.sizes or len(set(self.sizes)) < len(self.sizes) or min(self.sizes) < 1:
            raise ValueError(f"sizes must be distinct and at least 1, and not empty: {self.sizes}")
        if max(self.sizes) >= 1 << 32:
            raise ValueError(f"a probe must be smaller than 4 GiB: {max(self.sizes)} bytes")
        if not 0 <= self.budget_s < float("inf"):
            raise ValueError(f"a budget of {self.budget_s} s is not finite and at least 0")


def measure_profile(
    session: TunedSession, plan: MeasurePlan | None = None, *, progress: Progress | None = None
) -> Profile:
    """Measures all paths of this node; every worker calls it, while the session does no other work.

    Workers take turns, so that each path is measured alone. Each worker returns the same profile, bit for bit.

    Args:
        session: A session of at least two workers.
        plan: Sizes and time limit.
        progress: Called on the worker whose turn it is.

    Raises:
        OutOfDeviceMemoryError: If memory is too small even for the smallest probes.
        WorkerLostError, MemoryDeviceLostError, SyncTimeoutError: As while waiting for a tensor.
        ValueError: If the session has only one worker, and thus no link.
    """
    plan = plan or MeasurePlan()
    table = session.partition_table
    if table is None:
        raise ValueError("a session of one worker has no links to measure")
    is_emulated = session.emulation is not None
    number = session.node_workers.index(session.identity.rank)
    sizes = _affordable_sizes(session, table, plan.sizes)
    probes = session.open_probes(max(sizes))
    paths = paths_of_worker(number, table)
    repeats: Repeats = {}
    for turn in range(session.most_workers_of_a_node):  # nodes measure at the same time
        if turn == number:
            share_s = plan.budget_s / table.num_workers
            meter = LinkMeter(probes, {path: transfers_of(path, table) for path in paths}, share_s)
            if not is_emulated:  # other work of the host does not affect emulated links
                meter.touch(max(sizes))
            repeats = meter.measure(sizes, _part_of(progress, turn, table.num_workers))
            meter.resolve_doubts(number, table.local_device(number), is_emulated, most_s=share_s)
        session.barrier()
    probes.close()
    own = json.dumps({"host": host_key(read_host()), "curves": _rows(repeats, is_emulated)}).encode()
    shares = [json.loads(share) for share in gather_bytes(session, own)]
    session.release_buffers()
    return _profile([shares[rank] for rank in session.node_workers], table, session.emulation, plan)


def paths_of_worker(number: int, table: PartitionTable) -> list[PathId]:
    """The paths that one worker measures: its own, and its share of the paths between memory devices."""
    own = [
        PathId(kind=kind, source=number, target=device)
        for kind in (PUSH, PULL, BOTH)
        for device in range(table.num_devices)
    ]
    own += [
        PathId(kind=WORKERS, source=number, target=other)
        for other in range(table.num_workers)
        if other != number
    ]
    pairs = [
        PathId(kind=DEVICES, source=source, target=target)
        for source in range(table.num_devices)
        for target in range(table.num_devices)
        if source != target
    ]
    return own + pairs[number :: table.num_workers]


def transfers_of(path: PathId, table: PartitionTable) -> list[Probe]:
    """The concurrent probes of one path."""
    if path.kind == WORKERS:
        local = table.local_device(path.source)
        return [Probe(kind=ProbeKind.BETWEEN_WORKERS, device=local, target=path.target)]
    if path.kind == DEVICES:
        # A device without workers has no slots. Then use any worker's: only emulated links differ, by endpoint.
        owner = next(iter(table.devices[path.target].workers), 0)
        return [
            Probe(kind=ProbeKind.BETWEEN_DEVICES, device=path.source, target=path.target, slot_owner=owner)
        ]
    kinds = {PUSH: [ProbeKind.PUSH], PULL: [ProbeKind.PULL], BOTH: [ProbeKind.PUSH, ProbeKind.PULL]}
    return [Probe(kind=kind, device=path.target) for kind in kinds[path.kind]]


def time_paths(
    session: TunedSession, probes: LinkProbes, cells: Mapping[PathId, Sequence[int]]
) -> dict[PathId, dict[int, float]]:
    """Times some paths of this node's workers again; every worker calls it between the same two steps.

    Args:
        session: A session of at least two workers.
        probes: This worker's probes, large enough for all sizes.
        cells: The sizes in bytes by path, the same on every worker. Paths lead from workers to memory devices, back,
            or both.

    Returns:
        Microseconds by path and size, from a few repeats: the fastest for emulated links, the median for others. The
        same on every worker of the node.
    """
    table = session.partition_table
    assert table is not None
    number = session.node_workers.index(session.identity.rank)
    own = [path for path in cells if path.source == number]
    rows: list[tuple[str, int, int, int, float]] = []
    for turn in range(session.most_workers_of_a_node):
        if turn == number:
            for path in own:
                transfers = transfers_of(path, table)
                for size in cells[path]:
                    times_s = [probes.time_s(transfers, size) for _ in range(_FEW_REPEATS)]
                    time_s = min(times_s) if session.emulation is not None else median(times_s)
                    rows.append((path.kind, path.source, path.target, size, time_s * 1e6))
        session.barrier()
    shares = gather_bytes(session, json.dumps(rows).encode())
    times_us: dict[PathId, dict[int, float]] = {}
    for rank in session.node_workers:
        for kind, source, target, size, time_us in json.loads(shares[rank]):
            times_us.setdefault(PathId(kind=kind, source=source, target=target), {})[size] = time_us
    return times_us


def gather_bytes(session: TunedSession, own: bytes) -> list[bytes]:
    """The bytes that each worker of the job passes, by rank; every worker calls it."""
    rank, world_size = session.identity.rank, session.identity.world_size
    lengths = np.zeros(world_size, dtype=np.int64)
    lengths[rank] = len(own)
    session.all_reduce(lengths)
    ends = np.cumsum(lengths)
    everything = np.zeros(int(ends[-1]), dtype=np.uint8)
    everything[ends[rank] - len(own) : ends[rank]] = np.frombuffer(own, dtype=np.uint8)
    session.all_reduce(everything)
    return [part.tobytes() for part in np.split(everything, ends[:-1])]


class LinkMeter:
    """Measures one worker's repeats within its share of the time."""

    def __init__(
        self, probes: LinkProbes, transfers: Mapping[PathId, Sequence[Probe]], share_s: float
    ) -> None:
        self._probes = probes
        self._transfers = transfers
        self._share_s = share_s
        self._begin_s = time.monotonic()
        self._spent_s: dict[int, float] = {}
        self._repeats: Repeats = {path: {} for path in transfers}

    def measure(self, sizes: Iterable[int], progress: Progress) -> Repeats:
        """Measures at least one repeat of every size, then always the size that has had the least time so far."""
        ordered = sorted(sizes)
        for size in ordered:
            self._take(size, progress)
            while self._pays(size, self._share_s / len(ordered) - self._spent_s[size]):
                self._take(size, progress)
        unfinished = set(ordered)
        while unfinished:
            size = min(unfinished, key=lambda size: (self._spent_s[size], size))
            if self._pays(size, self._share_s - self._elapsed_s()):
                self._take(size, progress)
            else:
                unfinished.remove(size)
        progress(1.0)
        return self._repeats

    def _pays(self, size: int, left_s: float) -> bool:
        """Whether one more repeat of a size fits into the remaining time and adds information."""
        num_passes = len(next(iter(self._repeats.values()))[size])
        return num_passes < MOST_REPEATS and self._spent_s[size] / num_passes <= left_s

    def resolve_doubts(self, worker: int, local_device: int, is_emulated: bool, *, most_s: float) -> None:
        """Repeats both directions at once if too few repeats, or their spread, leave a route in doubt.

        After the second repeat, takes at most `most_s` seconds and MOST_REPEATS of a size. The routing table states
        which routes remain in doubt.
        """
        both = [path for path in self._transfers if path.kind == BOTH and path.source == worker]
        for size in {size for path in both for size in self._repeats[path]}:
            while min(len(self._repeats[path][size]) for path in both) < _LEAST_REPEATS:
                self._repeat(both, size)
        end_s = self._elapsed_s() + most_s
        for _ in range(MOST_REPEATS):
            curves = {path.target: summarise(self._repeats[path], is_emulated) for path in both}
            doubtful = sizes_in_doubt(curves, local_device)
            if not doubtful or self._elapsed_s() >= end_s:
                return
            for size in doubtful:
                self._repeat(both, size)

    def touch(self, largest_bytes: int) -> None:
        """Maps every page of every slot in the process that will copy it, so that links' times exclude mapping."""
        for path, probes in self._transfers.items():
            if path.kind not in (PUSH, PULL):
                self._probes.time_s(probes, largest_bytes)

    def _take(self, size: int, progress: Progress) -> None:
        begin_s = self._elapsed_s()
        self._repeat(self._transfers, size)
        self._spent_s[size] = self._spent_s.get(size, 0.0) + self._elapsed_s() - begin_s
        progress(min(1.0, self._elapsed_s() / self._share_s) if self._share_s > 0 else 0.0)

    def _repeat(self, paths: Iterable[PathId], size: int) -> None:
        """One more repeat of each path."""
        for path in paths:
            time_us = self._probes.time_s(self._transfers[path], size) * 1e6
            self._repeats[path].setdefault(size, []).append(time_us)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begin_s


def _part_of(progress: Progress | None, turn: int, num_turns: int) -> Progress:
    def whole(done: float) -> None:
        if progress is not None:
            progress((turn + done) / num_turns)

    return whole


def _affordable_sizes(session: TunedSession, table: PartitionTable, sizes: Sequence[int]) -> list[int]:
    """The sizes that fit into memory, according to the worker with the least available memory."""
    available = least_available_bytes(table)
    # Two slots of every worker, and a buffer at every memory device.
    most = np.array([-available * _MEMORY_FRACTION / (2 * table.num_workers + table.num_devices)])
    session.all_reduce(most, op="max")
    affordable = [size for size in sizes if size <= -most[0]]
    if not affordable:
        raise OutOfDeviceMemoryError(
            f"probes of {min(sizes)} bytes need {min(sizes) * (2 * table.num_workers + table.num_devices)} "
            f"bytes of device memory, but only {available} bytes are available"
        )
    return affordable


def summarise(times_us: Mapping[int, Sequence[float]], is_emulated: bool) -> Curve:
    """The curve over sizes: the fastest repeat for emulated links, the median for others."""
    return Curve.from_fastest(times_us) if is_emulated else Curve.from_repeats(times_us)


def _rows(repeats: Repeats, is_emulated: bool) -> list[list[Any]]:
    return [
        [*astuple(path), [astuple(point) for point in summarise(times, is_emulated).points]]
        for path, times in repeats.items()
    ]


def _profile(
    shares: Sequence[Any], table: PartitionTable, emulated: EmulatedSession | None, plan: MeasurePlan
) -> Profile:
    """The profile from the measurements of this node's workers, by client number."""
    curves: dict[PathId, Curve] = {}
    for share in shares:
        for kind, source, target, points in share["curves"]:
            curves[PathId(kind=kind, source=source, target=target)] = Curve(
                points=tuple(
                    CurvePoint(nbytes=nbytes, time_us=time_us, spread_us=spread_us, num_repeats=count)
                    for nbytes, time_us, spread_us, count in points
                )
            )
    # Workers may have different processors; the first worker's view of the host forms the key.
    key = profile_key(table, shares[0]["host"], None if emulated is None else emulated.emulation)
    return Profile(
        kind=MEASURED if emulated is None else EMULATED,
        key=key,
        time_budget_s=plan.budget_s,
        # On a host, all transfers cross the same memory.
        paths_share_links=emulated is None or paths_share_links(emulated.links, key.local_devices),
        curves={path: _no_slower_than_both(path, curve, curves) for path, curve in curves.items()},
    )


def _no_slower_than_both(path: PathId, curve: Curve, curves: Mapping[PathId, Curve]) -> Curve:
    """Limits the time of a push or pull alone to that of both together, which noise may exceed."""
    if path.kind not in (PUSH, PULL):
        return curve
    both = curves[replace(path, kind=BOTH)]
    pairs = zip(curve.points, both.points, strict=True)
    return Curve(points=tuple(min(pair, key=lambda point: point.time_us) for pair in pairs))
