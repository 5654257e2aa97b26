"""Named collective operations on arrays by the workers of a strategy: reduce, gather and broadcast."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
_TEXT_BYTES = _RECORD_BYTES - 9  # then a 1, which records of lost workers lack, and a number
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

    In a job that goes on without lost workers, operations have the parts of those that have contributed, the same on
    all workers. A gather or broadcast begins anew if a worker is lost in the middle of it.

    Args:
        session: Session of several workers; the caller still owns it.
    """

    def __init__(self, session: Session) -> None:
        self.rank = session.identity.rank
        self.num_workers = session.identity.world_size
        self.writes_for_node = self.rank == session.node_workers[0]
        """Whether this worker writes the memory that all workers of the node share."""
        self.may_lose_workers = session.settings.least_workers > 0
        """Whether the session goes on without lost workers."""
        self._session = session
        self._lost: set[int] = set()
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
        return self._registration_of(name, op, signatures, graphs).keys

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

        return self._registered((name, op, dtype, num_rows, row_elements), graphs, register).keys[0]

    def reduce(
        self, name: str, op: str, arrays: Sequence[Array], weights: Sequence[float] = ()
    ) -> list[Array]:
        """Reduces arrays over all workers; returns new ones.

        Args:
            name, op: As for keys_of().
            arrays: The arrays.
            weights: As for AsyncReducer.reduce_all(), by rank.

        Raises:
            CoarseError: If workers or memory devices are lost, or a worker does not participate in time.
        """
        sources = [np.asarray(array, order="C") for array in arrays]
        results = [np.empty(source.shape, source.dtype) for source in sources]
        full = [i for i, source in enumerate(sources) if source.size]
        if not full:
            return results
        signatures = [(sources[i].dtype.name, sources[i].size) for i in full]
        registration = self._registration_of(name, op, signatures)
        requests = [
            _request(key, sources[i], results[i]) for key, i in zip(registration.keys, full, strict=True)
        ]
        self._reduce_all(requests, f"reducing {name}", weights)
        self._see_losses(registration.group)
        return results

    def open_channel(self, channel: str, graphs: Sequence[Any]) -> None:
        """Registers a channel before its first use, which would do it too; collective.

        Args:
            channel: Its name.
            graphs: As for keys_of().
        """
        self._channel(channel, graphs)

    def gather(self, name: str, array: Array, channel: str = DEFAULT_CHANNEL) -> dict[int, Array]:
        """Returns the array of each worker that is not lost, by rank. Arrays may differ in their first dimension.

        Raises:
            SchemaMismatchError: If workers call different operations.
        """
        array = np.asarray(array, order="C")
        row = array.shape[1:]
        what = f"gathering {name}: {array.dtype} rows of shape {list(row)}"
        row_bytes = array.dtype.itemsize * int(np.prod(row, dtype=np.int64))

        def lay_out(lengths: dict[int, int]) -> Array:
            before = sum(length for rank, length in lengths.items() if rank < self.rank) * row_bytes
            contents = np.zeros(sum(lengths.values()) * row_bytes, np.uint8)
            contents[before : before + array.nbytes] = _bytes_of(array)
            return contents

        lengths, contents = self._exchange(channel, what, len(array), lay_out)
        if not row_bytes:
            return dict.fromkeys(lengths, array)
        ends = np.cumsum(list(lengths.values())) * row_bytes
        pieces = np.split(contents, ends[:-1])
        arrays = [piece.view(array.dtype).reshape(-1, *row) for piece in pieces]
        return dict(zip(lengths, arrays, strict=True))

    def broadcast(self, what: str, array: Array, channel: str = DEFAULT_CHANNEL) -> Array:
        """Returns the array of the first worker that is not lost on all workers.

        Args:
            what: Name of the operation, for errors: "creating variable w".
            array: Has the same shape and dtype on each worker.

        Raises:
            SchemaMismatchError: If workers call different operations.
        """
        what = f"{what}: {array.dtype}{list(array.shape)}"

        def lay_out(present: dict[int, int]) -> Array:
            contents = np.zeros(array.nbytes, np.uint8)
            if self.rank == min(present):
                contents[:] = _bytes_of(np.asarray(array, order="C"))
            return contents

        _, contents = self._exchange(channel, what, 0, lay_out)
        return contents.view(array.dtype).reshape(array.shape)

    def note_losses(self) -> None:
        """Tells the session which workers are lost, as reductions and exchanges have shown so far.

        Call it after the same ones on all workers, so that all learn of it at the same point of their program.
        """
        if self._lost:
            self._session.remove_members(self._lost)

    def note_present(self, present: Sequence[int]) -> None:
        """As note_losses(), for a reduction by the op: which workers have contributed to it, by rank."""
        self._lost.update(rank for rank, is_present in enumerate(present) if not is_present)
        self.note_losses()

    def close(self) -> None:
        """Ends running operations with an error. Idempotent."""
        self._reducer.close()

    def _registered(
        self,
        wanted: tuple[Any, ...],
        graphs: Sequence[Any],
        register: Callable[[], tuple[TensorGroup, list[str]]],
    ) -> _Registration:
        """The registration `wanted`, which `graphs` use from now on."""
        with self._registering:
            if wanted not in self._registrations:
                self._release_unused(f"asking for {wanted[0]}")
                self._registrations[wanted] = _Registration(*register(), is_of_functions=bool(graphs))
            registration = self._registrations[wanted]
            registration.graphs.update(graphs)
            return registration

    def _registration_of(
        self, name: str, op: str, signatures: Sequence[Signature], graphs: Sequence[Any] = ()
    ) -> _Registration:
        wanted = (name, op, tuple(signatures))
        return self._registered(wanted, graphs, lambda: self._register(*wanted))

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
        users = np.zeros(_MOST_OFFERED, np.int32)
        users[: len(offered)] = [bool(self._registrations[wanted].graphs) for wanted in offered]
        self._reduce_all([_request(self._offers[0], users, users)], what)
        return [wanted for wanted, count in zip(offered, users, strict=False) if count == 0]

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

    def _channel(self, channel: str, graphs: Sequence[Any] = ()) -> _Registration:
        """The exchanged operation names, and the chunks in which contents are transferred."""
        signatures = [("uint8", self.num_workers * _RECORD_BYTES)] + [("uint8", _CHUNK_BYTES)] * _NUM_CHUNKS
        return self._registration_of(channel, "sum", signatures, graphs)

    def _exchange(
        self, channel: str, what: str, number: int, lay_out: Callable[[dict[int, int]], Array]
    ) -> tuple[dict[int, int], Array]:
        """Adds up the bytes that `lay_out` returns on each worker for the numbers of all; returns both.

        Each byte is non-zero on at most one worker. Begins anew, on all workers, if one of them is lost meanwhile.
        """
        with self._lock_of(channel):
            while True:
                numbers = self._compare(channel, what, number)
                contents = lay_out(numbers)
                if self._add_up(channel, contents, what, len(numbers)):
                    return numbers, contents

    def _see_losses(self, group: TensorGroup) -> None:
        if self.may_lose_workers:
            self._lost |= group.absent_workers()

    def _compare(self, channel: str, what: str, number: int) -> dict[int, int]:
        """Checks that all workers call the same operation; returns the number of each that is not lost, by rank."""
        text = what.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        records = np.zeros((self.num_workers, _RECORD_BYTES), np.uint8)
        records[self.rank] = np.frombuffer(text + b"\1" + number.to_bytes(8, "little"), np.uint8)
        registration = self._channel(channel)
        self._reduce_all([_request(registration.keys[0], records, records)], what)
        self._see_losses(registration.group)
        present = {rank: bytes(record) for rank, record in enumerate(records) if record[_TEXT_BYTES]}
        texts = {
            rank: record[:_TEXT_BYTES].rstrip(b"\0").decode(errors="replace")
            for rank, record in present.items()
        }
        if len(set(texts.values())) > 1:
            doings = "; ".join(f"worker {rank} is {each}" for rank, each in texts.items())
            raise SchemaMismatchError(
                f"worker {self.rank}: the workers' operations differ: {doings}. Every worker must create the same "
                "variables and reduce the same values, in the same order."
            )
        return {rank: int.from_bytes(record[_TEXT_BYTES + 1 :], "little") for rank, record in present.items()}

    def _add_up(self, channel: str, contents: Array, what: str, num_present: int) -> bool:
        """Sums the bytes of all workers in place; returns whether so many have contributed to all of them."""
        registration = self._channel(channel)
        keys = registration.keys[1:]
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
            if self._fewest_contributors(registration.group, len(requests)) < num_present:
                return False
        return True

    def _fewest_contributors(self, group: TensorGroup, num_chunks: int) -> int:
        """The fewest workers that have contributed to one of a channel's first chunks."""
        if not self.may_lose_workers:
            return self.num_workers
        return min(group.contributors(1 + chunk) for chunk in range(num_chunks))

    def _reduce_all(self, requests: list[Request], what: str, weights: Sequence[float] = ()) -> None:
        if not requests:
            return
        with _explained(what):
            self._reducer.reduce_all(requests, weights)


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


def add_up(parts: Mapping[int, Array], op: str, weights: Array | None = None) -> Array:
    """Reduces gathered arrays, in rank order.

    Args:
        parts: The arrays, by rank.
        op: "sum", "mean" or "max".
        weights: As for AsyncReducer.reduce_all(), by rank.
    """
    combine: Callable[[Array, Array], Array] = np.maximum if op == "max" else np.add
    total = functools.reduce(combine, parts.values())
    if op == "mean":
        return (total / len(parts)).astype(total.dtype)
    return total if weights is None else (total * compensation(parts, weights)).astype(total.dtype)


def compensation(present: Iterable[int], weights: Array) -> float:
    """The factor by which a weighted sum gives the weights of lost workers to the others.

    Args:
        present: Ranks of the workers that have contributed to the sum.
        weights: Weights of all workers, by rank.
    """
    of_all, of_present = float(weights.sum()), float(weights[list(present)].sum())
    return of_all / of_present if of_present else 1.0


def _request(key: str, source: Array, destination: Array) -> Request:
    return key, source.ctypes.data, destination.ctypes.data, source.nbytes


def _bytes_of(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
