"""Managed memory is never used: its pages move by themselves, and no other process can map them."""

from __future__ import annotations

import re
from pathlib import Path

import coarse

PACKAGE = Path(coarse.__file__).parent
SOURCES = {".cpp", ".hpp", ".h", ".inc", ".cu", ".cuh", ".cc", ".py", ".pyi"}
# Names in calls, flags and attributes of the driver and the runtime.
MANAGED = re.compile(r"AllocManaged|MallocManaged|MemPrefetch|MemAdvise|__managed__|MEM_ATTACH|MemAttach")
DRIVER = PACKAGE / "kernels" / "include" / "coarse" / "gpu" / "cuda_api.hpp"


def functions_of_the_driver():
    """Those that COARSE looks up in libcuda, which it is not linked with."""
    return re.findall(r"^  F\((cu\w+),", DRIVER.read_text(), re.MULTILINE)


def test_the_driver_is_asked_for_no_managed_memory():
    functions = functions_of_the_driver()
    assert {"cuInit", "cuMemCreate", "cuMemAllocAsync", "cuMemSetAccess"} <= set(functions)
    assert not [name for name in functions if MANAGED.search(name)]


def test_no_source_names_managed_memory():
    sources = [path for path in PACKAGE.rglob("*") if path.suffix in SOURCES]
    assert {"cuda_api.hpp", "cuda_driver.cpp", "reduce.cu", "cuda_kernels.py"} <= {
        path.name for path in sources
    }
    found = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if MANAGED.search(line)
    ]
    assert not found
