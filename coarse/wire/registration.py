"""One memory device's view of registered tensor groups: the workers' requests, and whether they agree."""

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
SLOTS = "slots"  # those of the worker that receives the message
ROWS = "rows"  # likewise, if the group has tables
SETTINGS = "settings"  # likewise, if the group has an optimizer
NODE = "node"  # with several nodes
PARAMETERS = "parameters"  # these two if the group has an optimizer
STATES = "states"
REPLICA_CONTROL = "replica control"  # these three if the group has a replica; only for devices
REPLICA_PARAMETERS = "replica of parameters"
REPLICA_STATES = "replica of states"
UNDO_CONTROL = "undo control"  # these three with an undo log; only for devices
UNDO_PARAMETERS = "parameters before"
UNDO_STATES = "states before"
REPLICA_OF = {PARAMETERS: REPLICA_PARAMETERS, STATES: REPLICA_STATES}
SNAPSHOT_REQUEST = "snapshot request"  # these three with snapshots of parameters and states
SNAPSHOT_CONTROL = "snapshot control"
SNAPSHOT_POOL = "snapshot pool"


def fd_of(shared: Mapping[str, Segment], name: str) -> int:
    """The descriptor of a group's memory by name, for native code; -1 if the group has none."""
    return shared[name].fd if name in shared else -1


def region_of(shared: Mapping[str, Segment], name: str) -> _native.Region:
    """Like fd_of(), for memory that may be a part of a device file."""
    return shared[name].region if name in shared else _native.Region(-1)


def slots_of(client: int) -> str:
    """The name under which a worker receives the slots of `client`, to read them."""
    return f"slots of {client}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSchema:
    """Everything about a tensor group on which all workers must agree.

    Args:
        name: The workers' name for it.
        specs: Its tensors; for a staging group, its buffers as uint8.
        shard_bytes, gather_bytes, algorithm, large_algorithm: As for its partition (coarse.profiler.partition).
        is_staging: Whether its shards carry buffers whose length, dtype and op come with each push.
        is_open: Whether workers see each other's slots, which direct all-reduce needs.
        on_host: Whether its tensors lie in the host's memory regardless of the devices' memory. For workers' tensors
            on the host.
        state_names: Names of the float32 tensors that a remote optimizer keeps for each parameter, in the order of
            the update rule; None if the group has no optimizer.
        window_bytes: Size of the slot window (plan_partition); 0 gives each tensor its own slot. Needs an optimizer:
            parameters do not share memory.
        routes: The routing table of each worker, whose slots then lie in the memory devices of its routes; () if
            slots lie in the worker's own device, regardless of the shards' routes.
        is_boundary: Whether newcomers become members at its completion (docs/design/membership.md).
        are_gradients: Whether its means may be compressed between nodes (COARSE_NODE_COMPRESSION).
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
    is_boundary: bool = False
    are_gradients: bool = False

    @property
    def kept_bytes(self) -> int:
        """Bytes that a node holds once for all workers: parameters, states, master weights of narrow parameters."""
        if self.state_names is None:
            return 0
        num_states, wide = len(self.state_names), ITEM_BYTES["float32"]
        return sum(
            spec.nbytes + spec.num_elements * wide * (num_states + (spec.dtype != "float32"))
            for spec in self.specs
        )

    @property
    def updates_early(self) -> bool:
        """Whether parameters are updated before all gradients of a step are complete: gradients use a slot window."""
        return self.window_bytes > 0

    @property
    def has_tables(self) -> bool:
        """Whether some of its tensors receive rows as contributions."""
        return any(spec.row_elements for spec in self.specs)

    @property
    def compressible_bytes(self) -> int:
        """Bytes of the tensors that may be compressed between nodes."""
        means = (spec for spec in self.specs if spec.dtype == "float32" and spec.op == "mean")
        return sum(spec.nbytes for spec in means if not spec.row_elements) if self.are_gradients else 0

    def partition(self) -> PartitionPlan:
        """The layout, which worker and memory device compute in the same way."""
        return plan_partition(
            self.specs,
            shard_bytes=self.shard_bytes,
            gather_bytes=self.gather_bytes,
            algorithm=self.algorithm,
            large_algorithm=self.large_algorithm,
            window_bytes=self.window_bytes,
            small_first=bool(self.routes),
        )

    def native_plan(self, group: int, num_clients: int, num_ranks: int = 0) -> _native.GroupPlan:
        """The layout for the data path.

        Args:
            group: Number of the group.
            num_clients: Workers of the node.
            num_ranks: Workers of all nodes, if there are several and they go on without lost ones; else 0.
        """
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
            are_gradients=self.are_gradients,
            num_ranks=num_ranks,
        )

    def to_message(self, group: int) -> Message:
        """The control message that requests the registration."""
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
            "is_boundary": self.is_boundary,
            "are_gradients": self.are_gradients,
            "window_bytes": self.window_bytes,
            "routes": [[table.lat_proxy, table.bw_proxy, table.threshold_bytes] for table in self.routes],
        }

    @classmethod
    def from_message(cls, message: Message) -> GroupSchema:
        """Reads the control message of to_message().

        Raises:
            ProtocolError: If any value is out of range.
        """
        specs, state_names = message.get("specs"), message.get("state_names")
        if not isinstance(specs, list) or not 0 < len(specs) <= _MAX_TENSORS:
            raise ProtocolError("a registration has no list of tensors")
        if state_names is not None and not isinstance(state_names, list):
            raise ProtocolError("the state names of a registration are not a list")
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
                is_boundary=message.get("is_boundary") is True,
                are_gradients=message.get("are_gradients") is True,
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
    """Compares the registrations of two workers.

    Raises:
        SchemaMismatchError: If they differ; names the first difference.
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
            f"worker {owner} has {len(more.specs)} tensors, the other {len(fewer.specs)}; the first extra one "
            f"is {_describe(more.specs[len(fewer.specs)])}"
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
    """State of a group's kept parameters and optimizer states.

    Args:
        step: The optimizer's last step, from 1.
        num_updates: Number of updates of each tensor, in the order of the group.
    """

    step: int
    num_updates: tuple[int, ...]

    def to_message(self) -> Message:
        """The fields for a control message."""
        return {"step": self.step, "num_updates": list(self.num_updates)}

    @classmethod
    def from_message(cls, message: Message) -> RecoveredUpdates:
        """Reads to_message()."""
        return cls(step=int(message["step"]), num_updates=tuple(map(int, message["num_updates"])))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlaces:
    """Numbers of the node's workers with certain properties, which each worker reports when it registers tensors.

    Args:
        on_gpu: Workers with the tensors on a GPU.
        with_nccl: Workers with a group of tensors that NCCL may reduce.
    """

    on_gpu: int = 0
    with_nccl: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """A worker's use of the host's memory, which it reports when it registers tensors.

    Args:
        reserves: Whether it reserves pages of slots, parameters and states itself before they are written. Until then
            they use no memory.
        moved_bytes: Bytes of its own memory that it frees as the parameters move to the memory devices.
    """

    reserves: bool = False
    moved_bytes: int = 0

    def to_message(self) -> Message:
        """The fields for a control message."""
        return {"reserves": self.reserves, "moved_bytes": self.moved_bytes}

    @classmethod
    def from_message(cls, message: Message) -> WorkerMemory:
        """Reads to_message(); missing fields get their defaults.

        Raises:
            ProtocolError: If a number is invalid.
        """
        moved_bytes = int_field(message, "moved_bytes") if "moved_bytes" in message else 0
        return cls(reserves=message.get("reserves") is True, moved_bytes=moved_bytes)


