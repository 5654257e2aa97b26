"""The site of the documentation: no broken link, no page outside of the contents, nothing from the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("myst_parser")
    pytest.importorskip("tensorflow")
    out = tmp_path_factory.mktemp("site")
    strict = ["-W", "--keep-going", "-q", "-c", ROOT / "docs" / "site", "-d", out / "doctrees"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *strict, ROOT, out / "html"],
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=450,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out / "html"


def test_the_reference_has_the_docstrings(site):
    page = (site / "docs" / "api" / "torch.html").read_text()
    for name in ("DistributedDataParallel", "DistributedOptimizer", "Recovery"):
        assert f'id="coarse.torch.{name}"' in page


def test_pages_load_nothing_from_the_network(site):
    loaded = re.compile(r'<(?:script|img|link)[^>]*(?:src|href)="(https?:[^"]+)"')
    found = {url for page in site.rglob("*.html") for url in loaded.findall(page.read_text())}
    assert found == set()
