"""torch.distributed's backend "coarse" (docs/design/torch-backend.md).

Example:
    >>> torch.distributed.init_process_group("coarse")  # with nothing of COARSE imported
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from coarse.env import Settings
from coarse.torch.backend.building import load_extension
from coarse.torch.backend.meeting import open_group
from coarse.torch.store import TorchStore


def create_backend(options: Any) -> Any:
    """The backend of one process group, as torch asks for it; collective over the ranks of the group.

    Args:
        options: torch's DistributedBackendOptions: store, rank, size, time-out and name of the group.

    Returns:
        A c10d Backend written in C++, compiled at first need.

    Raises:
        RendezvousError: If a rank is missing.
        WorkerLostError: If one dies meanwhile.
        BuildError: If the C++ backend cannot be compiled.
    """
    timeout = (
        options.timeout if isinstance(options.timeout, timedelta) else timedelta(seconds=options.timeout)
    )
    settings = Settings.from_environment()
    rank, size = options.group_rank, options.group_size
    collectives = open_group(
        TorchStore(options.store, prefix="coarse"),
        rank=rank,
        size=size,
        timeout_s=min(timeout.total_seconds(), settings.timeout_s),
        node=settings.node,
    )
    extension = load_extension(settings.torch_backend)
    return extension.create(collectives.capsule(), rank=rank, size=size, timeout=timeout)
