"""Replayed training steps: real synchronisation on emulated links, recorded computation."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import pytest

from coarse.bench.harness.commands import BenchError, WorkerJob
from coarse.bench.replay import driver
from coarse.bench.replay.driver import SCHEMES, ReplayPlan, run_replay
from coarse.bench.replay.trace import ComputeTrace, GradientEvent
from coarse.cli.bench import _schemes_over
from coarse.cli.main import main

MIB = 1 << 20
TRACE = ComputeTrace(
    model="four layers",
    batch=1,
    sequence=0,
    forward_s=1e-3,
    backward_s=2e-3,
    flops=1e9,
    events=tuple(
        GradientEvent(name=f"layer{4 - i}", num_elements=MIB // 4, dtype="float32", ready=i / 4)
        for i in range(1, 5)
    ),
    source="made up",
)


def replay(**changes):
    plan = {
        "schemes": tuple(SCHEMES),
        "trace": TRACE,
        "machine": "aws-p3",
        "num_workers": 2,
        "time_dilation": 20.0,
        "steps": 2,
    }
    return {result.scheme: result for result in run_replay(ReplayPlan(**{**plan, **changes}))}


@pytest.mark.slow
def test_every_scheme_takes_the_time_of_its_links():
    results = replay(has_compute=False)
    assert set(results) == set(SCHEMES)
    # A worker's local pair carries 9 GB/s in both directions together; at least half of the exchange is added.
    assert results["local"].step.min_us >= 2 * 4 * MIB / 9e3
    assert results["fifo"].step.min_us > results["offload"].step.min_us
    for result in results.values():
        assert result.sync_gbytes_per_s == pytest.approx(4 * MIB / result.step.p50_us / 1e3)


def test_an_all_reduce_takes_the_fastest_way_for_each_size_and_says_so(capfd):
    arguments = ["bench", "replay", "--machine", "aws-p3", "--model", "resnet50", "--workers", "2"]
    assert main([*arguments, "--schemes", "workers,tree", "--no-compute", "--steps", "1"]) == 0
    printed = capfd.readouterr().out
    assert re.search(r"^workers: \S+ up to \d+ ([KM]i)?B", printed, re.MULTILINE)
    assert re.search(r"^tree: tree up to \d+ MiB$", printed, re.MULTILINE)


def test_all_gradients_cross_the_network_between_two_nodes():
    for result in replay(
        schemes=("coarse", "workers"), num_nodes=2, has_compute=False, steps=1, time_dilation=400.0
    ).values():
        assert result.step.min_us >= 4 * MIB / 12.5e3
        assert result.as_json()["num_nodes"] == 2


@pytest.mark.slow
def test_computation_passes_and_hides_synchronisation():
    computing = replay(schemes=("offload",))["offload"]
    alone = replay(schemes=("offload",), has_compute=False)["offload"]
    assert computing.step.min_us >= 3e3
    assert computing.blocked_us < alone.step.p50_us
    record = computing.as_json()
    assert record["compute_source"] == "made up"
    assert record["algbw_gbytes_per_s"] is None
    assert record["emulated_machine"] == "aws-p3"
    assert any(line.startswith("routes") for line in record["decisions"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schemes": ()}, "choose of coarse"),
        ({"schemes": ("gloo",)}, "gloo"),
        ({"num_workers": 0}, "start at 1"),
        ({"num_nodes": 3}, "2 workers cannot be divided evenly among 3 nodes"),
        ({"num_nodes": 0}, "among 0 nodes"),
        (
            {"num_workers": 6, "num_nodes": 2, "partition_table": "aws-p3"},
            "is for 4 workers, but this job has 3",
        ),
        ({"schemes": ("coarse", "ring"), "num_nodes": 2}, "scheme ring: .* only within one node"),
        ({"schemes": ("dense",), "num_nodes": 2}, "scheme dense: DENSE has one memory device"),
        (
            {"machine": "pcie4", "num_nodes": 2},
            "scheme coarse: the file of machine pcie4 describes no network",
        ),
        ({"time_dilation": 0.0}, "above 0"),
        ({"alone_steps": -1}, "at 0"),
        ({"measures": "luck"}, "not 'luck'"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        replay(**change)


def test_the_schemes_that_are_replayed_by_default_work_over_nodes():
    machine = {"trace": TRACE, "machine": "aws-p3", "num_workers": 4, "num_nodes": 2}
    driver.check_replay(ReplayPlan(schemes=_schemes_over(2), **machine))
    left_out = set(_schemes_over(1)) - set(_schemes_over(2))
    assert left_out == {"ring"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--machine", "aws-p3", "--schemes", "ring"], "scheme ring: the algorithm 'ring' works only within"),
        (["--machine", "pcie4"], "scheme coarse: the file of machine pcie4 describes no network"),
    ],
)
def test_what_does_not_work_over_nodes_is_a_usage_error(capsys, arguments, complaint):
    assert main(["bench", "replay", "--nodes", "2", *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_command_line_says_emulated(tmp_path, capfd):
    records = tmp_path / "records.jsonl"
    arguments = ["bench", "replay", "--machine", "sdsc-p100", "--model", "resnet50", "--workers", "2"]
    arguments += ["--schemes", "local", "--no-compute", "--steps", "1", "--json", str(records)]
    assert main(arguments) == 0
    printed = capfd.readouterr().out
    assert "emulated on" in printed
    (record,) = map(json.loads, records.read_text().splitlines())
    assert record["kind"] == "emulated"
    assert record["system"] == "local"
    assert 0 <= record["pacing_error"] <= 0.02
    assert record["lateness_us"] >= 0
    assert record["time_dilation"] >= 10
    assert "pacing error" in printed


def test_links_faster_than_this_machine_are_refused(tmp_path, capfd):
    """Time is not dilated but compressed: the host's copies take far longer than the links."""
    records = tmp_path / "records.jsonl"
    arguments = ["bench", "replay", "--machine", "aws-p3", "--model", "resnet50", "--workers", "2"]
    arguments += ["--schemes", "local", "--no-compute", "--steps", "1", "--json", str(records)]
    assert main([*arguments, "--time-dilation", "0.01"]) == 1
    printed = capfd.readouterr()
    assert "PaceError: local on aws-p3: this machine cannot emulate the links in time" in printed.err
    assert "with time dilated 0.08 times" in printed.err
    assert not records.exists()
    assert "blocked" not in printed.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workers", "6"), "scheme coarse: 6 workers and 6 memory devices need 12 GPUs, but aws-p3 has 8"),
        (("--memory-devices", "7"), "scheme coarse: 4 workers and 7 memory devices need 11 GPUs"),
        (
            ("--workers", "8", "--schemes", "dense"),
            "scheme dense: 8 workers and 1 memory devices need 9 GPUs",
        ),
        (("--workers", "1"), "one worker has nothing to synchronise"),
    ],
)
def test_what_a_machine_cannot_run_is_an_error_of_usage_before_anything_starts(
    capfd, monkeypatch, arguments, message
):
    monkeypatch.setattr(driver, "WorkerPool", None)
    assert main(["bench", "replay", "--machine", "aws-p3", *arguments]) == 2
    assert message in capfd.readouterr().err


