"""`coarse bench train-step`: parameters are verified against DDP's before any step is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from coarse.bench.harness.commands import BenchError
from coarse.bench.harness.control_group import NoControlGroupError
from coarse.bench.harness.launchers import missing
from coarse.bench.memory import run_state_memory
from coarse.bench.train_step import driver as train
from coarse.bench.train_step.driver import FirstStep, TrainPlan, num_progress_steps, run_train

pytest.importorskip("torch")

PLAN = TrainPlan(
    systems=("ddp", "none"),
    model="digits",
    batch=4,
    sequence=8,
    num_workers=2,
    threads=1,
    optimizer="adamw",
    steps=3,
    rounds=2,
)


def first_step(*, hashes: tuple[str, ...] = ("a", "a"), sample: tuple[float, ...] = (1.0, 2.0)) -> FirstStep:
    return FirstStep(
        losses=(1.0, 1.0),
        parameter_hashes=hashes,
        parameter_sample=sample,
        parameter_bytes=8,
        peak_bytes=1,
    )


@pytest.mark.slow
def test_peers_are_verified_and_timed_in_turns() -> None:
    turns: list[str] = []
    comparison = run_train(PLAN, turns.append)
    assert len(turns) == num_progress_steps(PLAN)
    assert comparison.side_by_side
    ddp, bare = comparison.results
    assert len(set(ddp.first_step.parameter_hashes)) == 1
    assert len(set(bare.first_step.parameter_hashes)) == 2
    assert ddp.step.iterations == PLAN.steps * PLAN.rounds
    assert ddp.first_step.peak_bytes > 2 * (50 << 20)
    assert comparison.blocked_us(ddp) == pytest.approx(ddp.step.p50_us - bare.step.p50_us)


@pytest.mark.slow
def test_systems_are_started_anew_for_every_turn_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train, "_MEMORY_MARGIN", 1e6)
    comparison = run_train(replace(PLAN, systems=("none",), rounds=1))
    assert not comparison.side_by_side
    assert comparison.results[0].step.iterations == PLAN.steps


def test_workers_that_disagree_are_an_error() -> None:
    with pytest.raises(BenchError, match="coarse: workers disagree"):
        train._verify(PLAN, {"coarse": first_step(hashes=("a", "b"))})


def test_parameters_that_are_not_those_of_ddp_are_an_error() -> None:
    steps = {"coarse": first_step(sample=(1.0, 2.1)), "ddp": first_step()}
    with pytest.raises(BenchError, match="coarse: parameters after one step are not those of ddp"):
        train._verify(PLAN, steps)


def test_bare_workers_need_not_agree() -> None:
    train._verify(PLAN, {"none": first_step(hashes=("a", "b")), "ddp": first_step()})


@pytest.mark.parametrize(
    ("flags", "systems"),
    [
        (("--against", ""), ["coarse"]),
        pytest.param(("--against", "ddp,ddp-tuned"), ["coarse", "ddp", "ddp-tuned"], marks=pytest.mark.slow),
        pytest.param(("--against", "", "--single"), ["coarse", "none"], marks=pytest.mark.slow),
        pytest.param(
            ("--against", "ddp", "--offload-optimizer"),
            ["coarse", "coarse-offload", "coarse-overlap", "ddp"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_command_prints_a_table_and_appends_records(
    flags: tuple[str, ...], systems: list[str], tmp_path: Path
) -> None:
    if (reason := missing("coarse")) is not None:
        pytest.skip(reason)
    path = tmp_path / "records.jsonl"
    command = [sys.executable, "-m", "coarse", "bench", "train-step", "--model", "digits", *flags]
    command += ["--steps", "3", "--rounds", "1", "--json", os.fspath(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["system"] for record in records] == systems
    assert {record["bench"] for record in records} == {"train-step"}
    assert "measured on" in result.stdout
    assert "digits, batch 1" in result.stdout


@pytest.mark.slow  # starts a job twice
def test_memory_of_a_whole_job_is_counted_by_a_control_group() -> None:
    turns: list[str] = []
    plan = replace(PLAN, systems=("zero",))
    try:
        (result,) = run_state_memory(plan, turns.append, finds_limits=False)
    except NoControlGroupError as error:
        pytest.skip(str(error))
    assert len(turns) == 2
    assert result.peak_bytes is not None
    assert result.peak_bytes > 2 * (100 << 20)
    assert result.limit_bytes is None
