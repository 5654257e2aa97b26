"""Whether a process group runs in C++ or in Python: all its ranks do alike, for the two make different calls."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from coarse.errors import RendezvousError, SettingsError
from coarse.rendezvous import PROGRESS_INTERVAL_S, PeerWatch
from coarse.settings import Settings
from coarse.torch.backend.building import COMPILE_LIMIT_S, BuildError, load_extension

if TYPE_CHECKING:
    from coarse.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """What one rank can have.

    Args:
        wanted: Its COARSE_TORCH_BACKEND.
        obstacle: Why it cannot have the C++ backend; "" if it has it.
    """

    wanted: str
    obstacle: str


def choose_extension(store: Store, watch: PeerWatch, *, rank: int, size: int, settings: Settings) -> Any:
    """The C++ backend as a module, or None where not all ranks have it; collective over the group.

    Compiles it if need be, which may take one rank a minute more than the others. Whoever runs in Python instead of
    what it could have says why.

    Raises:
        SettingsError: On all ranks, if COARSE_TORCH_BACKEND=native on one and the C++ backend cannot be had on one.
        RendezvousError: If a rank does not say in time what it can have.
        WorkerLostError: If one dies meanwhile.
    """
    extension, obstacle = None, ""
    try:
        extension = load_extension(settings.torch_backend)
    except BuildError as error:
        obstacle = str(error)
    own = _Offer(wanted=settings.torch_backend, obstacle=obstacle)
    store.set(f"backend/{rank}", json.dumps(asdict(own)).encode())
    deadline = time.monotonic() + settings.timeout_s + COMPILE_LIMIT_S
    offers = [_offer_of(peer, store, watch, rank=rank, deadline=deadline) for peer in range(size)]
    obstacles = {peer: offer.obstacle for peer, offer in enumerate(offers) if offer.obstacle}
    if not obstacles:
        return extension
    # Its own obstacle is what a user can do something about at once.
    peer = rank if rank in obstacles else min(obstacles)
    reason = obstacles[peer] if peer == rank else f"rank {peer} cannot have the one in C++: {obstacles[peer]}"
    if insists := [str(peer) for peer, offer in enumerate(offers) if offer.wanted == "native"]:
        raise SettingsError(
            f"rank {rank}: COARSE_TORCH_BACKEND=native on rank(s) {', '.join(insists)}, but {reason}"
        )
    logger.warning("rank %s: the backend runs in Python, which is slower: %s", rank, reason)
    return None


def _offer_of(peer: int, store: Store, watch: PeerWatch, *, rank: int, deadline: float) -> _Offer:
    started = time.monotonic()
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            return _Offer(**json.loads(watch.get(store, f"backend/{peer}", min(left_s, PROGRESS_INTERVAL_S))))
        except TimeoutError:
            waited_s = time.monotonic() - started
            logger.warning(
                "[w%s] %.0f s: waiting for rank %s, which compiles the torch backend (about a minute)",
                *(rank, waited_s, peer),
            )
    raise RendezvousError(
        f"rank {rank}: rank {peer} has joined, but had no torch backend after {time.monotonic() - started:.0f} s. "
        "Look at its output: a compiler may hang there."
    )
