"""`coarse simulate`: figures with units and their kind, warnings first, and how far it came."""

from __future__ import annotations

import json
import re

import pytest

from coarse.cli import simulate as command
from coarse.cli.main import main
from coarse.simulator.schemes.catalogue import SCHEMES


def simulate(*arguments):
    return main(["simulate", *arguments])


def test_prints_figures_with_units_and_kind(capsys):
    assert simulate("--machine", "aws-p3", "--model", "bert-base", "--scheme", "offload,workers") == 0
    out, err = capsys.readouterr()
    assert "aws-p3, 4 workers, bert-base: 415.4 MiB of gradients, 54.0 ms of computation" in out
    assert "One training step, simulated" in out
    assert "busiest links of each scheme, simulated" in out
    for word in ("step, ms", "blocked, ms", "GiB per worker", "GiB per memory device", "MiB a step"):
        assert word in out
    assert "outside of the validated range" not in err


def test_json_has_every_figure_and_its_kind(capsys):
    question = ("--machine", "sdsc-p100", "--workers", "2", "--model", "bert-base")
    assert simulate(*question, "--scheme", "all", "--json") == 0
    out, err = capsys.readouterr()
    records = json.loads(out)
    assert "allreduce-hierarchical left out: sdsc-p100: workers form 1 groups" in err
    assert [record["scheme"] for record in records] == [s for s in SCHEMES if s != "allreduce-hierarchical"]
    for record in records:
        assert record["kind"] == "simulated"
        assert record["step_s"] == pytest.approx(record["compute_s"] + record["blocked_s"])
        assert record["links"]
        assert "scaled to 4.65 TFLOPS" in record["compute"]


def test_questions_outside_of_the_validated_range_are_named_first(capsys):
    assert simulate("--machine", "cxl-pool", "--workers", "48", "--scheme", "fsdp") == 0
    warnings = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("outside of the validated range: ") for line in warnings[:3]] == [
        "48 workers are more than 10 times the largest validated number, 4",
        "no step over links of this kind was validated: cxl-pool",
        "not validated: fsdp (validated: coarse, offload, workers, dense)",
    ]


