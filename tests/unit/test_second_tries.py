"""A second try excuses an exceeded wait, but no crash, no sanitizer report and no unequal results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from second_tries import may_try_again, name_exit

TESTS = Path(__file__).parents[1]


def failed(check):
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        check()
    return caught.value


def code_is_0(code):
    assert code == 0, "what it printed"


def codes_are_0(codes):
    assert codes == [0, 0]


def digests_are_equal(digests):
    assert len(set(digests)) == 1


@pytest.mark.parametrize(
    "error",
    [
        None,
        TimeoutError("no answer within 200 s"),
        subprocess.TimeoutExpired("coarse run", 60),
        AssertionError("worker 1 ended with 1"),
        failed(lambda: code_is_0(-15)),
        failed(lambda: code_is_0(1)),
    ],
    ids=str,
)
def test_time_may_be_tried_again(error):
    assert may_try_again(error)


@pytest.mark.parametrize(
    "error",
    [
        failed(lambda: code_is_0(-11)),
        failed(lambda: code_is_0(-6)),
        failed(lambda: codes_are_0([0, -11])),
        AssertionError("coarse run: worker 1 died (SIGSEGV)"),
        AssertionError("Fatal Python error: Segmentation fault\n\nThread 0x1:"),
        AssertionError("==12==ERROR: AddressSanitizer: heap-use-after-free on address"),
        AssertionError("WARNING: ThreadSanitizer: data race (pid=12)"),
        failed(lambda: np.testing.assert_array_equal([1.0], [2.0])),
        failed(lambda: np.testing.assert_allclose([1.0], [2.0])),
        failed(lambda: digests_are_equal(["a", "b"])),
    ],
    ids=lambda error: str(error).strip()[:30],
)
def test_a_fault_may_not(error):
    assert not may_try_again(error)


def test_pytest_runs_a_late_test_again_and_a_crashed_one_not(tmp_path):
    path = tmp_path / "test_both.py"
    path.write_text(
        "def fails_first(name, error):\n"
        "    import pathlib\n"
        "    tried = pathlib.Path(__file__).with_name(name)\n"
        "    if not tried.exists():\n"
        "        tried.touch()\n"
        "        raise error\n"
        "def test_late(): fails_first('late', TimeoutError('no answer'))\n"
        "def test_crashed(): fails_first('crashed', AssertionError('worker 0 crashed with SIGSEGV'))\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--reruns",
        "1",
        "-p",
        "no:cacheprovider",
        "-c",
        TESTS.parent / "pyproject.toml",
    ]
    done = subprocess.run(
        [*command, f"--confcutdir={TESTS}", "-p", "conftest", path],
        env={"PYTHONPATH": str(TESTS), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "1 failed, 1 passed, 1 rerun" in done.stdout, done.stdout + done.stderr
    assert "FAILED" in done.stdout
    assert "::test_crashed" in done.stdout


@pytest.mark.parametrize(
    ("code", "text"), [(0, "ended with 0"), (-11, "crashed with SIGSEGV"), (-9, "was ended by SIGKILL")]
)
def test_exits_are_named(code, text):
    assert name_exit(code) == text
