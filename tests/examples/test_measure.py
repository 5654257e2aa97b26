"""Recorder: a worker's report of its training, and the state that measuring does not change."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from job import Job
from measure import Recorder, parameter_hash


def model_of(value: float) -> torch.nn.Linear:
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, value)
    torch.nn.init.zeros_(model.bias)
    return model


def test_hash_tells_models_apart_and_sees_through_the_wrapper(alone: Job) -> None:
    assert parameter_hash(model_of(1.0)) == parameter_hash(model_of(1.0))
    assert parameter_hash(model_of(1.0)) != parameter_hash(model_of(1.0 + 2**-23))
    assert parameter_hash(model_of(0.0)) != parameter_hash(model_of(-0.0))
    wrapped = torch.nn.parallel.DistributedDataParallel(model_of(1.0))
    assert parameter_hash(wrapped) == parameter_hash(model_of(1.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_hash_takes_every_type(dtype: torch.dtype) -> None:
    assert len(parameter_hash(model_of(1.0).to(dtype))) == 64


def _compute_for(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_report_has_every_figure_and_leaves_the_parameters(alone: Job, tmp_path: Path) -> None:
    model = torch.nn.parallel.DistributedDataParallel(model_of(1.0))
    before = parameter_hash(model)
    recorder = Recorder(alone, tmp_path / "new" / "report.json")
    for _ in range(30):
        with recorder.step(samples=4):
            _compute_for(0.002)
    recorder.write(model, lambda: model(torch.ones(4, 3)).sum(), accuracy=0.5)
    report = json.loads((tmp_path / "new" / "report-0.json").read_text())
    assert report["param_hash"] == before
    assert report["steps"] == 30
    assert report["accuracy"] == 0.5
    assert 2.0 <= report["step_ms_p50"] < 50.0
    assert 4 / 0.05 < report["samples_per_s"] <= 4 / 0.002
    assert report["blocked_ms_p50"] == report["synchronised_ms_p50"] - report["local_ms_p50"]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_step_is_enough_for_a_report(alone: Job, tmp_path: Path) -> None:
    model = torch.nn.parallel.DistributedDataParallel(model_of(1.0))
    recorder = Recorder(alone, tmp_path / "report.json")
    with recorder.step(samples=4):
        pass
    recorder.write(model, lambda: model(torch.ones(4, 3)).sum())
    assert json.loads((tmp_path / "report-0.json").read_text())["samples_per_s"] > 0


def test_nothing_is_measured_without_a_report(alone: Job) -> None:
    Recorder(alone, None).write(model_of(1.0), lambda: pytest.fail("calibrated"))
