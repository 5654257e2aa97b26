"""The package contains all sources that users compile, with their includes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coarse.machine.toml_lines import read_toml

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "coarse" / "kernels"
PACKED = read_toml(ROOT / "pyproject.toml").values["tool"]["setuptools"]["package-data"]
INCLUDED = re.compile(r"#include [<\"](coarse/[\w./]+)[>\"]")


def included_by(*sources):
    """Headers of coarse/kernels, and what these include."""
    found, unread = set(), list(sources)
    while unread:
        new = set(INCLUDED.findall(unread.pop().read_text())) - found
        found |= new
        unread += [KERNELS / "include" / name for name in new]
    return found


def packed_headers():
    paths = (path for pattern in PACKED["coarse.kernels"] for path in KERNELS.glob(pattern))
    return {
        str(path.relative_to(KERNELS / "include"))
        for path in paths
        if path.is_relative_to(KERNELS / "include")
    }


def test_the_torch_backends_headers_are_packed_and_tell_its_builds_apart():
    pytest.importorskip("torch")
    from coarse.torch.backend import building

    headers = included_by(*(ROOT / "coarse/torch/backend/native").glob("*.[ch]pp"))
    assert "coarse/collectives/collective.hpp" in headers
    assert headers <= packed_headers()
    assert headers == {str(header) for header in building._INTERFACE}


def test_the_headers_of_tensorflows_ops_are_packed():
    headers = included_by(*(ROOT / "coarse/tensorflow").glob("*.cc"))
    assert headers
    assert headers <= packed_headers()


def test_all_files_of_the_dashboards_page_are_packed():
    page = ROOT / "coarse" / "dashboard" / "page"
    packed = {path for pattern in PACKED["coarse.dashboard"] for path in page.parent.glob(pattern)}
    files = {path for path in page.rglob("*") if path.is_file()}
    assert page / "index.html" in files
    assert files <= packed
