"""`coarse bench checkpoint`: each system's saved state is compared with the model before its saves are timed."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coarse.bench.checkpoint.driver import SYSTEMS, SavePlan, run_checkpoint
from coarse.bench.harness.commands import BenchError
from coarse.bench.harness.launchers import missing
from coarse.bench.harness.worker_pool import WorkerPool

pytest.importorskip("torch")
pytest.importorskip("crc32c")

PLAN = SavePlan(
    systems=("torch",),
    model="digits",
    batch=4,
    sequence=8,
    num_workers=2,
    threads=1,
    optimizer="adamw",
    saves=2,
    every=3,
)


def test_what_was_not_saved_rightly_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ask = WorkerPool.ask

    def answer(pool: WorkerPool, command: str, *limits: float, **arguments: Any) -> list[Any]:
        return [True, False] if command == "check" else ask(pool, command, *limits, **arguments)

    monkeypatch.setattr(WorkerPool, "ask", answer)
    with pytest.raises(BenchError, match="torch: what was saved is not the model"):
        run_checkpoint(replace(PLAN, folder=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "changed", [{"saves": 0}, {"every": 1}, {"num_workers": 1}, {"model": "none"}, {"systems": ()}]
)
def test_plans_check_themselves(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"start at 1|none of|at least one"):
        replace(PLAN, **changed)


def test_all_steps_of_the_loop_count_with_their_saves(tmp_path: Path) -> None:
    (result,) = run_checkpoint(replace(PLAN, folder=str(tmp_path)))
    assert (result.step.iterations, result.stop.iterations) == (9, 2)
    assert result.longest_s * 1e6 >= result.stop.p50_us, "a step lasts until its save lets training go on"
    assert not math.isnan(result.added_error_s)
    assert result.saved_bytes > 3 * 4 * 151_306


@pytest.mark.slow
def test_command_prints_a_table_and_appends_records(tmp_path: Path) -> None:
    if (reason := missing("coarse")) is not None:
        pytest.skip(reason)
    path, folder = tmp_path / "records.jsonl", tmp_path / "saves"
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "coarse",
        "bench",
        "checkpoint",
        "--model",
        "digits",
        "--saves",
        "2",
        "--every",
        "400",
    ]
    command += ["--json", os.fspath(path), "--folder", os.fspath(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["system"] for record in records] == list(SYSTEMS)
    # Parameters and two moments, four bytes each.
    assert all(record["bytes"] > 3 * 4 * 151_306 for record in records)
    assert all(record["iterations"] == 2 for record in records)
    assert "measured on" in result.stdout
    assert list(folder.iterdir()) == []
