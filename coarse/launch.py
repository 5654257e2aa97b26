"""Who this process is among the workers of its job, and where they find each other: no framework is needed for it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coarse.env import Attempt, Settings, WorkerIdentity
from coarse.errors import RendezvousError
from coarse.rendezvous import WorkerAddress, gather_workers
from coarse.session import Session
from coarse.socket_store import Address, LocalAddress, PrefixStore, SocketStore, StoreServer, TcpAddress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the launcher's variables say.

    Args:
        identity: Of this process; which workers share its node is not known before they have met.
        address: Where worker 0 serves the store; None for a job of one worker.
    """

    identity: WorkerIdentity
    address: Address | None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Launch:
        """Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or else TF_CONFIG; without them, one worker.

        Raises:
            RendezvousError: If they contradict each other, or TF_CONFIG has tasks other than workers.
        """
        environ = os.environ if environ is None else environ
        if "RANK" not in environ and "WORLD_SIZE" not in environ and environ.get("TF_CONFIG"):
            return _from_tf_config(environ["TF_CONFIG"])
        identity = WorkerIdentity.from_environment(environ)
        return cls(
            identity=identity, address=None if identity.world_size == 1 else _address(identity, environ)
        )


def join_session(launch: Launch, number: int) -> Session:
    """Joins the session of this process's `number`-th strategy.

    Raises:
        RendezvousError: If workers are missing, there twice, or do not agree.
    """
    settings = Settings.from_environment()
    name = f"tensorflow{number}"
    if launch.address is None:
        from coarse.store import DirectoryStore

        return Session.join(
            identity=launch.identity, store=DirectoryStore(os.devnull), settings=settings, name=name
        )
    store = PrefixStore(
        _store_of_process(launch, settings), f"attempt{Attempt.from_environment().number}/session{number}"
    )
    addresses = gather_workers(
        launch.identity, PrefixStore(store, "join"), timeout_s=settings.timeout_s, node=settings.node
    )
    return Session.join(
        identity=_with_neighbours(launch.identity, addresses), store=store, settings=settings, name=name
    )


# Global because worker 0 can serve its address only once, however many strategies there are; forks have none.
_STORES: dict[tuple[int, Address], tuple[SocketStore, StoreServer | None]] = {}


def _store_of_process(launch: Launch, settings: Settings) -> SocketStore:
    assert launch.address is not None
    key = (os.getpid(), launch.address)
    if key not in _STORES:
        server = _serve(launch.address) if launch.identity.rank == 0 else None
        try:
            store = SocketStore(launch.address, timeout_s=settings.timeout_s)
        except RendezvousError as error:
            raise RendezvousError(f"worker {launch.identity.rank}: {error}") from error
        _STORES[key] = store, server
    return _STORES[key][0]


def _serve(address: Address) -> StoreServer:
    try:
        return StoreServer(address)
    except OSError as error:
        raise RendezvousError(
            f"worker 0 cannot serve {address}: {error}. Either it is taken or another process has rank 0; choose a "
            "free port and give each worker its own rank."
        ) from error


def _with_neighbours(identity: WorkerIdentity, addresses: list[WorkerAddress]) -> WorkerIdentity:
    host = addresses[identity.rank].host
    local = [rank for rank, address in enumerate(addresses) if address.host == host]
    return WorkerIdentity(
        rank=identity.rank,
        world_size=identity.world_size,
        local_rank=local.index(identity.rank),
        local_world_size=len(local),
    )


def _address(identity: WorkerIdentity, environ: Mapping[str, str]) -> Address:
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT", "")
    if not host or not port.isdigit() or int(port) > 65535:
        raise RendezvousError(
            f"worker {identity.rank} of {identity.world_size}: MASTER_ADDR={host!r}, MASTER_PORT={port!r} is no "
            "address. Start the script with `coarse run -n N script.py`, torchrun, or a TF_CONFIG."
        )
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return TcpAddress(host, int(port))
    # torchrun's agent has the port for a store that only PyTorch can speak to.
    if identity.local_world_size == identity.world_size:
        job = f"{host}:{port}/{environ.get('TORCHELASTIC_RUN_ID', '')}"
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return LocalAddress(hashlib.sha256(f"{job}/{attempt}".encode()).hexdigest()[:32])
    return TcpAddress(host, int(port) + 1)


def _from_tf_config(text: str) -> Launch:
    try:
        config = json.loads(text)
        cluster, task = config.get("cluster", {}), config.get("task", {})
        workers = [*cluster.get("chief", []), *cluster.get("worker", [])]
        rank = _rank_of_task(cluster, task)
    except (ValueError, AttributeError, TypeError) as error:
        raise RendezvousError(f"TF_CONFIG={text!r} cannot be read: {error}") from error
    world_size = max(1, len(workers))
    identity = WorkerIdentity(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    if world_size == 1:
        return Launch(identity=identity, address=None)
    host, _, port = str(workers[0]).rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise RendezvousError(f"TF_CONFIG: {workers[0]!r}, where the first worker is, is no host:port")
    return Launch(identity=identity, address=TcpAddress(host.strip("[]"), int(port)))


def _rank_of_task(cluster: Mapping[str, Any], task: Mapping[str, Any]) -> int:
    kind, index = task.get("type", "worker"), int(task.get("index", 0))
    if kind == "chief":
        return index
    if kind == "worker":
        return len(cluster.get("chief", [])) + index
    raise ValueError(
        f"a task of type {kind!r}; coarse.tensorflow has chief and worker, no servers nor evaluators"
    )
