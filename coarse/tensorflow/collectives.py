"""What the workers of a strategy do together with arrays: reduce, gather and broadcast, by name."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from coarse.client.async_reducer import Request
from coarse.client.tensor_group import TensorGroup
from coarse.errors import SchemaMismatchError, SyncTimeoutError
from coarse.schema import ITEM_BYTES, UPDATABLE_DTYPES, TensorSpec
from coarse.session import Session

Array = npt.NDArray[Any]
Signature = tuple[str, int]
"""Dtype and number of elements of a tensor."""

_RECORD_BYTES = 512
_TEXT_BYTES = _RECORD_BYTES - 8
_CHUNK_BYTES = 128 << 10
_NUM_CHUNKS = 4
_MOST_OFFERED = 1024  # registrations of functions about which workers agree at once; the others come later

DEFAULT_CHANNEL = "exchange"


@dataclass(slots=True)
class _Registration:
    """What is reduced by one name.

    Args:
        group: Its tensors.
        keys: By which they are reduced.
        is_of_functions: Whether it was registered for a function; else it stays.
        graphs: Of the functions that reduce it.
    """

    group: TensorGroup
    keys: list[str]
    is_of_functions: bool
    graphs: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)


class Collectives:
    """Collective operations of the workers of one session. Any thread may call; every worker has to.

    Reductions of different names may come in any order, and so may gathers and broadcasts of different channels.
    Those of one channel have one order, and workers that are at different ones are told what each of them does.

    What nobody uses any more is given back when something else is registered, for which all workers come together.

    Args:
        session: Of several workers; stays the caller's.
    """

    def __init__(self, session: Session) -> None:
        self.rank = session.identity.rank
        self.num_workers = session.identity.world_size
        self.writes_for_node = self.rank == session.node_workers[0]
        """Whether what all workers of the node share is this one's to write."""
        self._most_workers_of_a_node = session.most_workers_of_a_node
        self._reducer = session.open_async_reducer()
        self._cannot_reduce_rows = session.cannot_reduce_rows()
        self._registrations: dict[tuple[Any, ...], _Registration] = {}
        self._offers: list[str] = []  # the key by which workers say what they do not use
        self._dropped: deque[TensorGroup] = deque()  # by any thread, at any time
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._num_registered: dict[str, int] = {}
        self._registering = threading.Lock()
        self._exchanging: dict[str, threading.Lock] = {}

    @property
    def interface(self) -> int:
        """As AsyncReducer's."""
        return self._reducer.interface

    @property
    def failure(self) -> Exception | None:
        """What ended everything, once something has."""
        return self._reducer.failure

    def keys_of(
        self, name: str, op: str, signatures: Sequence[Signature], graphs: Sequence[Any] = ()
    ) -> list[str]:
        """The key of each tensor of a reduction, which is registered at the first call.

        Args:
            name: The same on every worker, for the same reduction.
            op: "sum", "mean" or "max".
            signatures: Of its tensors.
            graphs: Of the function that is to reduce them, and those around it. When they are gone on all workers,
                the keys are too. Whatever is registered without any stays.
        """
        wanted = (name, op, tuple(signatures))
        return self._registered(wanted, graphs, lambda: self._register(*wanted))

    @property
    def rows_interface(self) -> int:
        """As AsyncReducer's."""
        return self._reducer.rows_interface

    @property
    def updates_interface(self) -> int:
        """As AsyncReducer's."""
        return self._reducer.updates_interface

    def register_parameters(
        self, name: str, specs: Sequence[TensorSpec], state_names: Sequence[str], owner: Any
    ) -> tuple[TensorGroup, list[str]]:
        """Registers gradients whose parameters memory devices update; every node's are its first worker's.

        Args:
            name: The same on every worker, for the same parameters.
            specs, state_names: As for Session.register_parameters().
            owner: What alone asks for updates. When it is gone, the group is given up.

        Returns:
            The group, and the key of each gradient.
        """
        if self._owners:
            gc.collect()  # models refer to themselves, and Python does not know what their optimizers take here
        with self._registering:
            self._release_unused(f"building {name}")
            group = self._next_group(name)
            with _explained(f"building {name}"):
                registered = self._reducer.register_parameters(
                    group,
                    specs,
                    state_names,
                    writes=self.writes_for_node,
                    most_workers=self._most_workers_of_a_node,
                )
            self._owners.add(owner)
            weakref.finalize(owner, self._dropped.append, registered).atexit = False
        return registered, [f"{group}/{spec.name}" for spec in specs]

    def key_of_table(
        self, name: str, op: str, dtype: str, num_rows: int, row_elements: int, graphs: Sequence[Any] = ()
    ) -> str:
        """The key of a table whose rows are reduced, which is registered at the first call; "" if none can be here.

        Args:
            name: The same on every worker, for the same reduction.
            op: "sum" or "mean".
            dtype, num_rows, row_elements: Of the table.
            graphs: As for keys_of().
        """
        if self._cannot_reduce_rows or dtype not in UPDATABLE_DTYPES:
            return ""
        spec = TensorSpec(
            name="rows", dtype=dtype, num_elements=num_rows * row_elements, op=op, row_elements=row_elements
        )

        def register() -> tuple[TensorGroup, list[str]]:
            group = self._next_group(f"{name}, rows")
            with _explained(f"asking for {name}"):
                return self._reducer.register_table(group, spec), [group]

        return self._registered((name, op, dtype, num_rows, row_elements), graphs, register)[0]

    def reduce(self, name: str, op: str, arrays: Sequence[Array]) -> list[Array]:
        """Reduces arrays over all workers; returns new ones.

        Raises:
            CoarseError: If workers or memory devices are lost, or one does not come.
        """
        sources = [np.asarray(array, order="C") for array in arrays]
        results = [np.empty(source.shape, source.dtype) for source in sources]
        full = [i for i, source in enumerate(sources) if source.size]
        keys = (
            self.keys_of(name, op, [(sources[i].dtype.name, sources[i].size) for i in full]) if full else []
        )
        self._reduce_all(
            [_request(key, sources[i], results[i]) for key, i in zip(keys, full, strict=True)],
            f"reducing {name}",
        )
        return results

    def open_channel(self, channel: str, graphs: Sequence[Any]) -> None:
        """Registers a channel, which its first use would do too; every worker does so alike.

        Args:
            channel: Its name.
            graphs: As for keys_of().
        """
        self._channel_keys(channel, graphs)

    def gather(self, name: str, array: Array, channel: str = DEFAULT_CHANNEL) -> list[Array]:
        """Every worker's array, by rank. They may differ in their first dimension.

        Raises:
            SchemaMismatchError: If workers gather different things.
        """
        array = np.asarray(array, order="C")
        row = array.shape[1:]
        what = f"gathering {name}: {array.dtype} rows of shape {list(row)}"
        with self._lock_of(channel):
            lengths = self._compare(channel, what, len(array))
            row_bytes = array.dtype.itemsize * int(np.prod(row, dtype=np.int64))
            ends = np.cumsum(lengths) * row_bytes
            contents = np.zeros(int(ends[-1]), np.uint8)
            start = int(ends[self.rank]) - array.nbytes
            contents[start : start + array.nbytes] = _bytes_of(array)
            self._add_up(channel, contents, what)
        pieces = np.split(contents, ends[:-1])
        return (
            [piece.view(array.dtype).reshape(-1, *row) for piece in pieces]
            if row_bytes
            else [array] * len(pieces)
        )

    def broadcast(self, what: str, array: Array, channel: str = DEFAULT_CHANNEL) -> Array:
        """Worker 0's array, on all of them.

        Args:
            what: Says what the workers do, for errors: "creating variable w".
            array: Of the same shape and dtype on each.

        Raises:
            SchemaMismatchError: If workers do different things.
        """
        what = f"{what}: {array.dtype}{list(array.shape)}"
        contents = np.zeros(array.nbytes, np.uint8)
        if self.rank == 0:
            contents[:] = _bytes_of(np.asarray(array, order="C"))
        with self._lock_of(channel):
            self._compare(channel, what, 0)
            self._add_up(channel, contents, what)
        return contents.view(array.dtype).reshape(array.shape)

    def close(self) -> None:
        """Ends what is under way with an error. Idempotent."""
        self._reducer.close()

    def _registered(
        self,
        wanted: tuple[Any, ...],
        graphs: Sequence[Any],
        register: Callable[[], tuple[TensorGroup, list[str]]],
    ) -> list[str]:
        """The keys of what is registered as `wanted`, which graphs use from now on."""
        with self._registering:
            if wanted not in self._registrations:
                self._release_unused(f"asking for {wanted[0]}")
                self._registrations[wanted] = _Registration(*register(), is_of_functions=bool(graphs))
            registration = self._registrations[wanted]
            registration.graphs.update(graphs)
            return registration.keys

    def _release_unused(self, what: str) -> None:
        """Gives back what nobody uses any more: all workers are about to register the same, and nobody else does.

        Optimizers are gone on each worker by itself, for none comes again. What a function reduced is used again by
        whoever traces it anew: it is gone when no worker uses it, which they tell each other.
        """
        of_functions = [wanted for wanted, each in self._registrations.items() if each.is_of_functions]
        for wanted in self._unused_by_all(of_functions[:_MOST_OFFERED], what):
            self._dropped.append(self._registrations.pop(wanted).group)
        for _ in range(len(self._dropped)):
            group = self._dropped.popleft()
            if not self._reducer.release(group):
                self._dropped.append(group)  # a step is under way that used it

    def _unused_by_all(self, offered: Sequence[tuple[Any, ...]], what: str) -> list[tuple[Any, ...]]:
        """Which of them no worker has a function for; all name the same ones, in the order of registration."""
        if not offered:
            return []
        if not self._offers:
            _, self._offers = self._register("what nobody uses", "sum", (("int32", _MOST_OFFERED),))
        votes = np.zeros(_MOST_OFFERED, np.int32)
        votes[: len(offered)] = [not self._registrations[wanted].graphs for wanted in offered]
        self._reduce_all([_request(self._offers[0], votes, votes)], what)
        return [wanted for wanted, vote in zip(offered, votes, strict=False) if vote == self.num_workers]

    def _register(
        self, name: str, op: str, signatures: tuple[Signature, ...]
    ) -> tuple[TensorGroup, list[str]]:
        group = self._next_group(name)
        specs = [
            TensorSpec(name=f"tensor {i}", dtype=dtype, num_elements=num_elements, op=op)
            for i, (dtype, num_elements) in enumerate(signatures)
        ]
        with _explained(f"asking for {name}"):
            registered = self._reducer.register(group, specs)
        return registered, [f"{group}/{spec.name}" for spec in specs]

    def _next_group(self, name: str) -> str:
        """Of those of one name, which differ in their tensors; workers come to them in the same order."""
        number = self._num_registered.get(name, 0)
        self._num_registered[name] = number + 1
        return f"{name}#{number}" if number else name

    def _lock_of(self, channel: str) -> threading.Lock:
        with self._registering:
            return self._exchanging.setdefault(channel, threading.Lock())

    def _channel_keys(self, channel: str, graphs: Sequence[Any] = ()) -> list[str]:
        """Of what all say, and of the chunks in which contents travel."""
        signatures = [("uint8", self.num_workers * _RECORD_BYTES)] + [("uint8", _CHUNK_BYTES)] * _NUM_CHUNKS
        return self.keys_of(channel, "sum", signatures, graphs)

    def _compare(self, channel: str, what: str, number: int) -> list[int]:
        """Makes sure that all workers do the same; returns the number of each."""
        text = what.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        records = np.zeros((self.num_workers, _RECORD_BYTES), np.uint8)
        records[self.rank] = np.frombuffer(text + number.to_bytes(8, "little"), np.uint8)
        self._reduce_all([_request(self._channel_keys(channel)[0], records, records)], what)
        texts = [bytes(record[:_TEXT_BYTES]).rstrip(b"\0").decode(errors="replace") for record in records]
        if len(set(texts)) > 1:
            doings = "; ".join(f"worker {rank} is {each}" for rank, each in enumerate(texts))
            raise SchemaMismatchError(
                f"worker {self.rank}: workers do different things: {doings}. Every worker must create the same "
                "variables and reduce the same values, in the same order."
            )
        return [int.from_bytes(bytes(record[_TEXT_BYTES:]), "little") for record in records]

    def _add_up(self, channel: str, contents: Array, what: str) -> None:
        """Adds up the bytes of all workers, in place; where one has some, the others have zeros."""
        keys = self._channel_keys(channel)[1:]
        for start in range(0, contents.size, _CHUNK_BYTES * _NUM_CHUNKS):
            requests = []
            pieces = []
            for key, at in zip(keys, range(start, contents.size, _CHUNK_BYTES), strict=False):
                piece = contents[at : at + _CHUNK_BYTES]
                whole = piece if piece.size == _CHUNK_BYTES else np.resize(piece, _CHUNK_BYTES)
                requests.append(_request(key, whole, whole))
                pieces.append((piece, whole))
            self._reduce_all(requests, what)
            for piece, whole in pieces:
                if piece is not whole:
                    piece[:] = whole[: piece.size]

    def _reduce_all(self, requests: list[Request], what: str) -> None:
        if not requests:
            return
        with _explained(what):
            self._reducer.reduce_all(requests)


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Says in time-outs what this worker was at, and what the others have to do."""
    try:
        yield
    except SyncTimeoutError as error:
        raise SyncTimeoutError(
            f"{str(error).rstrip('.')}. This worker was {what}: what is reduced over workers, such as a metric that "
            "is read or a variable that is created, has to be asked for on all of them, not on one alone."
        ) from error


def can_reduce(dtype: str) -> bool:
    """Whether memory devices reduce tensors of this dtype."""
    return dtype in ITEM_BYTES


def add_up(parts: Sequence[Array], op: str) -> Array:
    """Reduces what was gathered, in the order of the ranks."""
    combine: Callable[[Array, Array], Array] = np.maximum if op == "max" else np.add
    total = parts[0]
    for part in parts[1:]:
        total = combine(total, part)
    return (total / len(parts)).astype(total.dtype) if op == "mean" else total


def _request(key: str, source: Array, destination: Array) -> Request:
    return key, source.ctypes.data, destination.ctypes.data, source.nbytes


def _bytes_of(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
