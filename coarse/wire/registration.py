"""Registered tensor groups as one memory device sees them: who has asked for what, and whether they agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coarse.errors import ProtocolError, SchemaMismatchError
from coarse.kernels import _native
from coarse.profiler.partition import ALGORITHMS, PartitionPlan, plan_partition
from coarse.profiler.routing import RoutingTable
from coarse.schema import ITEM_BYTES, OPS, TensorSpec
from coarse.wire.messages import Message, int_field
from coarse.wire.segments import Segment
from coarse.wire.slot_pieces import SlotPiece

DTYPE_NUMBERS = {name: number for number, name in enumerate(ITEM_BYTES)}
OP_NUMBERS = {name: number for number, name in enumerate(OPS)}
_ALGORITHM_NUMBERS = {name: number for number, name in enumerate(ALGORITHMS)}
_MAX_TENSORS = 1_000_000

CONTROL = "control"
SLOTS = "slots"  # of the worker that is told
ROWS = "rows"  # the same, where there are tables
SETTINGS = "settings"  # of the worker that is told, where the group has an optimizer
NODE = "node"  # where there are several nodes
PARAMETERS = "parameters"  # these two where the group has an optimizer
STATES = "states"
REPLICA_CONTROL = "replica control"  # these three where the group has a replica; only devices are told them
REPLICA_PARAMETERS = "replica of parameters"
REPLICA_STATES = "replica of states"
UNDO_CONTROL = "undo control"  # these three where a step that was begun is undone; only devices are told them
UNDO_PARAMETERS = "parameters before"
UNDO_STATES = "states before"
REPLICA_OF = {PARAMETERS: REPLICA_PARAMETERS, STATES: REPLICA_STATES}
SNAPSHOT_REQUEST = "snapshot request"  # these three where there are snapshots of parameters and states
SNAPSHOT_CONTROL = "snapshot control"
SNAPSHOT_POOL = "snapshot pool"


def fd_of(shared: Mapping[str, Segment], name: str) -> int:
    """The descriptor of what a group has under a name, for native code; -1 if it has nothing."""
    return shared[name].fd if name in shared else -1


def region_of(shared: Mapping[str, Segment], name: str) -> _native.Region:
    """The same of memory that may be a part of a device file."""
    return shared[name].region if name in shared else _native.Region(-1)


def slots_of(client: int) -> str:
    """What a worker is told the slots of `client` by, to read them."""
    return f"slots of {client}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSchema:
    """Everything about a tensor group on which all workers must agree.

    Args:
        name: What the workers call it.
        specs: Its tensors; of a staging group, its buffers as uint8.
        shard_bytes, gather_bytes, algorithm, large_algorithm: How it is cut (coarse.profiler.partition).
        is_staging: Its shards carry buffers whose length, dtype and op come with each push.
        is_open: Workers see each other's slots, so that they can reduce tensors themselves.
        on_host: Its tensors lie in the host's memory, whatever memory devices own: for what workers have there.
        state_names: Of the float32 tensors that an optimizer in the memory devices keeps beside each parameter, in
            the order of the update rule; None if the group has no optimizer.
        window_bytes: Tensors take turns in slots of so many bytes (plan_partition); 0 gives each one its own. Needs
            an optimizer: parameters do not share.
        routes: The routing table of each worker, in whose memory devices its slots then lie; () where they lie in
            its own one, whoever takes its shards.
    """

    name: str
    specs: tuple[TensorSpec, ...]
    shard_bytes: int
    gather_bytes: int
    algorithm: str
    is_staging: bool = False
    is_open: bool = False
    on_host: bool = False
    state_names: tuple[str, ...] | None = None
    window_bytes: int = 0
    large_algorithm: str = "direct"
    routes: tuple[RoutingTable, ...] = ()

    @property
    def kept_bytes(self) -> int:
        """What a node holds once, not once per worker: parameters, states and master weights of narrow parameters."""
        if self.state_names is None:
            return 0
        num_states, wide = len(self.state_names), ITEM_BYTES["float32"]
        return sum(
            spec.nbytes + spec.num_elements * wide * (num_states + (spec.dtype != "float32"))
            for spec in self.specs
        )

    @property
    def updates_early(self) -> bool:
        """Whether parameters are updated before all gradients of a step are complete: these take turns in slots."""
        return self.window_bytes > 0

    @property
    def has_tables(self) -> bool:
        """Whether contributions to some of its tensors are rows."""
        return any(spec.row_elements for spec in self.specs)

    def partition(self) -> PartitionPlan:
        """The layout that worker and memory device compute alike."""
        return plan_partition(
            self.specs,
            shard_bytes=self.shard_bytes,
            gather_bytes=self.gather_bytes,
            algorithm=self.algorithm,
            large_algorithm=self.large_algorithm,
            window_bytes=self.window_bytes,
            small_first=bool(self.routes),
        )

    def native_plan(self, group: int, num_clients: int) -> _native.GroupPlan:
        """The same for the data path."""
        plan = self.partition()
        shards = [
            (
                shard.tensor,
                shard.num_elements,
                shard.offset,
                DTYPE_NUMBERS[self.specs[shard.tensor].dtype],
                OP_NUMBERS[self.specs[shard.tensor].op],
                _ALGORITHM_NUMBERS[shard.algorithm],
                self.is_staging,
            )
            for shard in plan.shards
        ]
        return _native.GroupPlan(
            id=group,
            num_clients=num_clients,
            slot_bytes=plan.slot_bytes,
            shards=shards,
            num_states=-1 if self.state_names is None else len(self.state_names),
            row_elements=[spec.row_elements for spec in self.specs] if self.has_tables else [],
        )

    def to_message(self, group: int) -> Message:
        """The control message that asks for it."""
        return {
            "type": "register",
            "group": group,
            "name": self.name,
            "specs": [
                [spec.name, spec.dtype, spec.num_elements, spec.op, spec.row_elements] for spec in self.specs
            ],
            "shard_bytes": self.shard_bytes,
            "gather_bytes": self.gather_bytes,
            "algorithm": self.algorithm,
            "large_algorithm": self.large_algorithm,
            "is_staging": self.is_staging,
            "is_open": self.is_open,
            "on_host": self.on_host,
            "state_names": None if self.state_names is None else list(self.state_names),
            "window_bytes": self.window_bytes,
            "routes": [[table.lat_proxy, table.bw_proxy, table.threshold_bytes] for table in self.routes],
        }

    @classmethod
    def from_message(cls, message: Message) -> GroupSchema:
        """Reads the control message of to_message().

        Raises:
            ProtocolError: If anything in it is out of range.
        """
        specs, state_names = message.get("specs"), message.get("state_names")
        if not isinstance(specs, list) or not 0 < len(specs) <= _MAX_TENSORS:
            raise ProtocolError("a registration carries no list of tensors")
        if state_names is not None and not isinstance(state_names, list):
            raise ProtocolError("the state names of a registration are no list")
        try:
            return cls(
                name=str(message["name"]),
                specs=tuple(
                    TensorSpec(
                        name=str(name),
                        dtype=str(dtype),
                        num_elements=int(length),
                        op=str(op),
                        row_elements=int(row_elements),
                    )
                    for name, dtype, length, op, row_elements in specs
                ),
                shard_bytes=int_field(message, "shard_bytes", low=1),
                gather_bytes=int_field(message, "gather_bytes"),
                algorithm=str(message["algorithm"]),
                large_algorithm=str(message["large_algorithm"]),
                is_staging=message.get("is_staging") is True,
                is_open=message.get("is_open") is True,
                on_host=message.get("on_host") is True,
                state_names=None if state_names is None else tuple(map(str, state_names)),
                window_bytes=int_field(message, "window_bytes"),
                routes=tuple(
                    RoutingTable(lat_proxy=int(lat), bw_proxy=int(bw), threshold_bytes=int(threshold))
                    for lat, bw, threshold in message.get("routes", [])
                ),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"a registration cannot be read: {error}") from None


def check_agreement(first: int, expected: GroupSchema, other: int, offered: GroupSchema) -> None:
    """Compares what two workers registered.

    Raises:
        SchemaMismatchError: With the first difference, if there is one.
    """
    if expected == offered:
        return
    raise SchemaMismatchError(
        f"{expected.name}: workers {first} and {other} differ: "
        f"{_first_difference(first, expected, other, offered)}. Build the same model on every worker."
    )


def _first_difference(first: int, expected: GroupSchema, other: int, offered: GroupSchema) -> str:
    for index, (ours, theirs) in enumerate(zip(expected.specs, offered.specs, strict=False)):
        if ours != theirs:
            return f"tensor {index} is {_describe(ours)} on worker {first}, {_describe(theirs)} on worker {other}"
    if len(expected.specs) != len(offered.specs):
        more, fewer = (expected, offered) if len(expected.specs) > len(offered.specs) else (offered, expected)
        owner = first if more is expected else other
        return (
            f"worker {owner} has {len(more.specs)} tensors, the other {len(fewer.specs)}; "
            f"the first one more is {_describe(more.specs[len(fewer.specs)])}"
        )
    return (
        f"{_settings(expected)} on worker {first}, {_settings(offered)} on worker {other} "
        "(name, and the COARSE_ settings, must be the same everywhere)"
    )


def _describe(spec: TensorSpec) -> str:
    rows = f" in rows of {spec.row_elements}" if spec.row_elements else ""
    return f"{spec.name!r} of {spec.num_elements} x {spec.dtype} ({spec.op}{rows})"


def _settings(schema: GroupSchema) -> str:
    optimizer = "" if schema.state_names is None else f", optimizer state ({', '.join(schema.state_names)})"
    return (
        f"{schema.name!r} with shard_bytes={schema.shard_bytes}, gather_bytes={schema.gather_bytes}, "
        f"algorithm={schema.algorithm}"
        f"{f' ({schema.large_algorithm} for large tensors)' if schema.large_algorithm != 'direct' else ''}"
        f"{', dual synchronisation' if schema.is_open else ''}"
        f"{f', slots of {schema.window_bytes} bytes' if schema.window_bytes else ''}{optimizer}"
        f"{', routes ' + '; '.join(map(str, schema.routes)) if schema.routes else ''}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredUpdates:
    """What parameters and states of a group hold that were kept.

    Args:
        step: The optimizer's last step, from 1.
        num_updates: How many updates each tensor has seen, in the order of the group.
    """

    step: int
    num_updates: tuple[int, ...]

    def to_message(self) -> Message:
        """The part of a control message that tells it."""
        return {"step": self.step, "num_updates": list(self.num_updates)}

    @classmethod
    def from_message(cls, message: Message) -> RecoveredUpdates:
        """Reads to_message()."""
        return cls(step=int(message["step"]), num_updates=tuple(map(int, message["num_updates"])))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlaces:
    """How many workers of the node have something, of which each tells when it registers tensors.

    Args:
        on_gpu: The tensors on a GPU.
        with_nccl: A group of tensors that NCCL may reduce.
    """

    on_gpu: int = 0
    with_nccl: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """What a worker says of the host's memory when it registers tensors.

    Args:
        reserves: Whether it reserves pages of slots, parameters and states itself before they are written: until then
            they take nothing.
        moved_bytes: Of its own memory, which it frees as the parameters move to the memory devices.
    """

    reserves: bool = False
    moved_bytes: int = 0

    def to_message(self) -> Message:
        """The part of a control message that tells it."""
        return {"reserves": self.reserves, "moved_bytes": self.moved_bytes}

    @classmethod
    def from_message(cls, message: Message) -> WorkerMemory:
        """Reads to_message(); what is missing has its default.

        Raises:
            ProtocolError: If a number is none.
        """
        moved_bytes = int_field(message, "moved_bytes") if "moved_bytes" in message else 0
        return cls(reserves=message.get("reserves") is True, moved_bytes=moved_bytes)


EAGER = WorkerMemory()
"""That of a worker for which pages are taken when it registers tensors."""


@dataclass(slots=True)
class Registration:
    """One tensor group on its way from the first worker's request to the last worker's goodbye."""

    group: int
    schemas: dict[int, GroupSchema] = field(default_factory=dict)
    places: dict[int, WorkerPlaces] = field(default_factory=dict)  # of each client alone
    memories: dict[int, WorkerMemory] = field(default_factory=dict)  # likewise
    pieces: dict[int, list[SlotPiece]] = field(default_factory=dict)  # of the slots of each client
    slot_pieces: dict[tuple[int, int], Segment] = field(
        default_factory=dict
    )  # by client and place among these
    slots: dict[int, Segment] = field(default_factory=dict)  # by client, once all pieces are there
    rows: dict[int, Segment] = field(default_factory=dict)  # by client; the peers' by their descriptors
    settings: dict[int, Segment] = field(default_factory=dict)  # likewise, where there is an optimizer
    shared: dict[str, Segment] = field(default_factory=dict)  # made by the home device; CONTROL and others
    recovered: RecoveredUpdates | None = None  # what the home device has kept of it
    num_logged_shards: int = 0  # of those that memory devices tell each other of, on the home device
    is_replica_filled: bool = False  # that the device which keeps it has the same
    is_allocated: bool = False
    is_active: bool = False
    refusal: Message | None = None
    released: set[int] = field(default_factory=set)

    @property
    def schema(self) -> GroupSchema:
        """What the first worker asked for, and all others when it is active."""
        return next(iter(self.schemas.values()))

    @property
    def is_reserved_later(self) -> bool:
        """Whether all workers reserve pages themselves: one has no slots or parameters for another to fill."""
        return all(memory.reserves for memory in self.memories.values())

    @property
    def moved_bytes(self) -> int:
        """What all workers free as parameters move."""
        return sum(memory.moved_bytes for memory in self.memories.values())

    @property
    def has_all_slots(self) -> bool:
        """Whether every device has allocated its pieces, as this one has."""
        return self.is_allocated and len(self.slot_pieces) == sum(map(len, self.pieces.values()))

    def join_slots(self) -> None:
        """Puts pieces side by side, when all are there."""
        for client, pieces in self.pieces.items():
            segments = [self.slot_pieces.pop((client, place)) for place in range(len(pieces))]
            self.slots[client] = Segment.joined(segments)

    def close(self) -> None:
        """Gives up this process's descriptors."""
        for segment in (
            *self.slot_pieces.values(),
            *self.slots.values(),
            *self.settings.values(),
            *self.rows.values(),
            *self.shared.values(),
        ):
            segment.close()
