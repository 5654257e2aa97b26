"""The boundary between two training steps, where newcomers become members (docs/design/membership.md)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from coarse.client.control.connection import DeviceConnection, check_peers, send_to_all
from coarse.client.membership.members import Members
from coarse.client.memory.parameter_storage import ParameterStorage
from coarse.client.registered_groups import RegisteredGroups
from coarse.client.tensor_group import TensorGroup
from coarse.errors import CoarseError
from coarse.kernels import _native

_LOOK_INTERVAL_S = 0.001  # members wait for a newcomer from the moment at which it is one of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where the members are when newcomers become members, equal on all of them.

    Args:
        members: Ranks of all members, newcomers included.
        num_steps: Calls of cross() before.
        steps: The step of the last push of each tensor, by number of the group.
        buffers: Number of the group for unregistered arrays; -1 if there is none.
        next_group: Number of the next group that a worker registers.
    """

    members: tuple[int, ...]
    num_steps: int
    steps: dict[int, list[int]]
    buffers: int
    next_group: int

    def to_json(self) -> bytes:
        """The form in which members store it."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Position:
        """Reads to_json()."""
        fields: dict[str, Any] = json.loads(text)
        steps = {int(group): each for group, each in fields.pop("steps").items()}
        return cls(members=tuple(fields.pop("members")), steps=steps, **fields)


class StepBoundary:
    """One worker's part of the boundary of all steps of a session. One caller at a time.

    Each call of cross() pushes a byte, which the next call pulls: nobody waits. The memory device that completes it
    makes newcomers members of the next epoch before any worker sees the completion. So all members learn of it in the
    same call.

    Args:
        native: The client's data path.
        group: The registered boundary_schema().
        groups: All groups of this worker.
        storage: Through it a newcomer learns the others' position.
        members: The members that this worker sees.
        ranks: The workers of the node, by client number.
        number: This worker's client number.
        buffers: Returns the group for unregistered arrays; None if there is none.
    """

    def __init__(
        self,
        native: _native.Client,
        group: TensorGroup,
        groups: RegisteredGroups,
        storage: ParameterStorage,
        members: Members,
        ranks: Sequence[int],
        number: int,
        buffers: Callable[[], TensorGroup | None],
    ) -> None:
        self._native = native
        self._group = group
        self._groups = groups
        self._storage = storage
        self._members = members
        self._ranks = ranks
        self._number = number
        self._buffers = buffers
        self._has_pushed = False
        self._entered: frozenset[int] = frozenset()
        self.epoch = 0
        """The epoch to which this worker contributes."""
        self.num_steps = 0
        """Calls of cross(), also those of the others before this worker was a member."""

    @property
    def newcomers(self) -> frozenset[int]:
        """Ranks of the workers that are new in the epoch of this newcomer's enter(), until it calls cross()."""
        return self._entered

    def cross(self) -> frozenset[int]:
        """Goes over the boundary; every member calls it between the same two pushes.

        Returns:
            Ranks of newcomers that are members from now on, on all workers the same.
        """
        if self._has_pushed:
            self._group.pull(0)
        entered, self._entered = self._entered or self._enter_epoch(), frozenset()
        self._group.push(0)
        self._has_pushed = True
        self.num_steps += 1
        return entered

    def _enter_epoch(self) -> frozenset[int]:
        """Begins to contribute to the newest epoch, and stores the position for those that are new in it."""
        epoch = self._native.newest_epoch
        if epoch == self.epoch:
            return frozenset()
        newcomers = self._native.newcomers_of(epoch)
        self._native.enter_epoch(epoch, newcomers)
        self.epoch = epoch
        ranks = frozenset(self._ranks[each] for each in newcomers)
        position = self._position(tuple(sorted({*self._members.ranks, *ranks})))
        self._storage.store(_key(epoch), memoryview(position.to_json()))
        self._members.welcome(ranks)
        return ranks

    def _position(self, members: tuple[int, ...]) -> Position:
        buffers = self._buffers()
        return Position(
            members=members,
            num_steps=self.num_steps,
            steps={group.id: self._native.steps(group.id) for group in self._groups},
            buffers=-1 if buffers is None else buffers.id,
            next_group=self._groups.next_id,
        )

    def enter(
        self,
        connections: Sequence[DeviceConnection],
        check: Callable[[], object],
        open_buffers: Callable[[int], object],
    ) -> None:
        """Waits until this newcomer is a member, then continues from the others' position.

        Args:
            connections: One to each memory device.
            check: Raises if the session is lost.
            open_buffers: Registers the group of this number for unregistered arrays.

        Raises:
            CoarseError: If the session ends before, or the members have tensors that this worker has not registered.
        """

        def look() -> None:
            check()
            check_peers(connections)
            time.sleep(_LOOK_INTERVAL_S)

        send_to_all(connections, {"type": "ready"})
        while (epoch := self._native.member_since(self._number)) == _native.NO_EPOCH:
            look()
        while not (stored := self._storage.load(_key(epoch))).version:
            look()
        position = Position.from_json(bytes(stored.value))
        if position.buffers >= 0:
            open_buffers(position.buffers)
        self._take(position)
        while not all(self._native.are_steps_done(group.id) for group in self._groups):
            look()
        members = [number for number, rank in enumerate(self._ranks) if rank in position.members]
        self._native.enter_epoch(epoch, members)
        self.epoch = epoch
        self._entered = frozenset(self._ranks[each] for each in self._native.newcomers_of(epoch))
        self._members.begin(position.members)
        send_to_all(connections, {"type": "entered"})

    def _take(self, position: Position) -> None:
        own = {group.id for group in self._groups}
        if missing := position.steps.keys() - own:
            raise CoarseError(
                f"worker {self._ranks[self._number]}: the others have registered tensors {len(missing)} time(s) when "
                "this worker has not: all models, optimizers and reducers must be built before the first "
                "step, by every worker alike"
            )
        for group, steps in position.steps.items():
            self._native.set_steps(group, steps)
        self._groups.next_id = position.next_group
        self.num_steps = position.num_steps


def _key(epoch: int) -> str:
    """The key under which members store their position at the beginning of an epoch."""
    return f"coarse/epoch {epoch}"
