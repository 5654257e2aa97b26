"""Pacing accuracy of the links of an emulated session (docs/design/emulation.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingReport:
    """Arrivals at all memory devices of the job so far.

    Args:
        num_arrivals: Transfers that have arrived.
        mean_lateness_us: Mean delay between the due time and its detection, in host time.
    """

    num_arrivals: int
    mean_lateness_us: float


class LoggedTransfer(NamedTuple):
    """One transfer as emulated links served it; times in the machine's microseconds since the session started.

    `source` and `target` are endpoints: workers by client number, then memory devices (coarse.machine.links). With
    several nodes they are those of all nodes (coarse.machine.wiring).
    """

    source: int
    target: int
    shard: int
    """Number of the group; 0 for probes."""
    nbytes: int
    requested_us: float
    begin_us: float
    """When the last of its shared capacities started to serve it."""
    due_us: float


class ServedTransfer(NamedTuple):
    """Service times of one transfer on the links of its path, each from start to end on that link.

    In the machine's microseconds, without queueing time, so a busy link looks no slower than an idle one. Endpoints
    and buckets as in coarse.machine.links.
    """

    source: int
    target: int
    nbytes: int
    end_us: float
    latency_us: float
    service_us: list[tuple[int, float]]
    """Service time by bucket."""
