"""Cuts tensors into shards: pure functions, with equal results on every worker (COARSE paper, section III-E)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from coarse.schema import ITEM_BYTES, TensorSpec

SLOT_ALIGNMENT_BYTES = 64
"""Tensors start on a cache line, so that sync cores with neighbouring tensors never share one."""

ALGORITHMS = ("gather", "direct", "ring", "exchange", "probe", "nccl")
"""Names of the synchronisation algorithms, and of link probes; their positions are the native numbers."""

MOST_LOGGED_SHARDS = 8000
"""Most shards of a group by LOGGED_ALGORITHMS if its tensors allow: half of the capacity of memory devices."""

LOGGED_ALGORITHMS = ("ring", "exchange", "nccl")
"""Algorithms whose shards take a place in the memory devices' logs until they are reduced."""

_TABLE_SHARDS = 16
# Each shard of a table counts the rows before it: with many shards, counting would take longer than reducing.
_TABLE_SHARD_ROWS = 64
# Multiples of this number of rows are whole cache lines for any row length.

_MAX_SHARD_ELEMENTS = (1 << 32) - SLOT_ALIGNMENT_BYTES  # fits 32 bits, in whole cache lines of any dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRange:
    """A piece of one tensor: `num_elements` elements, starting at byte `offset` of a worker's slots."""

    tensor: int
    offset: int
    num_elements: int
    algorithm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPlan:
    """The place of every tensor of a group in a worker's slots, and its shards.

    Args:
        tensor_offsets: First byte of each tensor's slot, a multiple of SLOT_ALIGNMENT_BYTES. The offsets of tables,
            which have no slots, follow after the slots.
        slot_bytes: Size of all slots of one worker.
        shards: In the order of the tensors, and of the bytes within a tensor; each byte is in exactly one shard.
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

    A tensor smaller than twice `shard_bytes` stays whole. A larger one is cut into the largest number of equal shards
    of at least `shard_bytes` (paper, section IV-B: each shard is equal to or larger than the threshold). If there
    would be more than MOST_LOGGED_SHARDS, the threshold doubles until they fit.

    Args:
        specs: The tensors.
        shard_bytes: Partition threshold, at least 1.
        gather_bytes: Under "auto", one sync core gathers tensors of up to this size.
        algorithm: "auto", or one of ALGORITHMS for every tensor.
        large_algorithm: Algorithm of larger tensors under "auto".
        window_bytes: Size of the slot window, which tensors use in turn, from the last to the first; enlarged to the
            size of the largest tensor if necessary. 0 gives each tensor its own slot.
        small_first: Whether slots are sorted by the size of their shards, so that any routing table cuts them in two;
            otherwise they have the order of the tensors.

    Raises:
        ValueError: If a number is out of range or the algorithm is unknown.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes} must be at least 1")
    if algorithm not in ("auto", *ALGORITHMS):
        raise ValueError(f"algorithm {algorithm!r} must be one of auto, {', '.join(ALGORITHMS)}")
    if large_algorithm not in ALGORITHMS:
        raise ValueError(
            f"algorithm {large_algorithm!r} for large tensors must be one of {', '.join(ALGORITHMS)}"
        )
    cut_of = _cut_all(
        specs,
        shard_bytes=shard_bytes,
        gather_bytes=gather_bytes,
        algorithm=algorithm,
        large_algorithm=large_algorithm,
    )
    offsets, slot_bytes = _lay_out(specs, cut_of, window_bytes=window_bytes, small_first=small_first)
    shards = [
        ShardRange(tensor=index, offset=start + offset, num_elements=num_elements, algorithm=cut.algorithm)
        for index, (start, cut) in enumerate(zip(offsets, cut_of, strict=True))
        for offset, num_elements in cut.pieces
    ]
    return PartitionPlan(tensor_offsets=tuple(offsets), slot_bytes=slot_bytes, shards=tuple(shards))


def _cut_all(
    specs: Sequence[TensorSpec], *, shard_bytes: int, gather_bytes: int, algorithm: str, large_algorithm: str
) -> list[_Cut]:
    """The cut of each tensor, with the smallest threshold from `shard_bytes` on whose shards fit into the logs."""
    cuts: dict[tuple[int, str, int], _Cut] = {}  # by shape: the layers of a model repeat their shapes
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
    num_logged = sum(len(cut.pieces) for cut in cut_of if cut.algorithm in LOGGED_ALGORITHMS)
    is_cuttable = any(spec.nbytes >= 2 * shard_bytes for spec in specs)
    if num_logged <= MOST_LOGGED_SHARDS or not is_cuttable:
        return cut_of
    return _cut_all(
        specs,
        shard_bytes=2 * shard_bytes,
        gather_bytes=gather_bytes,
        algorithm=algorithm,
        large_algorithm=large_algorithm,
    )


def _lay_out(
    specs: Sequence[TensorSpec], cuts: Sequence[_Cut], *, window_bytes: int, small_first: bool
) -> tuple[list[int], int]:
    """Offsets of the tensors, and the end of their slots; tables, which have no slots, start after it."""
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
    """Offsets of consecutive slots of these lengths in the given order, and their end."""
    offsets = [0] * len(lengths)
    for index, end in zip(order, accumulate(lengths[index] for index in order), strict=True):
        offsets[index] = end - lengths[index]
    return offsets, sum(lengths)


def _take_turns(lengths: Sequence[int], window_bytes: int) -> tuple[list[int], int]:
    """Like _in_a_row(), for slots that are assigned from the last to the first, cyclically within a window."""
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
    """The number of equal shards, of at least `shard_bytes`, of a tensor of `nbytes`."""
    # Shards are cut at cache lines, but must not become smaller than the threshold.
    return max(1, nbytes // _round_up(shard_bytes))


def _round_up(nbytes: int) -> int:
    return -(-nbytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """The cut of a tensor: (first byte, elements) of each piece, and the size of its slot or of the table.

    `shard_bytes` is the size of its largest piece.
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