EAGER = WorkerMemory()
"""The default: pages are allocated at registration."""


@dataclass(slots=True)
class Registration:
    """One tensor group, from the first worker's request to the last worker's release."""

    group: int
    schemas: dict[int, GroupSchema] = field(default_factory=dict)
    places: dict[int, WorkerPlaces] = field(default_factory=dict)  # of each single client
    memories: dict[int, WorkerMemory] = field(default_factory=dict)  # likewise
    pieces: dict[int, list[SlotPiece]] = field(default_factory=dict)  # slot pieces of each client
    slot_pieces: dict[tuple[int, int], Segment] = field(
        default_factory=dict
    )  # by client and position among its pieces
    slots: dict[int, Segment] = field(default_factory=dict)  # by client, once all pieces exist
    rows: dict[int, Segment] = field(default_factory=dict)  # by client; the peers' by their descriptors
    settings: dict[int, Segment] = field(default_factory=dict)  # likewise, if the group has an optimizer
    shared: dict[str, Segment] = field(
        default_factory=dict
    )  # allocated by the home device; CONTROL and others
    recovered: RecoveredUpdates | None = None  # state of the group that the home device has kept
    num_logged_shards: int = 0  # shards in the devices' logs; on the home device
    reserved: dict[str, int] = field(
        default_factory=dict
    )  # bytes that this device has reserved for it, by use
    is_replica_filled: bool = False  # whether the keeper's replica is complete
    is_allocated: bool = False
    is_active: bool = False
    refusal: Message | None = None
    released: set[int] = field(default_factory=set)
    joined: set[int] = field(default_factory=set)  # clients that have requested it themselves
    epoch: int = 0  # of those that requested it first (docs/design/membership.md)

    @property
    def schema(self) -> GroupSchema:
        """The schema that the first worker requested, and all others too once the group is active."""
        return next(iter(self.schemas.values()))

    @property
    def is_reserved_later(self) -> bool:
        """Whether all workers reserve pages themselves; otherwise pages are allocated at registration."""
        return all(memory.reserves for memory in self.memories.values())

    @property
    def moved_bytes(self) -> int:
        """Bytes that all workers free as parameters move."""
        return sum(memory.moved_bytes for memory in self.memories.values())

    @property
    def has_all_slots(self) -> bool:
        """Whether all devices, including this one, have allocated their pieces."""
        return self.is_allocated and len(self.slot_pieces) == sum(map(len, self.pieces.values()))

    def join_slots(self) -> None:
        """Joins the pieces when all exist."""
        for client, pieces in self.pieces.items():
            segments = [self.slot_pieces.pop((client, place)) for place in range(len(pieces))]
            self.slots[client] = Segment.joined(segments)

    def close(self) -> None:
        """Closes this process's descriptors."""
        for segment in (
            *self.slot_pieces.values(),
            *self.slots.values(),
            *self.settings.values(),
            *self.rows.values(),
            *self.shared.values(),
        ):
            segment.close()
