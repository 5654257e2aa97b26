"""How exact the links of an emulated session are (docs/design/emulation.md)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingReport:
    """Arrivals at all memory devices of the node so far.

    Args:
        num_arrivals: Transfers that have arrived.
        mean_lateness_us: How long after they were due this was noticed, in time of the host.
    """

    num_arrivals: int
    mean_lateness_us: float
