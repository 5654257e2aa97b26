"""Goodput: the share of time that a job trains in spite of failures, each system with its own recovery.

    failure ─► pause (others end, processes start, state is read) ─► steps ─► checkpoint ─► steps ─► failure ...

A failure loses the step in progress, and all steps since the last checkpoint if the state is lost with it. The job
then pauses. A failure during the pause begins it anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from coarse.machine.description import Figure
from coarse.simulator.training_step import StepResult

_BYTES_PER_S = 1e9  # for one GB/s
_HOUR_S, _DAY_S = 3600.0, 86400.0
_NUM_FAILURES = 4000

RESTART_S = Figure(
    value=7.5,
    source="experiments/recovery: a kill until the job is further than before, 2 workers on one machine, without "
    "the time for reading the state",
    kind="measured",
)
READ_GBYTES_PER_S = Figure(
    value=1.1,
    source="experiments/recovery: 288 MiB by torch.load in 267 ms, from the page cache",
    kind="measured",
)
SAVE_GBYTES_PER_S = Figure(
    value=0.39, source="docs/benchmarks.md: 1.2 GiB by torch.save add 3.34 s to training", kind="measured"
)
BACKGROUND_SAVE_GBYTES_PER_S = Figure(
    value=1.4, source="docs/benchmarks.md: 1.2 GiB by COARSE's Checkpointer add 0.92 s", kind="measured"
)
REGISTER_S = Figure(
    value=0.07, source="experiments/recovery: registering and taking over state in memory", kind="measured"
)
QUORUM_S = Figure(
    value=5.0, source="torchft's lighthouse misses heartbeats for its default of 5 s", kind="recalled"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The cost of a failure under a system.

    Args:
        what: In words.
        worker_pause_s: Seconds without training after the loss of a worker.
        device_pause_s: The same for a memory device.
        is_worker_state_lost: Whether the loss of a worker sends the job back to a checkpoint.
        is_device_state_lost: The same for a memory device.
        checkpoint_s: Seconds that one checkpoint adds; 0 if the system needs none.
        absence_s: Seconds for which the others train without a lost worker.

    Raises:
        ValueError: If a time is negative or not finite.
    """

    what: str
    worker_pause_s: float
    device_pause_s: float = 0.0
    is_worker_state_lost: bool = False
    is_device_state_lost: bool = False
    checkpoint_s: float = 0.0
    absence_s: float = 0.0

    def __post_init__(self) -> None:
        times = (self.worker_pause_s, self.device_pause_s, self.checkpoint_s, self.absence_s)
        if min(times) < 0 or not math.isfinite(sum(times)):
            raise ValueError(f"times of a recovery are finite and start at 0: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The result of a job in spite of failures; simulated.

    Args:
        failures_per_day: Failures of the job.
        share: Steps that count, relative to those without failures and checkpoints.
        steps_per_hour: Steps that count, each of all workers.
        checkpoint_every_s: Time between checkpoints; infinite without any.
    """

    failures_per_day: float
    share: float
    steps_per_hour: float
    checkpoint_every_s: float


def recoveries(
    result: StepResult, *, restart_s: float = RESTART_S.value, num_states: int = 2
) -> Mapping[str, Recovery]:
    """The recoveries that fit a scheme, by name.

    Args:
        result: A step of the scheme.
        restart_s: Time until restarted processes train again, without reading state.
        num_states: Optimizer states of the size of the parameters.
    """
    state_bytes = result.model_bytes * (1 + num_states)
    read_s = state_bytes / (READ_GBYTES_PER_S.value * _BYTES_PER_S)
    if result.scheme in _WITH_MEMORY_DEVICES:
        return _of_memory_devices(restart_s, read_s, state_bytes)
    checkpoint = Recovery(
        what="all restart from the last checkpoint",
        worker_pause_s=restart_s + read_s,
        device_pause_s=restart_s + read_s,
        is_worker_state_lost=True,
        is_device_state_lost=True,
        checkpoint_s=state_bytes / (SAVE_GBYTES_PER_S.value * _BYTES_PER_S),
    )
    if result.num_workers == 1 or not result.scheme.startswith("allreduce"):
        return MappingProxyType({"checkpoint": checkpoint})
    discard = Recovery(
        what="the others discard the step and go on (as torchft); the lost worker copies their state",
        worker_pause_s=QUORUM_S.value + read_s,
        absence_s=restart_s,
    )
    return MappingProxyType({"checkpoint": checkpoint, "discard step": discard})


_WITH_MEMORY_DEVICES = (
    "coarse",
    "offload",
    "offload-ring",
    "offload-direct",
    "workers",
    "dense",
    "dense-least",
)


def _of_memory_devices(restart_s: float, read_s: float, state_bytes: float) -> Mapping[str, Recovery]:
    from_memory_s = restart_s + REGISTER_S.value
    return MappingProxyType(
        {
            "memory": Recovery(
                what="workers restart from memory; if a memory device is lost, from the last checkpoint",
                worker_pause_s=from_memory_s,
                device_pause_s=restart_s + read_s,
                is_device_state_lost=True,
                checkpoint_s=state_bytes / (BACKGROUND_SAVE_GBYTES_PER_S.value * _BYTES_PER_S),
            ),
            "memory, replicas": Recovery(
                what="workers restart from memory; if a memory device is lost, its replica replaces it",
                worker_pause_s=from_memory_s,
                device_pause_s=from_memory_s + read_s,
            ),
        }
    )


def goodput(
    result: StepResult, recovery: Recovery, hours_between_failures: float, *, seed: int = 0
) -> Goodput:
    """Trains until thousands of failures have happened, at moments that the seed decides.

    Args:
        result: A step of the scheme without failures.
        recovery: The system's recovery.
        hours_between_failures: Mean time between failures of one worker or memory device (exponential).
        seed: Equal seeds give equal results.

    Raises:
        ValueError: If the mean time is not above 0 and finite.
    """
    if not 0 < hours_between_failures < math.inf:
        raise ValueError(f"{hours_between_failures:g} hours between failures are not above 0 and finite")
    mean_s = hours_between_failures * _HOUR_S
    num_devices = result.num_devices if result.memory.device_bytes else 0
    rates = (result.num_workers / mean_s, num_devices / mean_s)
    run = _Run(result.step_s, recovery, rates)
    share = run.share(np.random.default_rng(seed))
    share *= 1 - min(1.0, sum(rates) * recovery.absence_s / result.num_workers)
    return Goodput(
        failures_per_day=sum(rates) * _DAY_S,
        share=share,
        steps_per_hour=share * _HOUR_S / result.step_s,
        checkpoint_every_s=run.interval_s,
    )


class _Run:
    """A job between failures.

    Args:
        step_s: Time of a step.
        recovery: The system's recovery.
        rates: Failures per second of workers and of memory devices.
    """

    def __init__(self, step_s: float, recovery: Recovery, rates: tuple[float, float]) -> None:
        self._step_s, self._recovery, self._rates = step_s, recovery, rates
        self._steps_of_interval = self._choose_interval()

    @property
    def interval_s(self) -> float:
        return self._steps_of_interval * self._step_s

    def share(self, chance: np.random.Generator) -> float:
        """Steps that count, relative to the steps that fit into the time."""
        worker_rate, device_rate = self._rates
        gaps = chance.exponential(1 / (worker_rate + device_rate), _NUM_FAILURES)
        hits_worker = chance.random(_NUM_FAILURES) < worker_rate / (worker_rate + device_rate)
        counted = since_checkpoint = 0.0
        pause_s = 0.0
        for gap_s, is_worker in zip(gaps.tolist(), hits_worker.tolist(), strict=True):
            before = since_checkpoint
            done, since_checkpoint = self._train(max(0.0, gap_s - pause_s), before)
            counted += done
            longest_s, is_lost = self._cost(is_worker)
            pause_s = max(longest_s, pause_s - gap_s)
            if is_lost:
                counted -= since_checkpoint
                since_checkpoint = 0.0
        return counted * self._step_s / float(gaps.sum())

    def _train(self, seconds: float, before: float) -> tuple[float, float]:
        """Steps done, and steps since the last checkpoint, after training for a time with `before` of them."""
        step_s, interval = self._step_s, self._steps_of_interval
        if math.isinf(interval):
            done = seconds // step_s
            return done, before + done
        cycle_s = interval * step_s + self._recovery.checkpoint_s
        cycles, rest_s = divmod(before * step_s + seconds, cycle_s)
        since = min(interval, rest_s // step_s)
        return cycles * interval + since - before, since

    def _cost(self, is_worker: bool) -> tuple[float, bool]:
        recovery = self._recovery
        if is_worker:
            return recovery.worker_pause_s, recovery.is_worker_state_lost
        return recovery.device_pause_s, recovery.is_device_state_lost

    def _choose_interval(self) -> float:
        """Steps between checkpoints: Young's sqrt(2 c / rate), at least 1; infinite if no failure needs any."""
        recovery = self._recovery
        losing = (recovery.is_worker_state_lost, recovery.is_device_state_lost)
        rate = sum(rate for rate, is_lost in zip(self._rates, losing, strict=True) if is_lost)
        if not rate:
            return math.inf
        return max(1.0, math.floor(math.sqrt(2 * recovery.checkpoint_s / rate) / self._step_s))
