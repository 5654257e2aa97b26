"""One COARSE session per torch process group, shared by all models that train in it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from coarse.env import WorkerIdentity, invitation
from coarse.errors import CoarseError
from coarse.metrics.writer import MetricsWriter
from coarse.rendezvous.workers import host_identity
from coarse.session import Session
from coarse.settings import Settings
from coarse.startup.newcomer import Invitation
from coarse.torch.failing import is_failing
from coarse.torch.group_teardown import hold_process_groups, keep_process_groups_in_forks
from coarse.torch.store import TorchStore, store_of_group
from coarse.torch.store_namespace import fresh_part

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class GroupSession:
    """The session of one process group, and the number of models registered with it.

    Args:
        session: The session.
        num_models: Number of names returned by next_model_name().
        dropped: Functions that free the memory of deleted models. Models may be deleted in any thread, while the
            session is in use. So their memory is freed when the next model is registered, or with the session.
    """

    session: Session
    num_models: int = 0
    dropped: deque[Callable[[], object]] = field(default_factory=deque)

    def next_model_name(self) -> str:
        """Returns a name that is the same on every worker, as long as all wrap their models in the same order."""
        self.num_models += 1
        return f"model{self.num_models - 1}"

    def free_dropped(self) -> None:
        """Frees the memory of deleted models."""
        while self.dropped:
            with contextlib.suppress(CoarseError):  # the next user of the session gets the error
                self.dropped.popleft()()


_ONLY_THE_DEFAULT_GROUP = (
    "COARSE_ON_LOSS=replace, COARSE_MAX_WORKERS: new workers can join torch's default process group only; wrap the "
    "model without process_group and device_mesh, or set COARSE_ON_LOSS=continue and no COARSE_MAX_WORKERS"
)

# Global because torch's process groups accept no attributes, and two wrappers with the same group share no other
# object through which they could find the session. Entries disappear with their group.
_SESSIONS: MutableMapping[Any, GroupSession] = weakref.WeakKeyDictionary()


def session_of_group(process_group: Any) -> GroupSession:
    """Returns the session of `process_group`; the first call joins it and is collective over the group.

    The session ends when the process exits or the group is deleted, whichever is first.
    """
    shared = _SESSIONS.get(process_group)
    if shared is None:
        keep_process_groups_in_forks()
        shared = _join(process_group)
        _SESSIONS[process_group] = shared
    shared.free_dropped()
    return shared


def metrics_of_default_group() -> MetricsWriter:
    """Counts events in the session of the default process group; counts nothing if there is none."""
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    shared = None if group is None else _SESSIONS.get(group)
    return MetricsWriter() if shared is None else shared.session.metrics_writer


def leave_sessions() -> None:
    """Leaves all sessions of this process, because the worker ends early and the others go on."""
    for shared in list(_SESSIONS.values()):
        shared.session.leave()


def _join(process_group: Any) -> GroupSession:
    if text := invitation():
        return _held(GroupSession(_enter(process_group, text)), process_group)
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    settings = Settings.from_environment()
    timeout_s = settings.timeout_s
    if settings.replaces_workers and process_group is not dist.group.WORLD:
        raise ValueError(_ONLY_THE_DEFAULT_GROUP)
    torch_store = store_of_group(process_group)
    # A launcher's store may outlive process groups: keys of an earlier session must not be reused.
    with fresh_part(torch_store, prefix="coarse", rank=rank, size=size, timeout_s=timeout_s) as store:
        identity = _identity(process_group, store)
        if settings.node_ports and identity.local_world_size < size:
            _warn_of_other_ports(process_group, rank, settings.node_ports)
        session = Session.join(identity=identity, store=store, name=str(process_group.group_name))
    return _held(GroupSession(session), process_group)


def _warn_of_other_ports(process_group: Any, rank: int, ports: str) -> None:
    backend = str(dist.get_backend(process_group))
    if rank == 0 and backend != "coarse":
        logger.warning(
            "[w0] COARSE_NODE_PORTS=%s limits COARSE's ports, but not those of the process group's backend, %s. If a "
            'firewall blocks others, use init_process_group("coarse") or coarse.torch.init_process_group()',
            *(ports, backend),
        )


def _enter(process_group: Any, text: str) -> Session:
    """Enters a running session in the place of a lost worker."""
    if process_group is not dist.group.WORLD:
        raise ValueError(_ONLY_THE_DEFAULT_GROUP)
    return Session.enter(identity=WorkerIdentity.from_environment(), invitation=Invitation.from_json(text))


def _held(shared: GroupSession, process_group: Any) -> GroupSession:
    """A session that ends with the process or its group."""
    atexit.register(_close_at_exit, shared, os.getpid())
    weakref.finalize(process_group, _close, shared, os.getpid()).atexit = False
    return shared


def _close_at_exit(shared: GroupSession, owner_pid: int) -> None:
    if os.getpid() == owner_pid and is_failing():
        hold_process_groups()  # other workers may be lost or hang; this process must end without them
    _close(shared, owner_pid)


def _close(shared: GroupSession, owner_pid: int) -> None:
    # Forked children inherit exit handlers, but must not close the session.
    if os.getpid() != owner_pid:
        return
    if not is_failing():
        shared.free_dropped()
    shared.session.close(is_finished=not is_failing())


def _identity(process_group: Any, store: TorchStore) -> WorkerIdentity:
    """The identity of this process among the workers of `process_group`, and the workers on its node."""
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    settings = Settings.from_environment()
    host = host_identity(settings.node).encode()
    store.set(f"host/{rank}", host)
    local = [peer for peer in range(world_size) if store.get(f"host/{peer}", settings.timeout_s) == host]
    return WorkerIdentity(
        rank=rank, world_size=world_size, local_rank=local.index(rank), local_world_size=len(local)
    )
