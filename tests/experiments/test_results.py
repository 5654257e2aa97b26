"""Results include their provenance, and the tables match the results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import common
from experiments.__main__ import EXPERIMENTS
from experiments.common import TABLE_BEGIN, TABLE_END, Experiment, Finding, Options, Outcome
from experiments.fig15_routing.run import EXPERIMENT as FIG15

ROOT = Path(__file__).resolve().parents[2]


def finding(**changes):
    values = {"ran": "this", "expected": "that", "found": "that", "agrees": True, "kind": "emulated"}
    return Finding(**{**values, **changes})


def test_results_have_their_kind_commit_and_machine(tmp_path):
    outcome = common.run_experiment(FIG15, Options(machines=("host",), is_quick=True, results=tmp_path))
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["commit"]
    assert document["machine"]["cores"] >= 1
    assert document["is_quick"]
    assert [Finding(**values) for values in document["findings"]] == list(outcome.findings)
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
        finding(found="one | two")


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
    document = {"experiment": "fig99", "figure": "Fig 99", "commit": "abc", "machine": machine}
    rows = [finding(), finding(agrees=False), finding(agrees=None)]
    lines = common.table_lines([{**document, "findings": [vars_of(row) for row in rows]}], is_index=True)
    assert lines[2] == "| [Fig 99](fig99/README.md) | this | that | that | yes | emulated |"
    assert "| **no** |" in lines[3]
    assert "| that |  | emulated |" in lines[4]
    assert lines[-1] == "Of commit abc on some, 2 cores, 2 GiB."


def vars_of(row):
    return {name: getattr(row, name) for name in ("ran", "expected", "found", "agrees", "kind")}


def test_quick_results_do_not_get_into_the_tables(capsys):
    for arguments in (["--quick"], ["--machine", "aws-p3"]):
        with pytest.raises(SystemExit) as end:
            common.parse_options(arguments, prog="test")
        assert end.value.code == 2
        assert "--results" in capsys.readouterr().err


def test_what_does_not_agree_is_told_and_no_failure(tmp_path, capsys):
    def main(agrees):
        outcome = Outcome(findings=[finding(agrees=agrees)], data=[])
        experiment = Experiment(name="test", figure="Fig 0", run=lambda options: outcome)
        return common.main(experiment, ["--results", str(tmp_path)])

    assert [main(True), main(None), main(False)] == [0, 0, 0]
    assert "this | that | that | **no** | emulated" in capsys.readouterr().out


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_every_experiment_is_documented_and_its_committed_results_are_of_a_full_run(experiment):
    readme = (experiment.folder / "README.md").read_text()
    index = (common.FOLDER / "README.md").read_text()
    document = json.loads((experiment.folder / "results" / "results.json").read_text())
    assert not document["is_quick"]
    for values in document["findings"]:
        row = " | ".join(Finding(**values).cells())
        assert row in readme
        assert row in index
    for picture in (experiment.folder / "results").glob("*.png"):
        assert f"](results/{picture.name})" in readme
        assert picture.with_suffix(".svg").exists()


def test_the_command_line_names_unknown_experiments():
    command = [sys.executable, "-m", "experiments", "fig99"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert ended.returncode == 2
    assert "no experiment is named fig99; there are fig08_bandwidth_matrix" in ended.stderr
