"""The workers of a job find each other, before they share any memory (docs/design/bootstrap.md)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from coarse.env import WorkerIdentity
from coarse.errors import (
    CoarseError,
    MemoryDeviceLostError,
    RendezvousError,
    WorkerLostError,
    follow_up,
    is_follow_up,
    told_error,
)
from coarse.process.liveness import LIVENESS_BACKLOG, LivenessListener, LivenessProbe
from coarse.security.node_ports import NodePorts
from coarse.store import Store

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 5.0
_LOOK_INTERVAL_S = 0.25  # a wait for one worker checks this often that the others live
_HEARING_S = 1.0  # for the others to hear why this worker failed, before the store may end with it
_HEARING_POLL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAddress:
    """The host and process of a worker.

    Args:
        host: Equal for workers that can share memory: those of one node.
        pid: Process id of the worker on that host.
        started: Start time of the process, in kernel units. Distinguishes it from a later process with the same pid.
        liveness_host, liveness_port: Address at which other nodes' workers probe it; "" and 0 if it has none.
    """

    host: str
    pid: int
    started: int
    liveness_host: str = ""
    liveness_port: int = 0

    @classmethod
    def of_this_process(cls, node: str = "", liveness: LivenessListener | None = None) -> WorkerAddress:
        """Args:
        node: As in Settings.
        liveness: Lets other nodes notice the end of this process.
        """
        return cls(
            host=host_identity(node),
            pid=os.getpid(),
            started=_start_time(os.getpid()),
            liveness_host="" if liveness is None else liveness.host,
            liveness_port=0 if liveness is None else liveness.port,
        )

    def lives_here(self) -> bool:
        """Whether the worker is a live process of this host."""
        try:
            return self.host == host_identity() and self.started == _start_time(self.pid)
        except OSError:
            return False

    @property
    def boot(self) -> str:
        """Equal for all workers on one running system, even if they cannot share memory."""
        return self.host.partition("/")[0]


def host_identity(node: str = "") -> str:
    """Equal for processes that can share memory and files: same boot, same mount and process namespaces.

    Args:
        node: As in Settings: splits a host into several nodes by name.
    """
    names = [node] if node else []
    return "/".join(
        [_boot_identity(), *(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("mnt", "pid")), *names]
    )


def _boot_identity() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # sandboxes hide /proc/sys
        booted = re.search(r"^btime .*", Path("/proc/stat").read_text(), re.MULTILINE)
        return f"{os.uname().nodename} {booted and booted[0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMap:
    """The nodes of a job, ordered by their lowest rank. The workers of a node can share memory.

    Args:
        ranks: The workers of each node, ascending. The first leads its node: it starts the memory devices.
        boots: The running system of each node.
        vacant: The ranks whose workers may join later.
    """

    ranks: tuple[tuple[int, ...], ...]
    boots: tuple[str, ...]
    vacant: tuple[int, ...] = ()

    @classmethod
    def of_addresses(cls, addresses: Sequence[WorkerAddress]) -> NodeMap:
        """Groups workers by host; `addresses` is indexed by rank."""
        nodes: dict[str, list[int]] = {}
        for rank, address in enumerate(addresses):
            nodes.setdefault(address.host, []).append(rank)
        return cls(
            ranks=tuple(map(tuple, nodes.values())),
            boots=tuple(addresses[ranks[0]].boot for ranks in nodes.values()),
        )

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.ranks)

    def with_places(self, count: int) -> NodeMap:
        """The map of a job of one node with `count` ranks in all, of which the further ones are vacant."""
        (present,) = self.ranks
        vacant = tuple(range(len(present), count))
        return replace(self, ranks=((*present, *vacant),), vacant=vacant)

    def node_of(self, rank: int) -> int:
        """The node of a worker."""
        return next(node for node, ranks in enumerate(self.ranks) if rank in ranks)

    def describe(self, node: int) -> str:
        """A node in words."""
        return f"node {node} (worker(s) {', '.join(map(str, self.ranks[node]))})"


_FAILED = "failed"
_FAILURES = "failures"
_HEARD = "heard"
_STARTED = "started"


class PeerWatch:
    """Notices lost workers of this node during the start, before memory devices can, and failures of all workers.

    The first worker of a node also notices the end of another node's first worker. That means that the whole node is
    gone; otherwise its other workers would have reported the failure. A context manager. Use it from one thread at a
    time.

    Args:
        identity: Rank and node of this worker.
        node: As in Settings.
        store: Through it workers tell each other why they failed; None if they do not, or follow() sets it later.
        reached_at: Address at which workers of other nodes can notice the end of this process; "" if not needed.
        ports: There; one of them is taken.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        node: str = "",
        *,
        store: Store | None = None,
        reached_at: str = "",
        ports: NodePorts | None = None,
    ) -> None:
        self._identity = identity
        self._host = host_identity(node)
        self._node = node
        self._store = store
        self._has_heard = False
        self._liveness: LivenessListener | None = None
        self._no_liveness: RendezvousError | None = None
        if reached_at:
            self._open_liveness(reached_at, ports or NodePorts())
        self._pids: dict[int, int] = {}
        self._pidfds: dict[int, int] = {}
        self._gone: set[int] = set()  # ended before the watch began
        self._elsewhere: dict[int, WorkerAddress] = {}
        self._probes: dict[int, LivenessProbe] = {}

    def _open_liveness(self, host: str, ports: NodePorts) -> None:
        try:
            self._liveness = LivenessListener(ports.listen(host, backlog=LIVENESS_BACKLOG))
        except RendezvousError as error:
            self._no_liveness = error
        except OSError:  # link_nodes() reports it
            pass

    def require_liveness(self) -> None:
        """Raises RendezvousError if other nodes cannot notice the end of this process, for all ports are taken."""
        if self._no_liveness is not None:
            raise self._no_liveness

    def own_address(self) -> WorkerAddress:
        """The address of this process, for the other workers."""
        return WorkerAddress.of_this_process(self._node, self._liveness)

    def add(self, rank: int, address: WorkerAddress) -> None:
        """Starts to watch a worker. If it has already ended, get() still returns its values, and check() raises."""
        if rank == self._identity.rank or rank in self._pids:
            return
        self._pids[rank] = address.pid
        if address.host != self._host:
            self._elsewhere[rank] = address
            return
        try:
            self._pidfds[rank] = os.pidfd_open(address.pid)
            is_gone = _start_time(address.pid) != address.started
        except OSError:
            is_gone = True
        if is_gone:
            self._gone.add(rank)

    def follow(self, store: Store) -> None:
        """After this call, workers tell each other through the store why they failed."""
        self._store = store

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tells the other workers of an error that leaves this block.

        Raises:
            Exception: As first_failure() returns it.
        """
        try:
            yield
        except Exception as error:
            first = self.first_failure(error)
            if first is not error:
                raise first from error
            raise

    def first_failure(self, error: Exception) -> Exception:
        """The error that ends the start here: that of the worker that failed first, for it has caused the others.

        If that is this worker, the others are told, and have a moment to hear it: the store may end with it.
        """
        if self._store is None:
            return error
        with contextlib.suppress(Exception):  # the store may have ended with a lost worker
            if is_follow_up(error):
                self._note_heard(self._store)
            else:
                return self._agree_on_first(self._store, error)
        return error

    def _agree_on_first(self, store: Store, error: Exception) -> Exception:
        reason = str(error).removeprefix(f"worker {self._identity.rank}: ")
        first = self._look_for_failure(store, 0.0)
        if first is None and isinstance(error, MemoryDeviceLostError) and not self._elsewhere:
            return error  # every worker of the node notices it, and the leader knows most about it
        if first is None and store.add(_FAILURES, 1) == 1:
            self._tell(store, error, reason)
            return error
        first = first or self._look_for_failure(store, _HEARING_S)
        return error if first is None or first["text"] == reason else self._error_of(first)

    def _tell(self, store: Store, error: Exception, reason: str) -> None:
        kind = type(error) if isinstance(error, CoarseError) else RendezvousError
        failure = {"rank": self._identity.rank, "error": kind.__name__, "text": reason}
        store.set(_FAILED, json.dumps(failure).encode())
        deadline = time.monotonic() + _HEARING_S
        while self._is_anyone_to_hear(store) and time.monotonic() < deadline:
            time.sleep(_HEARING_POLL_S)

    def _is_anyone_to_hear(self, store: Store) -> bool:
        ended = self._ended()
        return any(rank not in ended and _look(store, f"{_HEARD}/{rank}", 0.0) is None for rank in self._pids)

    def _note_heard(self, store: Store) -> None:
        if not self._has_heard:
            self._has_heard = True
            store.set(f"{_HEARD}/{self._identity.rank}", b"")

    def _look_for_failure(self, store: Store, timeout_s: float) -> dict[str, Any] | None:
        """The report of the first worker that failed, if one has."""
        told = _look(store, _FAILED, timeout_s)
        if told is None:
            return None
        self._note_heard(store)
        failure: dict[str, Any] = json.loads(told)
        return failure

    def _error_of(self, failure: Mapping[str, Any]) -> CoarseError:
        here = f"worker {self._identity.rank}: "
        if (
            failure["error"] == WorkerLostError.__name__
        ):  # the lost one has failed, not the one that noticed it
            return WorkerLostError(here + failure["text"])
        culprit = f"worker {failure['rank']}"
        text = f"{here}{culprit} failed at the start: {failure['text']}"
        return told_error(failure["error"], follow_up(text, culprit))

    def check(self) -> None:
        """Checks all workers once.

        Raises:
            WorkerLostError: If one has ended without a word.
            CoarseError: If one has failed; gives its reason.
        """
        ended = self._ended()
        if (told := self._told(is_store_sure=bool(self._elsewhere) and not ended)) is not None:
            raise told
        if ended:
            raise self._loss(ended)
        if self._store is not None:
            self._check_nodes(self._store)

    def _told(self, *, is_store_sure: bool) -> CoarseError | None:
        """The first failure, as an error of this worker.

        Args:
            is_store_sure: Whether a store that fails is an error; otherwise it may have ended with a lost worker.
        """
        if self._store is None:
            return None
        with contextlib.nullcontext() if is_store_sure else contextlib.suppress(Exception):
            failure = self._look_for_failure(self._store, 0.0)
            return None if failure is None else self._error_of(failure)
        return None

    def _check_nodes(self, store: Store) -> None:
        if min({self._identity.rank, *self._pidfds, *self._gone}) < self._identity.rank:
            return
        firsts: dict[str, int] = {}
        for rank, address in sorted(self._elsewhere.items(), key=lambda item: item[0]):
            firsts.setdefault(address.host, rank)
        for rank in firsts.values():
            if not self._look_out_for(rank).sees_end():
                continue
            if (told := self._told(is_store_sure=True)) is not None:
                raise told
            if _look(store, f"{_STARTED}/{rank}", 0.0) is None:
                raise self._loss([rank])
            self._probes[rank].close()

    def _look_out_for(self, rank: int) -> LivenessProbe:
        address = self._elsewhere[rank]
        if rank not in self._probes:
            self._probes[rank] = LivenessProbe(address.liveness_host, address.liveness_port)
        probe = self._probes[rank]
        if probe.problem:
            where = f"{address.liveness_host} port {address.liveness_port} ({probe.problem})"
            logger.warning(
                "[w%s] worker %s (pid %s) cannot be reached at %s: it has ended or is behind a firewall",
                *(self._identity.rank, rank, address.pid, where),
            )
            probe.problem = ""
        return probe

    def _ended(self) -> list[int]:
        """The workers of this node that have ended."""
        poll = select.poll()
        for pidfd in self._pidfds.values():
            poll.register(pidfd, select.POLLIN)
        ended = {pidfd for pidfd, _ in poll.poll(0)}
        return sorted(self._gone | {rank for rank, pidfd in self._pidfds.items() if pidfd in ended})

    def describe(self, rank: int) -> str:
        """A worker in words, with its pid if it has joined."""
        return f"worker {rank} (pid {self._pids[rank]})" if rank in self._pids else f"worker {rank}"

    def get(
        self, store: Store, key: str, timeout_s: float, on_look: Callable[[], None] = lambda: None
    ) -> bytes:
        """Like store.get(), but ends when a worker ends.

        Args:
            store, key, timeout_s: As for store.get().
            on_look: Called a few times a second.

        Raises:
            TimeoutError: If no worker sets the key in time.
            WorkerLostError: If a worker ends during the wait.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                return store.get(key, max(0.0, min(_LOOK_INTERVAL_S, left_s)))
            except TimeoutError:
                if left_s <= _LOOK_INTERVAL_S:
                    raise
            on_look()
            try:
                self.check()
            except CoarseError as loss:
                try:
                    return store.get(key, 0.0)  # set just before the worker ended
                except TimeoutError:
                    raise loss from None

    def close(self) -> None:
        """Stops watching. Idempotent."""
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])
        for probe in self._probes.values():
            probe.close()
        if self._liveness is not None:
            self._liveness.close()

    def __enter__(self) -> PeerWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._liveness is not None and self._store is not None:
            self._store.set(f"{_STARTED}/{self._identity.rank}", b"")  # its connection ends without an error
        self.close()

    def _loss(self, ranks: Sequence[int]) -> WorkerLostError:
        # More than one if other workers noticed the loss first and ended because of it.
        dead = ", ".join(f"worker {rank} (pid {self._pids[rank]})" for rank in ranks)
        return WorkerLostError(
            f"worker {self._identity.rank}: {dead} died while the session was starting. Look at its output, and "
            "start the job again."
        )


