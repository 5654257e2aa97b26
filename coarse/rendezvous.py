"""How the workers of a job find each other, before anything is shared (docs/design/bootstrap.md)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from coarse.env import WorkerIdentity
from coarse.errors import CoarseError, RendezvousError, WorkerLostError, follow_up, told_error
from coarse.liveness import LivenessProbe, Presence
from coarse.store import Store

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 5.0
_LOOK_INTERVAL_S = 0.25  # how often a wait for one worker looks at whether the others still live


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAddress:
    """Where a worker runs.

    Args:
        host: Equal for workers that can share memory: those of one node.
        pid: Its process on that host.
        started: When that process started, in the kernel's units: tells it from a later one of the same number.
        presence_host, presence_port: Where its Presence listens, for workers of other nodes; "" and 0 if it has none.
    """

    host: str
    pid: int
    started: int
    presence_host: str = ""
    presence_port: int = 0

    @classmethod
    def of_this_process(cls, node: str = "", presence: Presence | None = None) -> WorkerAddress:
        """Args:
        node: As in Settings.
        presence: By which other nodes notice its end.
        """
        return cls(
            host=host_identity(node),
            pid=os.getpid(),
            started=_start_time(os.getpid()),
            presence_host="" if presence is None else presence.host,
            presence_port=0 if presence is None else presence.port,
        )

    def lives_here(self) -> bool:
        """Whether it is a process of this host, and lives."""
        try:
            return self.host == host_identity() and self.started == _start_time(self.pid)
        except OSError:
            return False

    @property
    def boot(self) -> str:
        """Equal for workers of one running system, whether they can share memory or not."""
        return self.host.partition("/")[0]


def host_identity(node: str = "") -> str:
    """The same for processes that can share memory and files: same boot, same mount and process namespaces.

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
    """The nodes of a job: workers that can share memory, in the order of their lowest rank.

    Args:
        ranks: The workers of each node, ascending. The first leads its node: it starts the memory devices.
        boots: Which running system each node belongs to.
    """

    ranks: tuple[tuple[int, ...], ...]
    boots: tuple[str, ...]

    @classmethod
    def of_addresses(cls, addresses: Sequence[WorkerAddress]) -> NodeMap:
        """Groups workers, given by rank, by host."""
        nodes: dict[str, list[int]] = {}
        for rank, address in enumerate(addresses):
            nodes.setdefault(address.host, []).append(rank)
        return cls(
            ranks=tuple(map(tuple, nodes.values())),
            boots=tuple(addresses[ranks[0]].boot for ranks in nodes.values()),
        )

    @property
    def num_nodes(self) -> int:
        """How many there are."""
        return len(self.ranks)

    def node_of(self, rank: int) -> int:
        """The node of a worker."""
        return next(node for node, ranks in enumerate(self.ranks) if rank in ranks)

    def describe(self, node: int) -> str:
        """A node in words."""
        return f"node {node} (worker(s) {', '.join(map(str, self.ranks[node]))})"


_FAILED = "failed"
_STARTED = "started"


