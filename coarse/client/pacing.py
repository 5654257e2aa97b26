"""How exact the links of an emulated session are (docs/design/emulation.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingReport:
    """Arrivals at all memory devices of the node so far.

    Args:
        num_arrivals: Transfers that have arrived.
        mean_lateness_us: How long after they were due this was noticed, in time of the host.
    """

    num_arrivals: int
    mean_lateness_us: float


class LoggedTransfer(NamedTuple):
    """One transfer as emulated links served it; times in the machine's microseconds since the session started.

    `source` and `target` are endpoints: workers by client number, then memory devices (coarse.machine.links).
    """

    source: int
    target: int
    shard: int
    """Of the group that was being synchronised; 0 for probes."""
    nbytes: int
    requested_us: float
    begin_us: float
    """When the last of the capacities that it shares with others started on it."""
    due_us: float


class ServedTransfer(NamedTuple):
    """How long the links of its way were at one transfer, each from when it began on it until it was through.

    Times in the machine's microseconds. What the transfer waited for others before that is not in them, so a link
    that is busy looks no worse than one that is idle. Endpoints and buckets as in coarse.machine.links.
    """

    source: int
    target: int
    nbytes: int
    end_us: float
    latency_us: float
    service_us: list[tuple[int, float]]
    """By bucket."""
