"""One worker of `benchmarks/elastic.py` or `new_worker.py`: trains, and writes the time of each of its steps.

    python benchmarks/elastic_workers.py SYSTEM --place N --folder FOLDER --last-step N --model NAME --batch N

A line of FOLDER/steps-PLACE.jsonl is a step: its number, the seconds of the monotonic clock at its begin and end, and
whether it counted. FOLDER/pid-PLACE has the number of the process.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from coarse.bench.models import Workload, build_workload

LEARNING_RATE = 1e-3
TORCHFT_TIMEOUT = timedelta(seconds=5)
"""Of torchft's process group, as in its own example."""


class StepLog:
    """The lines of one worker."""

    def __init__(self, folder: Path, place: int) -> None:
        (folder / f"pid-{place}").write_text(str(os.getpid()))
        self._built = folder / f"built-{place}"
        self._file = (folder / f"steps-{place}.jsonl").open("a", buffering=1)

    def note_built(self) -> None:
        """Writes when this worker has its model, into FOLDER/built-PLACE."""
        self._built.write_text(str(time.monotonic()))

    def write(self, step: int, began_s: float, *, counted: bool = True) -> None:
        """Writes the line of a step that ends now."""
        self._file.write(json.dumps([step, began_s, time.monotonic(), counted]) + "\n")


def train_step(workload: Workload, module: Any, optimizer: Any, step: int) -> None:
    """Forward, backward, update."""
    optimizer.zero_grad()
    workload.loss(module, workload.batches[step % len(workload.batches)]).backward()
    optimizer.step()


def train_with_coarse(workload: Workload, log: StepLog, arguments: argparse.Namespace) -> None:
    """The two lines, under `coarse run --min-workers`."""
    import coarse.torch

    module = coarse.torch.DistributedDataParallel(workload.module)
    optimizer = torch.optim.AdamW(workload.module.parameters(), lr=LEARNING_RATE)
    optimizer = coarse.torch.DistributedOptimizer(optimizer, module)
    for step in range(arguments.last_step):
        began_s = time.monotonic()
        train_step(workload, module, optimizer, step)
        log.write(step, began_s)


def train_with_replacement(
    workload: Workload, log: StepLog, arguments: argparse.Namespace, *, offloads: bool = True
) -> None:
    """As with COARSE, until a new worker has been there for so many steps; under `--on-loss replace`.

    Args:
        workload, log, arguments: As for every system.
        offloads: Whether the optimizer runs in the memory devices; otherwise a new worker gets it from another one.
    """
    import coarse.torch

    coarse.torch.init_process_group()
    module = coarse.torch.DistributedDataParallel(workload.module)
    optimizer = torch.optim.AdamW(workload.module.parameters(), lr=LEARNING_RATE)
    if offloads:
        optimizer = coarse.torch.DistributedOptimizer(optimizer, module)
    session = module.session
    is_new = session.is_newcomer
    log.note_built()
    step = session.join_training(state={"optimizer": optimizer})
    last = step + 1 + arguments.steps_with_newcomer if is_new else sys.maxsize

    def note_change(change: Any) -> None:
        nonlocal last
        if change.joined:
            last = step + arguments.steps_with_newcomer

    session.on_change(note_change)
    while step < last:
        step += 1
        began_s = time.monotonic()
        train_step(workload, module, optimizer, step)
        log.write(step, began_s)


def train_with_torch(workload: Workload, log: StepLog, arguments: argparse.Namespace) -> None:
    """torch DDP under torchrun, which starts all workers again after a loss.

    A restarted job goes on at the last step that every worker had finished, without loading anything: a job that
    loads a checkpoint loses more.
    """
    dist.init_process_group("gloo")
    module = torch.nn.parallel.DistributedDataParallel(workload.module)
    optimizer = torch.optim.AdamW(workload.module.parameters(), lr=LEARNING_RATE)
    for step in range(first_missing_step(arguments.folder), arguments.last_step):
        began_s = time.monotonic()
        train_step(workload, module, optimizer, step)
        log.write(step, began_s)
    dist.destroy_process_group()


def first_missing_step(folder: Path) -> int:
    """The step at which a job goes on: the smallest that some worker has not finished."""
    dist.barrier()
    done = [len(path.read_text().splitlines()) for path in folder.glob("steps-*.jsonl")]
    dist.barrier()
    return min(done)


def train_with_torchft(workload: Workload, log: StepLog, arguments: argparse.Namespace) -> None:
    """torchft: a replica a worker, gloo, the quorum asked for in the forward pass, one all-reduce of all gradients.

    The DistributedDataParallel of torchft 0.2 fails with an AssertionError in its hook when gloo loses a worker.
    """
    import torchft

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TORCHFT_TIMEOUT),
        min_replica_size=arguments.min_workers,
        load_state_dict=lambda state: load_state(workload, optimizer, state),
        state_dict=lambda: {"model": workload.module.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"worker-{arguments.place}",
        timeout=2 * TORCHFT_TIMEOUT,
    )
    optimizer = torchft.Optimizer(manager, torch.optim.AdamW(workload.module.parameters(), lr=LEARNING_RATE))
    while (step := manager.current_step()) < arguments.last_step:
        began_s = time.monotonic()
        optimizer.zero_grad()
        workload.loss(workload.module, workload.batches[step % len(workload.batches)]).backward()
        average(manager, [parameter.grad for parameter in workload.module.parameters()])
        optimizer.step()
        log.write(step, began_s, counted=manager.current_step() > step)
    manager.shutdown(wait=False)


def average(manager: Any, gradients: list[torch.Tensor]) -> None:
    """Averages all gradients as one tensor."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(flat).wait()
    for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def load_state(workload: Workload, optimizer: Any, state: dict[str, Any]) -> None:
    """What torchft calls for a newcomer."""
    workload.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


SYSTEMS: dict[str, Callable[[Workload, StepLog, argparse.Namespace], None]] = {
    "coarse": train_with_coarse,
    "coarse-replace": train_with_replacement,
    "coarse-replace-plain": functools.partial(train_with_replacement, offloads=False),
    "torchft": train_with_torchft,
    "torchrun": train_with_torch,
}


@contextmanager
def own_store(system: str) -> Iterator[None]:
    """torchft wants the store of a replica's own process group."""
    if system != "torchft":
        yield
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), RANK="0", WORLD_SIZE="1")
    yield


def place_of(arguments: argparse.Namespace) -> int:
    """The number of this worker: torchft's replicas are told theirs, the others have a rank."""
    return int(os.environ["RANK"]) if arguments.place is None else int(arguments.place)


def main() -> None:
    parser = argparse.ArgumentParser(description="A worker of benchmarks/elastic.py.")
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--place", type=int)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--last-step", type=int, required=True)
    parser.add_argument("--min-workers", type=int, required=True)
    parser.add_argument("--steps-with-newcomer", type=int, default=200)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--sequence", type=int, required=True)
    arguments = parser.parse_args()
    arguments.place = place_of(arguments)
    torch.set_num_threads(1)
    workload = build_workload(
        arguments.model, batch=arguments.batch, sequence=arguments.sequence, rank=arguments.place
    )
    with own_store(arguments.system):
        SYSTEMS[arguments.system](workload, StepLog(arguments.folder, arguments.place), arguments)


if __name__ == "__main__":
    main()
