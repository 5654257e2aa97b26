"""TOML with the line of every key, so that errors can name the line.

tomllib reads the values and reports broken files. A scan of the tokens of a file that it has read gives the lines.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"at line (\d+)", str(error))
        line = int(at.group(1)) if at else text.count("\n") + 1  # "at end of document"
        raise ValueError(f"{path}:{line}: {error}") from None
    return TomlDocument(path=path, values=values, lines=_Scan(text).lines)


_TOKEN = re.compile(
    r"""
    \#[^\n]*
    | "{3} (?: \\. | [^\\] )*? "{3} (?!")  # which may end with one or two quotes of its text
    | '{3} .*? '{3} (?!')
    | " (?: \\. | [^"\\] )* "
    | '[^']*'
    | [\[\]{},=.\n]
    | [^\s\[\]{},=."'\#]+
    """,
    re.VERBOSE | re.DOTALL,
)


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    """Tokens with their lines, without comments; the last one ends a line."""
    line = 1
    for match in _TOKEN.finditer(text):
        token = match.group()
        if not token.startswith("#"):
            yield token, line
        line += token.count("\n")
    yield "\n", line


class _Scan:
    """The line of each key in text that is valid TOML."""

    def __init__(self, text: str) -> None:
        self.lines: dict[Key, int] = {}
        self._tokens = _tokens(text)
        self._lengths: dict[Key, int] = {}  # of arrays of tables, up to here
        table: Key = ()
        for token, line in self._tokens:
            if token == "[":
                table = self._header(line)
            elif token not in ("]", "\n"):
                self._assignment(table, token, line)

    def _header(self, line: int) -> Key:
        """Reads a header behind its first bracket; returns the table that it opens."""
        token, _ = next(self._tokens)
        is_array = token == "["
        names = self._names(next(self._tokens)[0] if is_array else token, end="]")
        table: Key = ()
        for number, name in enumerate(names, 1):
            # Several headers may open the same table; the first one counts.
            table = self._note(table, name, line)
            if is_array and number == len(names):
                self._lengths[table] = self._lengths.get(table, 0) + 1
            if table in self._lengths:
                table = self._note(table, self._lengths[table] - 1, line)
        return table

    def _assignment(self, table: Key, token: str, line: int) -> str:
        """Reads a key and its value behind the first token; returns the token that ends it."""
        for name in self._names(token, end="="):
            table = self._note(table, name, line)
        token, _ = next(self._tokens)
        if token == "{":
            return self._inline_table(table)
        depth = 0
        while depth or token not in ("\n", ",", "}"):
            depth += (token in ("[", "{")) - (token in ("]", "}"))
            token, _ = next(self._tokens)
        return token

    def _inline_table(self, table: Key) -> str:
        for token, line in self._tokens:
            if token == "}" or (token not in ("\n", ",") and self._assignment(table, token, line) == "}"):
                break
        return next(self._tokens)[0]

    def _names(self, token: str, *, end: str) -> list[str]:
        names = []
        while token != end:
            if token != ".":
                names.append(tomllib.loads(f"name = {token}")["name"] if token[0] in "\"'" else token)
            token, _ = next(self._tokens)
        return names

    def _note(self, table: Key, name: str | int, line: int) -> Key:
        key = (*table, name)
        self.lines.setdefault(key, line)
        return key
