"""Records of a benchmark: one JSON object per line, each with commit, machine and kind."""

from __future__ import annotations

import json
from pathlib import Path

from coarse.bench.provenance import BenchMachine, Provenance, append_records
from coarse.bench.sync.driver import SyncRecord
from coarse.bench.timing import Timing

HERE = Provenance(commit="abc123", machine=BenchMachine(cpu="Some CPU", cores=2, memory_bytes=24 * 2**30))
RECORD = SyncRecord(
    system="coarse",
    num_workers=2,
    nbytes=1 << 20,
    dtype="float32",
    timing=Timing(min_us=90.0, p50_us=100.0, p99_us=150.0, iterations=10),
)


def test_record_line_has_the_agreed_fields(tmp_path: Path) -> None:
    append_records(tmp_path / "records.jsonl", [RECORD.as_json()], HERE)
    assert json.loads((tmp_path / "records.jsonl").read_text()) == {
        "bench": "sync",
        "system": "coarse",
        "num_workers": 2,
        "bytes": 1048576,
        "dtype": "float32",
        "min_us": 90.0,
        "p50_us": 100.0,
        "p99_us": 150.0,
        "iterations": 10,
        "algbw_gbytes_per_s": 10.48576,
        "kind": "measured",
        "commit": "abc123",
        "machine": {"cpu": "Some CPU", "cores": 2, "memory_bytes": 25769803776},
    }


def test_records_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append_records(path, [RECORD.as_json()], HERE)
    append_records(path, [RECORD.as_json(), RECORD.as_json()], HERE)
    assert len(path.read_text().splitlines()) == 3


def test_machine_names_cpu_cores_and_memory() -> None:
    assert str(HERE.machine) == "Some CPU, 2 cores, 24.0 GiB"


def test_this_machine_can_be_described() -> None:
    here = Provenance.here()
    assert here.commit
    assert here.machine.cpu
    assert here.machine.cores >= 1
    assert here.machine.memory_bytes > 2**28
