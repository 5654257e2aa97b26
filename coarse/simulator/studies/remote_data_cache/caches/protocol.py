"""The coherence of remote data caches, message by message.

Nodes keep lines of their own memory and cache lines of other nodes. Messages between two nodes may overtake each
other, so the caller of a `System` chooses which message arrives next. `oracle` has the values that a read may return.

Hardware coherence (GPU-VI with a sharing tracker): a write goes to the line's home. Unless its tracker knows the line
as private, the home tells all nodes but the writer to invalidate, and acknowledges the write when all have answered.
Software coherence: a line is valid in the epoch of its stream in which it was fetched. Each kernel has its own epoch.
When the counter starts again at 0, the cache is reset.

A fetched line that became invalid on its way is used once and not installed, and no later read waits for it. It may
be newer than what the node holds or awaits, so these become invalid as well: a later read would go back in time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from coarse.simulator.studies.remote_data_cache.caches.remote_cache import Coherence


class Sharing(Enum):
    """The tracker's state of a line, in two bits at its home."""

    UNCACHED = "uncached"
    PRIVATE = "private"
    READ_SHARED = "read-shared"
    READ_WRITE_SHARED = "read-write shared"


@dataclass(slots=True, kw_only=True)
class CachedLine:
    """A set of a remote data cache: a line with its tag, and the epoch and stream in which it was fetched."""

    line: int
    value: int
    stream: int
    epoch: int


@dataclass(slots=True, kw_only=True)
class Pending:
    """A node's request on its way.

    Args:
        node, line, stream: Who wants what.
        epoch: Of the stream at the time of the request.
        is_write: Whether `value` is to be written.
        value: Number of the write.
        is_stale: The line became invalid since the request: the answer must not be installed.
        waiting: Operations that end when the answer comes.
    """

    node: int
    line: int
    stream: int
    epoch: int
    is_write: bool = False
    value: int = 0
    is_stale: bool = False
    waiting: list[Operation] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Operation:
    """A read or a write, as the oracle sees it.

    Args:
        node, stream, line, is_write: The access.
        value: The value that it wrote, or has read so far.
        began, ended: Moments, counted in operations and messages; `ended` is -1 before its end.
        kernel: Kernels that its stream has ended before it.
    """

    node: int
    stream: int
    line: int
    is_write: bool
    value: int = 0
    began: int
    ended: int = -1
    kernel: int = 0


@dataclass(slots=True, kw_only=True)
class Message:
    """A message that arrives when the caller of the system decides."""

    what: str
    arrive: Callable[[], None]


class Home:
    """Memory of one node: values, the tracker, and writes that wait for answers."""

    def __init__(self, chance: random.Random, private_probability: float) -> None:
        self.values: dict[int, int] = {}
        self.order: dict[int, list[int]] = {}
        self.sharing: dict[int, Sharing] = {}
        self.num_accesses: dict[int, int] = {}
        self._chance, self._private_probability = chance, private_probability

    def read(self, line: int, *, is_remote: bool) -> int:
        """The line's value; notes that a remote node has it."""
        if is_remote:
            self._count(line)
            self.sharing[line] = self.after_remote_read(self.sharing_of(line))
        return self.values.get(line, 0)

    def write(self, line: int, value: int, *, is_remote: bool) -> bool:
        """Writes; returns whether other nodes may have the line."""
        before = self.sharing_of(line)
        self._count(line)
        self.values[line] = value
        self.order.setdefault(line, []).append(value)
        self.sharing[line] = self.after_remote_write(before) if is_remote else self.after_local_write(before)
        return before in (Sharing.READ_SHARED, Sharing.READ_WRITE_SHARED)

    def sharing_of(self, line: int) -> Sharing:
        """The tracker's state."""
        return self.sharing.get(line, Sharing.UNCACHED)

    def after_remote_read(self, before: Sharing) -> Sharing:
        """Read-shared, unless it is written too."""
        return before if before is Sharing.READ_WRITE_SHARED else Sharing.READ_SHARED

    def after_remote_write(self, before: Sharing) -> Sharing:
        """Read-write shared."""
        return Sharing.READ_WRITE_SHARED

    def after_local_write(self, before: Sharing) -> Sharing:
        """Private, if no other node has it."""
        return Sharing.PRIVATE if before in (Sharing.UNCACHED, Sharing.PRIVATE) else Sharing.READ_WRITE_SHARED

    def end_local_write(self, line: int, num_accesses: int) -> None:
        """All have answered: by chance the line is private, unless there was another access meanwhile."""
        is_alone = self.num_accesses[line] == num_accesses
        if is_alone and self._chance.random() < self._private_probability:
            self.sharing[line] = Sharing.PRIVATE

    def _count(self, line: int) -> None:
        self.num_accesses[line] = self.num_accesses.get(line, 0) + 1


