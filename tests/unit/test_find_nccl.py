"""NCCL: if it cannot be loaded, the error contains the reason and the package to install."""

from __future__ import annotations

import sys

import pytest

from coarse.kernels import _native
from coarse.kernels.nccl import find_nccl

SONAME = "libcoarse_no_nccl.so.2"  # which no machine has


@pytest.fixture(autouse=True)
def only_wheels_of(monkeypatch, tmp_path):
    monkeypatch.setattr("coarse.kernels.nccl._SONAME", SONAME)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])


def test_nccl_that_is_not_there_is_named_with_what_to_install():
    with pytest.raises(
        _native.NcclError, match=rf"there is no NCCL: {SONAME}.*pip install 'coarse-train\[nccl\]'"
    ):
        find_nccl()


def test_nccl_that_cannot_be_loaded_is_named_with_the_reason(tmp_path):
    wheel = tmp_path / "nvidia" / "nccl" / "lib" / SONAME
    wheel.parent.mkdir(parents=True)
    wheel.write_text("not a library")
    with pytest.raises(_native.NcclError, match=rf"{wheel}: .*; there is no NCCL: {SONAME}"):
        find_nccl()
