"""One worker of a job whose workers are killed: trains digits until the job is told its last step.

    python -m experiments.elastic.worker SYSTEM --folder FOLDER --batch N --seed N [--place N]

All systems train the same model from the same parameters, on the same batches: which samples a worker takes in a step
depends on its place, the number of the step and the seed alone. What a worker writes into FOLDER:

    ready-PLACE        a line for each process: when it had imported all and built model and optimizer, and its id
    steps-PLACE.jsonl  a line for each step: its number, its begin and end, whether it counted
    end-PLACE          the accuracy of the final parameters
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.elastic_workers import LEARNING_RATE, TORCHFT_TIMEOUT, average, load_state, own_store
from coarse.bench.models import Workload, build_workload

CHECKPOINT_STEPS = 100
"""Steps between two checkpoints under torchrun: less than a second's."""

GLOO_TIMEOUT = timedelta(seconds=20)
"""Under torchrun. Restarted workers now and then wait for those that have ended; then all are restarted once more."""

MIN_WORKERS = 1


class Job:
    """This worker's part of the job: its data, model, optimizer and log.

    Args:
        folder: Of the job's files; has the data as `digits.npz`.
        place: This worker's number, which the process that replaces it has too.
        batch: Samples of a step.
        seed: Of the batches.
    """

    def __init__(self, folder: Path, place: int, *, batch: int, seed: int) -> None:
        self.folder, self.place = folder, place
        self._batch, self._seed = batch, seed
        self._data = {
            name: torch.from_numpy(values) for name, values in np.load(folder / "digits.npz").items()
        }
        self.workload: Workload = build_workload("digits", batch=batch, sequence=0, rank=0)
        self.optimizer = torch.optim.AdamW(self.workload.module.parameters(), lr=LEARNING_RATE)
        self._steps = (folder / f"steps-{place}.jsonl").open("a", buffering=1)
        self._stop = folder / "stop"
        self._last_step = sys.maxsize

    @property
    def module(self) -> nn.Module:
        """The model, with the same parameters in all workers."""
        module: nn.Module = self.workload.module
        return module

    def note_ready(self) -> None:
        """Writes that this process has imported all and built model and optimizer."""
        with (self.folder / f"ready-{self.place}").open("a") as file:
            file.write(f"{time.monotonic()} {os.getpid()}\n")

    def is_before_end(self, step: int) -> bool:
        """Whether this step is to be made."""
        if self._last_step == sys.maxsize and self._stop.exists():
            self._last_step = int(self._stop.read_text())
        return step < self._last_step

    def backward(self, module: nn.Module, optimizer: Any, step: int) -> None:
        """Forward and backward of a step."""
        optimizer.zero_grad()
        self.workload.loss(module, self._batch_of(step)).backward()

    def _batch_of(self, step: int) -> dict[str, torch.Tensor]:
        chance = torch.Generator().manual_seed((self._seed << 40) + (step << 8) + self.place)
        chosen = torch.randint(len(self._data["labels"]), (self._batch,), generator=chance)
        pixels = shifted(self._data["pixels"][chosen], chance)
        return {"pixels": pixels, "labels": self._data["labels"][chosen]}

    def note_step(self, step: int, began_s: float, *, counted: bool = True) -> None:
        """Writes the line of a step that ends now."""
        self._steps.write(json.dumps([step, began_s, time.monotonic(), counted]) + "\n")

    @torch.no_grad()
    def finish(self) -> None:
        """Writes the accuracy of the parameters as they are."""
        rows = self.module.eval()(self._data["test_pixels"])
        accuracy = (rows.argmax(dim=1) == self._data["test_labels"]).float().mean().item()
        (self.folder / f"end-{self.place}").write_text(str(accuracy))


def shifted(images: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    """The 8x8 images, each moved by up to one pixel along each axis."""
    windows = nn.functional.pad(images, (1, 1, 1, 1)).unfold(2, 8, 1).unfold(3, 8, 1)
    rows, columns = torch.randint(0, 3, (2, len(images)), generator=chance)
    return windows[torch.arange(len(images)), :, rows, columns]


def train_with_coarse(job: Job) -> None:
    """The optimizer in the memory devices; new workers take the places of lost ones."""
    import coarse.torch

    job.note_ready()
    coarse.torch.init_process_group()
    model = coarse.torch.DistributedDataParallel(job.module)
    optimizer = coarse.torch.DistributedOptimizer(job.optimizer, model)
    step = 0 if model.session is None else model.session.join_training()
    while job.is_before_end(step):
        began_s = time.monotonic()
        job.backward(model, optimizer, step)
        optimizer.step()
        job.note_step(step, began_s)
        step += 1


def train_with_torchrun(job: Job) -> None:
    """torch DDP under torchrun, which starts all workers again after a loss: they go on from the last checkpoint."""
    job.note_ready()
    dist.init_process_group("gloo", timeout=GLOO_TIMEOUT)
    checkpoint = job.folder / "checkpoint.pt"
    step = load_checkpoint(checkpoint, job)
    model = nn.parallel.DistributedDataParallel(job.module)
    while job.is_before_end(step):
        began_s = time.monotonic()
        job.backward(model, job.optimizer, step)
        job.optimizer.step()
        job.note_step(step, began_s)
        step += 1
        if step % CHECKPOINT_STEPS == 0 and dist.get_rank() == 0:
            save_checkpoint(checkpoint, job, step)
    job.finish()
    os._exit(0)  # destroying the group waits now and then for a worker that has ended before


def load_checkpoint(path: Path, job: Job) -> int:
    """Restores a checkpoint if there is one; returns the number of the next step."""
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    load_state(job.workload, job.optimizer, saved)
    return int(saved["step"])


def save_checkpoint(path: Path, job: Job, step: int) -> None:
    """Replaces the checkpoint; a worker that is killed meanwhile leaves the old one."""
    new = path.with_suffix(".new")
    torch.save({"model": job.module.state_dict(), "optimizer": job.optimizer.state_dict(), "step": step}, new)
    new.replace(path)


def train_with_torchft(job: Job) -> None:
    """torchft: a replica a worker, gloo, one all-reduce of all gradients.

    A new replica takes the parameters of another one in its first step, to which it contributes nothing.
    """
    import torchft

    job.note_ready()
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TORCHFT_TIMEOUT),
        min_replica_size=MIN_WORKERS,
        load_state_dict=lambda state: load_state(job.workload, optimizer, state),
        state_dict=lambda: {"model": job.module.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"worker-{job.place}",
        timeout=2 * TORCHFT_TIMEOUT,
    )
    optimizer = torchft.Optimizer(manager, job.optimizer)
    while job.is_before_end(manager.current_step()):
        began_s = time.monotonic()
        job.backward(job.module, optimizer, manager.current_step())
        average(manager, [parameter.grad for parameter in job.module.parameters()])
        step, takes_part = manager.current_step(), manager.is_participating()
        optimizer.step()
        job.note_step(step, began_s, counted=takes_part and manager.current_step() > step)
    manager.shutdown(wait=False)


SYSTEMS: dict[str, Callable[[Job], None]] = {
    "coarse": train_with_coarse,
    "torchft": train_with_torchft,
    "torchrun": train_with_torchrun,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="A worker of experiments/elastic.")
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--place", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    place = int(os.environ["RANK"]) if arguments.place is None else arguments.place
    job = Job(arguments.folder, place, batch=arguments.batch, seed=arguments.seed)
    with own_store(arguments.system):
        SYSTEMS[arguments.system](job)
        job.finish()


if __name__ == "__main__":
    main()
