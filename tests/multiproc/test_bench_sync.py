"""`coarse bench sync`: every system is verified, then timed; a record for each system and size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coarse.bench.harness.launchers import missing
from coarse.bench.sync.driver import SyncPlan, num_progress_steps, run_sync

SIZES = (4096, 100_000)


def installed(*systems: str) -> tuple[str, ...]:
    """Those of `systems` that run here; skips the test if none of them does."""
    present = tuple(system for system in systems if missing(system) is None)
    if not present:
        pytest.skip("; ".join(str(missing(system)) for system in systems))
    return present


@pytest.mark.parametrize(
    "system",
    ["gloo", "mpich", "openmpi", "impi", "ucc", "horovod", "coarse", "coarse-unregistered", "limit"],
)
def test_system_is_verified_and_timed(system: str) -> None:
    plan = SyncPlan(
        systems=installed(system), num_workers=2, sizes=SIZES, dtype="float32", budget_s=0.02, rounds=2
    )
    (small, large) = run_sync(plan)
    assert [small.nbytes, large.nbytes] == [4096, 100_000]
    for record in (small, large):
        assert record.system == system
        assert record.timing.iterations >= 2 * plan.rounds
        assert 0 < record.timing.min_us <= record.timing.p50_us <= record.timing.p99_us
        assert record.algbw_gbytes_per_s == pytest.approx(record.nbytes / record.timing.p50_us / 1e3)


@pytest.mark.parametrize(
    ("dtype", "peers"),
    [
        pytest.param("float64", ("gloo", "mpich"), marks=pytest.mark.slow),
        pytest.param("int32", (), marks=pytest.mark.slow),
        ("int64", ()),
    ],
)
def test_other_dtypes_are_verified_too(dtype: str, peers: tuple[str, ...]) -> None:
    systems = installed(*peers, "coarse", "coarse-unregistered")
    plan = SyncPlan(systems=systems, num_workers=3, sizes=(4096,), dtype=dtype, budget_s=0.01, rounds=1)
    assert [record.system for record in run_sync(plan)] == list(systems)


@pytest.mark.slow
def test_systems_take_turns_and_progress_counts_them() -> None:
    systems = installed("gloo", "mpich")
    plan = SyncPlan(systems=systems, num_workers=2, sizes=(4096,), budget_s=0.01, rounds=2)
    turns: list[str] = []
    run_sync(plan, turns.append)
    assert len(turns) == num_progress_steps(plan)
    assert turns == [
        *(f"starting {system}" for system in systems),
        *(f"4 KiB  {system}  round {index} of 2" for index in (1, 2) for system in systems),
    ]


def test_command_prints_tables_and_appends_records(tmp_path: Path) -> None:
    installed("coarse")
    peers = installed("gloo", "mpich")
    path = tmp_path / "records.jsonl"
    command = [
        sys.executable,
        "-m",
        "coarse",
        "bench",
        "sync",
        "--against",
        ",".join(peers),
        "--workers",
        "2",
    ]
    command += [
        "--memory-devices",
        "host,host",
        "--sizes",
        "4KiB,64KiB",
        "--budget",
        "0.02",
        "--rounds",
        "1",
        "--json",
        os.fspath(path),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in path.read_text().splitlines()]
    systems = (*peers, "limit", "coarse", "coarse-unregistered")
    assert [(record["bytes"], record["system"]) for record in records] == [
        (nbytes, system) for nbytes in (4096, 65536) for system in systems
    ]
    assert {record["kind"] for record in records} == {"measured"}
    assert {record["num_workers"] for record in records} == {2}
    for expected in ("measured on", "All-reduce, GB/s", "unregistered", "Latency"):
        assert expected in result.stdout
