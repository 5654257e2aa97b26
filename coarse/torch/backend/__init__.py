"""torch.distributed's backend "coarse" (docs/design/torch-backend.md).

Example:
    >>> torch.distributed.init_process_group("coarse")  # with nothing of COARSE imported
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from coarse.settings import Settings
from coarse.torch.backend.rank_rendezvous import open_group
from coarse.torch.store_namespace import fresh_part

# A group's time-out is of its operations; processes may take longer to come together, once.
_LEAST_MEETING_S = 30.0


def create_backend(options: Any) -> Any:
    """The backend of one process group, as torch asks for it; collective over the ranks of the group.

    Args:
        options: torch's DistributedBackendOptions: store, rank, size, time-out and name of the group.

    Returns:
        A c10d Backend written in C++, compiled at first use.

    Raises:
        RendezvousError: If a rank is missing.
        BackendBuildError: If a rank has no working C++ compiler.
        WorkerLostError: If one dies meanwhile.
    """
    timeout = (
        options.timeout if isinstance(options.timeout, timedelta) else timedelta(seconds=options.timeout)
    )
    settings = Settings.from_environment()
    rank, size = options.group_rank, options.group_size
    settings = replace(
        settings, timeout_s=min(max(timeout.total_seconds(), _LEAST_MEETING_S), settings.timeout_s)
    )
    prefix = _prefix(options.global_ranks_in_group)
    # A launcher's store outlives groups: keys of an earlier one of the same ranks must not be taken for ours.
    with fresh_part(
        options.store, prefix=prefix, rank=rank, size=size, timeout_s=settings.timeout_s
    ) as store:
        collectives, extension = open_group(store, rank=rank, size=size, settings=settings)
    return extension.create(collectives.capsule(), rank=rank, size=size, timeout=timeout)


def _prefix(ranks: Sequence[int]) -> str:
    """Of a group's keys in its store. torch names groups by how many a rank has made, so that groups of different
    ranks can have the same name, and store, at once: as sub-groups of sub-groups have."""
    return f"coarse/{hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]}"
