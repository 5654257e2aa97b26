"""What leases would give a worker's cache of parameters, which the runtime invalidates by one counter.

Each step a worker writes its gradient, a memory device updates a share of the parameters, and the worker reads all of
them. One line stands for a shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice

from coarse.simulator.studies.coherence.fig_4_2 import finish
from coarse.simulator.studies.coherence.operations import Shape
from coarse.simulator.studies.coherence.protocols.mgcc import REPAIRED, Mgcc, Rules
from coarse.simulator.studies.study import StateTable

SHARDS, STEPS, SHARES = 64, 40, (1.0, 0.5, 0.1, 0.02)

_DEVICE, _WORKER = 0, 1
_SHAPE = Shape(num_gpus=2, cus_per_gpu=1, l1_sets=1, l1_ways=2 * SHARDS, l2_sets=1, l2_ways=2 * SHARDS)


@dataclass(frozen=True, slots=True)
class Reads:
    """A worker's reads of all parameters in all steps.

    Args:
        fetched: Shards fetched, for each step.
        stale: Share of reads that returned a value older than the last update.
        largest_lag: Largest number of steps by which such a value was too old.
    """

    fetched: float
    stale: float
    largest_lag: int


def lease_reads(share: float, rules: Rules = REPAIRED) -> Reads:
    """Under MGCC, worker and memory device in different GPUs.

    Args:
        share: Of the shards that each step updates, in turn.
        rules: The protocol.
    """
    protocol = Mgcc(_SHAPE, rules)
    written, lags = [0] * SHARDS, []
    for step, updated in enumerate(_updates(share), 1):
        finish(protocol.write(_WORKER, SHARDS, step))
        finish(protocol.read(_DEVICE, SHARDS))
        for shard in updated:
            finish(protocol.write(_DEVICE, shard, step))
            written[shard] = step
        values = [finish(protocol.read(_WORKER, shard))[0] for shard in range(SHARDS)]
        lags += [step - value if value != last else 0 for value, last in zip(values, written, strict=True)]
    misses = protocol.l1[_WORKER].cache.misses - STEPS  # its own writes look for the line of the gradient
    return Reads(misses / STEPS, sum(lag > 0 for lag in lags) / len(lags), max(lags))


def _updates(share: float) -> Iterator[list[int]]:
    """The shards of each step."""
    shards = cycle(range(SHARDS))
    for _ in range(STEPS):
        yield list(islice(shards, max(1, round(share * SHARDS))))


def table() -> StateTable:
    """Leases and the runtime's counter, by the share of parameters that a step updates."""

    def row(share: float) -> tuple[str, ...]:
        lease = lease_reads(share)
        return (
            f"{share:.0%}",
            str(SHARDS),
            f"{lease.fetched:.1f}",
            f"{lease.stale:.0%}",
            str(lease.largest_lag),
        )

    return StateTable(
        title=f"A worker's reads of {SHARDS} shards in each step: one counter (staleness 0), and leases",
        columns=(
            "updated",
            "fetched, counter",
            "fetched, leases",
            "stale reads, leases",
            "largest lag, steps",
        ),
        rows=[row(share) for share in SHARES],
    )
