"""Keras trains on without lost workers under `coarse run --min-workers`; the others end with the same bits."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest
from elastic_data import BATCH, RATE, STEPS, X
from jobs import HERE, Job

pytestmark = pytest.mark.timeout(1000)

NEAR = 2e-3
"""What parameters of float32 are rounded to after many steps, over the learning rate."""


def run(folder, mode, *, min_workers, **variables):
    """The output of a job of four workers, and what those have written that went on."""
    options = ("-n", "4", "--min-workers", str(min_workers), "--memory-devices", "2")
    worker = (str(HERE / "elastic_worker.py"), str(folder), mode)
    code, printed = Job(sys.executable, "-m", "coarse", "run", *options, *worker, **variables).finish()
    assert code == 0, printed
    found = {}
    for rank in range(4):
        if (file := folder / f"{mode}-{rank}.json").exists():
            found[rank] = json.loads(file.read_text())
    return printed, found


@pytest.fixture(
    scope="module",
    params=["op", pytest.param("Python", marks=pytest.mark.slow)],
)
def losses(request, tmp_path_factory):
    """Worker 3 is killed at the end of the first epoch, worker 0 in a step of the third, worker 2 in predict()."""
    folder = tmp_path_factory.mktemp("losses")
    variables = {} if request.param == "op" else {"CXX": "/nonexistent/c++"}
    return folder, *run(folder, "losses", min_workers=1, **variables)


@pytest.fixture(scope="module")
def leaving(tmp_path_factory):
    """Worker 3 gets SIGTERM in a step of fit(), worker 0 is killed in a step of a loop of its own."""
    return run(tmp_path_factory.mktemp("leaving"), "leaving", min_workers=2)


def rows_of(step):
    """All rows of the global batch of a step."""
    first = step % STEPS * BATCH
    return sorted(X[first : first + BATCH, 0].tolist())


def moves_of(steps, start=(0.0, 0.0, 0.0)):
    """By step: how far each of the parameters has moved, over the learning rate."""
    values = np.array([start, *(step["parameters"] for step in steps)])
    return -np.diff(values, axis=0) / RATE


def check_moves(moves, seen, step_of_loss):
    """Each parameter moves by the mean of the rows of exactly the workers that have contributed.

    Args:
        moves: By step.
        seen: By worker that goes on: its rows of each step.
        step_of_loss: The step in which a worker was lost that had told its rows, but not the gradient of `early`. The
            rest of its epoch lacks its rows.
    """
    for step, (early, late, table) in enumerate(moves):
        rows = [value for each in seen for value in each[step]]
        means = np.mean(rows), np.mean(rows_of(step))
        is_short = step_of_loss <= step < (step_of_loss // STEPS + 1) * STEPS
        assert early == pytest.approx(means[0 if is_short else 1], abs=NEAR), step
        assert abs(early - late) < NEAR or (step == step_of_loss and abs(late - means[1]) < NEAR), step
        assert table == pytest.approx(1, abs=NEAR), step


def test_parameters_move_by_the_rows_of_those_that_have_contributed(losses):
    _, _, found = losses
    assert sorted(found) == [1, 2]
    assert found[1]["steps"] == found[2]["steps"]
    # 3 was lost at the end of an epoch, so the next one is divided among the others.
    seen = [found[rank]["seen"] for rank in (1, 2)]
    check_moves(moves_of(found[1]["steps"]), seen, step_of_loss=2 * STEPS + 2)


def test_survivors_have_the_same_bits(losses):
    _, _, found = losses
    assert found[1]["digest"] == found[2]["digest"]
    assert found[1]["history"] == found[2]["history"]


def test_all_learn_of_a_loss_after_the_same_step(losses):
    _, _, found = losses
    assert found[1]["changes"] == found[2]["changes"]
    assert found[1]["changes"] in (
        [[STEPS, 0, 1, 2], [2 * STEPS + 2 + late, 1, 2]]
        for late in range(2)  # worker 0 may have told of its rows in its last step
    )


def test_the_epochs_after_a_loss_have_all_rows(losses):
    _, _, found = losses
    for number in range(3 * STEPS, len(found[1]["steps"])):
        assert sorted(found[1]["seen"][number] + found[2]["seen"][number]) == rows_of(number)


def test_metrics_count_the_rows_of_those_that_are_left(losses):
    _, _, found = losses
    of_epochs = found[1]["history"]["target"]
    whole = pytest.approx(X.mean(), rel=1e-5)
    in_epoch_of_loss = slice(2 * STEPS, 3 * STEPS)
    rows = [x for rank in (1, 2) for each in found[rank]["seen"][in_epoch_of_loss] for x in each]
    assert of_epochs[2] == pytest.approx(np.mean(rows), rel=1e-5)
    assert [*of_epochs[:2], *of_epochs[3:]] == [whole] * (len(of_epochs) - 1)


def test_the_first_worker_that_is_left_writes_the_files_on(losses):
    folder, _, found = losses
    epochs = len(found[1]["history"]["loss"])
    assert (found[1]["is chief"], found[2]["is chief"]) == (True, False)
    written = sorted(int(each.name.partition(".")[0]) for each in folder.glob("[0-9]*.weights.h5"))
    assert written == list(range(1, epochs + 1))
    assert [each.name for each in folder.glob("best-*")] == ["best-1.weights.h5"]
    assert {found[rank]["best"] for rank in (1, 2)} == {found[1]["history"]["loss"][0]}
    header, *lines = (folder / "log.csv").read_text().splitlines()
    assert header.startswith("epoch,")
    assert [int(line.partition(",")[0]) for line in lines] == list(range(epochs))
    assert json.loads((folder / "backup" / "training_metadata.json").read_text())["epoch"] == epochs
    assert len(list((folder / "logs" / "train").iterdir())) == 2  # a file of each chief


def test_predictions_have_all_rows_although_a_worker_died_in_the_middle_of_an_exchange(losses):
    _, _, found = losses
    assert found[1]["has all rows"]
    assert found[1]["members"] == [1]


def test_the_launcher_names_the_lost(losses):
    _, printed, _ = losses
    for rank, left in ((3, 3), (0, 2)):
        said = rf"worker {rank} \(pid \d+\) was killed by SIGKILL.*the other {left} go on \(--min-workers 1\)"
        assert re.search(said, printed), printed


def test_optimizers_run_on_the_workers(leaving):
    printed, _ = leaving
    assert "SGD runs on the workers, not in the memory devices: COARSE_MIN_WORKERS" in printed


def test_a_worker_leaves_after_its_step(leaving):
    printed, found = leaving
    left = len(found[3]["steps"])
    for rank in (1, 2):
        assert found[rank]["steps"][:left] == found[3]["steps"]
        assert found[rank]["steps"][left]["members"] == [0, 1, 2]
    assert re.search(r"worker 3 \(pid \d+\) left at step \d+ \(SIGTERM\), .* the other 3 go on", printed), (
        printed
    )
    assert "Traceback" not in printed


def test_what_a_worker_has_done_that_leaves_counts_as_a_whole(leaving):
    _, found = leaving
    left = len(found[3]["steps"])
    moves = moves_of(found[1]["steps"])
    for step in range(left):
        mean = np.mean(rows_of(step))
        assert moves[step] == pytest.approx([mean, mean, 1], abs=NEAR)


def test_loops_go_on_without_a_lost_worker(leaving):
    _, found = leaving
    assert found[1]["digest"] == found[2]["digest"]
    assert found[1]["digest of loop"] == found[2]["digest of loop"]
    assert found[1]["loop"]["steps"] == found[2]["loop"]["steps"]
    moves = moves_of(found[1]["loop"]["steps"], found[1]["steps"][-1]["parameters"])
    check_moves(moves, [found[rank]["loop"]["seen"] for rank in (1, 2)], step_of_loss=3)


def test_an_evaluation_after_losses_has_all_rows(leaving):
    _, found = leaving
    for rank in (1, 2):
        assert found[rank]["evaluated"] == pytest.approx(X.mean(), rel=1e-5)
        assert found[rank]["members"] == [1, 2]


def test_other_operations_are_those_of_the_workers_that_are_left(leaving):
    _, found = leaving
    for rank in (1, 2):
        assert found[rank]["reductions"] == {
            "SUM": 5 + 9,
            "MEAN": 7,
            "gathered": [1, 2, 2],
            "variable": 1.0,  # the first one's
            "replicas": 2,
        }


@pytest.mark.parametrize("options", [("--on-loss", "replace", "--max-restarts", "1"), ("--max-workers", "3")])
def test_jobs_that_take_new_workers_are_refused(options, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import coarse.tensorflow\ncoarse.tensorflow.Strategy()\n")
    launcher = ("coarse", "run", "-n", "2", "--min-workers", "1", *options)
    code, printed = Job(sys.executable, "-m", *launcher, str(script)).finish()
    assert code != 0
    assert "new workers cannot join a job of coarse.tensorflow" in printed
