"""Tables of a benchmark: ratios to the best peer and the limit of the same size; missing values are dashes."""

from __future__ import annotations

import pytest

from coarse.bench.memory import StateMemory
from coarse.bench.provenance import BenchMachine
from coarse.bench.sync.driver import SyncRecord, format_bytes
from coarse.bench.tables import (
    bandwidth_table,
    heading,
    latency_table,
    memory_table,
    single_table,
    train_table,
)
from coarse.bench.timing import Timing
from coarse.bench.train_step.driver import Comparison, FirstStep, TrainPlan, TrainResult


def timing(p50_us: float) -> Timing:
    return Timing(min_us=p50_us, p50_us=p50_us, p99_us=2 * p50_us, iterations=7)


def sync_record(system: str, gbytes_per_s: float, nbytes: int = 1 << 20) -> SyncRecord:
    return SyncRecord(
        system=system,
        num_workers=2,
        nbytes=nbytes,
        dtype="float32",
        timing=timing(nbytes / gbytes_per_s / 1e3),
    )


def comparison(*, gpu: str = "", **step_ms: float) -> Comparison:
    plan = TrainPlan(
        systems=tuple(step_ms),
        model="digits",
        batch=1,
        sequence=32,
        num_workers=2,
        threads=1,
        optimizer="adamw",
        device="cuda:0" if gpu else "cpu",
    )
    first = FirstStep(
        losses=(1.0, 1.0),
        parameter_hashes=("a", "a"),
        parameter_sample=(0.0,),
        parameter_bytes=4,
        peak_bytes=3 << 20,
        peak_gpu_bytes=(5 << 20) if gpu else 0,
        used_gpu_bytes=(7 << 20) if gpu else 0,
        gpu=gpu,
        backend="gloo",
    )

    def phases(ms: float) -> dict[str, Timing]:
        return {
            "forward": timing(1e3),
            "backward": timing(2e3),
            "optimizer": timing(3e3),
            "step": timing(ms * 1e3),
        }

    return Comparison(
        results=tuple(
            TrainResult(system=system, plan=plan, first_step=first, phases=phases(ms))
            for system, ms in step_ms.items()
        ),
        side_by_side=True,
    )


def test_coarse_is_set_against_the_best_peer_and_the_limit() -> None:
    records = [
        sync_record("gloo", 1.5),
        sync_record("mpich", 4),
        sync_record("limit", 20),
        sync_record("coarse", 16),
        sync_record("coarse-unregistered", 6),
    ]
    table = bandwidth_table(records)
    columns = ("size", "gloo", "mpich", "limit", "coarse", "best peer", "/ best peer", "of limit")
    assert table.columns == columns
    assert table.rows == (
        ("1 MiB", "1.50", "4.00", "20.00", "16.00", "mpich", "4.00x", "80%"),
        ("  unregistered", "", "", "", "6.00", "mpich", "1.50x", "30%"),
    )


@pytest.mark.parametrize(("peer", "ratio"), [("impi", "0.12x"), ("ucc", "0.12x")])
def test_peers_that_are_faster_are_named_as_the_best(peer, ratio) -> None:
    records = [sync_record("mpich", 4), sync_record(peer, 8), sync_record("coarse", 1)]
    assert bandwidth_table(records).rows[0][-4:] == ("1.00", peer, ratio, "-")


def test_what_was_not_measured_is_a_dash() -> None:
    table = bandwidth_table([sync_record("coarse", 16)])
    assert table.rows == (("1 MiB", "-", "16.00", "-", "-", "-"),)


def test_peer_measured_at_some_sizes_only_is_a_dash_elsewhere() -> None:
    records = [
        sync_record("gloo", 2),
        sync_record("coarse", 4),
        sync_record("coarse", 8, nbytes=2 << 20),
    ]
    assert bandwidth_table(records).rows == (
        ("1 MiB", "2.00", "-", "4.00", "gloo", "2.00x", "-"),
        ("2 MiB", "-", "-", "8.00", "-", "-", "-"),
    )


def test_slow_systems_do_not_print_as_zero() -> None:
    assert bandwidth_table([sync_record("gloo", 0.0021)]).rows[0][1] == "0.0021"


def test_latency_is_that_of_sizes_up_to_64_kib() -> None:
    records = [sync_record("coarse", 1), sync_record("gloo", 0.001, 4096), sync_record("coarse", 0.1, 4096)]
    records.append(sync_record("coarse", 1, 64 << 10))
    table = latency_table(records)
    assert table.columns == ("system", "4 KiB: p50 us", "p99 us", "64 KiB: p50 us", "p99 us")
    assert table.rows == (("coarse", "41.0", "81.9", "65.5", "131.1"), ("gloo", "4096.0", "8192.0", "-", "-"))


