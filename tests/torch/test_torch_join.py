"""A further worker joins a running job by `coarse run --join`, and all end with the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import LIMIT_S, launch

from coarse.status.address import Address, find_launchers

SCRIPT = Path(__file__).parent / "replace_script.py"
COARSE_RUN = ("coarse", "run", "-n", "2", "--min-workers", "1", "--max-workers", "3")
NOBODY = "-1"


def parent_of(address: Address) -> int:
    try:
        stat = Path(f"/proc/{address.pid}/stat").read_text()
    except OSError:  # it has ended
        return -1
    return int(stat.rpartition(")")[2].split()[1])


def join(job: subprocess.Popen[bytes]) -> None:
    """Lets a worker join as soon as the launcher lets it."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        names = [each.job for each in find_launchers() if parent_of(each) == job.pid]
        command = [sys.executable, "-m", "coarse", "run", "--join", *names]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S) if names else None
        if done is not None and done.returncode == 0:
            assert "worker 2 takes part in the training" in done.stderr
            return
        assert done is None or "its workers have no session yet" in done.stderr, done.stderr
        assert job.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.parametrize("mode", ["backward", pytest.param("overlap", marks=pytest.mark.slow)])
def test_a_worker_joins_a_running_job(tmp_path: Path, mode: str) -> None:
    printed = launch(COARSE_RUN, SCRIPT, (str(tmp_path), mode, NOBODY, "1"), meanwhile=join)
    first, second, newcomer = (json.loads((tmp_path / f"end-{rank}").read_text()) for rank in range(3))
    assert first == second
    assert first["digest"] == newcomer["digest"], "parameters, buffers and states are the same"
    assert first["members"] == newcomer["members"] == [0, 1, 2]
    ((changed, *members),) = first["changes"]
    assert members == [0, 1, 2]
    for step, move in first["moves"].items():
        mean = (1 + 2) / 2 if int(step) < changed else (1 + 2 + 4) / 3
        assert move == pytest.approx(mean, abs=1e-2), step
    assert newcomer["moves"].items() <= first["moves"].items()
    assert str(changed) in newcomer["moves"], "it contributes from the step in which all learn of it"
    assert "worker 2 joined" in printed
