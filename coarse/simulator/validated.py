"""The questions for which simulated steps were compared with emulated ones (docs/simulator.md), and others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from coarse.machine.catalogue import load_machine
from coarse.simulator.setup import Setup

MACHINES = ("aws-p3", "sdsc-p100")
SCHEMES = ("coarse", "offload", "workers", "dense")
MOST_WORKERS = 4

_FAR = 10  # times the largest validated number


def outside_validated_range(setup: Setup, schemes: Iterable[str]) -> Iterator[str]:
    """The ways in which a question lies outside of what was validated, in words; none inside.

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
