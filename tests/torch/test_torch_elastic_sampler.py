"""ElasticSampler: workers are lost and replaced, and no sample of an epoch is trained on twice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launching import launch
from torch import nn

import coarse.torch

SCRIPT = Path(__file__).parent / "elastic_sampler_script.py"
NUM_SAMPLES, BATCH = 500, 4
REPLACE = (
    *("coarse", "run", "-n", "3", "--min-workers", "2", "--memory-devices", "2"),
    *("--on-loss", "replace", "--max-restarts", "2"),
)
CONTINUE = ("coarse", "run", "-n", "3", "--min-workers", "2", "--memory-devices", "2")
KEPT = ("coarse", "run", "-n", "2", "--max-restarts", "1", "--keep-devices", "60")


def batches_of(folder: Path, rank: int | str = "*") -> list[tuple[int, list[int]]]:
    """Epoch and samples of each batch."""
    return [batch for each in batches_of_files(folder, rank) for batch in each]


def batches_of_files(folder: Path, rank: int | str) -> list[list[tuple[int, list[int]]]]:
    """The same for each process."""
    files = folder.glob(f"seen-{rank}-*")
    return [[tuple(json.loads(line)) for line in path.read_text().splitlines()] for path in files]


def counts_by_epoch(batches: list[tuple[int, list[int]]], last_epoch: int) -> list[Counter[int]]:
    counts: list[Counter[int]] = [Counter() for _ in range(last_epoch + 1)]
    for epoch, samples in batches:
        counts[epoch].update(samples)
    return counts


def by_their_epochs(
    by_newcomer: list[tuple[int, list[int]]], others: list[Counter[int]]
) -> list[tuple[int, list[int]]]:
    """A newcomer's batches, of which the first ones may be of the epoch after that in which it came."""
    first = by_newcomer[0][0]
    return [
        (epoch + (epoch == first and not others[first].keys().isdisjoint(samples)), samples)
        for epoch, samples in by_newcomer
    ]


@pytest.mark.parametrize(
    ("mode", "num_loaders"),
    [("replace", 0), ("recovery", 1), pytest.param("replace", 2, marks=pytest.mark.slow)],
)
def test_each_sample_is_seen_once_while_a_worker_is_lost_and_replaced(
    tmp_path: Path, mode: str, num_loaders: int
) -> None:
    launch(REPLACE, SCRIPT, (str(tmp_path), mode, str(num_loaders)))
    (last_epoch,) = {int((tmp_path / f"end-{rank}").read_text()) for rank in range(3)}
    lost, newcomer = sorted(batches_of_files(tmp_path, 1), key=len)
    others = [*batches_of(tmp_path, 0), *lost, *batches_of(tmp_path, 2)]
    by_newcomer = by_their_epochs(newcomer, counts_by_epoch(others, last_epoch))
    counts = counts_by_epoch([*others, *by_newcomer], last_epoch)
    assert all(set(each.values()) == {1} for each in counts), "no sample twice in an epoch"
    for epoch, each in enumerate(counts):
        assert NUM_SAMPLES - len(each) < 3, (epoch, "all but fewer samples than workers")
    assert sum(epoch == last_epoch for epoch, _ in by_newcomer) >= NUM_SAMPLES // (3 * BATCH)
    assert len({tuple(samples) for _, samples in batches_of(tmp_path, 0)}) > 100, (
        "epochs differ in their order"
    )