class RemoteCache:
    """Remote data cache of one node: direct mapped, a tag next to each line.

    Args:
        num_lines: Lines.
        coherence: What makes them invalid.
        epoch_bits: Width of the epoch counters.
    """

    def __init__(self, num_lines: int, coherence: Coherence, epoch_bits: int) -> None:
        self.sets: dict[int, CachedLine] = {}
        self.epochs: dict[int, int] = {}
        self.num_reset_lines = 0
        self.num_lines, self.coherence, self.epoch_bits = num_lines, coherence, epoch_bits

    def find(self, line: int, stream: int) -> CachedLine | None:
        """The valid copy of a line."""
        held = self.sets.get(line % self.num_lines)
        if held is None or held.line != line:
            return None
        return held if self.is_current(held, stream) else None

    def is_current(self, held: CachedLine, stream: int) -> bool:
        """Whether a line may be used by a stream."""
        if self.coherence is not Coherence.SOFTWARE:
            return True
        return held.stream == stream and held.epoch == self.epoch(stream)

    def install(self, pending: Pending, value: int) -> None:
        """Puts what came back into its set, unless it is stale."""
        if not pending.is_stale:
            self.sets[pending.line % self.num_lines] = CachedLine(
                line=pending.line, value=value, stream=pending.stream, epoch=pending.epoch
            )

    def invalidate(self, line: int) -> None:
        """Removes a line."""
        held = self.sets.get(line % self.num_lines)
        if held is not None and held.line == line:
            del self.sets[line % self.num_lines]

    def epoch(self, stream: int) -> int:
        """The counter of a stream."""
        return self.epochs.get(stream, 0)

    def next_epoch(self, stream: int) -> bool:
        """Invalidates all lines of a stream; returns whether the counter was used up, and the cache was reset."""
        self.epochs[stream] = (self.epoch(stream) + 1) % 2**self.epoch_bits
        if self.epochs[stream] == 0:
            self.reset()
        return self.epochs[stream] == 0

    def reset(self) -> None:
        """Walks through all lines."""
        self.num_reset_lines += self.num_lines
        self.sets.clear()


