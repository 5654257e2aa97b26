"""benchmarks/nodes.py: its plan, what its results have already, verdicts and the table."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
pytest.importorskip("psutil")

import node_network
import node_plan
import node_table
import nodes
import tables
from node_network import Link
from node_plan import Case, Cell, Plan

from coarse.bench.provenance import BenchMachine, Provenance

MIB = 1 << 20
ORIGIN = Provenance(commit="1111111", machine=BenchMachine(cpu="Some CPU", cores=2, memory_bytes=24 << 30))


def parse_plan(*words):
    return nodes.plan_of(nodes.parse([*words, "--systems", "coarse,gloo,gloo-one-bucket,compute"]))


def record(operation="step", nbytes=100 * MIB, num_nodes=2, rate="1gbit", failures=(), **rounds_ms):
    """Over a cable of 1 byte in a nanosecond: a MiB takes 1.05 ms."""
    case = Case(
        cell=Cell(link=Link(rate=rate), nodes=num_nodes, workers=1), operation=operation, nbytes=nbytes
    )
    return {
        "bench": "nodes",
        **case.as_json(),
        "delay_by": node_network.NONE,
        "round_trip_ms": 0.05,
        "link_bits_per_s": 8e9,
        "rounds_ms": {name.replace("_", "-"): list(times) for name, times in rounds_ms.items()},
        "failures": dict.fromkeys(failures, "died"),
        **asdict(ORIGIN),
    }


# ---- plans ----


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rates", "1gigabit"), "rate '1gigabit' is none such as 500mbit"),
        (("--rates", "0gbit"), "rate '0gbit' is none"),
        (("--delays", "-1"), "0 to 1000 ms"),
        (("--losses", "100"), "less than 100%"),
        (("--nodes", "1"), "2 to 16 nodes"),
        (("--workers", "0"), "workers and rounds start at 1"),
        (("--rounds", "0"), "workers and rounds start at 1"),
        (("--sizes", "1000B"), "multiples of 4 KiB"),
        (("--operations", "broadcast"), "operation 'broadcast' is none of step, all_reduce"),
    ],
)
def test_impossible_plans_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        parse_plan(*words)


def test_systems_that_are_unknown_or_missing_are_refused(monkeypatch, capsys):
    with pytest.raises(ValueError, match="system 'nccl' is none of coarse"):
        nodes.plan_of(nodes.parse(["--systems", "nccl"]))
    monkeypatch.setattr(nodes, "missing", lambda system: f"{system}: not here")
    with pytest.raises(ValueError, match="nothing to measure"):
        nodes.plan_of(nodes.parse(["--systems", "mpich"]))
    assert "mpich: not here" in capsys.readouterr().err


def test_without_root_or_programs_nothing_starts(monkeypatch, tmp_path):
    monkeypatch.setattr(node_network.os, "geteuid", lambda: 1000)
    with pytest.raises(node_network.NetworkError, match="take root"):
        node_network.Networks([Link(rate="1gbit")], tmp_path)
    monkeypatch.setattr(node_network.os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(node_network.NetworkError, match="`ip` is missing; install iproute2"):
        node_network.Networks([Link(rate="1gbit")], tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(node_network.NetworkError, match="without no-such-compiler nothing else delays"):
        node_network.compile_forwarder(tmp_path)


def test_cases_are_the_product_of_what_was_asked_for():
    words = ("--rates", "1gbit,10gbit", "--delays", "0.1,5", "--losses", "0,0.1", "--nodes", "2,3")
    plan = parse_plan(*words, "--workers", "1,2", "--sizes", "1MiB,25MiB")
    assert len(plan.cases()) == 2 * 2 * 2 * 2 * 2 * 2 * 2
    assert len({case.key for case in plan.cases()}) == len(plan.cases())
    assert plan.systems_of("all_reduce") == ["coarse", "gloo"]


def test_only_round_trips_of_a_length_and_losses_alter_the_cable():
    link = Link(rate="10gbit", delay_ms=0.1)
    assert not link.is_altered
    assert replace(link, loss_percent=0.1).is_altered
    assert replace(link, loss_percent=0.1).one_way_us == 0
    assert replace(link, delay_ms=5).one_way_us == 2500


def test_netem_delays_before_the_rate_limits():
    first, second = node_network._port_disciplines(Link(rate="1gbit", delay_ms=5, loss_percent=0.1))
    assert first.startswith("root handle 1: netem delay 2500us loss 0.1%")
    assert second.startswith("parent 1:1 handle 2: tbf rate 1gbit")


# ---- results ----


@pytest.fixture
def plan() -> Plan:
    return parse_plan("--rates", "1gbit", "--delays", "0", "--losses", "0", "--nodes", "2", "--workers", "1")


def write(path, *records):
    path.write_text("".join(json.dumps(each) + "\n" for each in records))


def test_what_was_measured_at_this_commit_is_known(tmp_path, plan):
    path = tmp_path / "results"
    rounds = {name: [1.0] * 3 for name in ("coarse", "gloo", "gloo_one_bucket", "compute")}
    write(path, record(**rounds), record("all_reduce", MIB, **{"coarse": [1.0] * 2, "gloo": [1.0] * 3}))
    records = node_plan.read_records(path, ORIGIN)
    known = [case for case in plan.cases() if node_plan.is_known(case, plan, records)]
    assert [(case.operation, case.nbytes) for case in known] == [("step", 100 * MIB)]


def test_other_commits_machines_and_changed_checkouts_are_measured_again(tmp_path):
    path = tmp_path / "results"
    assert node_plan.read_records(path, ORIGIN) == {}
    write(path, record(coarse=[1.0]))
    assert len(node_plan.read_records(path, ORIGIN)) == 1
    assert node_plan.read_records(path, replace(ORIGIN, commit="2222222")) == {}
    other = replace(ORIGIN.machine, cores=16)
    assert node_plan.read_records(path, replace(ORIGIN, machine=other)) == {}
    changed = replace(ORIGIN, commit="1111111-dirty")
    write(path, {**record(coarse=[1.0]), "commit": changed.commit})
    assert node_plan.read_records(path, changed) == {}


def test_the_last_record_of_a_case_counts(tmp_path):
    path = tmp_path / "results"
    write(path, record(coarse=[1.0]), record(coarse=[2.0]))
    (last,) = node_plan.read_records(path, ORIGIN).values()
    assert last["rounds_ms"] == {"coarse": [2.0]}


# ---- verdicts ----


@pytest.mark.parametrize(("num_nodes", "share"), [(2, 1.0), (3, 4 / 3), (4, 1.5)])
def test_the_limit_is_what_any_all_reduce_sends(num_nodes, share):
    assert node_table.limit_ms(record(num_nodes=num_nodes)) == pytest.approx(share * 100 * MIB / 1e6)


@pytest.mark.parametrize(
    ("rounds_ms", "verdict"),
    [
        ({"coarse": [110, 111], "gloo": [120, 121]}, "ok"),
        ({"coarse": [111, 111], "gloo": [110, 110], "gloo_one_bucket": [130, 130]}, "ok"),  # noise
        ({"coarse": [108, 114], "gloo": [107, 107]}, "ok"),  # as much as rounds differ
        ({"coarse": [114, 114], "gloo": [130, 130], "gloo_one_bucket": [104, 104]}, "10% slower than gloo"),
        ({"coarse": [126, 126], "gloo": [130, 130]}, "20% above limit and computation"),
        ({"coarse": [126, 126], "gloo": [130, 130], "compute": [120, 120]}, "ok"),
        ({"coarse": [110], "gloo": [110], "coarse_int8": [55]}, "int8 2.00x as fast as gloo"),
        ({"coarse": [110], "gloo": [110], "coarse_int8": [30]}, "ok"),
        ({"gloo": [110]}, ""),
    ],
)
def test_verdicts_on_steps(rounds_ms, verdict):
    assert node_table.verdict(record(**rounds_ms)) == verdict


def test_small_steps_have_no_limit_and_int8_is_judged_at_one_rate():
    assert node_table.verdict(record(nbytes=MIB, coarse=[9.0], gloo=[9.0])) == "ok"
    fast = record(rate="10gbit", coarse=[110.0], gloo=[110.0], coarse_int8=[110.0])
    assert node_table.verdict(fast) == "ok"


@pytest.mark.parametrize(
    ("rounds_ms", "verdict"),
    [
        ({"coarse": [109], "gloo": [100], "mpich": [150]}, "ok"),
        ({"coarse": [120], "gloo": [150], "mpich": [100]}, "1.20x the time of MPICH"),
        ({"coarse": [120]}, "ok"),
    ],
)
def test_verdicts_on_all_reduces(rounds_ms, verdict):
    assert node_table.verdict(record("all_reduce", MIB, **rounds_ms)) == verdict


def test_failures_are_told():
    failed = record(failures=["coarse", "mpich"], gloo=[100.0])
    assert node_table.verdict(failed) == "coarse failed"
    assert node_table.times(failed)["MPICH"] == "failed"
    assert node_table.verdict(record(nbytes=MIB, failures=["gloo"], coarse=[9.0])) == "gloo failed"
    no_peer = record("all_reduce", failures=["gloo", "mpich"], coarse=[9.0])
    assert node_table.verdict(no_peer) == "gloo and MPICH failed"


# ---- table ----


def test_the_table_shows_the_faster_gloo_and_no_empty_columns():
    step = record(coarse=[200, 210, 220], gloo=[300], gloo_one_bucket=[252], num_nodes=4)
    head, _, first, second = node_table.table([record("all_reduce", MIB, coarse=[2.0], gloo=[1.0]), step])
    assert head == (
        "| cable | round trip, ms | loss | nodes x workers |  | size | COARSE, ms | gloo, ms | "
        "speed, to gloo | limit, ms | of the limit | verdict |"
    )
    assert first == (
        "| 1gbit, 8.00 Gbit/s | 0, 0.05 | 0% | 4 x 1 | DDP step | 100 MiB | 210 (200-220) | 252 | "
        "1.20x | 157 | 75% | 34% above limit and computation |"
    )
    assert second.endswith("| all_reduce | 1 MiB | 2 | 1 | 0.50x | 1.05 | 52% | 2.00x the time of gloo |")


def test_the_document_has_a_place_for_the_table(monkeypatch, tmp_path):
    document = tmp_path / "benchmarks.md"
    document.write_text(tables.DOCUMENT.read_text())
    monkeypatch.setattr(node_table, "DOCUMENT", document)
    node_table.write_document([record(coarse=[200.0])])
    written = document.read_text().partition("<!-- nodes -->")[2].partition("<!-- end of nodes -->")[0]
    assert "*Emulated* at commit 1111111 on Some CPU, 2 cores" in written
    assert "| DDP step | 100 MiB | 200 |" in written
