"""Named collective operations on arrays by the workers of a strategy: reduce, gather and broadcast."""

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
_MOST_OFFERED = 1024  # registrations of functions per agreement between workers; the others follow later

DEFAULT_CHANNEL = "exchange"


@dataclass(slots=True)
class _Registration:
    """The tensors that are reduced under one name.

    Args:
        group: The tensors.
        keys: Keys by which they are reduced.
        is_of_functions: Whether it was registered for a function; otherwise it is never released.
        graphs: Graphs of the functions that reduce it.
    """

    group: TensorGroup
    keys: list[str]
    is_of_functions: bool
    graphs: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)


class Collectives:
    """Collective operations of the workers of one session. Any thread may call; every worker must.

    Reductions of different names may run in any order, and so may gathers and broadcasts of different channels.
    Operations of one channel must have the same order on all workers. If workers run different ones, the error names
    each worker's operation.

    Unused registrations are released at the next registration, which synchronises all workers.

    Args:
        session: Session of several workers; the caller still owns it.
    """

    def __init__(self, session: Session) -> None:
        self.rank = session.identity.rank
        self.num_workers = session.identity.world_size
        self.writes_for_node = self.rank == session.node_workers[0]
        """Whether this worker writes the memory that all workers of the node share."""
        self._most_workers_of_a_node = session.most_workers_of_a_node
        self._reducer = session.open_async_reducer()
        self._cannot_reduce_rows = session.cannot_reduce_rows()
        self._registrations: dict[tuple[Any, ...], _Registration] = {}
        self._offers: list[str] = []  # the key for exchanging unused registrations
        self._dropped: deque[TensorGroup] = deque()  # appended by any thread, at any time
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
        """The error that ended all operations; None before."""
        return self._reducer.failure

    def keys_of(
        self, name: str, op: str, signatures: Sequence[Signature], graphs: Sequence[Any] = ()
    ) -> list[str]:
        """The key of each tensor of a reduction; the first call registers it.

        Args:
            name: The same on every worker, for the same reduction.
            op: "sum", "mean" or "max".
            signatures: Signatures of its tensors.
            graphs: Graphs of the function that will reduce them, and of enclosing functions. When they are deleted on
                all workers, the keys are released. Registrations without graphs are never released.
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
        """Registers gradients whose parameters memory devices update; each node uses its first worker's parameters.

        Args:
            name: The same on every worker, for the same parameters.
            specs, state_names: As for Session.register_parameters().
            owner: The only object that requests updates. When it is deleted, the group is released.

        Returns:
            The group, and the key of each gradient.
        """
        if self._owners:
            gc.collect()  # models have reference cycles, and Python does not see their optimizers' device memory
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
        """The key of a table whose rows are reduced; the first call registers it; "" if rows are not supported.

        Args:
            name: The same on every worker, for the same reduction.
            op: "sum" or "mean".
            dtype, num_rows, row_elements: Properties of the table.
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
            CoarseError: If workers or memory devices are lost, or a worker does not participate in time.
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
        """Registers a channel before its first use, which would do it too; collective.

        Args:
            channel: Its name.
            graphs: As for keys_of().
        """
        self._channel_keys(channel, graphs)

    def gather(self, name: str, array: Array, channel: str = DEFAULT_CHANNEL) -> list[Array]:
        """Returns every worker's array, by rank. Arrays may differ in their first dimension.

        Raises:
            SchemaMismatchError: If workers call different operations.
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
        """Returns worker 0's array on all workers.

        Args:
            what: Name of the operation, for errors: "creating variable w".
            array: Has the same shape and dtype on each worker.

        Raises:
            SchemaMismatchError: If workers call different operations.
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
        """Ends running operations with an error. Idempotent."""
        self._reducer.close()

    def _registered(
        self,
        wanted: tuple[Any, ...],
        graphs: Sequence[Any],
        register: Callable[[], tuple[TensorGroup, list[str]]],
    ) -> list[str]:
        """The keys of the registration `wanted`, which `graphs` use from now on."""
        with self._registering:
            if wanted not in self._registrations:
                self._release_unused(f"asking for {wanted[0]}")
                self._registrations[wanted] = _Registration(*register(), is_of_functions=bool(graphs))
            registration = self._registrations[wanted]
            registration.graphs.update(graphs)
            return registration.keys

    def _release_unused(self, what: str) -> None:
        """Releases unused registrations; all workers are about to register the same, and no other thread registers.

        Each worker releases groups of deleted optimizers separately, because these are never used again. Reductions
        of a function are used again if a worker traces it again. So workers exchange which ones they use, and release
        those that no worker uses.
        """
        of_functions = [wanted for wanted, each in self._registrations.items() if each.is_of_functions]
        for wanted in self._unused_by_all(of_functions[:_MOST_OFFERED], what):
            self._dropped.append(self._registrations.pop(wanted).group)
        for _ in range(len(self._dropped)):
            group = self._dropped.popleft()
            if not self._reducer.release(group):
                self._dropped.append(group)  # a running step uses it

    def _unused_by_all(self, offered: Sequence[tuple[Any, ...]], what: str) -> list[tuple[Any, ...]]:
        """The offered ones for which no worker has a function; all workers pass the same, in registration order."""
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
        """Returns a group name for another set of tensors of `name`; all workers need them in the same order."""
        number = self._num_registered.get(name, 0)
        self._num_registered[name] = number + 1
        return f"{name}#{number}" if number else name

    def _lock_of(self, channel: str) -> threading.Lock:
        with self._registering:
            return self._exchanging.setdefault(channel, threading.Lock())

    def _channel_keys(self, channel: str, graphs: Sequence[Any] = ()) -> list[str]:
        """Keys of the exchanged operation names, and of the chunks in which contents are transferred."""
        signatures = [("uint8", self.num_workers * _RECORD_BYTES)] + [("uint8", _CHUNK_BYTES)] * _NUM_CHUNKS
        return self.keys_of(channel, "sum", signatures, graphs)

    def _compare(self, channel: str, what: str, number: int) -> list[int]:
        """Checks that all workers call the same operation; returns each worker's number."""
        text = what.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        records = np.zeros((self.num_workers, _RECORD_BYTES), np.uint8)
        records[self.rank] = np.frombuffer(text + number.to_bytes(8, "little"), np.uint8)
        self._reduce_all([_request(self._channel_keys(channel)[0], records, records)], what)
        texts = [bytes(record[:_TEXT_BYTES]).rstrip(b"\0").decode(errors="replace") for record in records]
        if len(set(texts)) > 1:
            doings = "; ".join(f"worker {rank} is {each}" for rank, each in enumerate(texts))
            raise SchemaMismatchError(
                f"worker {self.rank}: the workers' operations differ: {doings}. Every worker must create the same "
                "variables and reduce the same values, in the same order."
            )
        return [int.from_bytes(bytes(record[_TEXT_BYTES:]), "little") for record in records]

    def _add_up(self, channel: str, contents: Array, what: str) -> None:
        """Sums the bytes of all workers in place; each byte is non-zero on at most one worker."""
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
    """Adds to time-out errors this worker's operation and what other workers must do."""
    try:
        yield
    except SyncTimeoutError as error:
        raise SyncTimeoutError(
            f"{str(error).rstrip('.')}. This worker was {what}. All workers must take part in each reduction, such "
            "as reading a metric or creating a variable, not one worker alone."
        ) from error


def can_reduce(dtype: str) -> bool:
    """Whether memory devices reduce tensors of this dtype."""
    return dtype in ITEM_BYTES


def add_up(parts: Sequence[Array], op: str) -> Array:
    """Reduces gathered arrays, in rank order."""
    combine: Callable[[Array, Array], Array] = np.maximum if op == "max" else np.add
    total = parts[0]
    for part in parts[1:]:
        total = combine(total, part)
    return (total / len(parts)).astype(total.dtype) if op == "mean" else total


def _request(key: str, source: Array, destination: Array) -> Request:
    return key, source.ctypes.data, destination.ctypes.data, source.nbytes


def _bytes_of(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
