"""Loads machines by name, from those that come with COARSE, or from files."""

from __future__ import annotations

import os
from pathlib import Path

from coarse.machine.description import Machine
from coarse.machine.named_files import find, names_in

_PRESETS = Path(__file__).with_name("presets")


def machine_names() -> list[str]:
    """Names that `load_machine` accepts, in alphabetical order."""
    return names_in(_PRESETS)


def load_machine(name: str | os.PathLike[str]) -> Machine:
    """Loads a machine by name or from a TOML file.

    Args:
        name: One of `machine_names`, or a path: with a "/" in it, or ".toml" at its end.

    Raises:
        ValueError: If the machine does not exist (suggests the nearest names), or its file is wrong.
    """
    from coarse.machine.machine_file import read_machine

    return read_machine(find(name, _PRESETS, what="machine"))
