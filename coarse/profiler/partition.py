"""How tensors are cut into shards: pure functions, the same result on every worker (COARSE paper, section III-E)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from coarse.schema import ITEM_BYTES, TensorSpec

SLOT_ALIGNMENT_BYTES = 64
"""Tensors start on a cache line, so that neighbours never share one between sync cores."""

ALGORITHMS = ("gather", "direct", "ring", "exchange", "probe", "nccl")
"""Names of the synchronisation algorithms, and of what measures links; their positions are the native numbers."""

_TABLE_SHARDS = 16
# Rows before a shard of a table are counted for each shard: many shards would count for longer than they reduce.
_TABLE_SHARD_ROWS = 64
# Multiples of so many rows are whole cache lines, however long a row is.

_MAX_SHARD_ELEMENTS = (1 << 32) - SLOT_ALIGNMENT_BYTES  # fits 32 bits, in whole cache lines of any dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRange:
    """A piece of one tensor: `num_elements` from byte `offset` of a worker's slots on."""

    tensor: int
    offset: int
    num_elements: int
    algorithm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPlan:
    """Where every tensor of a group lies in a worker's slots, and the shards it is cut into.

    Args:
        tensor_offsets: First byte of each tensor's slot, a multiple of SLOT_ALIGNMENT_BYTES. Those of tables, which
            have no slots, go on behind the slots.
        slot_bytes: Bytes of all slots of one worker.
        shards: In the order of the tensors, and of the bytes within a tensor; each byte in exactly one.
    """

    tensor_offsets: tuple[int, ...]
    slot_bytes: int
    shards: tuple[ShardRange, ...]


