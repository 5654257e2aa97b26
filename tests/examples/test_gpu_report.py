"""The report of `benchmarks/gpu_report.py`: targets match the figures, and the exit of a part is visible."""

from __future__ import annotations

import io
import json
import sys

import gpu_report
import pytest
from rich.console import Console


def training_record(system, **changes):
    usual = {
        "system": system,
        "model": "bert-base",
        "p50_us": 1e5,
        "blocked_us": None,
        "peak_gpu_bytes": 0,
        "used_gpu_bytes": 0,
        "bytes": 400,
        "num_workers": 2,
    }
    return usual | changes


def missed(findings):
    return [finding.what for finding in findings if finding.is_met is False]


def test_kernels_are_held_to_a_copy_but_not_small_shards():
    records = [
        {"case": "copy kernel", "of_copy": 0.5, "is_kernel": False},
        {"case": "mean of 2 to 1, float32", "of_copy": 0.86, "is_kernel": True},
        {"case": "AdamW by 2 gradients, float32", "of_copy": 0.84, "is_kernel": True},
        {"case": "60 shards of 64 KiB, one launch", "of_copy": 0.1, "is_kernel": True},
    ]
    findings = gpu_report.judge_kernels(records)
    assert [finding.is_met for finding in findings] == [True, False, None]
    assert missed(findings) == ["AdamW by 2 gradients, float32, of a copy"]


def test_transfers_are_held_to_pinned_copies():
    figures = {
        "pinned_d2h_gbytes_per_s": 50.0,
        "pinned_h2d_gbytes_per_s": 50.0,
        "pinned_both_gbytes_per_s": 90.0,
        "push_gbytes_per_s": 45.0,
        "pull_gbytes_per_s": 40.0,
        "push_and_pull_gbytes_per_s": 72.0,
    }
    findings = gpu_report.judge_transfers([figures])
    assert missed(findings) == ["pull, of a pinned copy"]
    assert findings[2].measured == "1.6x"
    assert missed(gpu_report.judge_overhead([{"client_us_per_25_mb": 49.0}])) == []
    assert len(missed(gpu_report.judge_overhead([{"client_us_per_25_mb": 51.0}]))) == 1


def test_steps_are_held_to_torch_ddp_and_optimizers_to_what_they_save():
    records = [
        training_record("ddp", p50_us=1.2e5, blocked_us=2e4),
        training_record("coarse", peak_gpu_bytes=5000),
        training_record("coarse-offload", peak_gpu_bytes=5000 - 1600),  # 100 parameters, 2 workers
        training_record("coarse-overlap", peak_gpu_bytes=5000 - 1400),
    ]
    findings = gpu_report.judge_training(records)
    assert missed(findings) == ["coarse-overlap, saved for each parameter of each worker"]
    assert findings[4].measured == "1.2x"
    assert findings[5].measured == "8 B"


@pytest.mark.parametrize(
    ("code", "is_met", "last_line"),
    [
        ("print('one'); print('3 passed'); print()", True, "3 passed"),
        ("raise SystemExit('not here')", False, "not here"),
    ],
)
def test_how_a_part_ended_is_in_the_report(tmp_path, code, is_met, last_line):
    part = gpu_report.Part(name="part", command=[sys.executable, "-c", code], judge=gpu_report.judge_nothing)
    assert gpu_report.findings_of(part, tmp_path) == []
    gpu_report.run_part(part, tmp_path)
    (finding,) = gpu_report.findings_of(part, tmp_path)
    assert (finding.is_met, finding.measured) == (is_met, last_line)


def test_figures_of_an_earlier_run_are_gone(tmp_path):
    write = f"import sys; open(sys.argv[1], 'a').write({json.dumps({'client_us_per_25_mb': 10})!r} + chr(10))"
    part = gpu_report.Part(
        name="overhead", command=[sys.executable, "-c", write, "FILE"], judge=gpu_report.judge_overhead
    )
    for _ in range(2):
        gpu_report.run_part(part, tmp_path)
        assert len((tmp_path / "overhead.jsonl").read_text().splitlines()) == 1
    findings = gpu_report.findings_of(part, tmp_path)
    assert [finding.measured for finding in findings][1:] == ["10 us"]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(gpu_report.table_of(findings, "a GPU"))
    assert "at most 50 us" in console.export_text()


def test_a_program_that_is_missing_is_named(tmp_path):
    part = gpu_report.Part(name="part", command=["no-such-program"], judge=gpu_report.judge_nothing)
    gpu_report.run_part(part, tmp_path)
    (finding,) = gpu_report.findings_of(part, tmp_path)
    assert (finding.is_met, finding.measured) == (False, "no-such-program is missing")
