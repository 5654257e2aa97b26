"""Divides tensors between memory devices and direct all-reduce (COARSE paper, section III-F)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coarse.profiler.profile import DEVICES, WORKERS
from coarse.settings import parse_bytes

if TYPE_CHECKING:
    from coarse.profiler.curve import Curve
    from coarse.profiler.profile import Profile
    from coarse.profiler.routing import RoutingTable

OFF, AUTO = "off", "auto"

ALIKE_FRACTION = 0.01
"""Uncertainty of estimates: for a smaller gain, the tensors are not split."""

_SHARES = 16
"""Number of shares of all bytes that are tried for the memory devices."""

_BYTES_PER_S = 1e9  # for one GB/s


def parse_mode(text: str) -> str | int:
    """Reads "off", "auto", or a size in bytes such as "64MiB".

    Raises:
        ValueError: If it is anything else.
    """
    return (
        text if text in (OFF, AUTO) else parse_bytes(text, what="dual synchronisation (off, auto or a size)")
    )


def ring_factor(num_members: int) -> float:
    """Bytes that each member of a ring sends per reduced byte: 2 (p-1) / p."""
    return 2 * (num_members - 1) / num_members


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCosts:
    """Seconds to synchronise a byte, by either way.

    Args:
        proxy_s_per_byte: Through the memory devices; T_sync(proxy) = this * m.
        worker_s_per_byte: Among the workers; T_sync(GPU) = this * (n - m).
        shared: Links that both ways use, as (proxy, worker) seconds per byte of each; their times add up.

    Raises:
        ValueError: If a cost is negative or not finite.
    """

    proxy_s_per_byte: float
    worker_s_per_byte: float
    shared: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        costs = (
            self.proxy_s_per_byte,
            self.worker_s_per_byte,
            *(cost for pair in self.shared for cost in pair),
        )
        if not all(0 <= cost < math.inf for cost in costs):
            raise ValueError(f"the seconds per byte must be finite and at least 0: {self}")

    @classmethod
    def of_profile(cls, profile: Profile, tables: Sequence[RoutingTable], *, shard_bytes: int) -> SyncCosts:
        """From measured curves: bandwidths at the shard size, of the slowest link of each ring.

        The paper counts only the ring between proxies. Here pushes and pulls count, too: they run in parallel with
        the ring, so that the slower of the two limits the speed, or alternate with it if paths share links.

        Args:
            profile: Profile of the machine.
            tables: The routing table of each worker.
            shard_bytes: S'.
        """
        key = profile.key
        load = Counter(table.bw_proxy for table in tables)
        link = max(
            load[table.bw_proxy] * _s_per_byte(profile.both_at_once(worker)[table.bw_proxy], shard_bytes)
            for worker, table in enumerate(tables)
        )
        devices = _ring_s_per_byte(profile, DEVICES, key.num_devices, shard_bytes)
        workers = _ring_s_per_byte(profile, WORKERS, key.num_workers, shard_bytes)
        if profile.paths_share_links:
            return cls(
                proxy_s_per_byte=link + devices,
                worker_s_per_byte=workers,
                shared=((link + devices, workers),),
            )
        return cls(proxy_s_per_byte=max(link, devices), worker_s_per_byte=workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class DualSyncInputs:
    """A job's data for the estimate.

    Args:
        tensor_bytes: Size of each tensor, or of each shard, in push order: the last layers first. None of them is
            split.
        forward_s, backward_s: T_FP and T_BP, from the first iterations.
        costs: Costs of a byte by either way.
        ready_s: When each tensor is ready, in seconds of the backward pass, not decreasing in push order. None if
            unknown: the estimate is then the paper's.
        workers_compute: Whether the workers reduce on the processors that compute the backward pass, and after it.
            Otherwise the reduction overlaps with the backward pass.

    Raises:
        ValueError: If `tensor_bytes` is empty, a tensor is empty, or a time is negative or not finite; if tensors are
            ready out of order or after the backward pass.
    """

    tensor_bytes: tuple[int, ...]
    forward_s: float
    backward_s: float
    costs: SyncCosts
    ready_s: tuple[float, ...] | None = None
    workers_compute: bool = False

    def __post_init__(self) -> None:
        if not self.tensor_bytes or min(self.tensor_bytes) < 1:
            raise ValueError("dual synchronisation needs tensors of at least one byte each")
        if not (0 <= self.forward_s < math.inf and 0 <= self.backward_s < math.inf):
            raise ValueError(
                f"forward_s={self.forward_s} and backward_s={self.backward_s} must be finite and at least 0"
            )
        if self.ready_s is not None:
            moments = (0.0, *self.ready_s, self.backward_s)
            if len(self.ready_s) != len(self.tensor_bytes) or not all(a <= b for a, b in pairwise(moments)):
                raise ValueError(
                    f"ready_s must give the time when each of {len(self.tensor_bytes)} tensors is ready, in "
                    f"order, within the {self.backward_s} s of the backward pass"
                )

    @property
    def total_bytes(self) -> int:
        """n: bytes of all tensors."""
        return sum(self.tensor_bytes)

    def boundaries(self) -> tuple[int, ...]:
        """Every m at a tensor boundary, from 0 to n."""
        return (0, *accumulate(self.tensor_bytes))

    def train_s(self, m_bytes: float) -> float:
        """T_train if the first `m_bytes` bytes go to the memory devices.

        max(T_FP + T_BP + T_sync(GPU), T_FP + T_sync(proxy)), and at least the time that shared links need from the
        start of the backward pass.
        """
        return self.forward_s + max(fixed + slope * m_bytes for fixed, slope in self._lines())

    def timeline_s(self, offloaded: Collection[int]) -> float:
        """T_train from the tensors' ready times, if the memory devices synchronise the positions `offloaded`.

        Each way, and each link that both ways use, serves its tensors one after the other in push order, none before
        it is ready.

        Raises:
            ValueError: If `ready_s` is None.
        """
        if self.ready_s is None:
            raise ValueError("the times when tensors are ready are unknown")
        costs = self.costs
        ways = ((costs.proxy_s_per_byte, 0.0), (0.0, costs.worker_s_per_byte), *_greatest(costs.shared))
        nbytes, ready_s = np.array(self.tensor_bytes, dtype=np.float64), np.array(self.ready_s)
        to_devices = np.zeros(len(nbytes), dtype=bool)
        to_devices[list(offloaded)] = True
        device_bytes, worker_bytes = _from_each_on(nbytes * to_devices), _from_each_on(nbytes * ~to_devices)
        # A way's end is the largest, over all tensors, of the ready time plus the time of that and all later tensors.
        ends_s = (
            float(np.max(ready_s + proxy * device_bytes + worker * worker_bytes)) for proxy, worker in ways
        )
        return self.forward_s + max(self.backward_s, *ends_s)

    def spread(self, share: float) -> frozenset[int]:
        """Positions of tensors with at most `share` of all bytes, and at most that share of each prefix of the step.

        This keeps both ways busy during the whole backward pass.
        """
        chosen, chosen_bytes = [], 0
        for position, (nbytes, pushed_bytes) in enumerate(
            zip(self.tensor_bytes, accumulate(self.tensor_bytes), strict=True)
        ):
            if chosen_bytes + nbytes <= share * pushed_bytes:
                chosen.append(position)
                chosen_bytes += nbytes
        return frozenset(chosen)

    def workers_only_s(self) -> float:
        """T_train of the workers alone: an all-reduce by the workers that overlaps with the backward pass.

        The best case: bounded by the bytes on the link, and by the last tensor, which cannot overlap. If workers
        compute the reduction, nothing overlaps.
        """
        if self.workers_compute:
            return self.train_s(0)
        cost = self.costs.worker_s_per_byte
        return self.forward_s + max(self.backward_s + cost * self.tensor_bytes[-1], cost * self.total_bytes)

    def optimum_bytes(self) -> float:
        """The m that minimises T_train regardless of tensor boundaries; the largest of several.

        T_train is the maximum of a few straight lines in m, so its minimum lies at an end or where two of them cross.
        Without shared links, these are the paper's two lines, and
        m = (T_BP + g n) / (a + g) for costs a of a byte through the proxies and g among the workers.
        """
        total = self.total_bytes
        crossings = [
            (other_fixed - fixed) / (slope - other_slope)
            for (fixed, slope), (other_fixed, other_slope) in combinations(self._lines(), 2)
            if slope != other_slope
        ]
        candidates = [0.0, float(total), *(m for m in crossings if 0 < m < total)]
        return min(candidates, key=lambda m: (self.train_s(m), -m))

    def neighbours(self, m_bytes: float) -> tuple[int, int]:
        """The nearest tensor boundaries below and above `m_bytes`, or equal to it, as positions in boundaries()."""
        boundaries = self.boundaries()
        above = min(bisect_left(boundaries, m_bytes), len(boundaries) - 1)
        return (above if boundaries[above] <= m_bytes else above - 1), above

    def _lines(self) -> tuple[tuple[float, float], ...]:
        """The lines whose maximum is T_train - T_FP, as (seconds at m = 0, seconds per byte of m)."""
        total, costs = self.total_bytes, self.costs
        lines = [(self.backward_s + costs.worker_s_per_byte * total, -costs.worker_s_per_byte)]
        ways = ((costs.proxy_s_per_byte, 0.0), *costs.shared)
        lines += [(worker * total, proxy - worker) for proxy, worker in _greatest(ways)]
        return tuple(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class DualSyncPlan:
    """The division of tensors between memory devices and workers.

    Args:
        offloaded: Positions, in push order, of the tensors for the memory devices; the workers reduce the others
            by direct all-reduce.
        m_bytes: Bytes of the offloaded tensors.
        optimum_bytes: The m from the formula, before rounding to a tensor boundary.
        predicted_s: T_train of this plan.
        devices_only_s: T_train with m = n.
        workers_only_s: T_train of an all-reduce by the workers that overlaps with the backward pass.
        reason: Why, in words.
    """

    offloaded: frozenset[int]
    m_bytes: int
    optimum_bytes: float
    predicted_s: float
    devices_only_s: float
    workers_only_s: float
    reason: str

    @property
    def num_offloaded(self) -> int:
        """Number of tensors for the memory devices."""
        return len(self.offloaded)


def plan_dual_sync(
    inputs: DualSyncInputs, *, mode: str | int = AUTO, least_gain: float = 0.0
) -> DualSyncPlan:
    """Splits a step's tensors between memory devices and workers.

    A pure function: the same inputs give the same plan on every worker.

    Args:
        inputs: Sizes, times and costs.
        mode: "auto" for the estimate's optimum, or the workers alone if that is faster; "off" for no dual
            synchronisation: all tensors go through the memory devices; or m in bytes, rounded to a tensor boundary.
        least_gain: Fraction of the step that "auto" must save if the tensors' ready times are unknown; for less,
            all tensors go to the memory devices.

    Raises:
        ValueError: If the mode is unknown or a negative size.
    """
    if isinstance(mode, str) and mode not in (OFF, AUTO):
        raise ValueError(f"dual synchronisation {mode!r} must be off, auto or a size in bytes")
    if isinstance(mode, int) and mode < 0:
        raise ValueError(f"dual synchronisation cannot offload {mode} bytes")
    optimum = inputs.optimum_bytes()
    if mode == OFF:
        return _plan(inputs, len(inputs.tensor_bytes), optimum, "off: all tensors go to the memory devices")
    if isinstance(mode, int):
        return _plan(inputs, _round(inputs, mode), optimum, f"{mode} bytes were requested")
    if inputs.ready_s is not None:
        return _plan_by_timeline(inputs, optimum)
    chosen = _round(inputs, optimum)
    predicted_s, workers_only_s = inputs.train_s(inputs.boundaries()[chosen]), inputs.workers_only_s()
    if workers_only_s < predicted_s:
        why = (
            f"offloading does not pay: {_ms(predicted_s)} at best, {_ms(workers_only_s)} if the workers "
            "synchronise everything while they compute"
        )
        return _plan(inputs, 0, optimum, why, predicted_s=workers_only_s)
    devices_only_s = inputs.train_s(inputs.total_bytes)
    if chosen < len(inputs.tensor_bytes) and predicted_s > (1 - least_gain) * devices_only_s:
        why = (
            f"splitting does not pay: {_ms(predicted_s)} at best, {_ms(devices_only_s)} through memory devices "
            f"alone, and less than {least_gain:.0%} is not worth it"
        )
        return _plan(inputs, len(inputs.tensor_bytes), optimum, why)
    return _plan(inputs, chosen, optimum, _explain(inputs, chosen, predicted_s))


def _plan_by_timeline(inputs: DualSyncInputs, optimum_bytes: float) -> DualSyncPlan:
    everything, nothing = frozenset(range(len(inputs.tensor_bytes))), frozenset[int]()
    splits = [everything, nothing, *(inputs.spread(share / _SHARES) for share in range(1, _SHARES))]
    timelines_s = {split: inputs.timeline_s(split) for split in splits}
    alike_s = min(timelines_s.values()) * (1 + ALIKE_FRACTION)
    best = min(splits, key=timelines_s.__getitem__)
    chosen = next(split for split in (everything, nothing, best) if timelines_s[split] <= alike_s)
    predicted_s, devices_only_s, workers_only_s = (
        timelines_s[split] for split in (chosen, everything, nothing)
    )
    if chosen == nothing:
        why = (
            f"offloading does not pay: {_ms(predicted_s)} if the workers synchronise everything while they compute, "
            f"{_ms(devices_only_s)} through memory devices alone"
        )
    elif chosen == everything:
        why = f"the memory devices keep up with everything: {_ms(predicted_s)} a step"
    else:
        why = (
            f"{_ms(predicted_s)} a step, spread over the backward pass; {_ms(devices_only_s)} through memory devices "
            f"alone, {_ms(workers_only_s)} by the workers alone"
        )
    return DualSyncPlan(
        offloaded=chosen,
        m_bytes=sum(inputs.tensor_bytes[position] for position in chosen),
        optimum_bytes=optimum_bytes,
        predicted_s=predicted_s,
        devices_only_s=devices_only_s,
        workers_only_s=workers_only_s,
        reason=why,
    )


def _plan(
    inputs: DualSyncInputs,
    num_offloaded: int,
    optimum_bytes: float,
    reason: str,
    *,
    predicted_s: float | None = None,
) -> DualSyncPlan:
    m_bytes = inputs.boundaries()[num_offloaded]
    return DualSyncPlan(
        offloaded=frozenset(range(num_offloaded)),
        m_bytes=m_bytes,
        optimum_bytes=optimum_bytes,
        predicted_s=inputs.train_s(m_bytes) if predicted_s is None else predicted_s,
        devices_only_s=inputs.train_s(inputs.total_bytes),
        workers_only_s=inputs.workers_only_s(),
        reason=reason,
    )


def _round(inputs: DualSyncInputs, m_bytes: float) -> int:
    """The better of the two tensor boundaries around m, or the higher one if both are equal.

    T_train is convex in m, so no other boundary is better than the better one around the optimum.
    """
    boundaries = inputs.boundaries()
    below, above = inputs.neighbours(m_bytes)
    return min((above, below), key=lambda position: inputs.train_s(boundaries[position]))


def _explain(inputs: DualSyncInputs, chosen: int, predicted_s: float) -> str:
    if inputs.costs.proxy_s_per_byte == inputs.costs.worker_s_per_byte == 0:
        return "synchronising costs nothing: all tensors go to the memory devices"
    if chosen == len(inputs.tensor_bytes):
        return f"the memory devices keep up with everything: {_ms(predicted_s)} a step"
    saved_s = inputs.train_s(inputs.total_bytes) - predicted_s
    return f"both finish together: {_ms(predicted_s)} a step, {_ms(saved_s)} less than through memory devices alone"


def _from_each_on(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum of each value and all later ones."""
    return np.cumsum(values[::-1])[::-1]


def _greatest(ways: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The ways that no other exceeds in both parts; other ways never limit the speed."""
    best_worker = -math.inf
    for proxy, worker in sorted(set(ways), reverse=True):
        if worker > best_worker:
            best_worker = worker
            yield proxy, worker


def _ring_s_per_byte(profile: Profile, kind: str, num_members: int, shard_bytes: int) -> float:
    links = [
        profile.curve(kind, member, (member + 1) % num_members)
        for member in range(num_members)
        if num_members > 1
    ]
    slowest = max((_s_per_byte(curve, shard_bytes) for curve in links), default=0.0)
    return ring_factor(num_members) * slowest


def _s_per_byte(curve: Curve, nbytes: int) -> float:
    return 1 / (curve.gbytes_per_s(nbytes) * _BYTES_PER_S)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
