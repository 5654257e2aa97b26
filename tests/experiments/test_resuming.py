"""`python -m experiments`: finished experiments are not run again, and one that fails does not stop the others."""

from __future__ import annotations

import subprocess

import pytest

from coarse.bench.provenance import BenchMachine, Provenance
from experiments import __main__ as command
from experiments import common
from experiments.common import Experiment, Finding, Outcome

HERE = Provenance(commit="abc1234", machine=BenchMachine(cpu="some", cores=2, memory_bytes=2**31))


class Runs:
    """Experiments that count how often they run, of which some fail."""

    def __init__(self, **errors):
        self.counts = dict.fromkeys(errors, 0)
        self.errors = errors
        self.experiments = tuple(
            Experiment(
                name=name,
                figure="Fig 0",
                machines=("host",),
                assumption="nothing",
                minutes=0.5,
                run=lambda options, name=name: self.run(name),
            )
            for name in errors
        )

    def run(self, name):
        self.counts[name] += 1
        if self.errors[name]:
            raise self.errors[name]
        return Outcome(findings=[Finding(ran=name, note="done", kind="measured")], data=[])


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command on given experiments and code; returns its exit code."""

    def run(runs, *arguments, here=HERE):
        monkeypatch.setattr(command, "EXPERIMENTS", runs.experiments)
        monkeypatch.setattr(common, "provenance", lambda: here)
        return command.main(["--results", str(tmp_path), *arguments])

    return run


def test_one_failure_does_not_stop_the_others(run, capsys):
    runs = Runs(first=None, broken=RuntimeError("no luck"), last=None)
    assert run(runs) == 1
    assert runs.counts == {"first": 1, "broken": 1, "last": 1}
    told = capsys.readouterr()
    assert "FAILED: broken: RuntimeError: no luck" in told.err
    assert "2 of 3 experiments have results" in told.out


def test_finished_experiments_are_not_run_again(run, capsys):
    runs = Runs(first=None, broken=RuntimeError("no luck"))
    run(runs)
    runs.errors["broken"] = None
    assert run(runs) == 0
    assert runs.counts == {"first": 1, "broken": 2}
    assert "first is finished at this commit; --again" in capsys.readouterr().out
    run(runs, "--again")
    assert runs.counts == {"first": 2, "broken": 3}


@pytest.mark.parametrize(
    "other",
    [
        Provenance(commit="def5678", machine=HERE.machine),
        Provenance(commit="abc1234", machine=BenchMachine(cpu="some", cores=4, memory_bytes=2**31)),
    ],
)
def test_another_commit_or_machine_runs_them_again(run, other):
    runs = Runs(first=None)
    run(runs)
    run(runs, here=other)
    assert runs.counts == {"first": 2}


def test_quick_results_are_none_of_a_full_run(run):
    runs = Runs(first=None)
    run(runs, "--quick")
    run(runs)
    assert runs.counts == {"first": 2}


def test_uncommitted_code_is_never_finished(run):
    runs = Runs(first=None)
    dirty = Provenance(commit="abc1234-dirty", machine=HERE.machine)
    for _ in range(2):
        run(runs, here=dirty)
    assert runs.counts == {"first": 2}


def test_a_half_written_result_does_not_count(run, tmp_path):
    runs = Runs(first=None)
    run(runs)
    results = tmp_path / "first" / "results.json"
    results.write_text(results.read_text()[:40])
    run(runs)
    assert runs.counts == {"first": 2}


def test_results_and_tables_alone_do_not_make_a_commit_dirty(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    folder = tmp_path / "experiments" / "fig08"
    (folder / "results").mkdir(parents=True)
    files = [
        folder / "README.md",
        folder / "results" / "results.json",
        tmp_path / "experiments" / "README.md",
    ]
    code = folder / "run.py"
    for file in (*files, code):
        file.write_text("old")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "all")
    monkeypatch.setattr(common, "FOLDER", tmp_path / "experiments")
    for file in files:
        file.write_text("new")
    assert not common._has_changed_code()
    code.write_text("new")
    assert common._has_changed_code()


def test_without_git_the_code_counts_as_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert common._has_changed_code()