def plan_partition(
    specs: Sequence[TensorSpec],
    *,
    shard_bytes: int,
    gather_bytes: int,
    algorithm: str = "auto",
    large_algorithm: str = "direct",
    window_bytes: int = 0,
    small_first: bool = False,
) -> PartitionPlan:
    """Lays tensors out and cuts them into shards.

    A tensor smaller than twice `shard_bytes` stays whole; a larger one is cut into as many equal shards as are
    possible without one of them falling below `shard_bytes` (paper, section IV-B: each shard is equal to or
    larger than the threshold).

    Args:
        specs: The tensors.
        shard_bytes: Partition threshold, at least 1.
        gather_bytes: Under "auto", tensors of up to so many bytes are gathered by one sync core.
        algorithm: "auto", or one of ALGORITHMS for every tensor.
        large_algorithm: That of larger tensors under "auto".
        window_bytes: Tensors, from the last to the first, take turns in slots of so many bytes, or of those of the
            largest tensor if that is more; 0 gives each one a slot of its own.
        small_first: Slots lie in the order of the sizes of their shards, so that any routing table cuts them in two;
            else in the order of the tensors.

    Raises:
        ValueError: If a number is out of range or the algorithm is unknown.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes} must be at least 1")
    if algorithm not in ("auto", *ALGORITHMS):
        raise ValueError(f"algorithm {algorithm!r} is none of auto, {', '.join(ALGORITHMS)}")
    if large_algorithm not in ALGORITHMS:
        raise ValueError(
            f"algorithm {large_algorithm!r} for large tensors is none of {', '.join(ALGORITHMS)}"
        )
    cuts: dict[tuple[int, str, int], _Cut] = {}  # of each shape: models repeat theirs layer by layer
    cut_of: list[_Cut] = []
    for spec in specs:
        shape = (spec.num_elements, spec.dtype, spec.row_elements)
        cut = cuts.get(shape)
        if cut is None:
            chosen = algorithm
            if algorithm == "auto":
                chosen = "gather" if spec.nbytes <= gather_bytes else large_algorithm
            num_shards = 1 if chosen == "gather" else count_shards(spec.nbytes, shard_bytes)
            cut = cuts[shape] = (_cut_table if spec.row_elements else _cut)(spec, num_shards, chosen)
        cut_of.append(cut)
    offsets, slot_bytes = _lay_out(specs, cut_of, window_bytes=window_bytes, small_first=small_first)
    shards = [
        ShardRange(tensor=index, offset=start + offset, num_elements=num_elements, algorithm=cut.algorithm)
        for index, (start, cut) in enumerate(zip(offsets, cut_of, strict=True))
        for offset, num_elements in cut.pieces
    ]
    return PartitionPlan(tensor_offsets=tuple(offsets), slot_bytes=slot_bytes, shards=tuple(shards))


def _lay_out(
    specs: Sequence[TensorSpec], cuts: Sequence[_Cut], *, window_bytes: int, small_first: bool
) -> tuple[list[int], int]:
    """Where tensors begin, and where their slots end; tables, which have none, begin behind these."""
    lengths = [0 if spec.row_elements else cut.slot_bytes for spec, cut in zip(specs, cuts, strict=True)]
    order: Sequence[int] = range(len(specs))
    if small_first:
        order = sorted(order, key=lambda index: cuts[index].shard_bytes)
    offsets, slot_bytes = _take_turns(lengths, window_bytes) if window_bytes else _in_a_row(lengths, order)
    end = slot_bytes
    for index, (spec, cut) in enumerate(zip(specs, cuts, strict=True)):
        if spec.row_elements:
            offsets[index], end = end, end + cut.slot_bytes
    return offsets, slot_bytes


def _in_a_row(lengths: Sequence[int], order: Sequence[int]) -> tuple[list[int], int]:
    """Offsets of slots of these lengths one after the other in an order, and their end."""
    offsets = [0] * len(lengths)
    for index, end in zip(order, accumulate(lengths[index] for index in order), strict=True):
        offsets[index] = end - lengths[index]
    return offsets, sum(lengths)


def _take_turns(lengths: Sequence[int], window_bytes: int) -> tuple[list[int], int]:
    """The same for slots that are given out from the last to the first, round and round within a window."""
    window_bytes = _round_up(max(window_bytes, *lengths))
    offsets = [0] * len(lengths)
    end = 0
    for index in reversed(range(len(lengths))):
        if end + lengths[index] > window_bytes:
            end = 0
        offsets[index] = end
        end += lengths[index]
    return offsets, min(window_bytes, sum(lengths))


def count_shards(nbytes: int, shard_bytes: int) -> int:
    """Into how many equal shards of at least `shard_bytes` a tensor of `nbytes` is cut."""
    # Shards are cut at cache lines, which must not take any of them below the threshold.
    return max(1, nbytes // _round_up(shard_bytes))


def _round_up(nbytes: int) -> int:
    return -(-nbytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """How a tensor is cut: (first byte, elements) of each piece, and the bytes of its slot, or of a table.

    `shard_bytes` are those of its largest piece.
    """

    pieces: tuple[tuple[int, int], ...]
    slot_bytes: int
    shard_bytes: int
    algorithm: str


def _cut(spec: TensorSpec, num_shards: int, algorithm: str) -> _Cut:
    item = ITEM_BYTES[spec.dtype]
    # Whole cache lines per shard: two sync cores never write the same line.
    per_line = SLOT_ALIGNMENT_BYTES // item
    lines = -(-spec.num_elements // per_line)
    num_shards = max(min(num_shards, lines), -(-spec.num_elements // _MAX_SHARD_ELEMENTS))
    bounds = [min(lines * i // num_shards * per_line, spec.num_elements) for i in range(num_shards + 1)]
    return _Cut(
        pieces=tuple((low * item, high - low) for low, high in pairwise(bounds)),
        slot_bytes=_round_up(spec.nbytes),
        shard_bytes=max(high - low for low, high in pairwise(bounds)) * item,
        algorithm=algorithm,
    )


def _cut_table(spec: TensorSpec, num_shards: int, algorithm: str) -> _Cut:
    row_bytes = spec.row_elements * ITEM_BYTES[spec.dtype]
    runs = -(-spec.num_rows // _TABLE_SHARD_ROWS)
    num_shards = min(num_shards, _TABLE_SHARDS, runs)
    num_shards = max(num_shards, -(-spec.num_elements // (_MAX_SHARD_ELEMENTS // 2)))
    bounds = [min(runs * i // num_shards * _TABLE_SHARD_ROWS, spec.num_rows) for i in range(num_shards + 1)]
    return _Cut(
        pieces=tuple((low * row_bytes, (high - low) * spec.row_elements) for low, high in pairwise(bounds)),
        slot_bytes=_round_up(spec.nbytes),
        shard_bytes=max(high - low for low, high in pairwise(bounds)) * row_bytes,
        algorithm=algorithm,
    )
