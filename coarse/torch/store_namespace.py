"""A separate part of a store for the current processes, if the store outlives processes.

The store of torchrun's agent keeps values from workers of earlier attempts, and from a destroyed group of the same
name. No number distinguishes attempts: once a worker has died, agents of several nodes count differently. So worker 0
draws a random name each time that the ranks meet, and sends it to every process that asks.
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
from coarse.rendezvous.workers import PROGRESS_INTERVAL_S, WorkerAddress
from coarse.torch.store import TorchStore

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05
_MOMENT_S = 1.0


@contextlib.contextmanager
def fresh_part(store: Any, *, prefix: str, rank: int, size: int, timeout_s: float) -> Iterator[TorchStore]:
    """A new, empty part of a torch store; collective over the ranks that meet in it.

    Other ranks get it as soon as rank 0 is present. Rank 0 admits them until it leaves the context, so all ranks must
    meet within the context.

    Args:
        store: The store that all ranks share.
        prefix: Common prefix of all namespaces of these ranks.
        rank, size: Rank of this process and number of ranks.
        timeout_s: How long to wait for rank 0.

    Raises:
        RendezvousError: If rank 0 does not arrive, or another process of this machine has the same `rank`.
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
    """Returns the number of processes that arrived as `rank`, with this one; checks that earlier ones are dead."""
    own = WorkerAddress.of_this_process()
    number = door.add(f"came/{rank}", 1)
    door.set(f"address/{rank}/{number}", json.dumps(asdict(own)).encode())
    if number > 1:
        with contextlib.suppress(TimeoutError):  # it was killed before it could identify itself
            before = WorkerAddress(**json.loads(door.get(f"address/{rank}/{number - 1}", _MOMENT_S)))
            if before != own and before.lives_here():
                raise RendezvousError(
                    f"worker {rank}: another process has already joined as rank {rank} (pid {before.pid}). "
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
        f"worker {rank}: worker 0 did not join within {timeout_s:.1f} s. Start it, or find out why it ended."
    )


def _tell(door: TorchStore, name: str, size: int, is_over: threading.Event) -> None:
    """Sends the name to every process that arrives, also to a successor of a dead process of the same rank."""
    told = dict.fromkeys(range(1, size), 0)
    pause_s = _FIRST_PAUSE_S
    with contextlib.suppress(
        RuntimeError, RendezvousError
    ):  # the store is gone; processes that need it get an error
        while not is_over.wait(pause_s):
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            for rank in told:
                if (number := door.add(f"came/{rank}", 0)) > told[rank]:
                    door.set(f"name/{rank}/{number}", name.encode())
                    told[rank] = number
                    pause_s = _FIRST_PAUSE_S
