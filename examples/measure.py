"""Measures the training of one worker and writes the figures.

Usage:

    recorder = Recorder(job, arguments.report)
    for images, labels in batches:
        with recorder.step(samples=len(labels)):
            ...forward, backward, optimizer...
    recorder.write(model, lambda: loss_of(model(images), labels), accuracy=accuracy)

The same code measures every strategy; it does not depend on the model's wrapper.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from job import Job

STEPS_LEFT_OUT = 10  # the first steps allocate and warm caches, and no later step does
CALIBRATION_ROUNDS = (3, 100)  # minimum and maximum
CALIBRATION_S = 4.0


class Recorder:
    """Times the training steps of one worker and writes them as JSON.

    Args:
        job: This worker's job.
        report: File to write. For a report `digits.json`, worker r writes `digits-r.json`. None: writes nothing,
            and `write` skips its calibration.
    """

    def __init__(self, job: Job, report: Path | None) -> None:
        self._job = job
        self._report = report
        self._step_s: list[float] = []
        self._samples: list[int] = []
        self._ended_at: list[float] = []

    @contextmanager
    def step(self, *, samples: int) -> Iterator[None]:
        """Times its block as one training step with `samples` samples of this worker."""
        began_at = time.perf_counter()
        yield
        self._ended_at.append(time.perf_counter())
        self._step_s.append(self._ended_at[-1] - began_at)
        self._samples.append(samples)

    def write(
        self, model: torch.nn.Module, compute_loss: Callable[[], torch.Tensor], **results: float
    ) -> None:
        """Writes the measurements, `results` and a hash of the parameters; collective.

        Call it last: it runs forward and backward passes of `compute_loss`. These do not change the parameters,
        but they change gradients and the running statistics of normalisation layers.
        """
        if self._report is None:
            return
        synchronised_ms, local_ms = calibrate(model, compute_loss)
        record = {
            "rank": self._job.rank,
            "world_size": self._job.world_size,
            "steps": len(self._step_s),
            "samples_per_s": self._samples_per_s(),
            "step_ms_p50": statistics.median(self._step_s[self._first_counted :]) * 1e3,
            "synchronised_ms_p50": synchronised_ms,
            "local_ms_p50": local_ms,
            "blocked_ms_p50": synchronised_ms - local_ms,
            "param_hash": parameter_hash(model),
            **results,
        }
        path = self._report.with_name(f"{self._report.stem}-{self._job.rank}{self._report.suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=2) + "\n")

    @property
    def _first_counted(self) -> int:
        return min(STEPS_LEFT_OUT, len(self._step_s) // 2)

    def _samples_per_s(self) -> float:
        """This worker's samples divided by wall time, including data loading."""
        first = max(self._first_counted, 1)
        if len(self._ended_at) <= first:
            return self._samples[-1] / self._step_s[-1]
        return sum(self._samples[first:]) / (self._ended_at[-1] - self._ended_at[first - 1])


def calibrate(model: torch.nn.Module, compute_loss: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """Median milliseconds of a step with communication and of the same step without. Collective.

    A step is forward, backward and the wait for the gradients. Both kinds alternate, each from a common start,
    so that changing load on the machine affects both. The difference is the blocked communication time.
    """
    rounds = _agreed_rounds(_timed_step(model, compute_loss, nullcontext()))
    synchronised: list[float] = []
    local: list[float] = []
    for _ in range(rounds):
        synchronised.append(_timed_step(model, compute_loss, nullcontext()))
        local.append(_timed_step(model, compute_loss, model.no_sync()))
    model.zero_grad()
    return statistics.median(synchronised) * 1e3, statistics.median(local) * 1e3


def _agreed_rounds(step_s: float) -> int:
    """Number of rounds that fit into the time on the slowest worker; the same on all workers."""
    slowest_s = torch.tensor(step_s)
    dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
    fewest, most = CALIBRATION_ROUNDS
    return max(fewest, min(most, int(CALIBRATION_S / (2 * float(slowest_s)))))


def _timed_step(
    model: torch.nn.Module, compute_loss: Callable[[], torch.Tensor], mode: AbstractContextManager[None]
) -> float:
    model.zero_grad()
    dist.barrier()
    began_at = time.perf_counter()
    with mode:
        compute_loss().backward()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - began_at


def parameter_hash(model: torch.nn.Module) -> str:
    """SHA-256 of all parameters and their names: equal on two workers if their models are bitwise equal."""
    digest = hashlib.sha256()
    for name, parameter in getattr(model, "module", model).named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
