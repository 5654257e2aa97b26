"""One COARSE session per strategy: how its workers find each other, which TensorFlow does not help with."""

from __future__ import annotations

import os

from coarse.env import WorkerIdentity
from coarse.errors import RendezvousError
from coarse.launch import Launch
from coarse.rendezvous import WorkerAddress, gather_workers
from coarse.session import Session
from coarse.settings import Settings
from coarse.socket_store import Address, PrefixStore, SocketStore, StoreServer


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
    store = PrefixStore(_store_of_process(launch, settings), f"session{number}")
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
