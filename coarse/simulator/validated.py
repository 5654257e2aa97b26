"""The questions for which simulated steps were compared with emulated ones (docs/simulator.md), and others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from coarse.machine.catalogue import load_machine
from coarse.simulator.setup import Setup

MACHINES = ("aws-p3", "sdsc-p100")
SCHEMES = ("coarse", "offload", "workers", "dense")
MOST_WORKERS = 4

_FAR = 10  # times the largest validated number


class Validation(NamedTuple):
    """A step that was emulated and simulated: times of the step, and of it without computation.

    `first_come_ms` is the simulated step if links serve first come, first served, as the emulator's.
    """

    machine: str
    num_workers: int
    model: str
    scheme: str
    emulated_ms: float
    emulated_blocked_ms: float
    simulated_ms: float
    simulated_blocked_ms: float
    first_come_ms: float

    @property
    def blocked_residual(self) -> float:
        """Of blocked time, because computation is given; relative to the emulated one."""
        return self.simulated_blocked_ms / self.emulated_blocked_ms - 1


VALIDATIONS = (
    Validation("aws-p3", 4, "bert-base", "offload", 79.9, 25.9, 80.7, 26.6, 79.8),
    Validation("aws-p3", 4, "bert-base", "workers", 75.2, 21.2, 74.9, 20.9, 74.9),
    Validation("aws-p3", 4, "bert-base", "coarse", 74.8, 20.8, 73.4, 19.4, 70.3),
    Validation("aws-p3", 4, "bert-base", "dense", 918.4, 864.3, 914.7, 860.7, 914.6),
    Validation("aws-p3", 2, "bert-base", "offload", 79.9, 25.9, 80.6, 26.5, 79.8),
    Validation("aws-p3", 2, "bert-base", "workers", 79.2, 25.2, 79.0, 25.0, 79.0),
    Validation("aws-p3", 2, "bert-base", "coarse", 62.9, 8.9, 66.8, 12.8, 62.5),
    Validation("aws-p3", 2, "bert-base", "dense", 915.5, 861.5, 914.7, 860.7, 914.6),
    Validation("sdsc-p100", 2, "bert-base", "offload", 113.7, 22.5, 110.0, 18.9, 113.3),
    Validation("sdsc-p100", 2, "bert-base", "workers", 101.8, 10.6, 101.6, 10.4, 101.6),
    Validation("sdsc-p100", 2, "bert-base", "coarse", 100.3, 9.1, 100.0, 8.8, 99.3),
    Validation("sdsc-p100", 2, "bert-base", "dense", 833.5, 742.3, 832.7, 741.5, 832.6),
    Validation("aws-p3", 4, "bert-large", "offload", 249.7, 61.3, 250.3, 62.0, 249.6),
    Validation("aws-g4dn", 4, "bert-large", "offload", 441.2, 76.1, 436.0, 70.9, 441.0),
    Validation("dgx1-volta", 4, "bert-large", "offload", 79.9, 32.8, 79.0, 31.9, 79.9),
    Validation("sdsc-p100", 2, "bert-large", "offload", 308.3, 149.3, 274.2, 115.2, 305.3),
)
"""The rows of docs/simulator/validation.md."""


class Uncertainty(NamedTuple):
    """The validated residuals of blocked time, as the range of a simulated step.

    Args:
        low_s, high_s: The step, if its blocked time is as far off as in the worst comparison either way.
        low, high: These residuals.
        num_compared: Number of comparisons.
        is_of_scheme: Whether they are of this scheme; otherwise of all schemes, because it was never compared.
    """

    low_s: float
    high_s: float
    low: float
    high: float
    num_compared: int
    is_of_scheme: bool


def uncertainty(scheme: str, step_s: float, blocked_s: float) -> Uncertainty:
    """The range of a simulated step by the comparisons of its scheme, or of all schemes if there is none."""
    own = [each.blocked_residual for each in VALIDATIONS if each.scheme == scheme]
    residuals = own or [each.blocked_residual for each in VALIDATIONS]
    low, high = min(*residuals, 0.0), max(*residuals, 0.0)
    compute_s = step_s - blocked_s
    return Uncertainty(
        low_s=compute_s + blocked_s / (1 + high),
        high_s=compute_s + blocked_s / (1 + low),
        low=low,
        high=high,
        num_compared=len(residuals),
        is_of_scheme=bool(own),
    )


def outside_validated_range(setup: Setup, schemes: Iterable[str]) -> Iterator[str]:
    """The ways in which a question lies outside of the validation, in words; none inside.

    Raises:
        ValueError: If the machine does not exist.
    """
    if setup.num_workers > _FAR * MOST_WORKERS:
        yield (
            f"{setup.num_workers} workers are more than {_FAR} times the largest validated number, {MOST_WORKERS}"
        )
    unknown = sorted(_links_of(setup) - _validated_links())
    if unknown:
        yield f"no step over links of this kind was validated: {', '.join(unknown)}"
    if setup.disturbances:
        yield "no step with stragglers or slow links was validated"
    others = [scheme for scheme in schemes if scheme not in SCHEMES]
    if others:
        yield f"not validated: {', '.join(others)} (validated: {', '.join(SCHEMES)})"


def _links_of(setup: Setup) -> set[str]:
    if setup.is_generated:
        return {setup.machine}
    return {link.name for link in load_machine(setup.machine).links}


def _validated_links() -> set[str]:
    return {link.name for name in MACHINES for link in load_machine(name).links}
