"""New workers take the places of lost ones under `coarse run --on-loss replace`, and all end with the same bits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import launch

SCRIPT = Path(__file__).parent / "replace_script.py"
COARSE_RUN = (
    *("coarse", "run", "-n", "3", "--min-workers", "2", "--memory-devices", "2"),
    *("--on-loss", "replace", "--max-restarts", "4"),
)
ALL = (0, 1, 2)


def others_of(lost: int) -> list[int]:
    return [rank for rank in ALL if rank != lost]


def mean(ranks: list[int]) -> float:
    return float(sum(2**rank for rank in ranks) / len(ranks))


def run(folder: Path, mode: str, lost: int, num_entries: int, *fates: str) -> tuple[str, dict[int, Any]]:
    printed = launch(COARSE_RUN, SCRIPT, (str(folder), mode, str(lost), str(num_entries), *fates))
    reports = {rank: json.loads((folder / f"end-{rank}").read_text()) for rank in ALL}
    assert len({report["digest"] for report in reports.values()}) == 1, (
        "all have the same parameters, buffers and states"
    )
    assert all(report["members"] == list(ALL) for report in reports.values())
    return printed, reports


def possible_members(step: int, changes: list[list[int]]) -> list[list[int]]:
    """The workers that may be in the mean of a step, by the steps before or in which members have changed."""
    members = list(ALL)
    for changed, *after in changes:
        if step == changed and len(after) < len(members):
            return [members, after]  # the step of a loss
        if step >= changed:
            members = after
    return [members]


def check_steps(reports: dict[int, Any], lost: int, *, num_entries: int = 1) -> None:
    """Every step of every worker has the same mean, which is over all members of that step."""
    one, other = (reports[rank] for rank in others_of(lost))
    assert one["changes"] == other["changes"], "all learn of it in the same step"
    assert one["moves"] == other["moves"]
    newcomers_moves = reports[lost]["moves"]
    assert newcomers_moves.items() <= one["moves"].items()
    assert [len(members) for _, *members in one["changes"]] == [2, 3] * num_entries
    for step, move in one["moves"].items():
        means = [mean(members) for members in possible_members(int(step), one["changes"])]
        assert any(move == pytest.approx(each, abs=1e-2) for each in means), (step, move, means)
    assert str(one["changes"][-1][0]) in newcomers_moves, (
        "it contributes from the step in which all learn of it"
    )


@pytest.mark.parametrize(
    ("mode", "lost"),
    [("backward", 1), ("overlap", 0), pytest.param("backward", 0, marks=pytest.mark.slow)],
)
def test_a_new_worker_takes_the_place_of_a_lost_one(tmp_path: Path, mode: str, lost: int) -> None:
    printed, reports = run(tmp_path, mode, lost, 1)
    check_steps(reports, lost)
    assert f"worker {lost} (pid " in printed
    assert "the other 2 go on (--min-workers 2)" in printed
    assert f"a new worker {lost} (pid " in printed
    assert "takes part in the training" in printed
    assert f"worker {lost} lost, worker {lost} replaced" in printed


@pytest.mark.parametrize("fates", [("start", "live"), ("built", "fail", "live")])
def test_others_go_on_when_a_new_worker_ends_while_it_starts(tmp_path: Path, fates: tuple[str, ...]) -> None:
    printed, reports = run(tmp_path, "backward", 1, 1, *fates)
    check_steps(reports, 1)
    assert printed.count("before it took part in the training") == len(fates) - 1


@pytest.mark.parametrize("fate", ["entered", pytest.param("step", marks=pytest.mark.slow)])
def test_a_new_worker_that_is_lost_is_replaced_again(tmp_path: Path, fate: str) -> None:
    _, reports = run(tmp_path, "backward", 1, 2, fate, "live")
    check_steps(reports, 1, num_entries=2)


@pytest.mark.parametrize(
    ("mode", "lost"),
    [
        ("plain", 1),
        ("split", 0),
        pytest.param("plain", 0, marks=pytest.mark.slow),
        pytest.param("two", 1, marks=pytest.mark.slow),
    ],
)
def test_a_new_worker_gets_what_workers_hold_themselves(tmp_path: Path, mode: str, lost: int) -> None:
    """Parameters, buffers, states of optimizers and schedules; the first worker provides them, or the second."""
    _, reports = run(tmp_path, mode, lost, 1)
    check_steps(reports, lost)


@pytest.mark.parametrize("fate", ["read", pytest.param("step", marks=pytest.mark.slow)])
def test_a_new_worker_that_is_lost_while_it_reads_the_state_is_replaced(tmp_path: Path, fate: str) -> None:
    _, reports = run(tmp_path, "plain", 1, 2, fate, "live")
    check_steps(reports, 1, num_entries=2)


def test_a_new_worker_that_names_other_objects_fails_and_the_others_go_on(tmp_path: Path) -> None:
    printed, reports = run(tmp_path, "plain", 1, 2, "nameless", "live")
    check_steps(reports, 1, num_entries=2)
    assert "join_training(state=...) with ['0', '1', '2'], and this worker with []" in printed


@pytest.mark.parametrize("mode", ["plain", pytest.param("split", marks=pytest.mark.slow)])
def test_another_worker_provides_the_state_if_the_first_is_lost_meanwhile(tmp_path: Path, mode: str) -> None:
    """A replacement is replaced itself: the next new worker gets the state from one that was new before."""
    printed, reports = run(tmp_path, mode, 1, 2, "orphan", "live")
    *_, faults = printed.rstrip().rpartition("faults: ")
    assert set(faults.split(", ")) == {
        f"worker {rank} {fate}" for rank in (0, 1) for fate in ("lost", "replaced")
    }
    last = reports[2]
    (first_loss, *_), (entry, *_), (second_loss, *_), (second_entry, *_) = last["changes"]
    assert [members for _, *members in last["changes"]] == [[0, 2], [0, 1, 2], [1, 2], [0, 1, 2]]
    assert entry == second_loss, "it is lost before it contributes"
    assert set(reports[1]["moves"]) == {str(step) for step in range(entry, 1 + max(map(int, last["moves"])))}
    assert str(second_entry) in reports[0]["moves"]
    for rank in (0, 1):
        assert reports[rank]["moves"].items() <= last["moves"].items()
    for step, move in last["moves"].items():
        members = possible_members(int(step), last["changes"])
        assert any(move == pytest.approx(mean(each), abs=1e-2) for each in members), (step, move, members)
    assert last["moves"][str(entry)] == pytest.approx(mean([1, 2]), abs=1e-2)
    assert first_loss < entry < second_entry


def refusal(folder: Path, *options: str, mode: str = "unnamed") -> str:
    command = [sys.executable, "-m", "coarse", "run", "-n", "3", "--min-workers", "2", *options]
    done = subprocess.run(
        [*command, str(SCRIPT), str(folder), mode, "1", "1"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0
    return done.stderr


def test_an_optimizer_whose_state_nobody_gives_is_refused_in_the_first_step(tmp_path: Path) -> None:
    said = refusal(tmp_path, "--on-loss", "replace", "--max-restarts", "1")
    assert "SGD updates parameter 'moved' on the workers, and a newcomer does not get its state" in said
    assert "give all trainable parameters to one DistributedOptimizer" in said


def test_a_number_of_restarts_is_required(tmp_path: Path) -> None:
    assert "starts at most --max-restarts new workers" in refusal(tmp_path, "--on-loss", "replace")


def test_a_state_that_cannot_be_stored_is_refused_in_the_first_step(tmp_path: Path) -> None:
    said = refusal(tmp_path, "--on-loss", "replace", "--max-restarts", "1", mode="odd")
    assert "join_training/state/odd/value is a builtins.object" in said
    assert "COARSE_ON_LOSS=continue" in said


DENSE_REFUSALS = {
    "group": "new workers can join torch's default process group only",
    "second model": "a second model was wrapped, and a newcomer joins the steps of one. Wrap one model",
    "checkpointer": "lets the workers agree through torch's own process group, which fails when one is lost",
    "join": "join() asks all workers through torch's own process group, which fails when one is lost",
    "hook": "a communication hook averages gradients by torch's own process group, which newcomers lack",
}


@pytest.mark.parametrize(
    ("mode", "refusals"),
    [
        ("dense", DENSE_REFUSALS),
        ("sparse", {"sparse": "the model has sparse gradients. Build its embeddings with sparse=False"}),
        ("stale", {"staleness": "workers have copies of the parameters. Pass staleness=0"}),
    ],
)
def test_training_with_which_a_new_worker_could_not_go_on_is_refused(
    tmp_path: Path, mode: str, refusals: dict[str, str]
) -> None:
    """On all workers, with the alternative."""
    launcher = ("coarse", "run", "-n", "2", "--min-workers", "1", *COARSE_RUN[-4:])
    launch(launcher, Path(__file__).parent / "refusal_script.py", (str(tmp_path), mode))
    for rank in range(2):
        said = json.loads((tmp_path / f"refusals-{rank}").read_text())
        assert said.keys() == refusals.keys()
        for asked, reason in refusals.items():
            assert reason in said[asked]
            assert re.search("or (set COARSE_ON_LOSS=continue|unset )", said[asked]), said[asked]
