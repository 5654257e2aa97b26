"""Checks, before any process starts, that a machine can run a scheme, and this host the job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coarse.bench.harness.job_memory import require_memory
from coarse.bench.replay.trace import ComputeTrace
from coarse.emulation.machine import choose_emulation
from coarse.errors import RendezvousError
from coarse.machine.partition_table import choose_partition_table
from coarse.session_parts.checks import check_nodes
from coarse.settings import Settings


def require_links(scheme: str, num_workers: int, num_nodes: int, settings: Mapping[str, Any]) -> None:
    """Refuses workers and memory devices that the machine does not have, and a scheme that works on one node alone.

    Args:
        scheme: Its name, for the error.
        num_workers: Number of workers on all nodes.
        num_nodes: Number of equal machines.
        settings: As of the scheme's workers: machine, time_dilation, memory_devices, partition_table, algorithm,
            dense, dual_sync.

    Raises:
        ValueError: If there is one worker only, a file is wrong, the machine has too few places, or there are several
            nodes and the machine has no network, or the scheme does not work over them.
    """
    if num_workers < 2:
        raise ValueError("one worker has nothing to synchronise: replay at least two (--workers)")
    try:
        table = choose_partition_table(
            settings["partition_table"],
            num_workers=num_workers // num_nodes,
            devices=int(settings["memory_devices"]),
        )
        choose_emulation(
            settings["machine"],
            table,
            time_dilation=settings["time_dilation"],
            dense=settings.get("dense", ""),
        )
        chosen = {
            name: settings[name]
            for name in ("machine", "algorithm", "dense", "dual_sync")
            if name in settings
        }
        check_nodes(Settings(**chosen), num_nodes)
    except (ValueError, RendezvousError) as error:
        raise ValueError(f"scheme {scheme}: {error}") from None


def require_room(trace: ComputeTrace, num_workers: int) -> None:
    """Refuses a model whose gradients do not fit into this host's memory, where those of all workers lie.

    Raises:
        BenchError: If they do not fit.
    """
    require_memory(
        num_workers * trace.nbytes,
        f"{num_workers} workers that replay {trace.model} push gradients of",
        "Choose a smaller model or fewer workers.",
    )
