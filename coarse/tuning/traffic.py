"""Timings of real traffic as evidence of what links carry (COARSE paper, section III-E; docs/design/planning.md)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from coarse.profiler.curve import CurvePoint
from coarse.profiler.profile import BOTH, PathId, Profile

if TYPE_CHECKING:
    from coarse.client.pacing import ServedTransfer

NEAR_FACTOR = 4
"""Traffic tells of sizes up to so many times larger or smaller than its own."""

Times = Mapping[PathId, Mapping[int, float]]
"""Microseconds by path and size in bytes."""


def times_of_traffic(
    served: Collection[ServedTransfer], sizes: Sequence[int], *, num_workers: int, num_devices: int
) -> dict[PathId, dict[int, float]]:
    """How long both directions at once take for each of `sizes`, by transfers of about that size.

    A push and a pull are put together as the links were at them: a link that both pass is at them one after the
    other, others side by side. The newest go with each other, and the median of all such pairs counts, without
    outliers.

    Args:
        served: The newest transfers, with ends as in coarse.machine.links.
        sizes: In bytes.
        num_workers, num_devices: Of the node.

    Returns:
        By path and size; only where there was traffic both ways.
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
    """Reads from traffic what probes of the same links would find now.

    Traffic is timed at the links, probes by the worker that waits for them, whose own delays come on top. So traffic
    tells by how much a time has changed since the last look, and a probe of that look how long it was: a route that
    is in use looks neither better nor worse than one that is idle as long as its link stays as it is.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[PathId, int], float] = {}

    def read(self, profile: Profile, traffic: Times) -> dict[PathId, dict[int, float]]:
        """The times that traffic alone tells.

        Args:
            profile: As it was after the last look.
            traffic: Of times_of_traffic() since then.

        Returns:
            Of the paths and sizes that had traffic before the last look too. All others are to be probed.
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
        """Keeps what traffic was like when the profile was renewed."""
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
