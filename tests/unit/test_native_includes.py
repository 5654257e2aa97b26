"""Folders of the native code depend on each other one way: each includes those named here, without a circle."""

from __future__ import annotations

import graphlib
import re
from pathlib import Path

import coarse

KERNELS = Path(coarse.__file__).parent / "kernels"
INCLUDED = re.compile(r'^#include "coarse/(\w+)/', re.MULTILINE)

INCLUDES = {
    "shared_memory": set(),
    "reduce": {"shared_memory"},
    "timeline": {"shared_memory"},
    "emulation": {"shared_memory", "timeline"},
    "snapshot": {"reduce", "shared_memory", "timeline"},
    "tensors": {"emulation", "reduce", "shared_memory", "snapshot", "timeline"},
    "recovery": {"shared_memory", "tensors"},
    "node": {"emulation", "reduce", "shared_memory", "tensors", "timeline"},
    "collectives": {"node", "reduce", "shared_memory"},
    "client": {"recovery", "reduce", "shared_memory", "tensors", "timeline"},
    "device": {"emulation", "node", "recovery", "reduce", "shared_memory", "tensors", "timeline"},
    "gpu": {"client", "emulation", "reduce", "shared_memory", "snapshot", "tensors"},
}
"""Folders of coarse/kernels/include/coarse and coarse/kernels/src, each with all others from which it includes."""


def folders_included():
    """The other folders from which each folder includes, in headers and sources."""
    found = {}
    for root in (KERNELS / "include" / "coarse", KERNELS / "src"):
        for folder in root.iterdir():
            texts = [file.read_text() for file in folder.iterdir()]
            included = {name for text in texts for name in INCLUDED.findall(text)}
            found.setdefault(folder.name, set()).update(included - {folder.name})
    return found


def test_native_code_includes_the_folders_named_here_only():
    assert folders_included() == INCLUDES


def test_no_folder_of_native_code_includes_itself_by_way_of_others():
    graphlib.TopologicalSorter(folders_included()).prepare()  # raises CycleError, which names the circle
