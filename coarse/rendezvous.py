"""How the workers of a job find each other, before anything is shared (docs/design/bootstrap.md)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from coarse.env import WorkerIdentity
from coarse.errors import RendezvousError, WorkerLostError
from coarse.store import Store

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 5.0
_LOOK_INTERVAL_S = 0.25  # how often a wait for one worker looks at whether the others still live


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAddress:
    """Where a worker runs.

    Args:
        host: Equal for workers that can share memory.
        pid: Its process on that host.
        started: When that process started, in the kernel's units: tells it from a later one of the same number.
    """

    host: str
    pid: int
    started: int

    @classmethod
    def of_this_process(cls) -> WorkerAddress:
        return cls(host=host_identity(), pid=os.getpid(), started=_start_time(os.getpid()))


def host_identity() -> str:
    """The same for processes that can share memory and files: same boot, same mount and process namespaces."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "/".join([boot, *(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("mnt", "pid"))])


class PeerWatch:
    """Notices the death of other workers of this host before the memory devices do it.

    A context manager. One thread at a time.
    """

    def __init__(self, identity: WorkerIdentity) -> None:
        self._identity = identity
        self._host = host_identity()
        self._pids: dict[int, int] = {}
        self._pidfds: dict[int, int] = {}

    def add(self, rank: int, address: WorkerAddress) -> None:
        """Starts to watch a worker.

        Raises:
            WorkerLostError: If it is gone already.
        """
        if rank == self._identity.rank or rank in self._pids or address.host != self._host:
            return
        self._pids[rank] = address.pid
        try:
            self._pidfds[rank] = os.pidfd_open(address.pid)
            is_gone = _start_time(address.pid) != address.started
        except OSError:
            is_gone = True
        if is_gone:
            raise self._loss([rank])

    def check(self) -> None:
        """Looks at all workers once.

        Raises:
            WorkerLostError: If one has ended.
        """
        poll = select.poll()
        for pidfd in self._pidfds.values():
            poll.register(pidfd, select.POLLIN)
        ended = {pidfd for pidfd, _ in poll.poll(0)}
        if ended:
            raise self._loss([rank for rank, pidfd in self._pidfds.items() if pidfd in ended])

    def get(self, store: Store, key: str, timeout_s: float) -> bytes:
        """As store.get(), but ends when a worker does.

        Raises:
            TimeoutError: If nobody set it.
            WorkerLostError: If a worker has ended meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                return store.get(key, max(0.0, min(_LOOK_INTERVAL_S, left_s)))
            except TimeoutError:
                if left_s <= _LOOK_INTERVAL_S:
                    raise
            try:
                self.check()
            except WorkerLostError as loss:
                try:
                    return store.get(key, 0.0)  # its last words
                except TimeoutError:
                    raise loss from None

    def close(self) -> None:
        """Stops watching. Idempotent."""
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])

    def __enter__(self) -> PeerWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _loss(self, ranks: Sequence[int]) -> WorkerLostError:
        # More than one if others have noticed before us, and ended because of it.
        dead = ", ".join(f"worker {rank} (pid {self._pids[rank]})" for rank in ranks)
        return WorkerLostError(
            f"worker {self._identity.rank}: {dead} died while the session was starting. Look at its output, and "
            "start the job again."
        )


def gather_workers(
    identity: WorkerIdentity, store: Store, *, timeout_s: float, watch: PeerWatch | None = None
) -> list[WorkerAddress]:
    """Waits until every worker of the job has come.

    Says every five seconds who is there and who is missing.

    Args:
        identity: Which worker this process is.
        store: Where the workers find each other.
        timeout_s: How long to wait.
        watch: Is told of every worker that comes, for the steps that follow.

    Returns:
        The address of each worker, by rank.

    Raises:
        RendezvousError: If another process has this rank, somebody is missing after `timeout_s` seconds, or
            workers have different ideas of how many they are.
        WorkerLostError: If one that had come dies before all are there.
    """
    if store.add(f"taken/{identity.rank}", 1) > 1:
        raise RendezvousError(
            f"worker {identity.rank}: another process has joined as rank {identity.rank} already. "
            "Give each process its own RANK."
        )
    announcement = {"world_size": identity.world_size, **asdict(WorkerAddress.of_this_process())}
    store.set(f"worker/{identity.rank}", json.dumps(announcement).encode())
    with contextlib.ExitStack() as stack:
        watch = watch or stack.enter_context(PeerWatch(identity))
        return _RollCall(identity, store, watch).wait(timeout_s)


def check_single_node(addresses: Sequence[WorkerAddress]) -> None:
    """Makes sure that all workers can share memory.

    Raises:
        RendezvousError: If they are spread over several nodes.
    """
    num_hosts = len({address.host for address in addresses})
    if num_hosts > 1:
        raise RendezvousError(
            f"the workers run on {num_hosts} nodes or containers that share no memory; this version "
            "synchronises workers of one node. Start them on one, or use torch DDP across nodes."
        )


class _RollCall:
    """One worker's list of who has come."""

    def __init__(self, identity: WorkerIdentity, store: Store, watch: PeerWatch) -> None:
        self._identity = identity
        self._store = store
        self._watch = watch
        self._found: dict[int, WorkerAddress] = {}

    def wait(self, timeout_s: float) -> list[WorkerAddress]:
        started = time.monotonic()
        next_report = started + PROGRESS_INTERVAL_S
        while missing := self._missing():
            now = time.monotonic()
            if now - started > timeout_s:
                raise RendezvousError(
                    f"worker {self._identity.rank}: after {now - started:.1f} s {self}. "
                    "Start the missing ones, or look at why they ended."
                )
            if now >= next_report:
                next_report = now + PROGRESS_INTERVAL_S
                logger.warning("[w%s] %.0f s: %s", self._identity.rank, now - started, self)
            wait_s = max(0.01, min(next_report, started + timeout_s) - now)
            if not self._take(missing[0], min(wait_s, _LOOK_INTERVAL_S)):
                for rank in missing[1:]:
                    self._take(rank, 0.0)
                self._check_lives()
        return [self._found[rank] for rank in range(self._identity.world_size)]

    def _check_lives(self) -> None:
        try:
            self._watch.check()
        except WorkerLostError as error:
            raise WorkerLostError(f"{error} At that moment {self}.") from None

    def __str__(self) -> str:
        here = ", ".join(map(str, sorted(self._found))) or "none"
        return f"workers {here} have joined, waiting for {', '.join(map(str, self._missing()))}"

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._identity.world_size) if rank not in self._found]

    def _take(self, rank: int, wait_s: float) -> bool:
        try:
            announcement = json.loads(self._store.get(f"worker/{rank}", wait_s))
        except TimeoutError:
            return False
        world_size = announcement.pop("world_size")
        if world_size != self._identity.world_size:
            raise RendezvousError(
                f"worker {self._identity.rank} has WORLD_SIZE={self._identity.world_size}, worker {rank} has "
                f"{world_size}. Start all workers of a job with the same number."
            )
        self._found[rank] = WorkerAddress(**announcement)
        self._watch.add(rank, self._found[rank])
        return True


def _start_time(pid: int) -> int:
    # Field 22 of proc(5), counted after the command, which may contain spaces and parentheses.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
