"""What a process imports, it pays for: the core needs no framework, a memory device not even numpy."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRAMEWORKS = {"torch", "tensorflow", "transformers", "sklearn"}


def modules_after(statement):
    script = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=150, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import coarse", FRAMEWORKS | {"numpy"}),
        ("import coarse.session, coarse.launch", FRAMEWORKS),
        ("import coarse.client.client", FRAMEWORKS | {"numpy"}),
        ("import coarse.proxy.device", FRAMEWORKS | {"numpy", "rich"}),
        ("import coarse.cli.device, coarse.cli.main", FRAMEWORKS | {"numpy", "rich"}),
        ("import coarse.profiler.partition, coarse.profiler.routing", FRAMEWORKS | {"numpy"}),
    ],
)
def test_imports_what_it_needs_only(statement, forbidden):
    assert modules_after(statement) & forbidden == set()


def test_a_tensorflow_that_was_not_tested_is_refused_by_name(tmp_path):
    (tmp_path / "tensorflow.py").write_text("__version__ = '2.99.1'\n")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import coarse.tensorflow",
        ],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 1
    assert (
        "ImportError: coarse.tensorflow works with TensorFlow 2.21.*, and 2.99.1 is installed" in done.stderr
    )
    assert "tensorflow==2.21.*" in done.stderr


def test_nothing_happens_at_import():
    script = (
        "import os, threading\n"
        "before = len(os.listdir('/proc/self/fd')), threading.active_count()\n"
        "import coarse, coarse.session, coarse.proxy.device\n"
        "assert before == (len(os.listdir('/proc/self/fd')), threading.active_count())\n"
    )
    subprocess.run(
        [sys.executable, "-c", script], timeout=150, check=True, env={"COARSE_TIMEOUT_S": "nonsense"}
    )
