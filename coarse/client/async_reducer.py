"""Reduces tensors by name, as many at once as there are, for frameworks that call from many threads."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from coarse.client.interfaces import Waiter
from coarse.client.memory.tensor_bytes import TensorBytes
from coarse.errors import CoarseError
from coarse.kernels import _native
from coarse.schema import ITEM_BYTES, TensorSpec

if TYPE_CHECKING:
    from coarse.client.tensor_group import TensorGroup

Request = tuple[str, int, int, int]
"""A tensor's key, the address of its contribution, that of its result (they may be the same), and its bytes."""


@dataclass(slots=True)
class _Registered:
    """A group, and what natively refers to it.

    Args:
        group: It.
        keys: By which natively something of it is asked for.
        remove: Forgets one of them, unless it is under way.
        mapped: Memory that native code has addresses of.
    """

    group: TensorGroup
    keys: list[str]
    remove: Callable[[str], bool]
    mapped: list[memoryview[Any]] = field(default_factory=list)


class _RegisteringClient(Waiter, Protocol):
    def register(
        self,
        name: str,
        specs: Sequence[TensorSpec],
        *,
        state_names: Sequence[str] | None = None,
        on_host: bool = False,
    ) -> TensorGroup:
        """Registers tensors, as Client does."""


class AsyncReducer:
    """The tensors of a session that are reduced whenever somebody asks for it, by name.

    Every worker registers the same tensors in the same order; requests may come in any order and from any thread. The
    first failure ends all that is under way, and every later request fails with it. While it is open nothing else
    pushes or pulls in the session.

    Args:
        client: Of the session; stays the caller's.
        native: The client's end of the data path.
    """

    def __init__(self, client: _RegisteringClient, native: _native.Client) -> None:
        self._client = client
        self._registering = threading.Lock()
        self.failure: CoarseError | None = None
        """What ended everything, once something has."""
        self._native = _native.AsyncReducer(native, client.timeout_s, self._describe)
        self._rows = _native.AsyncRows(native, self._native)
        self._updates = _native.AsyncUpdates(self._native)
        self._registered: dict[int, _Registered] = {}  # last: native ends go before memory that they look at

    @property
    def interface(self) -> int:
        """Address of a CoarseAsyncReducer (async_reducer_interface.h), through which native libraries reduce."""
        return self._native.interface

    @property
    def rows_interface(self) -> int:
        """Address of a CoarseAsyncRows, through which native libraries reduce the rows of tables."""
        return self._rows.interface

    @property
    def updates_interface(self) -> int:
        """Address of a CoarseAsyncUpdates, through which native libraries have parameters updated."""
        return self._updates.interface

    def register(self, name: str, specs: Sequence[TensorSpec]) -> TensorGroup:
        """Registers tensors, each to be reduced by the key `name/its own name`; every worker does it alike.

        Raises:
            SchemaMismatchError: If another worker registers something else; names the first difference.
            SyncTimeoutError: If another worker does not register.
        """
        with self._registering:
            group = self._client.register(name, specs)
            keys = [f"{name}/{spec.name}" for spec in specs]
            self._registered[group.id] = _Registered(group, keys, self._native.remove)
            for index, (key, spec) in enumerate(zip(keys, specs, strict=True)):
                self._native.add(key, group.id, index, spec.nbytes)
        return group

    def register_table(self, name: str, spec: TensorSpec) -> TensorGroup:
        """Registers a table, whose rows are to be reduced by the key `name`; every worker does it alike.

        Args:
            name: As for register().
            spec: With `row_elements`.

        Raises:
            SchemaMismatchError, SyncTimeoutError: As by register().
        """
        counter = TensorSpec(name="number of rows", dtype="int64", num_elements=1, op="sum")
        with self._registering:
            group = self._client.register(name, [counter, spec])
            self._registered[group.id] = _Registered(group, [name], self._rows.remove)
            self._rows.add(name, group.id, 0, 1, group.rows.fd)
        return group

    def register_parameters(
        self,
        name: str,
        specs: Sequence[TensorSpec],
        state_names: Sequence[str],
        *,
        writes: bool,
        most_workers: int,
    ) -> TensorGroup:
        """Registers gradients whose parameters are updated, by the key `name/name of the gradient`; as register().

        Args:
            name: As for register().
            specs: As for Session.register_parameters(), which checks what this does not.
            state_names: As for that.
            writes: Whether this worker's values of parameters are everybody's on this node; one worker's are.
            most_workers: Of any node, because all nodes register the same.

        Raises:
            SchemaMismatchError, SyncTimeoutError: As by register().
            OutOfDeviceMemoryError: If the memory devices cannot hold them.
        """
        ranks = self._client.ranks
        # Is never pushed: its memory, which all workers see, has of each parameter how often each worker copied it.
        copies = TensorSpec(name="copies", dtype="float32", num_elements=len(specs) * most_workers, op="mean")
        with self._registering:
            group = self._client.register(name, [*specs, copies], state_names=state_names)
            keys = [f"{name}/{spec.name}" for spec in specs]
            self._registered[group.id] = registered = _Registered(group, keys, self._updates.remove)
            settings = _mapped(group.settings())
            parameters = [_mapped(group.parameter(index)) for index in range(len(specs))]
            copied = _mapped(group.parameter(len(specs)))
            registered.mapped += [settings, *parameters, copied]
            for index, (spec, parameter) in enumerate(zip(specs, parameters, strict=True)):
                self._updates.add(
                    keys[index],
                    group.id,
                    index,
                    spec.nbytes,
                    _address(parameter),
                    _address(settings) + index * _native.UPDATE_SETTINGS_BYTES,
                    writes,
                    _address(copied) + index * len(ranks) * ITEM_BYTES["float32"],
                    len(ranks),
                    ranks.index(self._client.rank),
                )
        return group

    def release(self, group: TensorGroup) -> bool:
        """Gives a group up, which nobody asks for any more; its memory is freed when every worker has. Idempotent.

        Returns:
            Whether it is given up. Not while one of its tensors is under way: call it again later.
        """
        with self._registering:
            registered = self._registered.get(group.id)
            if registered is None:
                return True
            registered.keys = [key for key in registered.keys if not registered.remove(key)]
            if registered.keys:
                return False
            del self._registered[group.id]
            group.close()
        return True

    def reduce_all(self, requests: Sequence[Request]) -> None:
        """Reduces tensors, and waits for all of them.

        Raises:
            CoarseError: What went wrong, here or with a request of somebody else.
        """
        failure = self._native.reduce_all(list(requests))
        if failure:
            raise self.failure or CoarseError(failure)

    def close(self) -> None:
        """Ends what is under way with an error. Idempotent."""
        self._native.close()

    def _describe(self, status: _native.WaitStatus, group: int, tensor: int) -> str:
        try:
            self._client.check(status, lambda: self._registered[group].group._describe_wait(tensor))
        except CoarseError as error:
            self.failure = error
            return f"{type(error).__name__}: {error}"
        return f"a wait ended with {status.name}"


def _mapped(memory: TensorBytes) -> memoryview[Any]:
    if not isinstance(memory, memoryview):
        raise ValueError("parameters lie on a GPU, where only its own processes see them")
    return memory


def _address(memory: memoryview[Any]) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