class PeerWatch:
    """Notices the death of other workers of this node before the memory devices do it, and what other nodes tell.

    The first worker of a node also notices that the first of another one is gone, and with it all of that node, or it
    would have been told. A context manager. One thread at a time.

    Args:
        identity: Which worker this process is.
        node: As in Settings.
        store: Where workers of other nodes are met; None if there are none, or follow() comes later.
        reached_at: An address at which these can notice the end of this process; "" if they need not.
    """

    def __init__(
        self, identity: WorkerIdentity, node: str = "", *, store: Store | None = None, reached_at: str = ""
    ) -> None:
        self._identity = identity
        self._host = host_identity(node)
        self._node = node
        self._store = store
        self._presence: Presence | None = None
        if reached_at:
            with contextlib.suppress(OSError):  # which link_nodes() tells
                self._presence = Presence(reached_at)
        self._pids: dict[int, int] = {}
        self._pidfds: dict[int, int] = {}
        self._gone: set[int] = set()  # before they were watched
        self._elsewhere: dict[int, WorkerAddress] = {}
        self._probes: dict[int, LivenessProbe] = {}

    def own_address(self) -> WorkerAddress:
        """What others have to know of this process."""
        return WorkerAddress.of_this_process(self._node, self._presence)

    def add(self, rank: int, address: WorkerAddress) -> None:
        """Starts to watch a worker. If it is gone already, get() still has what it has left, and check() tells."""
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
        """From now on, check() also notices that a worker of another node has given the start up."""
        self._store = store

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Lets workers of other nodes know why this one gives the start up: by what error it leaves this block.

        Raises:
            CoarseError: What the first worker that gave it up has told: others have ended because of that.
        """
        try:
            yield
        except Exception as error:
            first = self._tell(error)
            if str(first) != str(error):
                raise first from error
            raise

    def _tell(self, error: Exception) -> Exception:
        if self._store is None:
            return error
        with contextlib.suppress(Exception):  # the store may have gone with whom we lost
            if (told := self._told()) is not None:
                return told
            kind = type(error) if isinstance(error, CoarseError) else RendezvousError
            failure = {"rank": self._identity.rank, "error": kind.__name__, "text": str(error)}
            self._store.set(_FAILED, json.dumps(failure).encode())
        return error

    def check(self) -> None:
        """Looks at all workers once.

        Raises:
            WorkerLostError: If one has ended.
            CoarseError: Why a worker of another node has given up.
        """
        self._check_processes()
        if self._store is not None:
            if (told := self._told()) is not None:
                raise told
            self._check_nodes(self._store)

    def _check_nodes(self, store: Store) -> None:
        if min({self._identity.rank, *self._pidfds, *self._gone}) < self._identity.rank:
            return
        firsts: dict[str, int] = {}
        for rank, address in sorted(self._elsewhere.items(), key=lambda item: item[0]):
            firsts.setdefault(address.host, rank)
        for rank in firsts.values():
            if not self._look_out_for(rank).sees_end():
                continue
            if (told := self._told()) is not None:
                raise told
            try:
                store.get(f"{_STARTED}/{rank}", 0.0)
            except TimeoutError:
                raise self._loss([rank]) from None
            self._probes[rank].close()

    def _look_out_for(self, rank: int) -> LivenessProbe:
        address = self._elsewhere[rank]
        if rank not in self._probes:
            self._probes[rank] = LivenessProbe(address.presence_host, address.presence_port)
        probe = self._probes[rank]
        if probe.problem:
            where = f"{address.presence_host} port {address.presence_port} ({probe.problem})"
            logger.warning(
                "[w%s] worker %s (pid %s) cannot be reached at %s: it ended, or is behind a firewall",
                *(self._identity.rank, rank, address.pid, where),
            )
            probe.problem = ""
        return probe

    def _told(self) -> CoarseError | None:
        assert self._store is not None
        try:
            failure = json.loads(self._store.get(_FAILED, 0.0))
        except TimeoutError:
            return None
        text = f"worker {self._identity.rank}: worker {failure['rank']} gave up: {failure['text']}"
        return told_error(failure["error"], follow_up(text, f"worker {failure['rank']}"))

    def _check_processes(self) -> None:
        poll = select.poll()
        for pidfd in self._pidfds.values():
            poll.register(pidfd, select.POLLIN)
        ended = {pidfd for pidfd, _ in poll.poll(0)}
        if dead := self._gone | {rank for rank, pidfd in self._pidfds.items() if pidfd in ended}:
            raise self._loss(sorted(dead))

    def describe(self, rank: int) -> str:
        """A worker that has come, in words."""
        return f"worker {rank} (pid {self._pids[rank]})" if rank in self._pids else f"worker {rank}"

    def get(
        self, store: Store, key: str, timeout_s: float, on_look: Callable[[], None] = lambda: None
    ) -> bytes:
        """As store.get(), but ends when a worker does.

        Args:
            store, key, timeout_s: As there.
            on_look: Called a few times a second.

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
            on_look()
            try:
                self.check()
            except CoarseError as loss:
                try:
                    return store.get(key, 0.0)  # its last words
                except TimeoutError:
                    raise loss from None

    def close(self) -> None:
        """Stops watching. Idempotent."""
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])
        for probe in self._probes.values():
            probe.close()
        if self._presence is not None:
            self._presence.close()

    def __enter__(self) -> PeerWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._presence is not None and self._store is not None:
            self._store.set(f"{_STARTED}/{self._identity.rank}", b"")  # its presence ends, for no bad reason
        self.close()

    def _loss(self, ranks: Sequence[int]) -> WorkerLostError:
        # More than one if others have noticed before us, and ended because of it.
        dead = ", ".join(f"worker {rank} (pid {self._pids[rank]})" for rank in ranks)
        return WorkerLostError(
            f"worker {self._identity.rank}: {dead} died while the session was starting. Look at its output, and "
            "start the job again."
        )


def gather_workers(
    identity: WorkerIdentity,
    store: Store,
    *,
    timeout_s: float,
    watch: PeerWatch | None = None,
    node: str = "",
) -> list[WorkerAddress]:
    """Waits until every worker of the job has come.

    Says every five seconds who is there and who is missing.

    Args:
        identity: Which worker this process is.
        store: Where the workers find each other.
        timeout_s: How long to wait.
        watch: Is told of every worker that comes, for the steps that follow.
        node: As in Settings.

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
    with contextlib.ExitStack() as stack:
        watch = watch or stack.enter_context(PeerWatch(identity, node))
        announcement = {"world_size": identity.world_size, **asdict(watch.own_address())}
        store.set(f"worker/{identity.rank}", json.dumps(announcement).encode())
        return _RollCall(identity, store, watch).wait(timeout_s)


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
