"""Errors of values from files: they name the wrong field, so that the file's reader can find its line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class FieldError(ValueError):
    """A wrong value.

    Args:
        field: The key of the value, with dots and positions for nesting, such as "path.local.over".
        message: The fault.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def check_distinct(field: str, values: Iterable[object], what: str) -> None:
    """Raises a FieldError if `values` contains a duplicate."""
    for value, count in Counter(values).items():
        if count > 1:
            raise FieldError(field, f"{what} {value} appears twice")
