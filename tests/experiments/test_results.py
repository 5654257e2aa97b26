"""Results include their provenance, and the tables match the results."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from coarse.machine.catalogue import load_machine
from experiments import common
from experiments.__main__ import EXPERIMENTS, ON_DEMAND
from experiments.common import (
    BASES_BEGIN,
    BASES_END,
    TABLE_BEGIN,
    TABLE_END,
    Finding,
    Options,
    Outcome,
)
from experiments.expectation import Expectation, judge_number
from experiments.fig15_routing.run import EXPERIMENT as FIG15

ROOT = Path(__file__).resolve().parents[2]


def finding(**changes):
    return Finding(**{"ran": "this", "note": "that", "kind": "emulated", **changes})


def judged(value):
    return finding(checks=(judge_number(Expectation(low=1, high=2, source="V-E"), value),), note="")


def test_results_have_their_kind_commit_and_machine(tmp_path):
    outcome = common.run_experiment(FIG15, Options(machines=("host",), is_quick=True, results=tmp_path))
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["commit"]
    assert document["machine"]["cores"] >= 1
    assert document["is_quick"]
    assert [Finding.from_json(values) for values in document["findings"]] == list(outcome.findings)
    assert all(values["kind"] == outcome.findings[0].kind for values in document["data"])
    assert {path.name for path in tmp_path.iterdir()} == {
        "results.json",
        "routing-host.png",
        "routing-host.svg",
    }


def test_figures_without_a_kind_are_refused():
    with pytest.raises(ValueError, match="without a kind"):
        Outcome(findings=[], data=[{"gbytes_per_s": 1}])
    with pytest.raises(ValueError, match="kind 'estimated'"):
        finding(kind="estimated")
    with pytest.raises(ValueError, match="no line break"):
        finding(note="one | two")
    with pytest.raises(ValueError, match="this: no measurement"):
        finding(note="")


def test_tables_are_rewritten_between_their_marks(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n\n{TABLE_BEGIN}\nold\n{TABLE_END}\n\nafter\n")
    for _ in range(2):
        common.replace_table(readme, ["| new |"])
    assert readme.read_text() == f"before\n\n{TABLE_BEGIN}\n| new |\n{TABLE_END}\n\nafter\n"
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="needs a line <!-- results -->"):
        common.replace_table(readme, [])


def test_a_row_says_whether_it_is_as_expected():
    machine = {"cpu": "some", "cores": 2, "memory_bytes": 2**31}
    document = {"experiment": "fig99", "figure": "Fig 99", "commit": "abc", "machine": machine, "data": []}
    rows = [judged(1.5), judged(3), judged(0.5), finding()]
    lines = common.table_lines([{**document, "findings": [row.as_json() for row in rows]}], is_index=True)
    assert lines[2] == "| [Fig 99](fig99/README.md) | this | 1 to 2 (V-E) | 1.5 | within | emulated |"
    assert "| **differs**: higher |" in lines[3]
    assert "| **differs**: lower |" in lines[4]
    assert "| nothing | that |  | emulated |" in lines[5]
    assert lines[-1] == "Of commit abc on some, 2 cores, 2 GiB."
    data = [{"pacing_error": 0.001}, {"pacing_error": 0.0123}, {}]
    lines = common.table_lines([{**document, "findings": [], "data": data}])
    assert lines[-1].endswith(" Largest pacing error: 1.2%.")


def test_quick_results_do_not_get_into_the_tables(capsys):
    for arguments in (["--quick"], ["--machine", "aws-p3"]):
        with pytest.raises(SystemExit) as end:
            common.parse_options(arguments, prog="test")
        assert end.value.code == 2
        assert "--results" in capsys.readouterr().err


def test_a_result_that_differs_is_told_and_no_failure(tmp_path, capsys):
    def main(row):
        outcome = Outcome(findings=[row], data=[])
        experiment = replace(FIG15, name="test", figure="Fig 0", run=lambda options: outcome)
        return common.main(experiment, ["--results", str(tmp_path)])

    assert [main(judged(1)), main(finding()), main(judged(3))] == [0, 0, 0]
    assert "this | 1 to 2 (V-E) | 3 | **differs**: higher | emulated" in capsys.readouterr().out


@pytest.mark.parametrize("experiment", [*EXPERIMENTS, *ON_DEMAND], ids=lambda experiment: experiment.name)
def test_every_experiment_is_documented_and_its_committed_results_are_of_a_full_run(experiment):
    readme = (experiment.folder / "README.md").read_text()
    index = (common.FOLDER / "README.md").read_text()
    document = json.loads((experiment.folder / "results" / "results.json").read_text())
    assert not document["is_quick"]
    for values in document["findings"]:
        finding = Finding.from_json(values)
        assert finding.verdict == values["verdict"]
        row = " | ".join(finding.cells())
        assert row in readme
        assert row in index
        assert not finding.deviations or "\n## Why it differs\n" in readme, row
    for picture in (experiment.folder / "results").glob("*.png"):
        assert f"](results/{picture.name})" in readme
        assert picture.with_suffix(".svg").exists()


def test_the_index_says_what_each_experiment_rests_on():
    index = (common.FOLDER / "README.md").read_text()
    _, _, rest = index.partition(BASES_BEGIN)
    table, end, _ = rest.partition(BASES_END)
    assert end
    assert table.strip().splitlines() == common.bases_lines([*EXPERIMENTS, *ON_DEMAND])


def test_all_experiments_together_take_less_than_twenty_minutes():
    assert sum(experiment.minutes for experiment in EXPERIMENTS) < 20


@pytest.mark.parametrize("experiment", [*EXPERIMENTS, *ON_DEMAND], ids=lambda experiment: experiment.name)
def test_an_experiment_names_machines_that_there_are(experiment):
    for machine in experiment.machines:
        assert machine == "host" or load_machine(machine).name


def test_the_command_line_names_unknown_experiments():
    command = [sys.executable, "-m", "experiments", "fig99"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert ended.returncode == 2
    assert "no experiment is named fig99; there are fig02_communication_share" in ended.stderr
