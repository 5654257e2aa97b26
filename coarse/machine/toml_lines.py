"""TOML with the line of every key, so that errors can name the line.

tomllib reads the values, because it reports broken files best. tomlkit keeps all text of a file; counting line
ends gives the lines.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.container import Container
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT, InlineTable, Item, Null, Table, Whitespace

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Key = tuple[str | int, ...]
"""Names and positions from the top of the document down to a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TomlDocument:
    """Values of a TOML file, and their lines.

    Args:
        path: Path of the file.
        values: Plain dicts, lists and scalars.
        lines: Line of each key, from 1. Values in an array have the array's line.
    """

    path: str
    values: dict[str, Any]
    lines: dict[Key, int]

    def line(self, key: Key) -> int:
        """The line of a key; for a missing key, the line of its parent; line 1 for the whole document."""
        while key and key not in self.lines:
            key = key[:-1]
        return self.lines.get(key, 1)

    def error(self, key: Key, message: str) -> ValueError:
        """An error that names file and line."""
        return ValueError(f"{self.path}:{self.line(key)}: {message}")

    def error_at(self, field: str, message: str, *, below: Key = ()) -> ValueError:
        """Like error(), for a dotted key below another key, such as the key of a FieldError."""
        parts = (int(part) if part.isdecimal() else part for part in field.split("."))
        return self.error((*below, *parts), message)


def read_toml(path: str | os.PathLike[str]) -> TomlDocument:
    """Reads a file.

    Raises:
        ValueError: If it cannot be read or is not TOML; the message names file and line.
    """
    name = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not UTF-8 text: {error}") from None
    return parse_toml(text, path=name)


def parse_toml(text: str, *, path: str) -> TomlDocument:
    """Reads text; `path` is for messages.

    Raises:
        ValueError: If it is not TOML; the message names file and line.
    """
    try:
        values = tomllib.loads(text)
        document = tomlkit.parse(text)
    except (tomllib.TOMLDecodeError, TOMLKitError) as error:
        at = re.search(r"at line (\d+)", str(error))
        line = int(at.group(1)) if at else text.count("\n") + 1  # "at end of document"
        raise ValueError(f"{path}:{line}: {error}") from None
    lines: dict[Key, int] = {}
    _Walk(lines).container(document, ())
    return TomlDocument(path=path, values=values, lines=lines)


class _Walk:
    """Goes through a document in the order of its text."""

    def __init__(self, lines: dict[Key, int]) -> None:
        self._lines = lines
        self._line = 1

    def container(self, container: Container, above: Key) -> None:
        for key, item in container.body:
            if key is None:
                self._skip(item)
            elif isinstance(item, AoT):
                self._lines.setdefault((*above, key.key), self._line)
                for number, table in enumerate(item.body):
                    self._table(table, (*above, key.key, number))
            elif isinstance(item, Table):
                self._table(item, (*above, key.key))
            else:
                self._value(item, (*above, key.key))

    def _table(self, table: Table, key: Key) -> None:
        self._pass(table.trivia.indent)
        # Several headers may open the same table; the first one counts.
        self._lines.setdefault(key, self._line)
        if not table.is_super_table():
            self._pass(table.trivia.trail)
        self.container(table.value, key)

    def _value(self, item: Item, key: Key) -> None:
        self._pass(item.trivia.indent)
        self._lines[key] = self._line
        if isinstance(item, InlineTable):
            self._inline(item.value, key)
        self._pass(item.as_string(), item.trivia.trail)

    def _inline(self, container: Container, above: Key) -> None:
        # An inline table occupies one line, unless it contains a multi-line string.
        for key, item in container.body:
            if key is not None:
                name = (*above, key.key)
                self._lines[name] = self._line
                if isinstance(item, InlineTable):
                    self._inline(item.value, name)

    def _skip(self, item: Item) -> None:
        if isinstance(item, Whitespace | Null):
            self._pass(item.as_string())
        else:
            self._pass(item.trivia.indent, item.trivia.trail)

    def _pass(self, *texts: str) -> None:
        self._line += sum(text.count("\n") for text in texts)
