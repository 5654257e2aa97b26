"""Reduces any number of tensors concurrently, by name, for frameworks that call from many threads."""

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
"""A tensor's key, the addresses of its contribution and its result (possibly equal), and its size in bytes."""


@dataclass(slots=True)
class _Registered:
    """A group and its native references.

    Args:
        group: The tensor group.
        keys: Keys by which native code requests the group's tensors.
        remove: Removes a key, unless its tensor is being reduced.
        mapped: Memory whose addresses native code holds.
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
        """Registers tensors, like Client.register()."""


class AsyncReducer:
    """Reduces a session's tensors on request, by name.

    Every worker registers the same tensors in the same order; requests may come in any order and from any thread. The
    first failure ends all pending requests, and every later request fails with the same error. While the reducer is
    open, nothing else may push or pull in the session.

    Args:
        client: The session's client; the caller closes it.
        native: The client's end of the data path.
    """

    def __init__(self, client: _RegisteringClient, native: _native.Client) -> None:
        self._client = client
        self._registering = threading.Lock()
        self.failure: CoarseError | None = None
        """The failure that ended all requests; None without one."""
        self._native = _native.AsyncReducer(native, client.timeout_s, self._describe)
        self._rows = _native.AsyncRows(native, self._native)
        self._updates = _native.AsyncUpdates(self._native)
        self._registered: dict[int, _Registered] = {}  # last: native code closes before its memory is freed

    @property
    def interface(self) -> int:
        """Address of a CoarseAsyncReducer (async_reducer_interface.h), through which native libraries reduce."""
        return self._native.interface

    @property
    def rows_interface(self) -> int:
        """Address of a CoarseAsyncRows, through which native libraries reduce sparse gradients."""
        return self._rows.interface

    @property
    def updates_interface(self) -> int:
        """Address of a CoarseAsyncUpdates, through which native libraries update parameters."""
        return self._updates.interface

    def register(self, name: str, specs: Sequence[TensorSpec]) -> TensorGroup:
        """Registers tensors under keys `name/tensor name`; every worker calls it with the same arguments.

        Raises:
            SchemaMismatchError: If another worker registers different tensors; names the first difference.
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
        """Registers a table, whose rows are reduced by the key `name`; every worker calls it with the same arguments.

        Args:
            name: As for register().
            spec: The table; its `row_elements` is set.

        Raises:
            SchemaMismatchError, SyncTimeoutError: As for register().
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
        """Like register(), for gradients whose parameters the memory devices update; keys are `name/gradient name`.

        Args:
            name: As for register().
            specs: As for Session.register_parameters(), but unchecked.
            state_names: As for Session.register_parameters().
            writes: Whether this worker provides the parameters' initial values on its node; exactly one worker does.
            most_workers: Largest number of workers on any node, because all nodes register the same tensors.

        Raises:
            SchemaMismatchError, SyncTimeoutError: As for register().
            OutOfDeviceMemoryError: If the memory devices cannot hold them.
        """
        ranks = self._client.ranks
        # Never pushed: its memory, visible to all workers, counts each worker's copies of each parameter.
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
        """Releases a group that is no longer used; its memory is freed when every worker has released it. Idempotent.

        Returns:
            Whether the group is released. False while one of its tensors is being reduced: call again later.
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

    def reduce_all(self, requests: Sequence[Request], weights: Sequence[float] = ()) -> None:
        """Reduces tensors and waits for all of them.

        Args:
            requests: The tensors.
            weights: Of all workers, by client number, if the results are weighted sums. Where a worker is lost before
                it has contributed, its weight goes to those that have. None may have been replaced.

        Raises:
            CoarseError: If this or any other request fails.
        """
        failure = self._native.reduce_all(list(requests), weights)
        if failure:
            raise self.failure or CoarseError(failure)

    def close(self) -> None:
        """Ends pending requests with an error. Idempotent."""
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
        raise ValueError("parameters lie on a GPU; this process cannot map their memory")
    return memory


def _address(memory: memoryview[Any]) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
