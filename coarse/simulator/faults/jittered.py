"""Steps whose workers compute for random times."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coarse.simulator.events.engine import Progress
from coarse.simulator.faults.disturbances import Jitter
from coarse.simulator.setup import Setup
from coarse.simulator.training_step import SIMULATED, simulate_step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times of several steps of a scheme; simulated.

    Args:
        scheme: Its name.
        steps_s: Seconds of each step.
    """

    scheme: str
    steps_s: tuple[float, ...]

    @property
    def mean_s(self) -> float:
        return float(np.mean(self.steps_s))

    def percentile_s(self, percent: float) -> float:
        """The time within which this share of the steps ends."""
        return float(np.percentile(self.steps_s, percent))

    def as_json(self) -> dict[str, Any]:
        """The fields of a record."""
        return {
            "kind": SIMULATED,
            "scheme": self.scheme,
            "steps_s": list(self.steps_s),
            "mean_s": self.mean_s,
        }


def simulate_jittered(
    setup: Setup, scheme: str, jitter: Jitter, progress: Progress | None = None
) -> StepTimes:
    """Simulates steps, each with its own random times of all workers.

    Raises:
        ValueError: As simulate_step().
    """
    steps = (
        simulate_step(replace(setup, disturbances=each), scheme, progress)
        for each in jitter.steps(setup.num_workers, setup.disturbances)
    )
    return StepTimes(scheme=scheme, steps_s=tuple(step.step_s for step in steps))
