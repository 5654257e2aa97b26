"""Tensor groups that a client registers for its own use; they lie in the host's memory."""

from __future__ import annotations

from coarse.schema import TensorSpec
from coarse.wire.registration import GroupSchema

_STAGING_BUFFERS = 2
_STAGING_BYTES = 2 << 20


def staging_schema(*, is_emulated: bool) -> GroupSchema:
    """Buffers that unregistered tensors use in turn.

    Args:
        is_emulated: Whether links are emulated.
    """
    buffers = [
        TensorSpec(name=f"buffer{i}", dtype="uint8", num_elements=_STAGING_BYTES, op="sum")
        for i in range(_STAGING_BUFFERS)
    ]
    return GroupSchema(
        name="staging buffers",
        specs=tuple(buffers),
        shard_bytes=_STAGING_BYTES,
        gather_bytes=0,
        algorithm="exchange" if is_emulated else "direct",
        is_staging=True,
        on_host=True,
    )


def node_barrier_schema(name: str, most_numbers: int, *, is_emulated: bool) -> GroupSchema:
    """The tensors of a node barrier (coarse.client.direct_allreduce.NodeBarrier): a byte, and numbers to compare.

    Args:
        name: Name of the barrier.
        most_numbers: Largest count of numbers to compare at once.
        is_emulated: As for staging_schema().
    """
    numbers = TensorSpec(name="numbers", dtype="float64", num_elements=most_numbers, op="max")
    return GroupSchema(
        name=f"barrier of {name}",
        specs=(TensorSpec(name="byte", dtype="uint8", num_elements=1, op="max"), numbers),
        shard_bytes=numbers.nbytes,
        gather_bytes=numbers.nbytes,
        algorithm="exchange" if is_emulated else "gather",
        on_host=True,
    )


def boundary_schema() -> GroupSchema:
    """The byte that every worker pushes at each boundary between two steps (coarse.client.membership)."""
    byte = TensorSpec(name="byte", dtype="uint8", num_elements=1, op="max")
    return GroupSchema(
        name="boundary of steps",
        specs=(byte,),
        shard_bytes=byte.nbytes,
        gather_bytes=byte.nbytes,
        algorithm="gather",
        on_host=True,
        is_boundary=True,
    )
