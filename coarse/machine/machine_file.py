"""Reads a machine from a TOML file; errors name file and line (docs/design/machines.md)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from coarse.machine.description import (
    DirectLink,
    Figure,
    Link,
    Machine,
    Network,
    PathClass,
    Power,
    Topology,
)
from coarse.machine.fields import FieldError
from coarse.machine.toml_lines import Key, TomlDocument, read_toml

_Value = TypeVar("_Value")


def read_machine(path: str | os.PathLike[str]) -> Machine:
    """Reads a machine; its name is the file's name without ".toml".

    Raises:
        ValueError: If the file cannot be read or does not describe a machine; the message names file and line.
    """
    document = read_toml(path)
    top = _Section(document, (), document.values)
    top.allow("description", "topology", "link", "path", "direct_link", "network", "power")
    topology = top.section("topology")
    with top.pointing():
        return Machine(
            name=Path(path).stem,
            description=top.text("description"),
            topology=_topology(topology),
            links=tuple(_link(name, section) for name, section in top.sections("link")),
            paths={name: _path(section, "over") for name, section in top.sections("path")},
            direct_links=tuple(_direct_link(section) for section in top.list_of_sections("direct_link")),
            network=_network(top.section("network")) if "network" in document.values else None,
            power=_power(top.section("power")) if "power" in document.values else None,
        )


class _Section:
    """A table of the file: returns values of the right type, and has the line of each."""

    def __init__(self, document: TomlDocument, key: Key, values: Any) -> None:
        self._document = document
        self._key = key
        if not isinstance(values, dict):
            raise document.error(key, f"{_dotted(key)} must be a table, not {values!r}")
        self._values: dict[str, Any] = values

    def allow(self, *names: str) -> None:
        """Refuses all other keys."""
        for name in self._values:
            if name not in names:
                raise self.error(name, f"unknown key {name!r}; known: {', '.join(names)}")

    def error(self, name: str, message: str) -> ValueError:
        """An error at the line of a key."""
        return self._document.error_at(name, message, below=self._key)

    @contextmanager
    def pointing(self) -> Iterator[None]:
        """Adds file and line to the errors of values that check themselves."""
        try:
            yield
        except FieldError as error:
            raise self.error(error.field, str(error)) from None

    def text(self, name: str) -> str:
        return self._typed(name, str, "a string")

    def optional_text(self, name: str) -> str:
        return self.text(name) if name in self._values else ""

    def numbers(self, name: str) -> tuple[int, ...]:
        return _whole_numbers(self._typed(name, list, "a list"), lambda message: self.error(name, message))

    def lists_of_numbers(self, name: str) -> tuple[tuple[int, ...], ...]:
        lists = self._values.get(name, [])
        if not isinstance(lists, list) or not all(isinstance(numbers, list) for numbers in lists):
            raise self.error(name, f"{name} must be a list of lists")
        return tuple(_whole_numbers(numbers, lambda message: self.error(name, message)) for numbers in lists)

    def texts(self, name: str) -> tuple[str, ...]:
        texts = self._values.get(name, [])
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise self.error(name, f"{name} must be a list of strings, not {texts!r}")
        return tuple(texts)

    def figure(self, name: str) -> Figure:
        """A number with its source and kind."""
        section = self.section(name)
        section.allow("value", "source", "kind")
        for part in ("value", "source", "kind"):
            section.require(part)
        with section.pointing():
            return Figure(**section._values)

    def optional_figure(self, name: str) -> Figure | None:
        return self.figure(name) if name in self._values else None

    def section(self, name: str) -> _Section:
        return _Section(self._document, (*self._key, name), self.require(name))

    def sections(self, name: str) -> list[tuple[str, _Section]]:
        """All tables below `name`, which may be missing."""
        if name not in self._values:
            return []
        above = self.section(name)
        return [(below, above.section(below)) for below in above._values]

    def list_of_sections(self, name: str) -> list[_Section]:
        sections = self._values.get(name, [])
        if not isinstance(sections, list):
            raise self.error(name, f"expected [[{name}]] sections")
        return [
            _Section(self._document, (*self._key, name, number), values)
            for number, values in enumerate(sections)
        ]

    def require(self, name: str) -> Any:
        """A value of any type."""
        if name not in self._values:
            raise self.error(name, f"{_dotted((*self._key, name))} is missing")
        return self._values[name]

    def _typed(self, name: str, kind: type[_Value], what: str) -> _Value:
        value = self.require(name)
        if not isinstance(value, kind) or not value:
            raise self.error(name, f"{name} must be {what} that is not empty, not {value!r}")
        return value


def _topology(section: _Section) -> Topology:
    section.allow("kind", "gpu", "switches", "sockets")
    with section.pointing():
        return Topology(
            kind=section.text("kind"),
            gpu=section.optional_text("gpu"),
            switches=section.lists_of_numbers("switches"),
            sockets=section.lists_of_numbers("sockets"),
        )


def _link(name: str, section: _Section) -> Link:
    section.allow("scope", "gbytes_per_s", "duplex_gbytes_per_s", "read_gbytes_per_s")
    with section.pointing():
        return Link(
            name=name,
            scope=section.text("scope"),
            gbytes_per_s=section.figure("gbytes_per_s"),
            duplex_gbytes_per_s=section.optional_figure("duplex_gbytes_per_s"),
            read_gbytes_per_s=section.optional_figure("read_gbytes_per_s"),
        )


def _path(section: _Section, *others: str) -> PathClass:
    section.allow("latency_us", "gbytes_per_s", "duplex_gbytes_per_s", *others)
    with section.pointing():
        return PathClass(
            latency_us=section.figure("latency_us"),
            gbytes_per_s=section.optional_figure("gbytes_per_s"),
            duplex_gbytes_per_s=section.optional_figure("duplex_gbytes_per_s"),
            over=section.texts("over"),
        )


def _direct_link(section: _Section) -> DirectLink:
    path = _path(section, "between")
    with section.pointing():
        return DirectLink(between=section.numbers("between"), path=path)


def _network(section: _Section) -> Network:
    section.allow("latency_us", "gbytes_per_s", "over")
    with section.pointing():
        return Network(
            latency_us=section.figure("latency_us"),
            gbytes_per_s=section.figure("gbytes_per_s"),
            over=section.texts("over"),
        )


def _power(section: _Section) -> Power:
    section.allow("worker_watt", "device_watt")
    return Power(worker_watt=section.figure("worker_watt"), device_watt=section.figure("device_watt"))


def _whole_numbers(values: list[Any], error: Callable[[str], ValueError]) -> tuple[int, ...]:
    for value in values:
        if type(value) is not int or value < 0:
            raise error(f"{value!r} is not a whole number of at least 0")
    return tuple(values)


def _dotted(key: Key) -> str:
    return ".".join(str(part) for part in key)
