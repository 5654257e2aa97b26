"""Finds memory devices that outlived the workers of the previous attempt."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coarse.client.control.connection import DeviceConnection, collect_replies
from coarse.env import Attempt
from coarse.errors import MemoryDeviceLostError, RendezvousError
from coarse.machine.partition_table import PartitionTable
from coarse.rendezvous.workers import PeerWatch
from coarse.security.private_directories import entered
from coarse.settings import Settings
from coarse.wire.persistent_sessions import PersistentDevices, find_session_directory
from coarse.wire.socket_directory import TOKEN_FILE, socket_path

logger = logging.getLogger(__name__)

_DISMISSAL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """The name under which persistent devices are found.

    Args:
        session: Distinguishes the sessions of one job.
        attempt: The job's attempt.
    """

    session: str
    attempt: Attempt

    def find_directory(self) -> Path | None:
        """Directory in which they listen; None if none exist."""
        return find_session_directory(self.attempt.job, self.session)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDevices:
    """Memory devices that wait for this attempt.

    Args:
        directory: Directory in which they listen.
        lost: Devices that have ended and that new ones must replace.
    """

    directory: Path
    lost: frozenset[int]


def find_persistent_devices(
    keeping: Keeping, table: PartitionTable, replicas: int = 0
) -> FoundDevices | None:
    """Finds memory devices that wait for this attempt. Ends devices that wait for an attempt of an earlier run.

    Args:
        keeping: The name of the devices.
        table: The devices of this attempt.
        replicas: Number of devices that may be lost.

    Returns:
        None if no device waits.

    Raises:
        RendezvousError: If they serve other workers than those of `table`, or still have workers.
    """
    directory = keeping.find_directory()
    kept = None if directory is None else PersistentDevices.read(directory)
    if keeping.attempt.number == 0:
        if directory is not None and kept is not None:
            _dismiss(directory, kept)
        return None
    lost = frozenset() if directory is None or kept is None else _find_lost(directory, kept)
    if directory is None or kept is None or len(lost) > replicas:
        logger.warning(
            "attempt %d: no memory device of the previous attempt is left; nothing can be recovered from memory",
            keeping.attempt.number,
        )
        return None
    workers = tuple(device.workers for device in table.devices)
    if kept.workers != workers:
        raise RendezvousError(
            f"attempt {keeping.attempt.number}: the kept memory devices serve the workers {kept.workers}, but "
            f"this attempt has {workers}. Start it with as many workers and memory devices as the previous "
            "attempt"
        )
    if kept.memories != table.memories:
        raise RendezvousError(
            f"attempt {keeping.attempt.number}: the kept memory devices own {', '.join(kept.memories)}, but "
            f"this attempt wants {', '.join(table.memories)}. Start it with the memories of the previous "
            "attempt"
        )
    return FoundDevices(directory=directory, lost=lost)


def _find_lost(directory: Path, kept: PersistentDevices) -> frozenset[int]:
    """Devices that no longer listen."""
    lost = set()
    for device in range(len(kept.workers)):
        try:
            DeviceConnection(device, socket_path(directory, device)).close()
        except MemoryDeviceLostError:
            lost.add(device)
    return frozenset(lost)


def introducer(directory: str, settings: Settings, watch: PeerWatch) -> Callable[[int, int, int], None]:
    """Returns a function that gives a waiting device a connection to the replacement of a lost one.

    That function raises CoarseError if the waiting device is lost too, or does not answer in time.
    """

    def introduce(waiting: int, new: int, fd: int) -> None:
        connection = DeviceConnection(waiting, socket_path(directory, waiting))
        try:
            connection.send({"type": "replace", "token": read_token(directory), "device": new}, [fd])
            collect_replies(
                [connection],
                kind="replaced",
                group=None,
                timeout_s=settings.timeout_s,
                what=f"replacing memory device md{new}",
                on_silence=watch.check,
            )
        finally:
            connection.close()

    return introduce


def _dismiss(directory: Path, kept: PersistentDevices) -> None:
    """Ends memory devices that an earlier run left waiting; returns after their end."""
    connections = []
    # Connect to all devices before ending any: the first one to end removes the directory.
    for device in range(len(kept.workers)):
        with contextlib.suppress(MemoryDeviceLostError):
            connections.append(DeviceConnection(device, socket_path(directory, device)))
    try:
        with contextlib.suppress(FileNotFoundError):
            token = (directory / TOKEN_FILE).read_text()
            for connection in connections:
                with contextlib.suppress(MemoryDeviceLostError):
                    connection.send({"type": "dismiss", "token": token})
        for connection in connections:
            connection.await_end(_DISMISSAL_TIMEOUT_S)
    finally:
        for connection in connections:
            connection.close()


def read_token(directory: str) -> str:
    """The token with which a worker proves its right to join the memory devices of a directory.

    Raises:
        MemoryDeviceLostError: If the devices have ended.
        RendezvousError: If another user could have prepared the directory.
    """
    try:
        with entered(directory) as own:
            return (own / TOKEN_FILE).read_text()
    except PermissionError as error:
        raise RendezvousError(
            f"refused to join memory devices: {error}. Either the temporary directory does not support file "
            "owners and modes (set TMPDIR to one that does), or another user has written to the store of the "
            "rendezvous."
        ) from error
    except FileNotFoundError:
        raise MemoryDeviceLostError("the memory devices ended before all workers had joined them") from None
