"""A release needs its tag, a clean commit and a dated section of the changelog."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import coarse

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "packaging"))

import release  # noqa: E402

CHANGELOG = """# Changelog

## 0.2.0 (unreleased)

- Later.

## 0.1.0 (2026-12-01)

### PyTorch

- First.
"""


def test_the_version_is_the_package_s():
    assert release.version_of((ROOT / "coarse" / "__init__.py").read_text()) == coarse.__version__


@pytest.mark.parametrize("described", ["v0.1.0-dirty", "v0.1.0-2-gabcdef1", "v0.1.1", "abcdef1"])
def test_another_commit_than_the_tagged_one_is_refused(described):
    release.check_tag("v0.1.0", "0.1.0")
    with pytest.raises(ValueError, match=f"this is {described}, not the clean commit with the tag v0.1.0"):
        release.check_tag(described, "0.1.0")


def test_notes_are_the_section_of_the_version():
    assert release.notes_of(CHANGELOG, "0.1.0") == "### PyTorch\n\n- First.\n"
    with pytest.raises(ValueError, match=r"calls 0\.2\.0 unreleased"):
        release.notes_of(CHANGELOG, "0.2.0")
    with pytest.raises(ValueError, match=r"no section on 0\.3\.0"):
        release.notes_of(CHANGELOG, "0.3.0")


def test_this_commit_is_not_released_by_chance():
    """The changelog has an unreleased section, or the commit no tag."""
    done = subprocess.run(
        [sys.executable, ROOT / "packaging" / "release.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("release: this is ")
