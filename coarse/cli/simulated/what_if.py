"""`coarse plan --what-if`: a step on another machine, simulated, in words and with its uncertainty."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coarse.cli.display.tables import print_table

if TYPE_CHECKING:  # slow to import; `coarse --help` must not load these
    from coarse.bench.replay.trace import ComputeTrace
    from coarse.simulator.setup import Setup
    from coarse.simulator.training_step import StepResult
    from coarse.simulator.validated import Uncertainty

_SCHEMES = ("coarse", "offload", "allreduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """The user's machine, for comparison.

    Args:
        machine: Its name.
        num_workers: Its workers.
        kind: Whether its links were measured, emulated or simulated.
        step_s: A step there, as the planner predicts it.
        trace: Computation of a worker there.
    """

    machine: str
    num_workers: int
    kind: str
    step_s: float
    trace: ComputeTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Steps on the other machine.

    Args:
        setup: The question.
        doubts: The ways in which it lies outside of the validation.
        steps: The step of each scheme, and its uncertainty.
        here: The user's machine; None if nothing is known of it.
        are_times_recorded: Whether workers there compute as fast as the processor that recorded the model.
    """

    setup: Setup
    doubts: Sequence[str]
    steps: Sequence[tuple[StepResult, Uncertainty]]
    here: Here | None
    are_times_recorded: bool


def answer(machine: str, num_workers: int, model: str, tflops: float | None, here: Here | None) -> Answer:
    """Simulates a step on `machine`.

    Args:
        machine: Name of a machine, path of its file, or kind of a generated one.
        num_workers: Workers there, each with a memory device.
        model: The model that they train.
        tflops: Speed of a worker there; None for half of its GPU's peak, or recorded times.
        here: The user's machine.

    Raises:
        ValueError: If the machine or model does not exist, or they do not fit together.
    """
    from coarse.bench.replay.trace import load_trace, place_trace
    from coarse.machine.catalogue import load_machine
    from coarse.simulator.machines.generated import KINDS
    from coarse.simulator.setup import Setup
    from coarse.simulator.training_step import simulate_step
    from coarse.simulator.validated import outside_validated_range, uncertainty

    gpu = "" if machine in KINDS else load_machine(machine).topology.gpu
    recorded = load_trace(model)
    trace = place_trace(recorded, gpu=gpu, tflops=tflops)
    setup = Setup(machine=machine, trace=trace, num_workers=num_workers)
    results = [simulate_step(setup, scheme) for scheme in _SCHEMES]
    return Answer(
        setup=setup,
        doubts=tuple(outside_validated_range(setup, _SCHEMES)),
        steps=[(each, uncertainty(each.scheme, each.step_s, each.blocked_s)) for each in results],
        here=here,
        are_times_recorded=trace is recorded,
    )


def print_answer(found: Answer) -> None:
    """Prints the answer, first its parts outside of the validation."""
    print("\n".join(_sentences(found)))
    print_table(
        "A step there, simulated",
        ("scheme", "step, ms", "between, ms", "samples/s", "blocked time in comparisons with emulated steps"),
        [_row(found, result, doubt) for result, doubt in found.steps],
    )


def _sentences(found: Answer) -> Iterator[str]:
    setup, here = found.setup, found.here
    for words in found.doubts:
        yield f"Outside of the validated range: {words}."
    if found.doubts:
        yield "So the true step may lie outside of the range below."
    if here is None:
        yield "No profile of this machine is cached, so nothing is compared with it (`coarse profile` measures one)."
    else:
        yield (
            f"You have {here.num_workers} workers on {here.machine}: a step of {here.trace.model} takes "
            f"{here.step_s * 1e3:.1f} ms there, as planned from {here.kind} links ({here.trace.source})."
        )
    result, doubt = found.steps[0]
    yield (
        f"On {setup.machine} with {setup.num_workers} workers a step takes {result.step_s * 1e3:.1f} ms "
        f"({doubt.low_s * 1e3:.1f} to {doubt.high_s * 1e3:.1f}), of which a worker computes "
        f"{result.compute_s * 1e3:.1f} ms ({setup.trace.source}){_in_proportion(found, result)}."
    )
    if found.are_times_recorded:
        yield "That is the time of the recording's processor; give the speed of a worker there by --tflops."


def _in_proportion(found: Answer, result: StepResult) -> str:
    here = found.here
    if here is None:
        return ""
    before = here.num_workers * here.trace.batch / here.step_s
    return f": {_samples_per_s(found, result) / before:.3g} times your samples per second"


def _samples_per_s(found: Answer, result: StepResult) -> float:
    return result.num_workers * found.setup.trace.batch / result.step_s


def _row(found: Answer, result: StepResult, doubt: Uncertainty) -> tuple[str, ...]:
    compared = f"{doubt.low:+.0%} to {doubt.high:+.0%} in {doubt.num_compared}"
    return (
        result.scheme,
        f"{result.step_s * 1e3:.1f}",
        f"{doubt.low_s * 1e3:.1f} to {doubt.high_s * 1e3:.1f}",
        f"{_samples_per_s(found, result):.1f}",
        compared if doubt.is_of_scheme else f"never compared; other schemes: {compared}",
    )


def answer_as_json(found: Answer) -> Mapping[str, Any]:
    """The answer as JSON values."""
    here = found.here
    return {
        "kind": "simulated",
        "outside_validated_range": list(found.doubts),
        "here": here
        and {
            "machine": here.machine,
            "num_workers": here.num_workers,
            "links": here.kind,
            "step_s": here.step_s,
            "compute": here.trace.source,
        },
        "there": [
            {
                **result.as_json(),
                "compute": found.setup.trace.source,
                "samples_per_s": _samples_per_s(found, result),
                "low_s": doubt.low_s,
                "high_s": doubt.high_s,
                "num_compared": doubt.num_compared,
                "is_of_scheme": doubt.is_of_scheme,
            }
            for result, doubt in found.steps
        ],
    }
