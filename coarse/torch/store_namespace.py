"""A part of a store for the processes that are there now, where the store outlives processes.

The store of torchrun's agent keeps what workers of earlier attempts have set, and those of a group of the same name
that was destroyed. No number tells attempts apart: once a worker has died, agents of several nodes count differently.
So worker 0 draws a name for each meeting, and tells it to everybody who asks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from coarse.errors import RendezvousError
from coarse.rendezvous import PROGRESS_INTERVAL_S, WorkerAddress
from coarse.torch.store import TorchStore

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05
_MOMENT_S = 1.0


@contextlib.contextmanager
def fresh_part(store: Any, *, prefix: str, rank: int, size: int, timeout_s: float) -> Iterator[TorchStore]:
    """A part of a torch store in which nothing was set before; collective over the ranks that meet in it.

    Other ranks get it as soon as rank 0 is there, which lets them in for as long as the context lasts. Within it all
    have to meet.

    Args:
        store: What all have in common.
        prefix: Of this meeting and of earlier ones of the same ranks.
        rank, size: Who this process is.
        timeout_s: How long to wait for rank 0.

    Raises:
        RendezvousError: If rank 0 does not come, or another process of this machine is here as `rank`.
    """
    door = TorchStore(store, prefix=f"{prefix}/door", timeout_s=timeout_s)
    number = _come(door, rank)
    if rank != 0:
        name = _ask(door, rank, number, timeout_s)
        yield TorchStore(store, prefix=f"{prefix}/{name}", timeout_s=timeout_s)
        return
    name, is_over = secrets.token_hex(8), threading.Event()
    telling = threading.Thread(target=_tell, args=(door, name, size, is_over), daemon=True)
    telling.start()
    try:
        yield TorchStore(store, prefix=f"{prefix}/{name}", timeout_s=timeout_s)
    finally:
        is_over.set()
        telling.join()


def _come(door: TorchStore, rank: int) -> int:
    """How many processes have come as `rank`, with this one. Those before it must be dead, as far as one can see."""
    own = WorkerAddress.of_this_process()
    number = door.add(f"came/{rank}", 1)
    door.set(f"address/{rank}/{number}", json.dumps(asdict(own)).encode())
    if number > 1:
        with contextlib.suppress(TimeoutError):  # it was killed before it could say who it is
            before = WorkerAddress(**json.loads(door.get(f"address/{rank}/{number - 1}", _MOMENT_S)))
            if before != own and before.lives_here():
                raise RendezvousError(
                    f"worker {rank}: another process has joined as rank {rank} already (pid {before.pid}). "
                    "Give each process its own RANK."
                )
    return number


def _ask(door: TorchStore, rank: int, number: int, timeout_s: float) -> str:
    started = time.monotonic()
    while (left_s := started + timeout_s - time.monotonic()) > 0:
        try:
            return door.get(f"name/{rank}/{number}", min(left_s, PROGRESS_INTERVAL_S)).decode()
        except TimeoutError:
            waited_s = time.monotonic() - started
            logger.warning("[w%s] %.0f s: waiting for worker 0", rank, waited_s)
    raise RendezvousError(
        f"worker {rank}: after {timeout_s:.1f} s worker 0 has not come. Start it, or look at why it ended."
    )


def _tell(door: TorchStore, name: str, size: int, is_over: threading.Event) -> None:
    """Whoever comes is told, also after another one of its rank, who is dead."""
    told = dict.fromkeys(range(1, size), 0)
    pause_s = _FIRST_PAUSE_S
    with contextlib.suppress(
        RuntimeError, RendezvousError
    ):  # the store is gone, and whoever needs it hears of that
        while not is_over.wait(pause_s):
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            for rank in told:
                if (number := door.add(f"came/{rank}", 0)) > told[rank]:
                    door.set(f"name/{rank}/{number}", name.encode())
                    told[rank] = number
                    pause_s = _FIRST_PAUSE_S
