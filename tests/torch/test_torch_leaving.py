"""A worker leaves after SIGTERM under `coarse run --min-workers`: nobody sees an error, and no gradient is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import LIMIT_S, launch

SCRIPT = Path(__file__).parent / "leaving_script.py"
COARSE_RUN = ("coarse", "run", "-n", "3", "--min-workers", "2", "--memory-devices", "2")
REPLACING = ("--on-loss", "replace", "--max-restarts", "2")


@pytest.mark.parametrize(
    ("mode", "leaver", "options"),
    [
        ("plain", 0, ()),
        ("accumulate", 1, ()),
        ("overlap", 1, REPLACING),
        ("accumulate", 2, REPLACING),
        pytest.param("backward", 0, REPLACING, marks=pytest.mark.slow),
        pytest.param("backward", 2, (), marks=pytest.mark.slow),
    ],
)
def test_a_worker_leaves_after_its_step(
    tmp_path: Path, mode: str, leaver: int, options: tuple[str, ...]
) -> None:
    printed = launch(COARSE_RUN, SCRIPT, (str(tmp_path), mode, str(leaver)), *options)
    others = [rank for rank in range(3) if rank != leaver]
    left, *stayed = (json.loads((tmp_path / f"end-{rank}").read_text()) for rank in (leaver, *others))
    assert stayed[0] == stayed[1], "parameters, buffers and steps are the same"
    assert stayed[0]["members"] == others
    assert left["forwards"] == 0, "it leaves before the first forward of a step"
    moves = stayed[0]["moves"]
    for step, move in moves.items():
        ranks = range(3) if step in left["moves"] else others
        assert move == pytest.approx(sum(2**rank for rank in ranks) / len(ranks), abs=1e-2), step
    assert left["moves"].items() <= moves.items()
    said = (
        rf"worker {leaver} \(pid \d+\) left at step \d+ \(SIGTERM\), .* the other 2 go on \(--min-workers 2\)"
    )
    assert re.search(said, printed), printed
    assert f"faults: none; worker {leaver} left at step " in printed
    assert "Traceback" not in printed
    assert "a new worker" not in printed, "who asks a worker to leave wants it gone"


def test_a_signal_to_the_launcher_ends_all_at_once(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", *COARSE_RUN, "--no-prefix", str(SCRIPT), str(tmp_path), "endless"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COARSE_PROFILE": "off"},
        text=True,
    ) as job:
        assert job.stdout is not None
        assert "trains" in job.stdout.readline()
        job.send_signal(signal.SIGTERM)
        _, said = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 128 + signal.SIGTERM, said
    assert "stopped by SIGTERM; no worker is left" in said
    assert "left at step" not in said
    assert "Traceback" not in said
