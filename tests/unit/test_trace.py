"""Recorded training steps: files describe their contents; impossible contents are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coarse.bench.models import NUM_PARAMETERS
from coarse.bench.replay.trace import ComputeTrace, GradientEvent, load_trace, read_trace, record_trace

fractions = st.floats(0, 1)


def _event(ready: float = 0.5, num_elements: int = 8) -> GradientEvent:
    return GradientEvent(name=f"p{ready}", num_elements=num_elements, dtype="float32", ready=ready)


def _trace(*events: GradientEvent, forward_s: float = 1.0) -> ComputeTrace:
    return ComputeTrace(
        model="m",
        batch=1,
        sequence=0,
        forward_s=forward_s,
        backward_s=2.0,
        flops=3e12,
        events=events,
        source="test",
    )


@given(st.lists(fractions, min_size=1, max_size=20))
def test_survives_json(ready: list[float]) -> None:
    trace = _trace(*map(_event, sorted(set(ready))))
    assert ComputeTrace.from_json(trace.to_json()) == trace


def test_events_are_in_the_order_of_readiness() -> None:
    with pytest.raises(ValueError, match="order"):
        _trace(_event(0.9), _event(0.1))


@pytest.mark.parametrize("forward_s", [0.0, -1.0])
def test_durations_are_positive(forward_s: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        _trace(_event(), forward_s=forward_s)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "Expecting"), ("[]", "read"), ("{}", "format"), ('{"format": "another"}', "not in the format")],
)
def test_what_is_no_trace_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ComputeTrace.from_json(text)


def test_unknown_field_is_refused() -> None:
    fields = json.loads(_trace(_event()).to_json())
    with pytest.raises(ValueError, match="colour"):
        ComputeTrace.from_json(json.dumps({**fields, "colour": 1}))


def test_another_processor_keeps_the_shares_of_the_time() -> None:
    faster = _trace(_event()).on_processor(10.0, "assumed")
    assert faster.forward_s + faster.backward_s == pytest.approx(0.3)
    assert faster.backward_s / faster.forward_s == pytest.approx(2.0)
    assert faster.source == "assumed"


@pytest.mark.parametrize("model", ["bert-large", "bert-base", "resnet50"])
def test_packaged_traces_hold_every_parameter(model: str) -> None:
    trace = load_trace(model)
    assert sum(event.num_elements for event in trace.events) == NUM_PARAMETERS[model]
    assert len(trace.specs()) == len({spec.name for spec in trace.specs()})


def test_a_gradient_appears_once() -> None:
    with pytest.raises(ValueError, match=r"gradient p0\.5 appears twice"):
        _trace(_event(), _event())


def test_a_trace_without_a_layer_is_refused(tmp_path: Path) -> None:
    trace = load_trace("resnet50")
    file = tmp_path / "resnet50.json"
    file.write_text(replace(trace, events=trace.events[1:]).to_json())
    with pytest.raises(
        ValueError, match=f"^{file}: gradients of .* but resnet50 has 25557032: a layer is missing"
    ):
        read_trace(file)
    file.write_text(trace.to_json())
    assert read_trace(file) == trace


def test_a_file_that_is_no_json_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "resnet50.json"
    file.write_text('{\n "model": \n')
    with pytest.raises(ValueError, match=f"^{file}:3: Expecting value"):
        read_trace(file)
    file.write_text("{}")
    with pytest.raises(ValueError, match=f"^{file}: compute trace cannot be read"):
        read_trace(file)


def test_unknown_model_names_those_that_there_are() -> None:
    with pytest.raises(
        ValueError,
        match="alexnet, bert-base, bert-large, bert-small, gpt2-medium, resnet152, resnet50, vgg16",
    ):
        load_trace("gpt")


def test_a_recorded_trace_follows_the_backward_pass() -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    batch = torch.randn(128, 64)
    trace = record_trace(
        module,
        lambda: module(batch).square().mean(),
        model="mlp",
        batch=128,
        sequence=0,
        source="test",
        repeats=3,
    )
    names = [event.name for event in trace.events]
    assert set(names) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert set(names[:2]) == {"2.weight", "2.bias"}
    assert trace.flops == 3 * 2 * 128 * 64 * 256 * 2 - 2 * 128 * 64 * 256  # no gradient of the input
