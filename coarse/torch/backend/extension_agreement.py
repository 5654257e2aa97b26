"""All ranks of a process group need the C++ backend: they compile it, and fail together if one cannot."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from coarse.errors import BackendBuildError, RendezvousError
from coarse.rendezvous.workers import PROGRESS_INTERVAL_S, PeerWatch
from coarse.torch.backend.building import COMPILE_LIMIT_S, BuildError, load_extension

if TYPE_CHECKING:
    from coarse.store import Store

logger = logging.getLogger(__name__)


def agree_on_extension(store: Store, watch: PeerWatch, *, rank: int, size: int, timeout_s: float) -> Any:
    """Returns the C++ backend as a module; collective over the group.

    Compiles it if necessary, which may delay a rank by a minute.

    Raises:
        BackendBuildError: On all ranks, if one cannot compile it; names the rank and the reason.
        RendezvousError: If a rank does not report in time.
        WorkerLostError: If a rank dies meanwhile.
    """
    extension, obstacle = None, ""
    try:
        extension = load_extension()
    except BuildError as error:
        obstacle = str(error)
    store.set(f"backend/{rank}", obstacle.encode())
    deadline = time.monotonic() + timeout_s + COMPILE_LIMIT_S
    found = [_obstacle_of(peer, store, watch, rank=rank, deadline=deadline) for peer in range(size)]
    obstacles = {peer: reason for peer, reason in enumerate(found) if reason}
    if obstacles:
        # A rank names its own obstacle first: its user can act on it at once.
        peer = rank if rank in obstacles else min(obstacles)
        raise BackendBuildError(f"rank {peer} cannot compile the torch backend: {obstacles[peer]}")
    return extension


def _obstacle_of(peer: int, store: Store, watch: PeerWatch, *, rank: int, deadline: float) -> str:
    """The reason why a rank has no C++ backend; "" if it has one."""
    started = time.monotonic()
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            return watch.get(store, f"backend/{peer}", min(left_s, PROGRESS_INTERVAL_S)).decode()
        except TimeoutError:
            waited_s = time.monotonic() - started
            logger.warning(
                "[w%s] %.0f s: waiting for rank %s, which is compiling the torch backend (about a minute)",
                *(rank, waited_s, peer),
            )
    raise RendezvousError(
        f"rank {rank}: rank {peer} has joined, but its torch backend was not ready after "
        f"{time.monotonic() - started:.0f} s. Look at its output: its compiler may hang."
    )