class System:
    """Nodes with homes and caches, and the messages between them.

    Args:
        num_nodes: Nodes; line n is at home at node n modulo this.
        cache_lines: Lines of each remote data cache.
        coherence: Software or hardware.
        epoch_bits: Width of the epoch counters.
        private_probability: With which a local write ends a line's sharing state.
        seed: Of the tracker's chance.
    """

    def __init__(
        self,
        *,
        num_nodes: int,
        cache_lines: int,
        coherence: Coherence,
        epoch_bits: int = 20,
        private_probability: float = 0.01,
        seed: int = 0,
    ) -> None:
        chance = random.Random(seed)
        self.coherence, self.num_nodes = coherence, num_nodes
        self.homes = [Home(chance, private_probability) for _ in range(num_nodes)]
        self.caches = [RemoteCache(cache_lines, coherence, epoch_bits) for _ in range(num_nodes)]
        self.messages: list[Message] = []
        self.operations: list[Operation] = []
        self.kernel_ends: dict[int, list[int]] = {}
        self.num_hits = self.num_invalidations = 0
        self._pending: list[Pending] = []
        self._moment = self._last_write = 0

    # ---- operations ----

    def can_access(self, node: int, line: int) -> bool:
        """Whether the node's own write of the line has ended; the next access waits for that."""
        return not any(each.is_write and (each.node, each.line) == (node, line) for each in self._pending)

    def read(self, node: int, line: int, stream: int = 0) -> Operation:
        """Begins a read. It has ended if the line is local or hits."""
        operation = self._operation(node, stream, line, is_write=False)
        home = self._home_of(line)
        if home == node:
            self._end(operation, self.homes[home].read(line, is_remote=False))
        elif (held := self.caches[node].find(line, stream)) is not None:
            self.num_hits += 1
            self._end(operation, held.value)
        else:
            self._fetch(operation)
        return operation

    def write(self, node: int, line: int, stream: int = 0) -> Operation:
        """Begins a write of a new value."""
        self._last_write += 1
        operation = self._operation(node, stream, line, is_write=True)
        operation.value = self._last_write
        pending = self._request(operation)
        pending.is_write, pending.value = True, operation.value
        self._outdate(node, line, but=pending)
        self.caches[node].invalidate(line)
        if self._home_of(line) == node:
            self._write_home(pending)
        else:
            self._send(f"write {line} {node}>home", lambda: self._write_home(pending))
        return operation

    def end_kernel(self, stream: int = 0) -> None:
        """All writes of the stream have ended; its next kernel has an epoch of its own.

        Raises:
            ValueError: If a write is on its way.
        """
        if not self.writes_have_ended(stream):
            raise ValueError(f"a write of stream {stream} is on its way; deliver all messages first")
        self._moment += 1
        self.kernel_ends.setdefault(stream, []).append(self._moment)
        if self.coherence is Coherence.SOFTWARE:
            for node in range(self.num_nodes):
                self._next_epoch(node, stream)

    def writes_have_ended(self, stream: int) -> bool:
        """Whether no write of a stream is on its way."""
        return not any(each.is_write and each.stream == stream for each in self._pending)

    def deliver(self, position: int) -> None:
        """Lets the message at a position of `messages` arrive."""
        self._moment += 1
        self.messages.pop(position).arrive()

    def deliver_all(self) -> None:
        """Lets all messages arrive, the first sent first."""
        while self.messages:
            self.deliver(0)

    # ---- reads ----

    def _fetch(self, operation: Operation) -> None:
        for pending in self._pending:
            if self.may_join(pending, operation):
                pending.waiting.append(operation)
                return
        pending = self._request(operation)
        self._send(f"read {pending.line} {pending.node}>home", lambda: self._answer(pending))

    def may_join(self, pending: Pending, operation: Operation) -> bool:
        """Whether a read may wait for the answer to an earlier one."""
        same = (pending.node, pending.line, pending.stream) == (
            operation.node,
            operation.line,
            operation.stream,
        )
        is_old = self.coherence is Coherence.SOFTWARE and pending.epoch != self._epoch(operation)
        return same and not (pending.is_write or pending.is_stale or is_old)

    def _answer(self, pending: Pending) -> None:
        value = self.homes[self._home_of(pending.line)].read(pending.line, is_remote=True)
        self._send(f"fill {pending.line} home>{pending.node}", lambda: self._fill(pending, value))

    def _fill(self, pending: Pending, value: int) -> None:
        self._pending.remove(pending)
        if pending.is_stale:
            self._outdate(pending.node, pending.line)
            self.caches[pending.node].invalidate(pending.line)
        self.caches[pending.node].install(pending, value)
        for operation in pending.waiting:
            self._end(operation, value)

    # ---- writes ----

    def _write_home(self, pending: Pending) -> None:
        node, line, home = pending.node, pending.line, self._home_of(pending.line)
        may_be_shared = self.homes[home].write(line, pending.value, is_remote=home != node)
        told = self.told_of(node, home) if may_be_shared and self.coherence is Coherence.HARDWARE else []
        awaited, num_accesses = self.awaited_of(told), self.homes[home].num_accesses[line]

        def answered(other: int) -> None:
            if other in awaited:
                awaited.remove(other)
                self._end_write_if_answered(pending, awaited, num_accesses)

        for other in told:
            self._invalidate(other, line, answered)
        self._end_write_if_answered(pending, awaited, num_accesses)

    def told_of(self, writer: int, home: int) -> list[int]:
        """Nodes that the home tells of a write."""
        return [node for node in range(self.num_nodes) if node not in (writer, home)]

    def awaited_of(self, told: list[int]) -> set[int]:
        """Those of them whose answers the home awaits before it acknowledges."""
        return set(told)

    def _end_write_if_answered(self, pending: Pending, awaited: set[int], num_accesses: int) -> None:
        if awaited:
            return
        home = self._home_of(pending.line)
        if home == pending.node:
            self.homes[home].end_local_write(pending.line, num_accesses)
            self._written(pending)
        else:
            self._send(f"acknowledge {pending.line} home>{pending.node}", lambda: self._written(pending))

    def _invalidate(self, node: int, line: int, answered: Callable[[int], None]) -> None:
        def arrive() -> None:
            self.num_invalidations += 1
            self.caches[node].invalidate(line)
            self._outdate(node, line)
            self._send(f"answer {line} {node}>home", lambda: answered(node))

        self._send(f"invalidate {line} home>{node}", arrive)

    def _written(self, pending: Pending) -> None:
        self._pending.remove(pending)
        if self._home_of(pending.line) != pending.node:
            self.caches[pending.node].install(pending, pending.value)
        for operation in pending.waiting:
            self._end(operation, pending.value)

    # ---- parts ----

    def _home_of(self, line: int) -> int:
        return line % self.num_nodes

    def _epoch(self, operation: Operation) -> int:
        return self.caches[operation.node].epoch(operation.stream)

    def _operation(self, node: int, stream: int, line: int, *, is_write: bool) -> Operation:
        self._moment += 1
        operation = Operation(
            node=node,
            stream=stream,
            line=line,
            is_write=is_write,
            began=self._moment,
            kernel=len(self.kernel_ends.get(stream, [])),
        )
        self.operations.append(operation)
        return operation

    def _end(self, operation: Operation, value: int) -> None:
        operation.value, operation.ended = value, self._moment

    def _request(self, operation: Operation) -> Pending:
        pending = Pending(
            node=operation.node,
            line=operation.line,
            stream=operation.stream,
            epoch=self._epoch(operation),
            waiting=[operation],
        )
        self._pending.append(pending)
        return pending

    def _outdate(self, node: int, line: int, but: Pending | None = None) -> None:
        """Notes that the awaited answer may be older than an invalidation."""
        for pending in self._pending:
            if (pending.node, pending.line) == (node, line) and pending is not but:
                pending.is_stale = True

    def _next_epoch(self, node: int, stream: int) -> None:
        if self.caches[node].next_epoch(stream):
            for pending in self._pending:
                pending.is_stale |= pending.node == node

    def _send(self, what: str, arrive: Callable[[], None]) -> None:
        self.messages.append(Message(what=what, arrive=arrive))
