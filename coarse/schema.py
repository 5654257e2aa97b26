"""The tensors of a group: names, lengths, dtypes and reductions, the same on every worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8, "uint8": 1}
)
"""Bytes per element of each dtype that sync cores can reduce."""

OPS = ("sum", "mean", "max")

UPDATABLE_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of parameters that an optimizer in the memory devices can update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor as it is registered with the memory devices.

    Args:
        name: Unique within its group; tensors are matched between workers by name and position.
        dtype: A key of ITEM_BYTES.
        num_elements: Length of the flattened tensor, at least 1.
        op: "sum", "mean" (sum over the world size) or "max".
        row_elements: Length of a row, if the tensor is a table of which contributions have a few rows each; 0 for a
            tensor that is pushed as a whole.

    Raises:
        ValueError: If any of them is out of range; the message names the tensor and the choices.
    """

    name: str
    dtype: str
    num_elements: int
    op: str = "mean"
    row_elements: int = 0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a tensor needs a name")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(
                f"tensor {self.name!r}: dtype {self.dtype!r} cannot be reduced; "
                f"supported are {', '.join(ITEM_BYTES)}. Convert the tensor first."
            )
        if self.op not in OPS:
            raise ValueError(f"tensor {self.name!r}: op {self.op!r} must be one of {', '.join(OPS)}")
        if self.op == "mean" and self.dtype in ("int32", "int64", "uint8"):
            raise ValueError(
                f"tensor {self.name!r}: mean of {self.dtype} is not exact; use op='sum' and divide yourself"
            )
        if self.num_elements < 1:
            raise ValueError(f"tensor {self.name!r}: needs at least one element, has {self.num_elements}")
        if self.row_elements:
            self._check_rows()

    def _check_rows(self) -> None:
        if not 0 < self.row_elements < 1 << 32 or self.num_elements % self.row_elements:
            raise ValueError(
                f"table {self.name!r}: {self.num_elements} elements are not a whole number of rows of "
                f"{self.row_elements} each, or a row has 4 Gi elements or more"
            )
        if self.op == "max":
            raise ValueError(f"table {self.name!r}: rows can be summed or averaged, but not reduced by max")

    @property
    def num_rows(self) -> int:
        """Rows of a table; 0 for other tensors."""
        return self.num_elements // self.row_elements if self.row_elements else 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of the tensor's slot; 0 for a table, which has none."""
        return 0 if self.row_elements else self.nbytes

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.num_elements * ITEM_BYTES[self.dtype]
