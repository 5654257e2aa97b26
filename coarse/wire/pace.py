"""Shares a node's processors between its workers and sync cores."""

from __future__ import annotations

from dataclasses import dataclass, replace

from coarse.machine.host import count_granted_cores
from coarse.settings import Settings

_MOST_DEFAULT_SYNC_CORES = 4


def count_sync_cores(settings: Settings, num_devices: int, num_workers: int) -> int:
    """Sync cores per memory device: by default an even share of the cores that workers leave, at least one.

    One in an emulated session, because a device's first sync core does all of the work there.
    """
    if settings.machine:
        return settings.sync_cores or 1
    spare = count_granted_cores() - num_workers
    return settings.sync_cores or max(1, min(_MOST_DEFAULT_SYNC_CORES, spare // num_devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How workers and sync cores of a node share its processors.

    Args:
        spin_us: How long a wait polls for its result before it sleeps.
        bytes_per_ring: A worker wakes a memory device once for this many pushed bytes.
    """

    spin_us: int
    bytes_per_ring: int


def choose_pace(settings: Settings, num_devices: int, num_workers: int) -> Pace:
    """Frequent wake-ups if every worker and sync core has a processor, rare ones if they compete for processors.

    With spare processors, a device that is woken early reduces while its workers still compute. Without, each
    wake-up interrupts a worker, and reducing later costs nothing: BERT-base on two cores spent 40 ms of a step
    in synchronisation with a wake-up per MiB, 20 ms with one per 16 MiB.
    """
    num_threads = num_workers + num_devices * count_sync_cores(settings, num_devices, num_workers)
    is_shared = num_threads > count_granted_cores()
    pace = _SPARING if is_shared else _EAGER
    if settings.machine:
        pace = replace(
            pace, bytes_per_ring=1
        )  # emulated links start when a push is posted, not when the device notices it
    return pace if settings.spin_us < 0 else replace(pace, spin_us=settings.spin_us)


_EAGER = Pace(spin_us=100, bytes_per_ring=1 << 20)
_SPARING = Pace(spin_us=30, bytes_per_ring=16 << 20)
