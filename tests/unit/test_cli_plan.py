"""`coarse plan`: tables and JSON with reasons, from a profile or a machine; errors that suggest a fix."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from planning import key_of, profile_of

from coarse.cli.main import main
from coarse.machine.host import read_host
from coarse.profiler.profile import cache_path, current_versions, host_key


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plan(tmp_path, *arguments):
    path = tmp_path / "plan.json"
    assert main(["plan", *arguments, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def routes(document):
    return [(table["lat_proxy"], table["bw_proxy"]) for table in document["routing"]]


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ("aws-g4dn", [(0, 0), (1, 1), (2, 2), (3, 3)]),
        ("aws-p3", [(0, 1), (1, 0), (2, 3), (3, 2)]),
        ("sdsc-p100", [(0, 0), (1, 1)]),
    ],
)
def test_routes_of_the_papers_machines(tmp_path, capsys, machine, expected):
    document = plan(tmp_path, "--machine", machine)
    assert routes(document) == expected
    assert document["kind"] == "simulated"
    shown = capsys.readouterr().out
    assert f"{machine}: {len(expected)} workers, {len(expected)} memory devices; simulated" in shown
    assert "has the lowest latency" in shown
    assert "smallest tested size that reaches 90%" in shown
    assert "dual_sync" not in document


def test_another_partition_table(tmp_path):
    document = plan(tmp_path, "--machine", "aws-p3", "--partition-table", "aws-p3-2to1")
    assert [table["local_device"] for table in document["routing"]] == [0, 0, 1, 1]


def test_times_behind_the_routes_are_shown_on_demand(capsys):
    assert main(["plan", "--machine", "sdsc-p100"]) == 0
    assert "push and pull at once" not in capsys.readouterr().out
    assert main(["plan", "--machine", "sdsc-p100", "--show-routing"]) == 0
    shown = capsys.readouterr().out
    assert "Worker 1: push and pull at once" in shown
    assert "64 MiB" in shown


def test_a_profile_of_a_file(tmp_path, capsys):
    path = tmp_path / "profile.json"
    profile_of(local=(5, 4), remote=(10, 8), kind="emulated").save(path)
    document = plan(tmp_path, "--profile", str(path))
    assert routes(document) == [(0, 1), (1, 0)]
    assert "session" not in document
    assert f"emulated, from {path}" in capsys.readouterr().out.replace("\n", "")


def test_the_last_profile_of_this_machine(tmp_path):
    key = key_of(host=host_key(read_host()), versions=current_versions())
    profile_of(key, local=(5, 4), remote=(10, 8)).save(cache_path(key))
    document = plan(tmp_path)
    assert document["origin"] == str(cache_path(key))
    # In the host's memory a session stays local whatever the profile says, and says so.
    assert routes(document) == [(0, 1), (1, 0)]
    assert document["session"][0].startswith("routes: local, because shards in the host's memory")
    assert document["session"][1:3] == ["w0: md0", "w1: md1"]
    assert plan(tmp_path, "--profile", "cached")["kind"] == "measured"


@pytest.mark.parametrize("model", ["bert-large", "bert-base", "resnet50"])
def test_dual_synchronisation_of_a_model(tmp_path, capsys, model):
    split = plan(tmp_path, "--machine", "aws-p3", "--model", model)["dual_sync"]
    assert 0 <= split["m_bytes"] <= split["total_bytes"]
    assert split["predicted_s"] >= split["forward_s"] + split["backward_s"]
    assert "half of the peak of a V100" in split["times"]
    assert "Dual synchronisation of" in capsys.readouterr().out


def test_a_t4_does_not_pay_and_says_so(tmp_path):
    split = plan(tmp_path, "--machine", "aws-g4dn", "--model", "bert-large")["dual_sync"]
    assert split["num_offloaded"] == 0
    assert "offloading does not pay" in split["reason"]


@pytest.mark.parametrize(
    ("mode", "check"),
    [
        ("off", lambda split: split["m_bytes"] == split["total_bytes"]),
        ("0", lambda split: split["num_offloaded"] == 0),
        ("500MiB", lambda split: abs(split["m_bytes"] - (500 << 20)) < 4 << 20),
    ],
)
def test_modes_of_dual_synchronisation(tmp_path, mode, check):
    arguments = ["--machine", "aws-p3", "--model", "bert-large", "--dual-sync", mode]
    assert check(plan(tmp_path, *arguments)["dual_sync"])


def test_slower_workers_have_more_time_to_hide_traffic_in(tmp_path):
    fast, slow = (
        plan(tmp_path, "--machine", "aws-p3", "--model", "bert-large", "--tflops", tflops)["dual_sync"]
        for tflops in ("8", "2")
    )
    assert slow["m_bytes"] > fast["m_bytes"]
    assert slow["times"] == "scaled to 2 TFLOPS"


def test_without_a_profile_the_way_to_one_is_told(capsys):
    assert main(["plan"]) == 1
    assert "Measure one with `coarse profile`" in capsys.readouterr().err


def test_a_profile_that_cannot_be_read(tmp_path, capsys):
    path = tmp_path / "profile.json"
    path.write_text("{}")
    assert main(["plan", "--profile", str(path)]) == 1
    shown = capsys.readouterr().err
    assert f"profile {path}: format is None" in shown
    assert "`coarse profile --refresh`" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--machine", "aws-p4"], "no machine is named 'aws-p4'; did you mean aws-p3"),
        (["--partition-table", "aws-p3"], "--partition-table needs --machine"),
        (["--machine", "sdsc-p100", "--partition-table", "aws-p3"], "GPU"),
        (["--machine", "aws-p3", "--dual-sync", "maybe"], "off, auto or a size"),
        (["--machine", "aws-p3", "--tflops", "0"], "--tflops 0.0 must be above 0"),
    ],
)
def test_wrong_arguments(capsys, arguments, message):
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_that_cannot_be_written(tmp_path, capsys):
    path = tmp_path / "none" / "plan.json"
    with pytest.raises(SystemExit) as end:
        main(["plan", "--machine", "sdsc-p100", "--json", str(path)])
    assert end.value.code == 2
    assert f"--json: {path}: there is no folder {path.parent}" in capsys.readouterr().err


def test_the_workers_own_all_reduce(tmp_path, capsys):
    from_bytes = plan(tmp_path, "--machine", "aws-p3")["workers_all_to_all_from_bytes"]
    assert from_bytes == pytest.approx(22 / (1 / 4.333e3 - 1 / 8.667e3), rel=0.01), (
        "as all links at once allow"
    )
    assert "over all links at once" in capsys.readouterr().out
    profile = profile_of(key_of(local_devices=(0, 1, 2, 3), num_devices=4), remote=(30, 10))
    profile.save(tmp_path / "profile.json")
    from_bytes = plan(tmp_path, "--profile", str(tmp_path / "profile.json"))["workers_all_to_all_from_bytes"]
    assert from_bytes == pytest.approx(30 * 12e3 * 4 / (3 * 2), rel=0.01), "of pairs that were measured alone"
    assert "in pairs" in capsys.readouterr().out
    assert plan(tmp_path, "--machine", "sdsc-p100")["workers_all_to_all_from_bytes"] is None


def test_processes_with_other_hashes_plan_the_same(tmp_path):
    plans = []
    for seed in ("1", "2"):
        path = tmp_path / f"plan-{seed}.json"
        arguments = ["plan", "--machine", "aws-p3", "--model", "bert-large", "--json", str(path)]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-m", "coarse", *arguments]
        subprocess.run(command, check=True, timeout=150, env=environment, stdout=subprocess.DEVNULL)
        plans.append(path.read_bytes())
    assert plans[0] == plans[1]


def what_if(tmp_path, machine, *arguments):
    return plan(tmp_path, "--what-if", machine, "--model", "bert-base", *arguments)


def test_what_if_answers_in_words_beside_this_machine(tmp_path, capsys):
    key = key_of(host=host_key(read_host()), versions=current_versions())
    profile_of(key, local=(5, 4), remote=(10, 8)).save(cache_path(key))
    document = what_if(tmp_path, "aws-p3")
    shown = capsys.readouterr().out
    assert document["here"]["num_workers"] == 2
    assert "You have 2 workers on host: a step of bert-base takes" in shown
    assert "as planned from measured links" in shown
    coarse = document["there"][0]
    ratio = document["here"]["step_s"] / coarse["step_s"]
    assert f"On aws-p3 with 2 workers a step takes {coarse['step_s'] * 1e3:.1f} ms" in shown
    assert f"{ratio:.3g} times your samples per second" in shown
    assert coarse["samples_per_s"] == pytest.approx(2 * 2 / coarse["step_s"])


def test_what_if_says_first_what_was_not_validated(tmp_path, capsys):
    document = what_if(tmp_path, "cxl-pool", "--workers", "64", "--tflops", "60")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "Outside of the validated range: 64 workers are more than 10 times the largest validated number, 4."
    )
    assert lines[3] == "So the true step may lie outside of the range below."
    assert lines[4].startswith("No profile of this machine is cached")
    assert lines[5].startswith("On cxl-pool with 64 workers a step takes ")
    assert "the recording's processor" not in "".join(lines)
    assert len(document["outside_validated_range"]) == 3
    assert document["here"] is None


def test_what_if_has_the_range_of_validated_residuals(tmp_path, capsys):
    document = what_if(tmp_path, "sdsc-p100", "--workers", "2", "--machine", "aws-p3")
    assert "You have 4 workers on aws-p3" in capsys.readouterr().out
    coarse, offload, allreduce = document["there"]
    assert coarse["low_s"] == pytest.approx(coarse["compute_s"] + coarse["blocked_s"] / (12.8 / 8.9))
    assert coarse["high_s"] == pytest.approx(coarse["compute_s"] + coarse["blocked_s"] / (19.4 / 20.8))
    assert (coarse["num_compared"], offload["num_compared"], allreduce["num_compared"]) == (3, 7, 16)
    assert [each["is_of_scheme"] for each in document["there"]] == [True, True, False]


def test_what_if_of_recorded_times_names_the_way_to_others(tmp_path, capsys):
    what_if(tmp_path, "cxl-switch", "--workers", "4")
    assert "give the speed of a worker there by --tflops" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--what-if", "aws-p3"], "--what-if needs --model: bert-large"),
        (["--what-if", "aws-p3", "--model", "bert-base"], "no profile of this machine is cached, so"),
        (["--what-if", "aws-p9", "--model", "bert-base", "--workers", "2"], "no machine is named 'aws-p9'"),
        (["--machine", "aws-p3", "--workers", "2"], "--workers needs --what-if"),
    ],
)
def test_impossible_what_ifs_get_one_line(arguments, message, capsys):
    assert main(["plan", *arguments]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("coarse plan: ")
    assert message in error
