"""Files that come with COARSE, by name: machines and partition tables."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path


def find(name: str | os.PathLike[str], folder: Path, *, what: str) -> Path:
    """The file for a name or path; `folder` contains the named files.

    Raises:
        ValueError: If a name is unknown; suggests the nearest ones.
    """
    text = os.fspath(name)
    if os.sep in text or text.endswith(".toml"):
        return Path(text)
    names = names_in(folder)
    if text not in names:
        raise ValueError(f"no {what} is named {text!r}; {suggestion(text, names)}")
    return folder / f"{text}.toml"


def names_in(folder: Path) -> list[str]:
    """Names of the TOML files in a folder."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of an error message: similar names, or all names."""
    known = list(known)
    nearest = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    return (
        f"did you mean {' or '.join(nearest)}?"
        if nearest
        else f"known: {', '.join(known)}, or a path to a TOML file"
    )
