"""Link performance from timings of real traffic (COARSE paper, section III-E; docs/design/planning.md)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from coarse.profiler.curve import CurvePoint
from coarse.profiler.profile import BOTH, PathId, Profile

if TYPE_CHECKING:
    from coarse.emulation.pacing import ServedTransfer

NEAR_FACTOR = 4
"""Traffic is evidence for sizes up to this factor larger or smaller than its own."""

Times = Mapping[PathId, Mapping[int, float]]
"""Microseconds by path and size in bytes."""


def times_of_traffic(
    served: Collection[ServedTransfer], sizes: Sequence[int], *, num_workers: int, num_devices: int
) -> dict[PathId, dict[int, float]]:
    """The time of both directions at once for each of `sizes`, from transfers of about that size.

    Combines a push and a pull by their service times on links: a link that both use serves them one after the other;
    other links serve them at the same time. Pairs the newest transfers; the result is the median of all pairs,
    without outliers.

    Args:
        served: The newest transfers, with endpoints as in coarse.machine.links.
        sizes: Sizes in bytes.
        num_workers, num_devices: Workers and memory devices of the node.

    Returns:
        Times by path and size; only for paths with traffic in both directions.
    """
    newest = sorted(served, key=lambda transfer: transfer.end_us, reverse=True)
    times: dict[PathId, dict[int, float]] = {}
    for worker in range(num_workers):
        for device in range(num_devices):
            ends = (worker, num_workers + device)
            pushes = [each for each in newest if (each.source, each.target) == ends]
            pulls = [each for each in newest if (each.target, each.source) == ends]
            for size in sizes:
                pairs = zip(_near(pushes, size), _near(pulls, size), strict=False)
                pair_times = [_both_us(push, pull, size) for push, pull in pairs]
                if pair_times:
                    path = PathId(kind=BOTH, source=worker, target=device)
                    times.setdefault(path, {})[size] = CurvePoint.from_repeats(size, pair_times).time_us
    return times


class TrafficGauge:
    """Estimates from traffic the times that probes of the same links would measure now.

    Traffic is timed at the links; probes are timed by the waiting worker, including its own delays. Therefore traffic
    gives the change of a time since the last check, and that check's probe gives the time itself. Thus a route in use
    looks neither better nor worse than an idle one as long as its link does not change.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[PathId, int], float] = {}

    def read(self, profile: Profile, traffic: Times) -> dict[PathId, dict[int, float]]:
        """The times that traffic alone gives.

        Args:
            profile: The profile after the last check.
            traffic: Result of times_of_traffic() since then.

        Returns:
            Times of the paths and sizes that also had traffic before the last check. All others need probes.
        """
        found: dict[PathId, dict[int, float]] = {}
        for path, times in traffic.items():
            for size, time_us in times.items():
                last_us = self._last.get((path, size))
                if last_us is not None:
                    level_us = profile.curves[path].time_us(size)
                    found.setdefault(path, {})[size] = level_us * time_us / last_us
        return found

    def look_done(self, traffic: Times) -> None:
        """Stores the traffic times at the renewal of the profile."""
        self._last = {
            (path, size): time_us for path, times in traffic.items() for size, time_us in times.items()
        }


def _near(transfers: Sequence[ServedTransfer], size: int) -> list[ServedTransfer]:
    return [
        each for each in transfers if size <= NEAR_FACTOR * each.nbytes and each.nbytes <= NEAR_FACTOR * size
    ]


def _both_us(push: ServedTransfer, pull: ServedTransfer, size: int) -> float:
    """Time until `size` bytes have arrived at both ends."""
    service_us: dict[int, float] = {}
    for transfer in (push, pull):
        for bucket, time_us in transfer.service_us:
            service_us[bucket] = service_us.get(bucket, 0.0) + time_us * size / transfer.nbytes
    return max(push.latency_us, pull.latency_us) + max(service_us.values(), default=0.0)
