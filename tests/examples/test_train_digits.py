"""The comparison of `make train`: its summary, and the results that it rejects."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import train_digits
from rich.console import Console


def report(**changes: object) -> dict[str, object]:
    known = {"accuracy": 0.98, "samples_per_s": 100.0, "step_ms_p50": 4.0, "blocked_ms_p50": 1.0}
    return {**known, "param_hash": "ab", **changes}


def test_summary_adds_throughput_and_averages_times() -> None:
    entry = train_digits.entry_of(
        [report(), report(samples_per_s=50.0, step_ms_p50=6.0, accuracy=0.99)], 700.0
    )
    assert entry == {
        "accuracy": 0.98,
        "samples_per_s": 150.0,
        "step_ms_p50": 5.0,
        "blocked_ms_p50": 1.0,
        "peak_mib": 700.0,
        "param_hashes": ["ab", "ab"],
    }


def test_turns_are_merged_by_medians_and_differences_stay() -> None:
    turns = [
        train_digits.entry_of([report(step_ms_p50=ms), report(step_ms_p50=ms, param_hash=name)], 1.0)
        for ms, name in ((9.0, "ab"), (4.0, "ab"), (5.0, "cd"))
    ]
    merged = train_digits.merged(turns)
    assert merged["step_ms_p50"] == 5.0
    assert merged["param_hashes"] == ["ab", "ab/cd"]
    assert train_digits.merged(turns[:1]) == turns[0]


def test_faults_are_named() -> None:
    good = train_digits.entry_of([report(), report()], 1.0)
    poor = train_digits.entry_of([report(accuracy=0.9), report(param_hash="cd")], 1.0)
    other = train_digits.entry_of([report(param_hash="cd"), report(param_hash="cd")], 1.0)
    assert train_digits.faults_of({"coarse": good, "ddp": good}, 0.97) == []
    assert train_digits.faults_of({"coarse": good, "ddp": other}, 0.97) == [
        "COARSE and torch DDP (gloo) ended up with different parameters"
    ]
    assert train_digits.faults_of({"coarse": good, "ddp": poor}, 0.97) == [
        "torch DDP (gloo): test accuracy 90.00%, 97% needed",
        "torch DDP (gloo): the workers ended up with different parameters",
    ]


def plan(tmp_path: Path, *script_arguments: str, limit_s: float = 120.0) -> train_digits.Plan:
    return train_digits.Plan(
        output=tmp_path,
        num_workers=2,
        num_memory_devices=2,
        limit_s=limit_s,
        script_arguments=script_arguments,
    )


def test_failed_run_shows_its_output(tmp_path: Path) -> None:
    with pytest.raises(train_digits.RunFailedError, match=r"(?s)--no-such-flag.*exit code 2") as failure:
        train_digits.measure("ddp", plan(tmp_path, "--no-such-flag"), Console(file=io.StringIO()))
    assert "unrecognized arguments" in str(failure.value)
    assert "unrecognized arguments" in (tmp_path / "ddp.log").read_text()


def test_run_beyond_its_limit_is_ended(tmp_path: Path) -> None:
    with pytest.raises(train_digits.RunFailedError, match=r"took more than 0\.5 s"):
        train_digits.measure("ddp", plan(tmp_path, limit_s=0.5), Console(file=io.StringIO()))


@pytest.mark.slow
def test_compares_both_and_writes_the_summary(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = train_digits.main(["--output", str(tmp_path), "--min-accuracy", "1.01", "--", "--epochs", "1"])
    shown = capfd.readouterr().out
    assert code == 1
    assert "FAILED: COARSE: test accuracy" in shown
    assert "samples/s, all workers" in shown
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary) == ["coarse", "ddp"]
    for entry in summary.values():
        assert set(entry) == {
            *("accuracy", "samples_per_s", "step_ms_p50", "blocked_ms_p50", "peak_mib", "param_hashes")
        }
        assert len(entry["param_hashes"]) == 2
        assert len(set(entry["param_hashes"])) == 1
        assert entry["peak_mib"] > 100
