"""One COARSE session per torch process group, shared by all models that train in it."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from coarse.env import WorkerIdentity
from coarse.errors import CoarseError
from coarse.rendezvous import host_identity
from coarse.session import Session
from coarse.settings import Settings
from coarse.torch.failing import is_failing
from coarse.torch.group_teardown import hold_process_groups, keep_process_groups_in_forks
from coarse.torch.store import TorchStore, store_of_group
from coarse.torch.store_namespace import fresh_part


@dataclass(slots=True)
class GroupSession:
    """The session of one process group, and how many models were registered with it.

    Args:
        session: The session.
        num_models: How many names were given out.
        dropped: What frees the memory of models that are gone. They may go in any thread and at any time, in
            which the session may be in use; their memory is freed when the next model comes, or with the
            session.
    """

    session: Session
    num_models: int = 0
    dropped: deque[Callable[[], object]] = field(default_factory=deque)

    def next_model_name(self) -> str:
        """A name that is the same on every worker, as long as all wrap their models in the same order."""
        self.num_models += 1
        return f"model{self.num_models - 1}"

    def free_dropped(self) -> None:
        """Frees the memory of models that are gone."""
        while self.dropped:
            with contextlib.suppress(CoarseError):  # whoever uses the session next is told of the loss
                self.dropped.popleft()()


# Global because torch's process groups take no attributes, and two wrappers that were given the same group
# have nothing else in common through which they could find the session. Entries vanish with their group.
_SESSIONS: MutableMapping[Any, GroupSession] = weakref.WeakKeyDictionary()


def session_of_group(process_group: Any) -> GroupSession:
    """Returns the session of `process_group`, joining it at the first call (collective over the group).

    It ends when the process exits or when the group is gone, whichever comes first.
    """
    shared = _SESSIONS.get(process_group)
    if shared is None:
        keep_process_groups_in_forks()
        shared = _join(process_group)
        _SESSIONS[process_group] = shared
    shared.free_dropped()
    return shared


def _join(process_group: Any) -> GroupSession:
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    timeout_s = Settings.from_environment().timeout_s
    torch_store = store_of_group(process_group)
    # A launcher's store may outlive process groups: keys of an earlier session must not be taken for ours.
    with fresh_part(torch_store, prefix="coarse", rank=rank, size=size, timeout_s=timeout_s) as store:
        session = Session.join(
            identity=_identity(process_group, store), store=store, name=str(process_group.group_name)
        )
    shared = GroupSession(session)
    atexit.register(_close_at_exit, shared, os.getpid())
    weakref.finalize(process_group, _close, shared, os.getpid()).atexit = False
    return shared


def _close_at_exit(shared: GroupSession, owner_pid: int) -> None:
    if os.getpid() == owner_pid and is_failing():
        hold_process_groups()  # others may be lost, or hang, and an end does not wait for them
    _close(shared, owner_pid)


def _close(shared: GroupSession, owner_pid: int) -> None:
    # Forked children inherit exit handlers; the session is not theirs to close.
    if os.getpid() != owner_pid:
        return
    if not is_failing():
        shared.free_dropped()
    shared.session.close(is_finished=not is_failing())


def _identity(process_group: Any, store: TorchStore) -> WorkerIdentity:
    """Who this process is among the workers of `process_group`, and which of them share its node."""
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    settings = Settings.from_environment()
    host = host_identity(settings.node).encode()
    store.set(f"host/{rank}", host)
    local = [peer for peer in range(world_size) if store.get(f"host/{peer}", settings.timeout_s) == host]
    return WorkerIdentity(
        rank=rank, world_size=world_size, local_rank=local.index(rank), local_world_size=len(local)
    )
