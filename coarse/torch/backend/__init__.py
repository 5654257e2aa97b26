"""torch.distributed's backend "coarse" (docs/design/torch-backend.md).

Example:
    >>> torch.distributed.init_process_group("coarse")  # without importing COARSE
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

# A group's time-out applies to its operations; processes may need longer for the initial meeting.
_LEAST_MEETING_S = 30.0


def create_backend(options: Any) -> Any:
    """Creates the backend of one process group for torch; collective over the ranks of the group.

    Args:
        options: torch's DistributedBackendOptions: store, rank, size, time-out and name of the group.

    Returns:
        A c10d Backend written in C++, compiled at first use.

    Raises:
        RendezvousError: If a rank is missing.
        BackendBuildError: If a rank has no working C++ compiler.
        WorkerLostError: If a rank dies meanwhile.
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
    # A launcher's store outlives groups: keys of an earlier group of the same ranks must not be reused.
    with fresh_part(
        options.store, prefix=prefix, rank=rank, size=size, timeout_s=settings.timeout_s
    ) as store:
        collectives, extension = open_group(store, rank=rank, size=size, settings=settings)
    return extension.create(collectives.capsule(), rank=rank, size=size, timeout=timeout)


def _prefix(ranks: Sequence[int]) -> str:
    """Prefix of a group's keys in its store.

    torch names groups by the number that a rank has created. So groups of different ranks, such as sub-groups of
    sub-groups, can have the same name and store at the same time.
    """
    return f"coarse/{hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]}"
