"""Shared by all tests, independent of how they were started."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import settings
from second_tries import may_try_again

# A slow example on a busy machine is not a fault.
settings.register_profile("coarse", deadline=None, max_examples=40)
settings.register_profile("thorough", deadline=None, max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "coarse"))

_ROOT = Path(__file__).parents[1]
_COMPILED = _ROOT / "build" / "test-cache"
_CUDA_STAND_INS = {
    "cuda_stand_in.cpp": "libcuda.so.1",
    "nvrtc_stand_in.cpp": "libnvrtc.so.13",
    "nccl_stand_in.cpp": "libnccl.so.2",
}


def pytest_configure():
    # A shell makes its background processes ignore signals; processes that the tests start would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(config, items):
    """If failed tests run again, excludes those whose failure a second try cannot excuse."""
    if not (reruns := config.getoption("reruns", None)):
        return
    for item in items:
        item.add_marker(pytest.mark.flaky(reruns=reruns, condition=may_try_again))


def pytest_terminal_summary(terminalreporter):
    """Reports why tests failed that passed on the second run; pytest reports only final failures."""
    passed = {report.nodeid for report in terminalreporter.getreports("passed")}
    for report in terminalreporter.getreports("rerun"):
        if report.nodeid in passed:
            terminalreporter.section(f"failed at first: {report.nodeid}")
            terminalreporter.write_line(report.longreprtext)


@pytest.fixture(autouse=True, scope="session")
def told_crashes():
    """Makes every Python process that crashes print its stack."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONFAULTHANDLER", "1")
        yield


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """A separate cache folder for the tests, so that no cached profile of this host affects them.

    What is compiled there has names of its ingredients, and is kept for all processes of tests and from run to run.
    """
    cache = tmp_path_factory.mktemp("cache")
    (cache / "coarse").mkdir()
    for compiled in ("tensorflow", "torch_backend"):
        kept = _COMPILED / "coarse" / compiled
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        (cache / "coarse" / compiled).symlink_to(kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield


@pytest.fixture(scope="session")
def cuda_stand_ins(tmp_path_factory):
    """A folder with the stand-ins of tests/native for CUDA's driver, its compiler and NCCL, for LD_LIBRARY_PATH."""
    compiler = os.environ.get("CXX", "c++").split()
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"{compiler[0]} is missing, which compiles the stand-ins for CUDA")
    folder = tmp_path_factory.mktemp("cuda_stand_ins")
    includes = [f"-I{_ROOT}/coarse/kernels/{name}" for name in ("include", "cuda")]
    for source, library in _CUDA_STAND_INS.items():
        output = ["-o", str(folder / library), f"-Wl,-soname,{library}"]
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", *includes]
        subprocess.run([*compiler, *flags, str(_ROOT / "tests" / "native" / source), *output], check=True)
    return folder
