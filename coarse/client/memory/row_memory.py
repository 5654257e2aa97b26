"""The memory of a worker's rows of tables and of the means of all workers' rows."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coarse.errors import OutOfDeviceMemoryError
from coarse.kernels import _native
from coarse.schema import ITEM_BYTES, TensorSpec

NUMBER_BYTES = 8
"""Bytes of a row number, an int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Some rows of a table, in the memory where memory devices read or write them.

    Args:
        count: Number of rows.
        numbers: Row numbers, as int64; ascending, without duplicates.
        values: The rows one after the other.
    """

    count: int
    numbers: memoryview[Any]
    values: memoryview[Any]


class RowMemory:
    """One worker's rows of a tensor group. Pages are allocated on first use.

    Args:
        specs: Tensors of the group.
        plan: The group's plan.
        fd: Descriptor of the sparse memory; the caller closes it.
    """

    def __init__(self, specs: Sequence[TensorSpec], plan: _native.GroupPlan, fd: int) -> None:
        self._specs = specs
        self._places = plan.row_buffers()
        self._fd = os.dup(fd)
        self._memory = memoryview(mmap.mmap(fd, plan.rows_bytes))
        self._taken: dict[int, int] = {}  # allocated bytes, by start offset

    @property
    def fd(self) -> int:
        """Descriptor of the sparse memory; this object closes it."""
        return self._fd

    def give(self, tensor: int, count: int) -> Rows:
        """Memory for the `count` rows that this worker contributes next; write the rows before pushing the tensor.

        Raises:
            OutOfDeviceMemoryError: If the memory is not available.
        """
        header, numbers, values, _, _ = self._places[tensor]
        return self._rows(tensor, header, numbers, values, count)

    def expect(self, tensor: int, most_rows: int) -> None:
        """Allocates memory for a mean of up to `most_rows` rows; call it before pushing the tensor for a mean.

        Raises:
            OutOfDeviceMemoryError: If the memory is not available.
        """
        _, _, _, numbers, values = self._places[tensor]
        self._take(tensor, numbers, values, min(most_rows, self._specs[tensor].num_rows))

    def mean(self, tensor: int) -> Rows:
        """The last mean of all workers' rows, valid until the tensor is pushed again."""
        header, _, _, numbers, values = self._places[tensor]
        count_at = header + NUMBER_BYTES
        count = int.from_bytes(self._memory[count_at : count_at + NUMBER_BYTES], "little")
        return self._rows(tensor, count_at, numbers, values, count)

    def replace_mean(self, tensor: int, count: int) -> Rows:
        """Memory for `count` rows that replace mean(), for an update by the mean.

        Raises:
            OutOfDeviceMemoryError: If the memory is not available.
        """
        header, _, _, numbers, values = self._places[tensor]
        return self._rows(tensor, header + NUMBER_BYTES, numbers, values, count)

    @property
    def taken_bytes(self) -> int:
        """Device memory allocated for rows of this worker so far."""
        return sum(self._taken.values())

    def _rows(self, tensor: int, count_at: int, numbers: int, values: int, count: int) -> Rows:
        self._take(tensor, numbers, values, count)
        self._memory[count_at : count_at + NUMBER_BYTES] = count.to_bytes(NUMBER_BYTES, "little")
        return Rows(
            count=count,
            numbers=self._memory[numbers : numbers + count * NUMBER_BYTES],
            values=self._memory[values : values + count * self._row_bytes(tensor)],
        )

    def _row_bytes(self, tensor: int) -> int:
        spec = self._specs[tensor]
        return spec.row_elements * ITEM_BYTES[spec.dtype]

    def _take(self, tensor: int, numbers: int, values: int, count: int) -> None:
        # Allocate before writing: on a full machine a store would end in SIGBUS.
        for place, length in ((numbers, count * NUMBER_BYTES), (values, count * self._row_bytes(tensor))):
            taken = self._taken.get(place, 0)
            if length <= taken:
                continue
            try:
                os.posix_fallocate(self._fd, place + taken, length - taken)
            except OSError as error:
                raise OutOfDeviceMemoryError(
                    f"table {self._specs[tensor].name!r}: {count} rows need {(length - taken) / 2**20:.1f} MiB "
                    f"more of device memory ({error.strerror}). Use smaller batches, or fewer workers on this node."
                ) from error
            self._taken[place] = length

    def __del__(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)
