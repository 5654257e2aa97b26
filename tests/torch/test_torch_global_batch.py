"""A global batch: each step is one of a single process on the samples of all workers, however many there are."""

from __future__ import annotations

import contextlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from global_batch_script import (
    BATCH,
    GLOBAL_BATCH,
    LOST_STEP,
    NUM_SAMPLES,
    build_model,
    data,
    dtype_of,
    parameters_of,
)
from launching import launch
from torch import nn

import coarse.torch

SCRIPT = Path(__file__).parent / "global_batch_script.py"
COARSE_RUN = ("coarse", "run", "-n", "3", "--min-workers", "2", "--memory-devices", "2")
REPLACING = ("--on-loss", "replace", "--max-restarts", "1")
STEPS_OF_AN_EPOCH = 12

Parts = list[tuple[list[list[int]], float]]
"""Of a step: each worker's batches, and the sum of its weighted losses."""


def run(folder: Path, mode: str, *options: str) -> dict[int, Parts]:
    """The steps of a job, by number."""
    launch(COARSE_RUN, SCRIPT, (str(folder), mode), *options)
    steps = defaultdict(list)
    for path in folder.glob("steps-*"):
        for line in path.read_text().splitlines():
            step, *part = json.loads(line)
            steps[step].append(tuple(part))
    return dict(sorted(steps.items()))


def samples_of(parts: Parts) -> list[int]:
    return [sample for batches, _ in parts for batch in batches for sample in batch]


def check_as_one_process(folder: Path, mode: str, steps: Mapping[int, Parts]) -> None:
    """Trains one process on the same samples, with the same losses and parameters."""
    inputs, targets = data(dtype_of(mode))
    module, optimizer = build_model(dtype_of(mode))
    for step, parts in steps.items():
        samples = samples_of(parts)
        loss = nn.functional.mse_loss(module(inputs[samples]), targets[samples])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses = [loss for _, loss in parts]
        assert sum(losses) / len(losses) == pytest.approx(loss.item(), rel=1e-5), step
    for path in folder.glob("end-*"):
        assert json.loads(path.read_text()) == pytest.approx(parameters_of(module), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("mode", ["plain", "optimizer"])
def test_a_lost_worker_changes_neither_the_global_batch_nor_its_mean(tmp_path: Path, mode: str) -> None:
    steps = run(tmp_path, mode)
    sizes = {step: len(samples_of(parts)) for step, parts in steps.items()}
    assert sizes.pop(LOST_STEP) == 6, "without those of the lost worker"
    end_of_epoch = STEPS_OF_AN_EPOCH
    assert (sizes.pop(end_of_epoch), sizes.pop(2 * end_of_epoch)) == (3, 3)
    assert set(sizes.values()) == {GLOBAL_BATCH}
    batches = {
        step: [len(batch) for batches, _ in parts for batch in batches] for step, parts in steps.items()
    }
    assert batches[1] == [3, 3, 3]
    assert sorted(batches[LOST_STEP + 1]) == [2, 2, 2, 3], "two each, of 5 and 4 samples"
    assert max(map(max, batches.values())) == BATCH
    check_as_one_process(tmp_path, mode, steps)
    epoch = [sample for step in steps if step > STEPS_OF_AN_EPOCH for sample in samples_of(steps[step])]
    assert sorted(epoch) == list(range(NUM_SAMPLES)), "each once"


def test_a_new_worker_begins_with_the_first_batch_of_a_step(tmp_path: Path) -> None:
    steps = run(tmp_path, "replace", *REPLACING)
    (entry, *_) = (step for step, parts in steps.items() if step > LOST_STEP and len(parts) == 3)
    sizes = {14: "5 and 4 of the others", 12: "at the end of an epoch", 5: "2 and 1 of the others"}
    assert len(samples_of(steps[entry])) in sizes, "those that the others had, and more"
    after = [len(samples_of(steps[step])) for step in range(entry + 1, max(steps))]
    assert after.count(GLOBAL_BATCH) >= len(after) - 1, "but for the end of an epoch"
    check_as_one_process(tmp_path, "replace", steps)


# ---- in a job of one worker ----


@pytest.fixture
def model() -> Iterator[nn.Module]:
    yield coarse.torch.DistributedDataParallel(nn.Linear(1, 1))
    dist.destroy_process_group()


def sampler_of(model: nn.Module) -> coarse.torch.ElasticSampler:
    return coarse.torch.ElasticSampler(range(24), model, 4, shuffle=False, global_batch_size=10)


def mean_loss_of(model: nn.Module, batch: list[int]) -> torch.Tensor:
    return model(torch.tensor(batch)[:, None].float()).mean()


def test_one_worker_accumulates_all_batches_of_a_step(model: nn.Module) -> None:
    sampler = sampler_of(model)
    assert len(sampler) == 3 + 3 + 1
    seen = []
    for batch in sampler:
        with sampler.accumulate():
            loss = mean_loss_of(model, batch)
        weight = (sampler.weighted(loss) / loss).item()
        seen.append((batch, pytest.approx(weight), sampler.completes_step))
    first = [([0, 1, 2, 3], 0.4, False), ([4, 5, 6], 0.3, False), ([7, 8, 9], 0.3, True)]
    assert seen[:3] == first
    assert [batch for batch, *_ in seen[3:]] == [
        [10, 11, 12, 13],
        [14, 15, 16],
        [17, 18, 19],
        [20, 21, 22, 23],
    ]
    assert seen[-1][1:] == (1.0, True)


def test_an_iterator_that_begins_within_a_step_goes_on_there(model: nn.Module) -> None:
    sampler = sampler_of(model)
    for batch in sampler:
        with sampler.accumulate():
            sampler.weighted(mean_loss_of(model, batch)).backward()
        break
    assert len(sampler) == 6
    assert next(iter(sampler)) == [4, 5, 6]


def test_a_step_that_is_not_complete_is_not_part_of_the_state(model: nn.Module) -> None:
    sampler = sampler_of(model)
    batch = next(iter(sampler))
    with sampler.accumulate():
        sampler.weighted(mean_loss_of(model, batch)).backward()
    other = sampler_of(model)
    other.load_state_dict(sampler.state_dict())
    assert next(iter(other)) == [0, 1, 2, 3]


@pytest.mark.parametrize("lacking", ["accumulate()", "weighted()", "completes_step"])
def test_a_loop_that_would_update_by_something_else_than_the_mean_is_refused(
    model: nn.Module, lacking: str
) -> None:
    """Also while each worker has one batch in a step, for that may change by a loss."""
    sampler = coarse.torch.ElasticSampler(range(24), model, 4, global_batch_size=4)

    def train() -> None:
        for batch in sampler:
            with contextlib.nullcontext() if lacking == "accumulate()" else sampler.accumulate():
                loss = mean_loss_of(model, batch)
                (loss if lacking == "weighted()" else sampler.weighted(loss)).backward()
            assert lacking == "completes_step" or sampler.completes_step

    with pytest.raises(RuntimeError, match=f"it lacks {re.escape(lacking)};"):
        train()


def test_a_global_batch_without_a_sample_for_each_worker_is_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="global_batch_size=0: each of up to 1 worker"):
        coarse.torch.ElasticSampler(range(24), model, 4, global_batch_size=0)
