"""docs/benchmarks.md: its tables match the records, which are from one commit and one machine."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MACHINE = {"cpu": "Some CPU", "cores": 2, "memory_bytes": 24 << 30}


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("benchmark_tables", ROOT / "benchmarks" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # where dataclasses look for names
        spec.loader.exec_module(module)
        yield module


def sync(system, nbytes, p50_us):
    rate = nbytes / p50_us / 1e3
    return {"system": system, "bytes": nbytes, "p50_us": p50_us, "algbw_gbytes_per_s": rate}


@pytest.fixture
def peers():
    """COARSE twice as fast as gloo, half as fast as Intel MPI."""
    return [
        sync("gloo", 4096, 8.0),
        sync("impi", 4096, 2.0),
        sync("limit", 4096, 1.0),
        sync("coarse", 4096, 4.0),
        sync("coarse-unregistered", 4096, 16.0),
    ]


def test_ratios_are_to_the_fastest_peer_which_is_bold(tables, peers):
    head, _, row = tables.all_reduce_table(peers)
    assert head.startswith("| size | gloo | Intel MPI | limit | COARSE |")
    assert row == "| 4 KiB | 0.51 | **2** | 4.1 | 1 | 0.50x | 0.26 | 0.12x |"


def test_latencies_are_of_small_tensors_alone(tables, peers):
    lines = list(tables.latency_table([*peers, sync("coarse", 1 << 20, 99.0)]))
    assert lines[2:] == ["| 4 KiB | 8 | 2 | 4 | 16 |"]


def test_steps_compare_with_the_fastest_of_several_ddps(tables):
    steps = {"coarse-offload": 500.0, "ddp": 1000.0, "ddp-tuned": 800.0, "none": 600.0}
    blocked = {"coarse-offload": -100.0, "ddp": 400.0, "ddp-tuned": 200.0, "none": None}
    records = [
        {
            "system": name,
            "p50_us": 1e3 * ms,
            "blocked_us": None if blocked[name] is None else 1e3 * blocked[name],
        }
        for name, ms in steps.items()
    ]
    rows = list(tables.step_table(records))[2:]
    assert rows[0] == "| COARSE, optimizer in the memory devices, in step() | 500 | none | 1.60x |"
    assert rows[1] == "| DDP, gradients as bucket views | 1000 | 400 | 0.80x |"
    assert rows[-1] == "| no communication | 600 |  | 1.33x |"


def test_a_system_that_had_no_room_is_left_without_a_peak(tables):
    record = {"system": "ddp", "peak_bytes": None, "copies_of_parameters": None, "smallest_limit_bytes": None}
    assert list(tables.memory_table([record]))[2:] == ["| DDP, gradients as bucket views | no room |  |"]


def test_records_of_two_commits_are_refused(tables):
    records = [{"commit": commit, "machine": MACHINE} for commit in ("1111111", "2222222")]
    with pytest.raises(ValueError, match=r"several commits or machines \(1111111, 2222222\)"):
        tables.provenance(records)
    assert "commit 1111111 on Some CPU, 2 cores, 24.0 GiB" in tables.provenance(records[:1])


def test_only_what_stands_between_marks_changes(tables):
    text = "before\n<!-- a -->\nold\n<!-- end of a -->\nafter\n"
    assert tables.between_marks(text, "a", ["new"]) == text.replace("old", "new")
    with pytest.raises(ValueError, match="has no place for b"):
        tables.between_marks(text, "b", [])


def test_the_document_has_a_place_for_every_table(tables):
    text = tables.DOCUMENT.read_text()
    for name in [each.name for each in tables.BENCHMARKS] + ["latency", "provenance"]:
        tables.between_marks(text, name, ["x"])


def test_a_benchmark_that_was_interrupted_leaves_no_records(tables, tmp_path, monkeypatch):
    def fail(command, **_):
        Path(command[-1]).write_text(json.dumps({"system": "coarse"}) + "\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(tables.subprocess, "run", fail)
    with pytest.raises(KeyboardInterrupt):
        tables.run(tables.BENCHMARKS[0], tmp_path)
    assert not (tmp_path / "all-reduce.jsonl").exists()
    monkeypatch.setattr(tables.subprocess, "run", lambda command, **_: Path(command[-1]).write_text("{}\n"))
    tables.run(tables.BENCHMARKS[0], tmp_path)
    assert tables.read(tmp_path / "all-reduce.jsonl") == [{}]