@pytest.mark.parametrize(
    ("mode", "num_loaders", "step"),
    [
        ("leave", 2, 6),
        ("leave", 2, 42),
        ("term", 2, 5),
        pytest.param("leave", 0, 6, marks=pytest.mark.slow),
        pytest.param("leave", 0, 42, marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_leaves_as_planned_takes_no_sample_along(
    tmp_path: Path, mode: str, num_loaders: int, step: int
) -> None:
    """Neither those that it had loaded in advance nor those of the step before which it leaves."""
    launch(CONTINUE, SCRIPT, (str(tmp_path), mode, str(num_loaders), str(step)))
    (last_epoch,) = {int((tmp_path / f"end-{rank}").read_text()) for rank in (0, 2)}
    num_unseen = 0 if mode == "leave" else 1  # fewer than workers, if it has left at a step that is not known
    for each in counts_by_epoch(batches_of(tmp_path), last_epoch):
        assert set(each.values()) == {1}, "no sample twice"
        assert len(each) >= NUM_SAMPLES - num_unseen
    by_leaver = sum(len(samples) for _, samples in batches_of(tmp_path, 1))
    assert by_leaver >= (step - 2) * BATCH, "it has trained before"


def test_restarted_workers_go_on_with_the_samples_that_no_step_has_used(tmp_path: Path) -> None:
    launch(KEPT, SCRIPT, (str(tmp_path), "restart", "0"))
    assert len(list(tmp_path.glob("seen-*"))) == 4, "two attempts of two workers"
    for each in counts_by_epoch(batches_of(tmp_path), 2):
        assert set(each) == set(range(NUM_SAMPLES))
        assert set(each.values()) == {1}, "the step of the crash was made again"


def test_recovery_without_the_sampler_is_refused_where_workers_are_replaced(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        *REPLACE,
        "--max-restarts",
        "1",
        str(SCRIPT),
        str(tmp_path),
        "refused",
        "0",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "Recovery knows no position in the data for a new worker" in done.stderr


# ---- in a job of one worker ----


@pytest.fixture
def model() -> Iterator[nn.Module]:
    yield coarse.torch.DistributedDataParallel(nn.Linear(1, 1))
    dist.destroy_process_group()


def train(model: nn.Module, batch: list[int]) -> None:
    model(torch.tensor(batch)[:, None].float()).sum().backward()


def test_each_epoch_has_an_order_of_its_own(model: nn.Module) -> None:
    sampler = coarse.torch.ElasticSampler(range(10), model, 4, seed=3)
    orders = [[index for batch in sampler for index in batch] for _ in sampler.epochs(2)]
    assert [sorted(order) for order in orders] == [list(range(10))] * 2
    assert orders[0] != orders[1]
    again = coarse.torch.ElasticSampler(range(10), model, 4, seed=3)
    assert [index for batch in again for index in batch] == orders[0]


def test_batches_keep_the_order_of_the_dataset_if_it_is_not_shuffled(model: nn.Module) -> None:
    sampler = coarse.torch.ElasticSampler(range(10), model, 4, shuffle=False)
    assert len(sampler) == 3
    assert list(sampler) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_batch_without_a_step_is_given_again(model: nn.Module) -> None:
    sampler = coarse.torch.ElasticSampler(range(10), model, 4, shuffle=False)
    assert next(iter(sampler)) == [0, 1, 2, 3]
    for batch in sampler:
        train(model, batch)
        break
    assert next(iter(sampler)) == [4, 5, 6, 7]


def test_evaluation_uses_no_batch(model: nn.Module) -> None:
    sampler = coarse.torch.ElasticSampler(range(10), model, 4, shuffle=False)
    batch = next(iter(sampler))
    with torch.no_grad():
        model(torch.ones(1, 1))
    model.eval()(torch.ones(1, 1))
    assert next(iter(sampler)) == batch


def test_its_state_goes_on_after_the_last_step(model: nn.Module) -> None:
    sampler = coarse.torch.ElasticSampler(range(10), model, 4, shuffle=False)
    batches = iter(sampler)
    train(model, next(batches))
    next(batches)
    other = coarse.torch.ElasticSampler(range(10), model, 2, shuffle=False)
    other.load_state_dicts([sampler.state_dict()])
    assert list(other) == [[4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize(("num_samples", "batch_size"), [(10, 0), (0, 4)])
def test_a_division_without_batches_is_refused(model: nn.Module, num_samples: int, batch_size: int) -> None:
    with pytest.raises(ValueError, match="need a sample each"):
        coarse.torch.ElasticSampler(range(num_samples), model, batch_size)
