"""The default process group of a worker that takes the place of a lost one: torch's own cannot take new members."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_BACKEND = "coarse_newcomer"


class NewcomerGroup(dist.ProcessGroup):  # type: ignore[misc]
    """Has a rank and a size. Collectives raise, as those of the other workers do after a loss."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)

    def getBackendName(self) -> str:  # noqa: N802, torch's name
        """The name under which torch knows the backend."""
        return _BACKEND


def make_group_of_newcomer(rank: int, size: int) -> None:
    """Creates torch's default process group without any connection."""
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, _create, devices=["cpu"])
    dist.init_process_group(_BACKEND, store=dist.HashStore(), rank=rank, world_size=size)


def _create(store: Any, rank: int, size: int, timeout: Any) -> NewcomerGroup:
    del store, timeout
    return NewcomerGroup(rank, size)
