"""One COARSE session per strategy, and its rendezvous, which TensorFlow does not provide."""

from __future__ import annotations

import atexit
import os

from coarse.env import WorkerIdentity, job_secret
from coarse.errors import RendezvousError
from coarse.rendezvous.launcher_environment import LauncherEnvironment, unserved
from coarse.rendezvous.socket_store import Address, PrefixStore, SocketStore, TcpAddress, serve
from coarse.rendezvous.store_server import StoreServer
from coarse.rendezvous.workers import WorkerAddress, gather_workers
from coarse.security.job_secret import JobSecret
from coarse.session import Session
from coarse.settings import Settings


def join_session(launch: LauncherEnvironment, number: int) -> Session:
    """Joins the session of this process's `number`-th strategy.

    Raises:
        RendezvousError: If workers are missing, present twice, or do not agree; if settings admit new workers later.
    """
    settings = Settings.from_environment()
    _check_newcomers(settings)
    name = f"tensorflow{number}"
    if launch.address is None:
        from coarse.store import DirectoryStore

        return Session.join(
            identity=launch.identity, store=DirectoryStore(os.devnull), settings=settings, name=name
        )
    store = PrefixStore(_store_of_process(launch, settings), f"session{number}")
    addresses = gather_workers(
        launch.identity, PrefixStore(store, "join"), timeout_s=settings.timeout_s, node=settings.node
    )
    _shut_door(launch)
    return Session.join(
        identity=_with_neighbours(launch.identity, addresses), store=store, settings=settings, name=name
    )


def _check_newcomers(settings: Settings) -> None:
    if settings.replaces_workers:
        raise RendezvousError(
            "COARSE_ON_LOSS=replace, COARSE_MAX_WORKERS: new workers cannot join a job of coarse.tensorflow, because "
            "nobody gives them the variables and the position in the data. Set COARSE_ON_LOSS=continue and no "
            "COARSE_MAX_WORKERS: the job then goes on without lost workers"
        )


# Global because worker 0 can serve its address only once for all strategies; forks have no store.
_STORES: dict[tuple[int, Address], tuple[SocketStore, StoreServer | None]] = {}


def _store_of_process(launch: LauncherEnvironment, settings: Settings) -> SocketStore:
    assert launch.address is not None
    key = (os.getpid(), launch.address)
    if key not in _STORES:
        timeout_s, secret = settings.timeout_s, job_secret()
        server = _serve(launch.address, secret, timeout_s) if launch.identity.rank == 0 else None
        try:
            store = SocketStore(launch.address, timeout_s=timeout_s, secret=secret)
        except RendezvousError as error:
            raise RendezvousError(f"worker {launch.identity.rank}: {error}") from error
        _STORES[key] = store, server
    return _STORES[key][0]


def _shut_door(launch: LauncherEnvironment) -> None:
    """Closes the store to new connections, after all workers have connected once each."""
    assert launch.address is not None
    if (server := _STORES[os.getpid(), launch.address][1]) is not None:
        server.shut_door()


def _serve(address: Address, secret: JobSecret, timeout_s: float) -> StoreServer:
    try:
        server = serve(address, secret=secret, timeout_s=timeout_s)
        atexit.register(server.shut_door)
        return server
    except OSError as error:
        if isinstance(address, TcpAddress):
            raise unserved(address.host, address.port, str(error)) from error
        raise RendezvousError(f"worker 0 cannot serve {address}: {error}") from error


def _with_neighbours(identity: WorkerIdentity, addresses: list[WorkerAddress]) -> WorkerIdentity:
    host = addresses[identity.rank].host
    local = [rank for rank, address in enumerate(addresses) if address.host == host]
    return WorkerIdentity(
        rank=identity.rank,
        world_size=identity.world_size,
        local_rank=local.index(identity.rank),
        local_world_size=len(local),
    )