def test_latency_falls_back_to_the_smallest_size() -> None:
    records = [sync_record("coarse", 1, 1 << 20), sync_record("coarse", 1, 64 << 10)]
    assert latency_table(records).columns == ("system", "64 KiB: p50 us", "p99 us")
    assert latency_table(records[:1]).columns == ("system", "1 MiB: p50 us", "p99 us")


def test_blocked_time_is_against_the_bare_step_and_its_share_against_ddp() -> None:
    measured = comparison(coarse=110, ddp=140, none=100)
    assert train_table(measured).rows == (
        ("coarse", "110.00", "220.00", "1.00", "2.00", "3.00", "10.00", "25%", "1.27x", "3"),
        ("ddp", "140.00", "280.00", "1.00", "2.00", "3.00", "40.00", "100%", "1.00x", "3"),
        ("none", "100.00", "200.00", "1.00", "2.00", "3.00", "-", "-", "1.40x", "3"),
    )


def test_figures_are_against_the_fastest_ddp() -> None:
    rows = train_table(comparison(coarse=110, ddp=150, **{"ddp-tuned": 120}, none=100)).rows
    assert [row[7:9] for row in rows] == [
        ("50%", "1.09x"),
        ("250%", "0.80x"),
        ("100%", "1.00x"),
        ("-", "1.20x"),
    ]


def test_without_peers_there_is_nothing_to_compare_with() -> None:
    assert train_table(comparison(coarse=110)).rows == (
        ("coarse", "110.00", "220.00", "1.00", "2.00", "3.00", "-", "-", "-", "3"),
    )


def test_steps_on_a_gpu_say_over_what_ddp_reduces() -> None:
    assert train_table(comparison(gpu="a GPU", ddp=200, coarse=110)).title.endswith(", DDP over gloo")
    assert "DDP over" not in train_table(comparison(ddp=200, coarse=110)).title


def test_steps_on_a_gpu_name_it_and_have_its_memory() -> None:
    table = train_table(comparison(gpu="a GPU", coarse=110))
    assert table.title == "digits, batch 1, 2 workers of 1 thread on cuda:0, adamw fused"
    assert table.columns[-2:] == ("torch's peak GPU MiB", "whole GPU MiB")
    assert table.rows[0][-2:] == ("5", "7")


def test_ddp_that_is_no_slower_than_bare_gives_no_share() -> None:
    measured = comparison(coarse=110, ddp=100, none=100)
    assert measured.blocked_percent_of_ddp(measured.results[0]) is None


def test_single_process_table_shows_the_overhead_of_wrapping() -> None:
    assert [row[3] for row in single_table(comparison(coarse=103, none=100)).rows] == ["+3.0%", "+0.0%"]


def test_train_record_has_the_agreed_fields() -> None:
    measured = comparison(coarse=110, ddp=140, none=100)
    record = measured.as_json(measured.results[0])
    assert record["bench"] == "train-step"
    assert record["p50_us"] == 110e3
    assert record["blocked_us"] == pytest.approx(10e3)
    assert record["blocked_percent_of_ddp"] == pytest.approx(25)
    assert record["peak_bytes"] == 3 << 20
    assert {"system", "num_workers", "bytes", "p99_us", "algbw_gbytes_per_s"} <= record.keys()


def test_heading_names_machine_and_kind() -> None:
    line = heading(BenchMachine(cpu="Some CPU", cores=2, memory_bytes=2**34), "2 workers")
    assert line == "2 workers; measured on Some CPU, 2 cores, 16.0 GiB"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (4, "4 B"),
        (1000, "1000 B"),
        (4096, "4 KiB"),
        (25 << 20, "25 MiB"),
        (2 << 30, "2 GiB"),
    ],
)
def test_sizes_read_as_people_write_them(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_memory_is_shown_beside_peers_and_with_the_least_that_a_job_trains_in() -> None:
    plan = TrainPlan(
        systems=("ddp", "coarse-overlap", "coarse"),
        model="bert-base",
        batch=1,
        sequence=32,
        num_workers=2,
        threads=1,
        optimizer="adamw",
    )

    def taken(system: str, peak_gib: float | None, limit_gib: float | None) -> StateMemory:
        return StateMemory(
            system=system,
            plan=plan,
            peak_bytes=None if peak_gib is None else int(peak_gib * 2**30),
            limit_bytes=None if limit_gib is None else int(limit_gib * 2**30),
            resolution_bytes=0 if limit_gib is None else 2**28,
            available_bytes=5 * 2**30,
        )

    table = memory_table(
        [taken("ddp", 4, 3.5), taken("coarse-overlap", 2, None), taken("coarse", None, None)]
    )
    assert "control group of the whole job, start included" in table.title
    rows = {row[0]: row for row in table.rows}
    ddp_column = table.columns.index("of ddp's")
    assert rows["ddp"][1] == "4.00"
    assert rows["ddp"][-1] == "3.50 (not 3.25)"
    assert rows["coarse-overlap"][ddp_column].startswith("50")
    assert rows["coarse"][1] == "> 5.00"
    assert rows["coarse"][-1] == "-"
