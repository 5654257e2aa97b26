"""A job goes on without lost workers under `coarse run --min-workers`: the others end with the same bits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import launch

SCRIPT = Path(__file__).parent / "elastic_script.py"
COARSE_RUN = ("coarse", "run", "-n", "3", "--min-workers", "2", "--memory-devices", "2")


def check_survivors(folder: Path, printed: str, lost: int, fate: str, *, step: int) -> None:
    members = [rank for rank in range(3) if rank != lost]
    ends = [json.loads((folder / f"end-{rank}").read_text()) for rank in members]
    assert not (folder / f"end-{lost}").exists()
    digests = {digest for digest, _, _ in ends}
    assert len(digests) == 1, "all survivors have the same parameters, buffers and states"
    for _, left, changes in ends:
        assert left == members
        ((changed, *worlds),) = changes
        assert worlds == [[0, 1, 2], members]
        assert changes == ends[0][2], "all learn of it after the same step"
        assert changed in (step, step + 1)
    assert f"worker {lost} (pid " in printed
    assert fate in printed
    assert "the other 2 go on (--min-workers 2)" in printed
    assert f"faults: worker {lost} lost" in printed


@pytest.mark.parametrize(
    ("mode", "fate", "lost"),
    [
        ("plain", "die", 1),
        pytest.param("plain", "raise", 0, marks=pytest.mark.slow),
        ("optimizer", "raise", 1),
        pytest.param("optimizer", "die", 0, marks=pytest.mark.slow),
        ("overlap", "die", 0),
    ],
)
def test_others_go_on_after_a_loss_in_backward(tmp_path: Path, mode: str, fate: str, lost: int) -> None:
    printed = launch(COARSE_RUN, SCRIPT, (str(tmp_path), mode, fate, str(lost)))
    said = "was killed by SIGKILL" if fate == "die" else "failed with exit code 1"
    check_survivors(tmp_path, printed, lost, said, step=4)


FAILPOINTS = (
    # Before settings are written, between pushes of updates, before and after they are pulled.
    ("step.prepare:kill@rank=1,step=4", 1),
    ("step.push:kill@rank=0,step=4,count=3", 0),
    ("step.pull:kill@rank=2,step=4", 2),
    ("step.done:kill@rank=0,step=4", 0),
)


@pytest.mark.parametrize(
    ("failpoint", "lost"),
    [FAILPOINTS[1], *(pytest.param(*each, marks=pytest.mark.slow) for each in FAILPOINTS)],
)
def test_others_go_on_after_a_loss_in_an_update(tmp_path: Path, failpoint: str, lost: int) -> None:
    printed = launch(COARSE_RUN, SCRIPT, (str(tmp_path), "optimizer"), "--failpoints", failpoint)
    check_survivors(tmp_path, printed, lost, "was killed by SIGKILL", step=4)


def test_with_too_few_workers_the_job_ends(tmp_path: Path) -> None:
    failpoints = "step.push:kill@rank=1,step=3,count=1;backward.push:kill@rank=2,step=6,count=1"
    done = subprocess.run(
        [
            *(sys.executable, "-m", *COARSE_RUN, "--failpoints", failpoints),
            *(str(SCRIPT), str(tmp_path), "optimizer"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 137, done.stderr
    assert "WorkerLostError" in done.stderr
    said = r"worker 1 .*; its last contribution was step \d+\. Then worker 2 \(pid"
    assert re.search(said, done.stderr), done.stderr
    assert "1 worker(s) are left, and COARSE_MIN_WORKERS=2" in done.stderr
