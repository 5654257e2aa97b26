"""Compute traces: when each gradient of a model's backward pass is ready, to replay computation.

A trace has only a training step's durations per layer and its tensors' sizes. Replaying it needs no processor, so
that the step of an eight-GPU machine runs on two cores, through the real runtime (coarse.bench.replay.driver).
"""

from __future__ import annotations

import functools
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from coarse.bench.models import NUM_PARAMETERS
from coarse.schema import ITEM_BYTES, TensorSpec

_FORMAT = "coarse compute trace 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientEvent:
    """A gradient that becomes ready in the backward pass.

    Args:
        name: Name of the parameter.
        num_elements: Number of elements of the gradient, at least 1.
        dtype: A name in ITEM_BYTES.
        ready: Time of readiness, as a fraction of the backward pass: 0 <= ready <= 1.

    Raises:
        ValueError: If a value is out of range.
    """

    name: str
    num_elements: int
    dtype: str
    ready: float

    def __post_init__(self) -> None:
        if self.num_elements < 1 or self.dtype not in ITEM_BYTES or not 0 <= self.ready <= 1:
            raise ValueError(f"no gradient of a compute trace: {self}")

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient."""
        return self.num_elements * ITEM_BYTES[self.dtype]

    def spec(self) -> TensorSpec:
        """The gradient as a tensor to register."""
        return TensorSpec(name=self.name, dtype=self.dtype, num_elements=self.num_elements, op="mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTrace:
    """One training step's computation.

    Args:
        model: Its name.
        batch: Samples of one worker.
        sequence: Tokens of one sample; 0 for image models.
        forward_s: Seconds of the forward pass, above 0.
        backward_s: Seconds of the backward pass, above 0.
        flops: Floating-point operations of both passes together.
        events: Gradients in the order in which they become ready: the last layers' first.
        source: The machine of the durations, and whether they were measured there.

    Raises:
        ValueError: If it has no events, they are out of order, one appears twice, or a duration is not positive.
    """

    model: str
    batch: int
    sequence: int
    forward_s: float
    backward_s: float
    flops: float
    events: tuple[GradientEvent, ...]
    source: str

    def __post_init__(self) -> None:
        if min(self.forward_s, self.backward_s, self.flops) <= 0 or not self.events:
            raise ValueError(
                f"compute trace of {self.model}: durations, operations and events must be positive"
            )
        for name, count in Counter(event.name for event in self.events).items():
            if count > 1:
                raise ValueError(f"compute trace of {self.model}: gradient {name} appears twice")
        ready = [event.ready for event in self.events]
        if ready != sorted(ready):
            raise ValueError(
                f"compute trace of {self.model}: gradients are not in the order of their readiness"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients of one worker."""
        return sum(event.nbytes for event in self.events)

    def specs(self) -> list[TensorSpec]:
        """The gradients as tensors to register, in the order of their readiness."""
        return [event.spec() for event in self.events]

    def on_processor(self, tflops: float, source: str) -> ComputeTrace:
        """The same step on a processor that sustains `tflops` (1e12 operations a second) throughout.

        Layers keep their shares of the time. The result is an estimate; mark it as such wherever it is shown.
        """
        factor = self.flops / (tflops * 1e12) / (self.forward_s + self.backward_s)
        return replace(
            self, forward_s=self.forward_s * factor, backward_s=self.backward_s * factor, source=source
        )

    def with_batch(self, batch: int) -> ComputeTrace:
        """The same step with another batch: operations and durations grow with it, and layers keep their shares.

        An estimate; mark it as such wherever it is shown.

        Raises:
            ValueError: If `batch` is below 1.
        """
        if batch < 1:
            raise ValueError(f"a batch of {batch} samples")
        factor = batch / self.batch
        return replace(
            self,
            batch=batch,
            forward_s=self.forward_s * factor,
            backward_s=self.backward_s * factor,
            flops=self.flops * factor,
            source=self.source
            if batch == self.batch
            else f"{self.source}, scaled from a batch of {self.batch}",
        )

    def to_json(self) -> str:
        """JSON text for from_json()."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ComputeTrace:
        """Reads the result of to_json().

        Raises:
            ValueError: If the text is not such a result.
        """
        try:
            fields = json.loads(text)
            if fields.pop("format") != _FORMAT:
                raise ValueError(f"not in the format {_FORMAT!r}")
            fields["events"] = tuple(GradientEvent(**event) for event in fields["events"])
            return cls(**fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"compute trace cannot be read: {error!r}") from None


PEAK_TFLOPS: Mapping[str, float] = MappingProxyType({"V100": 15.7, "P100": 9.3, "T4": 8.1})
"""Peak float32 operations of GPUs, as published by their manufacturers."""

_SUSTAINED_FRACTION = 0.5


def compute_until(moment_s: float) -> None:
    """Waits for the time of a computation without using a processor, until time.perf_counter() is `moment_s`."""
    remaining_s = moment_s - time.perf_counter()
    if remaining_s > 0:
        time.sleep(remaining_s)


def check_tflops(tflops: float) -> None:
    """Refuses impossible processor speeds.

    Raises:
        ValueError: If `tflops` is not above 0 and finite.
    """
    if not 0 < tflops < float("inf"):
        raise ValueError(f"--tflops {tflops} must be above 0")


def place_trace(trace: ComputeTrace, *, gpu: str = "", tflops: float | None = None) -> ComputeTrace:
    """The trace with the durations of another processor.

    Args:
        trace: The recorded trace.
        gpu: A name in PEAK_TFLOPS, half of whose peak is assumed; with any other name the trace is unchanged.
        tflops: Sustained speed of the processor, in 1e12 operations a second; overrides `gpu`.

    Raises:
        ValueError: If `tflops` is not above 0 and finite.
    """
    if tflops is not None:
        check_tflops(tflops)
        return trace.on_processor(tflops, f"scaled to {tflops:g} TFLOPS")
    if gpu not in PEAK_TFLOPS:
        return trace
    sustained = _SUSTAINED_FRACTION * PEAK_TFLOPS[gpu]
    return trace.on_processor(
        sustained, f"scaled to {sustained:g} TFLOPS, assumed to be half of the peak of a {gpu} (--tflops)"
    )


def load_trace(model: str) -> ComputeTrace:
    """The trace of `model` included in COARSE.

    Raises:
        ValueError: If there is none; names the available ones. If its file is wrong or lacks a layer; names the file.
    """
    directory = files("coarse.bench.replay") / "traces"
    known = sorted(
        each.name.removesuffix(".json") for each in directory.iterdir() if each.name.endswith(".json")
    )
    if model not in known:
        raise ValueError(f"there is no compute trace of {model!r}, only of {', '.join(known)}")
    return read_trace(Path(str(directory / f"{model}.json")))


def read_trace(file: Path) -> ComputeTrace:
    """Reads a trace, which has to hold each parameter of a model of coarse.bench.models.

    Raises:
        ValueError: If it cannot be read, or lacks a layer; names the file, and the line of JSON that is none.
    """
    try:
        trace = ComputeTrace.from_json(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}:{error.lineno}: {error.msg}") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    found = sum(event.num_elements for event in trace.events)
    expected = NUM_PARAMETERS.get(trace.model, found)
    if found != expected:
        raise ValueError(
            f"{file}: gradients of {found} parameters, but {trace.model} has {expected}: a layer is missing or has "
            "another size. Record the step again"
        )
    return trace


def record_trace(
    module: Any, run_forward: Any, *, model: str, batch: int, sequence: int, source: str, repeats: int = 5
) -> ComputeTrace:
    """Measures one training step of a torch module on this machine: medians over `repeats` steps after a warm-up.

    Args:
        module: A torch.nn.Module in training mode.
        run_forward: Runs it on a batch and returns the loss.
        model, batch, sequence: Values of the trace's fields.
        source: Describes the measurement and the machine.
        repeats: Number of measured steps, at least 1.
    """
    from torch.utils.flop_counter import FlopCounterMode

    parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
    stamps: dict[str, float] = {}
    hooks = [
        each.register_post_accumulate_grad_hook(functools.partial(_stamp, stamps, name))
        for name, each in parameters.items()
    ]
    with FlopCounterMode(display=False) as counter:
        run_forward().backward()
    steps = [_time_step(run_forward, stamps) for _ in range(repeats)]
    for hook in hooks:
        hook.remove()
    ready = {name: float(np.median([step.ready[name] for step in steps])) for name in stamps}
    return ComputeTrace(
        model=model,
        batch=batch,
        sequence=sequence,
        forward_s=float(np.median([step.forward_s for step in steps])),
        backward_s=float(np.median([step.backward_s for step in steps])),
        flops=float(counter.get_total_flops()),
        events=_events(parameters, ready),
        source=source,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimedStep:
    forward_s: float
    backward_s: float
    ready: dict[str, float]  # by parameter: fraction of the backward pass


def _stamp(stamps: dict[str, float], name: str, parameter: Any) -> None:
    parameter.grad = None
    stamps[name] = time.perf_counter()


def _time_step(run_forward: Any, stamps: dict[str, float]) -> _TimedStep:
    started = time.perf_counter()
    loss = run_forward()
    middle = time.perf_counter()
    loss.backward()
    ended = time.perf_counter()
    ready = {name: (stamp - middle) / (ended - middle) for name, stamp in stamps.items()}
    return _TimedStep(forward_s=middle - started, backward_s=ended - middle, ready=ready)


def _events(parameters: dict[str, Any], ready: dict[str, float]) -> tuple[GradientEvent, ...]:
    ordered: Sequence[str] = sorted(ready, key=lambda name: ready[name])
    return tuple(
        GradientEvent(
            name=name,
            num_elements=parameters[name].numel(),
            dtype=str(parameters[name].dtype).removeprefix("torch."),
            ready=round(ready[name], 6),
        )
        for name in ordered
    )
