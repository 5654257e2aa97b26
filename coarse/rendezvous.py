"""How the workers of a job find each other, before anything is shared (docs/design/bootstrap.md)."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from coarse.env import WorkerIdentity
from coarse.errors import RendezvousError
from coarse.store import Store

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 5.0


def host_identity() -> str:
    """The same for processes that can share memory and files: same boot, same mount namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/mnt').st_ino}"


def gather_workers(identity: WorkerIdentity, store: Store, *, timeout_s: float) -> list[str]:
    """Waits until every worker of the job has come.

    Says every five seconds who is there and who is missing.

    Returns:
        The host of each worker, by rank.

    Raises:
        RendezvousError: If another process has this rank, or somebody is missing after `timeout_s` seconds.
    """
    if store.add(f"taken/{identity.rank}", 1) > 1:
        raise RendezvousError(
            f"worker {identity.rank}: another process has joined as rank {identity.rank} already. "
            "Give each process its own RANK."
        )
    announcement = {"host": host_identity(), "world_size": identity.world_size}
    store.set(f"worker/{identity.rank}", json.dumps(announcement).encode())
    announcements = _collect(identity, store, timeout_s)
    for rank, other in enumerate(announcements):
        if other["world_size"] != identity.world_size:
            raise RendezvousError(
                f"worker {identity.rank} has WORLD_SIZE={identity.world_size}, worker {rank} has "
                f"{other['world_size']}. Start all workers of a job with the same number."
            )
    return [str(other["host"]) for other in announcements]


def check_single_node(hosts: Sequence[str]) -> None:
    """Makes sure that all workers can share memory.

    Raises:
        RendezvousError: If they are spread over several nodes.
    """
    if len(set(hosts)) > 1:
        raise RendezvousError(
            f"the workers run on {len(set(hosts))} nodes or containers that share no memory; this version "
            "synchronises workers of one node. Start them on one, or use torch DDP across nodes."
        )


def _collect(identity: WorkerIdentity, store: Store, timeout_s: float) -> list[dict[str, object]]:
    started = time.monotonic()
    found: dict[int, dict[str, object]] = {}
    next_report = started + PROGRESS_INTERVAL_S
    while True:
        missing = [rank for rank in range(identity.world_size) if rank not in found]
        if not missing:
            return [found[rank] for rank in range(identity.world_size)]
        now = time.monotonic()
        if now - started > timeout_s:
            raise RendezvousError(
                f"worker {identity.rank}: after {now - started:.1f} s {_roll_call(found, missing)}. "
                "Start the missing ones, or look at why they ended."
            )
        if now >= next_report:
            next_report = now + PROGRESS_INTERVAL_S
            logger.warning("[w%s] %.0f s: %s", identity.rank, now - started, _roll_call(found, missing))
        wait_s = max(0.01, min(next_report, started + timeout_s) - now)
        try:
            found[missing[0]] = json.loads(store.get(f"worker/{missing[0]}", wait_s))
        except TimeoutError:
            _take_what_is_there(store, missing, found)


def _take_what_is_there(store: Store, missing: list[int], found: dict[int, dict[str, object]]) -> None:
    for rank in missing:
        try:
            found[rank] = json.loads(store.get(f"worker/{rank}", 0.01))
        except TimeoutError:
            continue


def _roll_call(found: dict[int, dict[str, object]], missing: list[int]) -> str:
    here = ", ".join(map(str, sorted(found))) or "none"
    return f"workers {here} have joined, waiting for {', '.join(map(str, missing))}"