def test_a_model_that_does_not_fit_into_memory_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(driver, "WorkerPool", None)
    huge = replace(TRACE, events=(replace(TRACE.events[0], num_elements=1 << 48),))
    with pytest.raises(BenchError, match=r"four layers push gradients of 2097152\.0 GiB"):
        replay(trace=huge, schemes=("local",))


@pytest.mark.parametrize(("measures", "seconds"), [(driver.BLOCKED, 0.002), (driver.STEP, 0.005)])
def test_the_pacing_error_relates_to_what_the_run_measures(measures, seconds):
    plan = ReplayPlan(schemes=("coarse",), trace=TRACE, machine="aws-p3", num_workers=2, measures=measures)
    assert driver._measured_s(plan, 0.005) == pytest.approx(seconds)


def test_known_ways_are_not_measured_again():
    known = {1 << power: "tree" for power in range(2, 40)}
    (result,) = run_replay(
        ReplayPlan(
            schemes=("workers",),
            trace=TRACE,
            machine="aws-p3",
            num_workers=2,
            time_dilation=20.0,
            steps=1,
            alone_steps=2,
            known_ways=known,
        )
    )
    assert set(result.ways_by_size.values()) == {"tree"}
    assert result.alone is not None
    assert result.alone.iterations == 2
    assert result.alone.min_us < result.step.min_us


def test_an_unknown_machine_is_an_error_of_usage(capfd):
    assert main(["bench", "replay", "--machine", "aws-p4"]) == 2
    assert "did you mean aws-p3" in capfd.readouterr().err


class SlowToPush:
    """A group on a host whose processes get their processors late; its pulls wait for links."""

    PUSH_S, PULL_S = 0.01, 0.03

    def push(self, index):
        time.sleep(self.PUSH_S)

    def pull(self, index):
        time.sleep(self.PULL_S)

    def flush(self):
        """Nothing is held back."""

    def pull_all(self):
        """Everything has arrived."""

    def barrier(self):
        """Nobody else is waited for."""


@pytest.mark.parametrize("scheme", ["local", "fifo"])
def test_a_late_push_counts_towards_the_pacing_error(tmp_path, scheme):
    options = {"trace": TRACE.to_json(), "has_compute": False, "known_ways": {}, "num_nodes": 1}
    options["time_dilation"] = 2.0
    job = WorkerJob(rank=0, num_workers=2, system=scheme, directory=tmp_path, options=options)
    commands = driver.ReplayCommands(job)
    commands._session = commands._group = SlowToPush()
    commands.run(3, has_compute=False)
    # Without waiting for pulls, all four gradients are ready at the start.
    mean_s = SlowToPush.PUSH_S * (1 + 2 + 3 + 4) / 4 if SCHEMES[scheme].is_pipelined else SlowToPush.PUSH_S
    assert commands.take_push_delays() == pytest.approx(mean_s * 1e6 / 2, rel=0.2)
    commands.run(1, has_compute=False)
    assert len(commands._push_delays_s) == len(TRACE.events)
