"""Errors of values that are read from files: which field is wrong, for the reader to find its line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class FieldError(ValueError):
    """A wrong value.

    Args:
        field: The key that holds it, with dots and positions on the way down, as in "path.local.over".
        message: What is wrong.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def check_distinct(field: str, values: Iterable[object], what: str) -> None:
    """Raises a FieldError if one of `values` is there twice."""
    for value, count in Counter(values).items():
        if count > 1:
            raise FieldError(field, f"{what} {value} is named twice")
