"""Finds the torch process group in which a model trains, or creates one from the launcher's variables."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from coarse.env import WorkerIdentity, invitation, process_environment
from coarse.errors import RendezvousError
from coarse.rendezvous.launcher_environment import rendezvous_address, unserved, why_unresolved
from coarse.rendezvous.workers import gather_workers
from coarse.security.listening import host_and_port, rendezvous_host
from coarse.settings import Settings
from coarse.startup.node_address import gloo_variables
from coarse.startup.reachability import check_reach, watch_for_start
from coarse.torch.deadlines import Call, within
from coarse.torch.failing import is_failing
from coarse.torch.group_teardown import (
    hold_process_groups,
    keep_process_groups_in_forks,
    leave_process_groups,
)
from coarse.torch.newcomer_group import make_group_of_newcomer
from coarse.torch.store import serve_store
from coarse.torch.store_namespace import fresh_part

logger = logging.getLogger(__name__)

_REPORT_INTERVAL_S = 5.0
_GRACE_S = 1.0  # time for torch's own time-out to end the call, so that no abandoned thread wakes up
_PATIENCE_S = 5.0
_LEAVING_S = 5.0  # time for collectives that other workers have not joined yet


def current_process_group() -> Any:
    """Returns torch's default process group; creates it if it does not exist.

    An existing group is used unchanged and not destroyed. A new group is created from RANK, WORLD_SIZE, MASTER_ADDR
    and MASTER_PORT (world size 1 without them), with the backend of host_backend() and the time-out COARSE_TIMEOUT_S.
    It is destroyed at exit. In a worker that takes the place of a lost one, it has rank and size, but no collectives.

    Raises:
        RendezvousError: If the variables contradict each other, or a worker is missing or present twice.
    """
    if not dist.is_available():
        raise RuntimeError("this torch was built without torch.distributed; install a build that has it")
    if not dist.is_initialized():
        _make_process_group(WorkerIdentity.from_environment(), process_environment())
    return dist.group.WORLD


def init_process_group() -> None:
    """Creates torch's default process group, for scripts that need ranks before they wrap a model. Idempotent.

    An existing group is kept. In a script without a launcher, the group has one worker.

    Raises:
        RendezvousError: As current_process_group().
    """
    current_process_group()


def host_backend(settings: Settings) -> str:
    """torch's backend of the process groups that COARSE makes for data in host memory.

    gloo listens at any free port. If the ports are limited, it is COARSE's own backend.
    """
    return "coarse" if settings.node_ports else "gloo"


def choose_process_group(process_group: Any, device_mesh: Any) -> Any:
    """Returns the group that DistributedDataParallel's arguments select; without them, the default group.

    Raises:
        ValueError: If both are given, the mesh has several dimensions, or this worker is not in the group.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError("give process_group or device_mesh, not both")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise ValueError(f"device_mesh must have one dimension, not {device_mesh.ndim}; slice it by name")
        process_group = device_mesh.get_group(mesh_dim=0)
    if process_group is None:
        return current_process_group()
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this worker is not in process_group; only its members may wrap the model")
    return process_group


def _make_process_group(identity: WorkerIdentity, environ: Mapping[str, str]) -> None:
    settings = Settings.from_environment()
    rank, size, timeout_s = identity.rank, identity.world_size, settings.timeout_s
    timeout = timedelta(seconds=timeout_s)
    if invitation():
        make_group_of_newcomer(rank, size)
    elif size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=size, timeout=timeout)
    else:
        whole = _connect(identity, environ, timeout_s)
        with fresh_part(whole, prefix="coarse", rank=rank, size=size, timeout_s=timeout_s) as store:
            # Runs before torch's rendezvous, which waits without any message.
            with watch_for_start(identity, settings) as watch:
                addresses = gather_workers(identity, store, timeout_s=timeout_s, watch=watch)
                check_reach(rank, addresses, store, settings, watch)
            if size > identity.local_world_size:
                process_environment().update(gloo_variables(settings, environ))
            part = store.part("group")
            within(
                timeout_s,
                lambda: dist.init_process_group(
                    host_backend(settings), store=part, rank=rank, world_size=size, timeout=timeout
                ),
                "a worker that torch's gloo connects to, or the store at MASTER_ADDR,",
                patience_s=_PATIENCE_S,  # torch's own error, if raised in time, has more details
            )
    keep_process_groups_in_forks()
    atexit.register(_destroy, os.getpid())


def _destroy(owner_pid: int) -> None:
    # A forked child inherits the exit handlers but not the group's threads.
    if os.getpid() != owner_pid or not dist.is_initialized():
        return
    if is_failing():
        hold_process_groups()  # other workers may be lost or hang; this process must end without them
    else:
        leave_process_groups(_LEAVING_S)


def _connect(identity: WorkerIdentity, environ: Mapping[str, str], timeout_s: float) -> Any:
    """Returns the job's TCPStore: served by torchrun's agent if there is one, by worker 0 otherwise."""
    host, port = rendezvous_address(identity, environ)
    if identity.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        try:
            timeout = timedelta(seconds=min(_REPORT_INTERVAL_S, timeout_s))  # for the connection to itself
            store = _serve(rendezvous_host(host), port, timeout)
        except (OSError, RuntimeError) as error:
            raise unserved(host, port, _first_line(error)) from error
    else:
        store = _reach(identity.rank, host, port, timeout_s)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _reach(rank: int, host: str, port: int, timeout_s: float) -> Any:
    """Returns a client of the store at `host` and `port`, once the store answers."""
    started = time.monotonic()
    attempt: Call[Any] | None = None
    while True:
        attempted = time.monotonic()
        left_s = max(0.1, min(_REPORT_INTERVAL_S, started + timeout_s - attempted))
        if attempt is None:
            timeout = timedelta(seconds=left_s)
            attempt = Call(lambda timeout=timeout: _open(rendezvous_host(host), port, False, timeout))  # type: ignore[misc]
        try:
            return attempt.result(left_s + _GRACE_S)
        except TimeoutError:
            reason = "it accepts the connection, but does not answer"  # a late answer still counts
        except RuntimeError as error:  # DistNetworkError and DistStoreError are RuntimeErrors
            reason, attempt = why_unresolved(host) or _first_line(error), None
        elapsed_s = time.monotonic() - started
        if elapsed_s >= timeout_s:
            raise RendezvousError(
                f"worker {rank}: no process answered at {host_and_port(host, port)} within {elapsed_s:.0f} s "
                f"({reason}). Start worker 0, or check MASTER_ADDR, MASTER_PORT and the network, for example for a "
                "firewall."
            )
        unresolved = why_unresolved(host)
        logger.warning(
            "[w%s] %.0f s: waiting for worker 0 at %s%s",
            *(rank, elapsed_s, host_and_port(host, port), unresolved and f" ({unresolved})"),
        )
        # Some failures, such as those of name resolution, are immediate.
        time.sleep(max(0.0, min(attempted + _REPORT_INTERVAL_S, started + timeout_s) - time.monotonic()))


def _serve(host: str, port: int, timeout: timedelta) -> Any:
    try:
        return serve_store(host, port, timeout=timeout)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return _open(host, port, True, timeout)  # this process itself may serve a store there


def _open(host: str, port: int, serve: bool, timeout: timedelta) -> Any:
    return dist.TCPStore(
        host, port, is_master=serve, timeout=timeout, wait_for_workers=False, multi_tenant=True
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
