"""`coarse simulate NAME` and `--all`: what a study found, on the terminal, as JSON and in its page."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest
from matplotlib.figure import Figure

from coarse.cli.main import main
from coarse.simulator import scale
from coarse.simulator.faults import failure_sweep
from coarse.simulator.studies import catalogue
from coarse.simulator.studies.study import Basis, Claim, Comparison, StateTable, Study, StudyResult


def simulate(*arguments):
    return main(["simulate", *arguments])


def compared(what, document, simulated, basis=Basis.PREDICTED, reason=""):
    return Comparison(
        what=what,
        document=document,
        simulated=simulated,
        unit="ms",
        source="Table 1",
        basis=basis,
        reason=reason,
    )


COMPARISONS = (
    compared("2 rooms", 10.0, 11.0),
    compared("4 rooms | halls", 10.0, 14.0, reason="doors"),
    compared("1 room", 10.0, 10.0, Basis.FITTED),
    compared("doors", 3.0, 3.0, Basis.EXACT),
)
CLAIMS = (
    Claim(what="grows with rooms", source="Figure 2", holds=True, found="1.4 times"),
    Claim(what="halls are free", source="Figure 3", holds=False, found="2 ms", reason="doors"),
)
STEPS = StateTable(title="a door opens", columns=("step", "door"), rows=(("1", "shut"), ("2", "open")))


def measured_rooms(progress):
    progress("counts rooms")
    figure = Figure()
    figure.subplots().plot([1, 2], [1, 2])
    return StudyResult(comparisons=COMPARISONS, claims=CLAIMS, tables=(STEPS,), pictures={"rooms": figure})


def study(name, run=measured_rooms):
    return Study(name=name, title=f"Title of {name}", document="Doe, Rooms, 1999", run=run)


def broken(progress):
    raise RuntimeError("no door")


def interrupted(progress):
    progress("walks")
    raise KeyboardInterrupt


swept = scale.Sweep(
    workers=(8, 16),
    steps_s={(machine, scheme): (7e-3, 8e-3) for machine in scale.MACHINES for scheme in scale.SCHEMES},
    compute_s=5e-3,
)

swept_failures = failure_sweep.FailureSweep(
    hours=(1000, 10), shares={("coarse", "memory"): (0.9, 0.5), ("allreduce", "checkpoint"): (0.8, 0.25)}
)


@pytest.fixture
def registered(monkeypatch):
    """Makes studies the only ones that there are."""

    def register(*studies):
        for each in studies:
            module = ModuleType(f"coarse.simulator.studies.of_test_{each.name}")
            module.STUDY = each
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(catalogue, "_MODULES", {each.name: f"of_test_{each.name}" for each in studies})
        monkeypatch.setattr(catalogue, "NAMES", tuple(each.name for each in studies))

    return register


@pytest.fixture
def docs(tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "sweep", lambda progress: swept)
    monkeypatch.setattr(failure_sweep, "sweep_failures", lambda progress: swept_failures)
    (tmp_path / "simulator").mkdir()
    (tmp_path / "simulator" / "failures.md").write_text("<!-- goodput -->\nstale\n<!-- end of goodput -->\n")
    (tmp_path / "simulator.md").write_text(
        "before\n<!-- scale -->\nstale\n<!-- end of scale -->\n"
        "<!-- studies -->\nstale\n<!-- end of studies -->\nafter\n"
    )
    return tmp_path


def test_prints_figures_claims_and_tables_with_verdicts(registered, capsys):
    registered(study("rooms"))
    assert simulate("rooms") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Title of rooms: Doe, Rooms, 1999; 3 of 4 figures agree, 1 of 2 claims hold" in out
    assert "2 rooms Table 1 10 ms 11 ms +10.0% predicted agrees" in out
    assert "4 rooms | halls Table 1 10 ms 14 ms +40.0% predicted differs doors" in out
    assert "halls are free Figure 3 2 ms does not hold doors" in out
    assert "a door opens, simulated" in out


def test_json_has_every_figure_and_verdict(registered, capsys):
    registered(study("rooms"))
    assert simulate("rooms", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["study"], found["document"]) == ("simulated", "rooms", "Doe, Rooms, 1999")
    assert [(each["basis"], each["agrees"]) for each in found["comparisons"]] == [
        ("predicted", True),
        ("predicted", False),
        ("fitted", True),
        ("exact", True),
    ]
    assert [each["holds"] for each in found["claims"]] == [True, False]
    assert found["tables"] == [
        {"title": "a door opens", "columns": ["step", "door"], "rows": [["1", "shut"], ["2", "open"]]}
    ]


def test_a_trace_is_printed_alone(registered, capsys):
    registered(
        Study(name="doors", title="Doors", document="Doe", run=broken, traces={"fig-1": lambda: STEPS})
    )
    assert simulate("doors", "--trace", "fig-1") == 0
    assert "2 open" in " ".join(capsys.readouterr().out.split())
    assert simulate("doors", "--trace", "fig-1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [["1", "shut"], ["2", "open"]]
    assert simulate("--list") == 0
    assert "doors Doors Doe fig-1" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["room"], "there is no study 'room'; the studies are rooms"),
        (["rooms", "--trace", "fig-9"], "rooms has no trace 'fig-9'; its traces: none"),
        (["--trace", "fig-9", "--list"], "--trace needs the NAME of a study"),
        ([], "give one of NAME, --machine, --list, --all"),
        (["rooms", "--machine", "aws-p3"], "not NAME and --machine"),
        (["--all", "--docs", "nowhere"], "nowhere holds no simulator.md; start in a clone"),
        (["--all", "--from", "cellar"], "--from cellar is none of scale, failures, rooms"),
        (["rooms", "--from", "scale"], "--from needs --all"),
    ],
)
def test_wrong_questions_get_one_line(arguments, message, registered, capsys):
    registered(study("rooms"))
    assert simulate(*arguments) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("coarse simulate: ")
    assert message in error


def test_all_writes_pages_pictures_and_the_summary(registered, docs):
    registered(study("rooms"), study("halls"))
    page = docs / "simulator" / "rooms.md"
    page.write_text("# Rooms\n\nprose\n<!-- results -->\nstale\n<!-- end of results -->\nmore prose\n")
    assert simulate("--all", "--docs", str(docs)) == 0
    text = page.read_text()
    assert text.startswith("# Rooms\n\nprose\n<!-- results -->\n")
    assert text.endswith("<!-- end of results -->\nmore prose\n")
    assert "stale" not in text
    assert (
        "| 4 rooms \\| halls | Table 1 | 10 ms | 14 ms | +40.0% | predicted | **differs** | doors |" in text
    )
    assert "| 2 | open |" in text
    assert "![rooms](pictures/rooms-rooms.png)" in text
    assert (docs / "simulator" / "pictures" / "rooms-rooms.png").stat().st_size > 1000
    assert (docs / "simulator" / "halls.md").read_text().startswith("# Title of halls\n\nDoe, Rooms, 1999")
    index = (docs / "simulator.md").read_text()
    row = "Doe, Rooms, 1999 | 4 | 1 of 2 (50%) | 1 of 1 | 1 of 1 | 1 of 2 |"
    assert f"| [rooms](simulator/rooms.md): Title of rooms | {row}" in index
    assert "| all |  | 8 | 2 of 4 (50%) | 2 of 2 | 2 of 2 | 2 of 4 |" in index
    assert "stale" not in index
    assert "<!-- studies -->\n| study |" in index
    assert "| COARSE on fat-tree | 7.0 | 8.0 |" in index
    assert "](simulator/pictures/scale.png)" in index
    failures = (docs / "simulator" / "failures.md").read_text()
    assert "stale" not in failures
    assert "| AllReduce: checkpoint | 80.0% | 25.0% |" in failures
    assert index.endswith("<!-- end of studies -->\nafter\n")


def test_all_again_changes_nothing(registered, docs):
    registered(study("rooms"))
    simulate("--all", "--docs", str(docs))
    before = {path: path.read_bytes() for path in docs.rglob("*") if path.is_file()}
    simulate("--all", "--docs", str(docs))
    assert {path: path.read_bytes() for path in docs.rglob("*") if path.is_file()} == before
    assert len(before) == 9


def test_a_failed_study_does_not_stop_the_others(registered, docs, capsys):
    registered(study("doors", broken), study("rooms"))
    assert simulate("--all", "--docs", str(docs)) == 1
    assert "doors (3 of 4) failed: RuntimeError: no door" in capsys.readouterr().err
    assert "| doors | **failed**: RuntimeError: no door |" in (docs / "simulator.md").read_text()
    assert (docs / "simulator" / "rooms.md").exists()
    assert not (docs / "simulator" / "doors.md").exists()


def test_an_interrupt_says_how_far_it_came_and_keeps_written_pages(registered, docs, capsys):
    registered(study("rooms"), study("walk", interrupted))
    assert simulate("--all", "--docs", str(docs)) == 130
    out, err = capsys.readouterr()
    assert "rooms (3 of 4): 3 of 4 figures agree, 1 of 2 claims hold" in out
    assert "interrupted in walk (4 of 4): walks" in err
    assert "3 of 4 parts are done; to go on: coarse simulate --all --from walk" in err
    assert (docs / "simulator" / "rooms.md").exists()


def test_a_run_goes_on_where_it_was_interrupted(registered, docs, monkeypatch, capsys):
    registered(study("rooms"), study("walk"), study("halls"))
    assert simulate("--all", "--docs", str(docs)) == 0
    expected = {path: path.read_bytes() for path in docs.rglob("*") if path.is_file()}
    (docs / "simulator" / "walk.md").unlink()
    registered(study("rooms", broken), study("walk"), study("halls"))
    monkeypatch.setattr(scale, "sweep", broken)
    capsys.readouterr()
    assert simulate("--all", "--from", "walk", "--docs", str(docs)) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "walk (4 of 5)",
        "halls (5 of 5)",
    ]
    assert {path: path.read_bytes() for path in docs.rglob("*") if path.is_file()} == expected


def test_a_part_that_was_never_written_is_missed(registered, docs):
    registered(study("rooms"), study("halls"))
    assert simulate("--all", "--from", "halls", "--docs", str(docs)) == 1
    assert (
        "| rooms | **failed**: its page: No such file or directory |" in (docs / "simulator.md").read_text()
    )


def test_a_sweep_has_a_step_of_every_scheme_and_number(monkeypatch):
    monkeypatch.setattr(scale, "MODEL", "alexnet")
    parts = []
    found = scale.sweep(parts.append, workers=(8, 16))
    assert set(found.steps_s) == {(machine, each) for machine in scale.MACHINES for each in scale.SCHEMES}
    assert all(len(steps_s) == 2 and min(steps_s) > found.compute_s for steps_s in found.steps_s.values())
    assert parts[0] == "coarse on cxl-pool, 8 workers"
    assert len(parts) == 16


def test_a_failed_sweep_does_not_stop_the_studies(registered, docs, monkeypatch, capsys):
    monkeypatch.setattr(scale, "sweep", broken)
    registered(study("rooms"))
    assert simulate("--all", "--docs", str(docs)) == 1
    assert "scale (1 of 3) failed: RuntimeError: no door" in capsys.readouterr().err
    assert (docs / "simulator" / "rooms.md").exists()


def test_goodput_of_every_recovery_falls_with_failures(monkeypatch):
    monkeypatch.setattr(failure_sweep, "MODEL", "alexnet")
    found = failure_sweep.sweep_failures(lambda words: None, num_workers=64)
    assert list(found.shares) == [
        ("coarse", "memory"),
        ("coarse", "memory, replicas"),
        ("allreduce", "checkpoint"),
        ("allreduce", "discard step"),
    ]
    for shares in found.shares.values():
        assert list(shares) == sorted(shares, reverse=True)
        assert shares[0] > 0.9