def test_links_that_serve_first_come_are_asked_for_by_an_option(capsys):
    question = (
        "--machine",
        "sdsc-p100",
        "--workers",
        "2",
        "--model",
        "bert-base",
        "--scheme",
        "offload",
        "--json",
    )
    steps_s = []
    for service in ("fair", "first-come"):
        assert simulate(*question, "--service", service) == 0
        steps_s += [record["step_s"] for record in json.loads(capsys.readouterr().out)]
    assert steps_s == [pytest.approx(0.1100, abs=1e-4), pytest.approx(0.1133, abs=1e-4)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheme", "ring"], "no scheme 'ring'; known: coarse, offload"),
        (["--model", "bert"], "there is no compute trace of 'bert'"),
        (["--workers", "0"], "0 workers cannot be divided"),
        (["--workers", "9"], "need 18 GPUs, but aws-p3 has 8"),
        (["--machine", "aws-p4"], "no machine is named 'aws-p4'"),
        (["--machine", "cxl3-x8", "--workers", "200"], "machine files have at most 256 endpoints"),
        (["--host-overhead-us", "-1"], "overhead and states start at 0"),
        (["--service", "fifo"], "no service 'fifo'; known: fair, first-come"),
        (["--straggler", "4=2"], "there is no worker 4 among 4"),
        (["--slow-link", "pcie=2"], "there is no link 'pcie'"),
        (["--slow-link", "x=0"], "x cannot be 0 times slower"),
        (["--jitter", "-1"], "jitter and seed start at 0"),
        (["--failures", "0"], "0 hours between failures"),
        (["--failures", "9", "--restart-s", "-1"], "times of a recovery are finite and start at 0"),
    ],
)
def test_wrong_questions_get_one_line(arguments, message, capsys):
    assert simulate("--machine", "aws-p3", *arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("coarse simulate: ")
    assert message in error


def test_disturbed_steps_and_goodput_are_printed(capsys):
    question = ("--machine", "aws-p3", "--model", "bert-base", "--scheme", "offload,allreduce")
    disturbed = ("--straggler", "1=2", "--jitter", "0.1", "--steps", "3", "--failures", "100,1000")
    assert simulate(*question, *disturbed) == 0
    out, err = capsys.readouterr()
    assert "no step with stragglers or slow links was validated" in err
    assert "3 steps with jitter of 10% (seed 0), simulated" in out
    assert "Goodput with failures, simulated" in out
    rows = [line.split()[:2] for line in out.splitlines() if re.match(r" +10+ +(offload|allreduce) ", line)]
    assert (
        rows
        == [["1000", "offload"]] * 2
        + [["1000", "allreduce"]] * 2
        + [["100", "offload"]] * 2
        + [["100", "allreduce"]] * 2
    )


def test_json_of_disturbed_steps_is_the_same_for_the_same_seed(capsys):
    def records(seed):
        question = ("--machine", "aws-p3", "--model", "bert-base", "--scheme", "offload", "--json")
        simulate(*question, "--jitter", "0.1", "--steps", "2", "--failures", "1", "--seed", seed)
        return json.loads(capsys.readouterr().out)

    (record,) = records("1")
    assert len(record["jitter"]["steps_s"]) == 2
    assert [each["recovery"] for each in record["goodput"]] == ["memory", "memory, replicas"]
    assert record["goodput"][1]["checkpoint_every_s"] is None
    assert records("1") == [record]
    assert records("2") != [record]


def test_an_interrupt_says_how_far_it_came_and_keeps_finished_schemes(monkeypatch, capsys):
    update = command.SchemeProgress.update

    def interrupted(self, num_finished, num_tasks):
        update(self, num_finished, num_tasks)
        if "(2 of 2)" in str(self) and num_finished >= 100:
            raise KeyboardInterrupt

    monkeypatch.setattr(command.SchemeProgress, "update", interrupted)
    arguments = ("--machine", "aws-p3", "--model", "bert-base", "--scheme", "workers,offload")
    assert simulate(*arguments) == 130
    out, err = capsys.readouterr()
    assert re.search(r"interrupted in offload \(2 of 2\), after 1\d\d of \d+ transfers", err)
    assert "workers" in out
    assert "offload" not in out


MACHINE = """\
description = "any number of workers and memory devices"

[topology]
kind = "expanders"

[link.lane]
scope = "host"
gbytes_per_s = { value = 10, source = "s", kind = "assumed" }

[path.worker-device]
latency_us = { value = 1, source = "s", kind = "assumed" }
over = ["lane"]

[path.device-device]
latency_us = { value = 1, source = "s", kind = "assumed" }
over = ["lane"]

[path.worker-worker]
latency_us = { value = 1, source = "s", kind = "assumed" }
over = ["lane"]
"""
POWER = """
[power]
worker_watt = { value = 250, source = "data sheet", kind = "announced" }
device_watt = { value = 20, source = "data sheet", kind = "announced" }
"""


def test_energy_is_shown_if_the_file_cites_power_and_memory_devices_count_if_they_are_used(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    question = ("--machine", str(file), "--workers", "2", "--scheme", "offload,allreduce", "--tflops", "10")
    file.write_text(MACHINE)
    assert simulate(*question) == 0
    assert "J a step" not in capsys.readouterr().out
    file.write_text(MACHINE + POWER)
    assert simulate(*question) == 0
    assert "250 W of a worker (announced: data sheet)" in capsys.readouterr().out
    assert simulate(*question, "--json") == 0
    through_devices, allreduce = json.loads(capsys.readouterr().out)
    assert through_devices["energy_j"] == pytest.approx((2 * 250 + 2 * 20) * through_devices["step_s"])
    assert allreduce["energy_j"] == pytest.approx(2 * 250 * allreduce["step_s"])
