"""A memory device's contents that survive a restart of the job's workers (docs/design/recovery.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from coarse.errors import SchemaMismatchError
from coarse.proxy.storage import Storage, VersionedStorage
from coarse.wire.registration import PARAMETERS, STATES, GroupSchema, RecoveredUpdates
from coarse.wire.segments import Segment


@dataclass(slots=True)
class PersistentGroup:
    """Parameters and states of one group.

    `group` is its number in the current attempt; `updates` is its state between attempts.
    """

    schema: GroupSchema
    segments: dict[str, Segment]
    group: int
    updates: RecoveredUpdates | None = None

    def close(self) -> None:
        """Frees the memory."""
        for segment in self.segments.values():
            segment.close()


class PersistentGroups:
    """A home device's groups with optimizers, or their replicas, by name. Used from the control thread alone."""

    def __init__(self) -> None:
        self._groups: dict[str, PersistentGroup] = {}

    def find(self, schema: GroupSchema) -> PersistentGroup | None:
        """The kept data of a group that is being registered; None if nothing was kept.

        Raises:
            SchemaMismatchError: If the kept group differs; names the first difference.
        """
        kept = self._groups.get(schema.name)
        if kept is None or kept.updates is None:
            return None
        if difference := _first_difference(kept.schema, schema):
            raise SchemaMismatchError(
                f"{schema.name}: memory devices have kept it after step {kept.updates.step}, but {difference}. "
                "Restart the job with the model and optimizer that it was started with"
            )
        return kept

    def adopt(self, group: int, schema: GroupSchema, shared: Mapping[str, Segment]) -> None:
        """Starts to keep a group that was registered, with kept or new memory.

        Args:
            group: Number of the group.
            schema: Schema of the group.
            shared: The group's segments that the node holds once; the caller closes them.
        """
        if (previous := self._groups.get(schema.name)) is not None:
            previous.close()
        self._groups[schema.name] = PersistentGroup(
            schema=schema,
            segments={
                name: segment.duplicate() for name, segment in shared.items() if name in (PARAMETERS, STATES)
            },
            group=group,
        )

    def restore(
        self, schema: GroupSchema, segments: Mapping[str, Segment], updates: RecoveredUpdates
    ) -> None:
        """Takes a group that another memory device has kept.

        Args:
            schema: Schema of the group.
            segments: Parameters and states; this object takes ownership.
            updates: State of their contents.
        """
        if (previous := self._groups.get(schema.name)) is not None:
            previous.close()
        self._groups[schema.name] = PersistentGroup(
            schema=schema, segments=dict(segments), group=-1, updates=updates
        )

    def with_updates(self) -> Iterator[tuple[PersistentGroup, RecoveredUpdates]]:
        """All groups whose state is known, with that state."""
        for kept in self._groups.values():
            if kept.updates is not None:
                yield kept, kept.updates

    def forget(self, group: int) -> None:
        """Removes a group that the workers have released."""
        for name, kept in list(self._groups.items()):
            if kept.group == group:
                self._groups.pop(name).close()

    def record_updates(self, finished: Iterable[tuple[int, int, list[int], str]]) -> list[str]:
        """Records the state of the groups after an attempt, and drops groups without a whole step.

        Args:
            finished: The native proxy's report: group, step, numbers of updates, and the error, if any.

        Returns:
            Why groups could not be kept.
        """
        problems = []
        updates = {group: (step, numbers, problem) for group, step, numbers, problem in finished}
        for name, kept in list(self._groups.items()):
            if kept.group not in updates:
                continue
            step, numbers, problem = updates[kept.group]
            if problem:
                problems.append(f"{name} after step {step}: {problem}")
            if problem or step == 0:
                self._groups.pop(name).close()
            else:
                kept.updates = RecoveredUpdates(step=step, num_updates=tuple(numbers))
                kept.group = -1
        return problems

    def close(self) -> None:
        """Closes everything. Idempotent."""
        while self._groups:
            self._groups.popitem()[1].close()


@dataclass(slots=True)
class DeviceContents:
    """Contents that outlive an attempt's workers: parameters, states, and values that workers have stored.

    `groups` are the home device's groups; `replicas` are their copies on the keeper. `failures` counts failures by
    their label in coarse_failures_total.
    """

    groups: PersistentGroups = field(default_factory=PersistentGroups)
    replicas: PersistentGroups = field(default_factory=PersistentGroups)
    storage: Storage = field(default_factory=VersionedStorage)
    failures: Counter[str] = field(default_factory=Counter)

    def close(self) -> None:
        """Closes everything. Idempotent."""
        self.groups.close()
        self.replicas.close()
        self.storage.close()


def _first_difference(kept: GroupSchema, offered: GroupSchema) -> str:
    if kept.state_names != offered.state_names:
        return f"its optimizer kept {kept.state_names}, and now keeps {offered.state_names}"
    for index, (old, new) in enumerate(zip(kept.specs, offered.specs, strict=False)):
        if old != new:
            return (
                f"tensor {index} was {old.name!r} of {old.num_elements} x {old.dtype} and is now {new.name!r} of "
                f"{new.num_elements} x {new.dtype}"
            )
    if len(kept.specs) != len(offered.specs):
        return f"it had {len(kept.specs)} tensors and now has {len(offered.specs)}"
    return ""
