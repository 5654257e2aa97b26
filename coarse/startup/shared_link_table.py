"""The link table of an emulated session of several nodes: one piece of memory that all memory devices map.

All nodes are processes of one machine. The leader of node 0 writes the table, and the other leaders open it through
/proc (docs/design/emulation.md).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator

from coarse.emulation.machine import Emulation
from coarse.emulation.paced_links import link_table_bytes, write_link_table
from coarse.errors import RendezvousError
from coarse.kernels import _native
from coarse.rendezvous.workers import NodeMap, PeerWatch
from coarse.store import Store
from coarse.wire.host_memory import memory_name

_KEY = "link table"


@contextlib.contextmanager
def shared_link_table(
    nodes: NodeMap,
    node: int,
    store: Store,
    emulation: Emulation | None,
    *,
    timeout_s: float,
    watch: PeerWatch,
) -> Iterator[int]:
    """The descriptor of the job's link table, until the block ends; -1 with one node, or without emulation.

    The block of node 0 must not end before the leaders of all nodes are in theirs.

    Raises:
        RendezvousError: If node 0 publishes no table in time, or this process cannot open it.
        WorkerLostError: If a worker dies during the wait.
    """
    if nodes.num_nodes == 1 or emulation is None:
        yield -1
        return
    fd = _publish(store, emulation) if node == 0 else _open(nodes, node, store, timeout_s, watch)
    try:
        yield fd
    finally:
        os.close(fd)


def _publish(store: Store, emulation: Emulation) -> int:
    name = memory_name(f"links-{secrets.token_hex(8)}")
    fd = _native.create_sealed_memory(name, link_table_bytes(emulation))
    write_link_table(fd, emulation)
    store.set(_KEY, json.dumps({"pid": os.getpid(), "fd": fd, "name": name}).encode())
    return fd


def _open(nodes: NodeMap, node: int, store: Store, timeout_s: float, watch: PeerWatch) -> int:
    try:
        place = json.loads(watch.get(store, _KEY, timeout_s))
    except TimeoutError:
        raise RendezvousError(
            f"{nodes.describe(node)}: {nodes.describe(0)} has published no link table within {timeout_s:.1f} s"
        ) from None
    path = f"/proc/{int(place['pid'])}/fd/{int(place['fd'])}"
    try:
        if place["name"] not in os.readlink(path):  # in another namespace the number is another process's
            raise FileNotFoundError(f"{path} is not the table")
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RendezvousError(
            f"{nodes.describe(node)} cannot open the link table of {nodes.describe(0)} ({error}): nodes with "
            "emulated links are processes of one user that see each other in /proc; start all workers in one "
            "container, or unset COARSE_MACHINE"
        ) from None
