"""`coarse run`: a worker that has left is no failure, and the job goes on as long as enough workers are there."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from run_harness import coarse_run

SCRIPT = """\
import os, signal, sys
from coarse.env import notes_pipe
from coarse.status.launcher_notes import tell_launcher
rank = int(os.environ["RANK"])
for leaver, code in (map(int, each.split(":")) for each in sys.argv[1:]):
    if rank == leaver:
        tell_launcher(notes_pipe(), {"left": rank, "step": 7, "is_asked": True})
        sys.exit(code)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("code", [0, 1])
def test_a_worker_that_has_left_is_no_failure(script: Path, code: int) -> None:
    done = coarse_run("-n", "3", "--min-workers", "1", script, f"1:{code}")
    assert done.returncode == 0
    assert "left at step 7 (SIGTERM)" in done.stderr
    assert ("failed with exit code 1, after it had left" in done.stderr) == bool(code)


def test_when_all_have_left_the_job_has_not_finished(script: Path) -> None:
    done = coarse_run("-n", "2", "--min-workers", "1", script, "0:0", "1:0")
    assert done.returncode == 128 + signal.SIGTERM
    assert "0 are left, too few (--min-workers 1)" in done.stderr
    assert done.stderr.splitlines()[-1] == "coarse run: all workers have left before the end of the job"


def test_a_worker_that_fails_when_others_have_left_is_a_failure_if_too_few_stay(script: Path) -> None:
    script.write_text(SCRIPT + "if rank == 1: sys.exit(9)\nsignal.pause()\n")
    done = coarse_run("-n", "3", "--min-workers", "2", script, "0:0")
    assert done.returncode == 9


def test_a_restart_of_the_job_starts_a_worker_in_each_place(script: Path) -> None:
    script.write_text(
        "import os, sys\n"
        "is_first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "if not is_first: sys.exit(print('again', flush=True))\n" + SCRIPT + "sys.exit(9)\n"
    )
    done = coarse_run("-n", "2", "--min-workers", "2", "--max-restarts", "1", script, "1:0")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[w0] again", "[w1] again"]
    assert "left at step 7" in done.stderr