def _look(store: Store, key: str, timeout_s: float) -> bytes | None:
    """The value of a key; None if nobody sets it in time."""
    try:
        return store.get(key, timeout_s)
    except TimeoutError:
        return None


def gather_workers(
    identity: WorkerIdentity,
    store: Store,
    *,
    timeout_s: float,
    watch: PeerWatch | None = None,
    node: str = "",
) -> list[WorkerAddress]:
    """Waits until every worker of the job has joined.

    Logs every five seconds which workers have joined and which are missing.

    Args:
        identity: Rank and node of this worker.
        store: Where the workers find each other.
        timeout_s: How long to wait.
        watch: Watches every worker that joins, also in the steps that follow.
        node: As in Settings.

    Returns:
        The address of each worker, by rank.

    Raises:
        RendezvousError: If another process has this rank, a worker is missing after `timeout_s` seconds, or workers
            have different WORLD_SIZE values.
        WorkerLostError: If a worker that had joined dies before all have joined.
    """
    if store.add(f"taken/{identity.rank}", 1) > 1:
        raise RendezvousError(
            f"worker {identity.rank}: another process has already joined as rank {identity.rank}. Give each "
            "process its own RANK."
        )
    with contextlib.ExitStack() as stack:
        watch = watch or stack.enter_context(PeerWatch(identity, node))
        announcement = {"world_size": identity.world_size, **asdict(watch.own_address())}
        store.set(f"worker/{identity.rank}", json.dumps(announcement).encode())
        return _RollCall(identity, store, watch).wait(timeout_s)


class _RollCall:
    """One worker's list of the workers that have joined."""

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
                late = RendezvousError(
                    f"worker {self._identity.rank}: after {now - started:.1f} s {self}. Start the missing "
                    "ones, or find out why they ended."
                )
                raise self._watch.first_failure(late)
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
            raise WorkerLostError(f"{error} At that time, {self}.") from None

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
                f"worker {self._identity.rank} has WORLD_SIZE={self._identity.world_size}, but worker {rank} "
                f"has {world_size}. Start all workers of a job with the same number."
            )
        self._found[rank] = WorkerAddress(**announcement)
        self._watch.add(rank, self._found[rank])
        return True


def _start_time(pid: int) -> int:
    # Field 22 of proc(5), counted after the command, which may contain spaces and parentheses. Of the first thread,
    # because QEMU in user mode invents what a process reads about itself in /proc/PID/stat.
    return int(Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[19])
