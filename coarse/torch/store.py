"""The rendezvous store of a torch process group, as COARSE's Store."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from coarse.env import job_secret, master_address
from coarse.errors import RendezvousError
from coarse.security.listening import host_and_port, listen_for_workers, rendezvous_host
from coarse.security.node_ports import NodePorts
from coarse.settings import Settings
from coarse.torch.deadlines import within

_T = TypeVar("_T")

_WHO = "the workers' store, which worker 0 or torchrun's agent serves,"
_FIRST_POLL_S = 0.001
_LONGEST_POLL_S = 0.05


class TorchStore:
    """A coarse.store.Store on top of any torch.distributed store.

    Waiting polls `check` instead of calling the store's blocking `wait`: a TCPStore client serves one caller at a
    time, so a blocked wait would delay other threads of the process that use the same store.

    torch's stores let everybody read and write. So, if the job has a secret, each value includes a proof of it, and
    values without a proof are refused with RendezvousError. Counters have no proof.

    Args:
        store: The torch store to use.
        prefix: Prefix of every key, to avoid other users' keys.
        timeout_s: Time limit for each answer of the store; COARSE_TIMEOUT_S if not given.

    Raises:
        RendezvousError: From each method, if the store does not answer in time. torch's calls would wait forever.
    """

    def __init__(self, store: Any, *, prefix: str, timeout_s: float | None = None) -> None:
        self._store = dist.PrefixStore(prefix, store)
        self._prefix = prefix
        self._secret = job_secret()
        self._timeout_s = Settings.from_environment().timeout_s if timeout_s is None else timeout_s
        self._is_silent = False

    def set(self, key: str, value: bytes) -> None:
        sealed = self._secret.seal(f"{self._prefix}/{key}", value)
        self._ask(lambda: self._store.set(key, sealed))

    def get(self, key: str, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        pause_s = _FIRST_POLL_S
        while not self.has(key):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no process set {key!r} within {timeout_s:.1f} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        return self._secret.open(f"{self._prefix}/{key}", bytes(self._ask(lambda: self._store.get(key))))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(lambda: self._store.add(key, amount)))

    def part(self, prefix: str) -> Any:
        """A part of the store, as a torch store."""
        return dist.PrefixStore(prefix, self._store)

    def has(self, *keys: str) -> bool:
        """Whether every one of `keys` was set or added to."""
        return bool(self._ask(lambda: self._store.check(list(keys))))

    def _ask(self, function: Callable[[], _T]) -> _T:
        # A caller that waits forever blocks the client for all other callers.
        if self._is_silent:
            raise RendezvousError(f"{_WHO} did not answer an earlier request")
        try:
            return within(self._timeout_s, function, _WHO)
        except RendezvousError:
            self._is_silent = True
            raise


def store_of_group(process_group: Any) -> Any:
    """Returns the torch store of `process_group`; collective over the group if it has no store.

    Groups of backends with their own rendezvous, such as mpi, have no store. Their first worker then serves one and
    sends its address to the others through the group.
    """
    store = dist.distributed_c10d._world.pg_map[process_group][1]
    return _serve_store(process_group) if store is None else store


def _serve_store(process_group: Any) -> Any:
    settings = Settings.from_environment()
    timeout_s = settings.timeout_s
    timeout = timedelta(seconds=timeout_s)
    server: list[Any] = [None]
    store = None
    if dist.get_rank(process_group) == 0:
        host = rendezvous_host(_reachable_host())
        ports = NodePorts.parse(settings.node_ports)
        store = _serve_at(ports.first_free(lambda port: listen_for_workers(host, port)), host, timeout)
        server[0] = (host, store.port)
    first = dist.get_global_rank(process_group, 0)
    within(
        timeout_s,
        lambda: dist.broadcast_object_list(server, src=first, group=process_group),
        "a worker of the process group",
    )
    if store is None:
        host, port = server[0]
        store = within(
            timeout_s,
            lambda: dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout),
            f"the first worker's store at {host_and_port(host, port)}",
        )
    return store


def serve_store(host: str, port: int, *, timeout: timedelta) -> Any:
    """Returns a TCPStore that this process serves only at its address; torch's own listen on all interfaces.

    Args:
        host: From rendezvous_host().
        port: 0 for any free port.
        timeout: Time-out of its waits.

    Raises:
        OSError, RuntimeError: If the address is taken.
    """
    return _serve_at(listen_for_workers(host, port), host, timeout)


def _serve_at(listener: socket.socket, host: str, timeout: timedelta) -> Any:
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),  # the store closes it, also if it cannot reach itself
    )


def _reachable_host() -> str:
    return master_address() or socket.gethostname()
