"""Metrics of Keras workers: the endpoint, and the callback for TensorBoard and functions."""

from __future__ import annotations

import json
import math
import socket
import sys

import pytest
from jobs import HERE, Job
from prometheus_client.parser import text_string_to_metric_families

ROWS, BATCH, EPOCHS, EVERY = 52, 8, 2, 3  # of metrics_worker.py
BATCHES = EPOCHS * math.ceil(ROWS / BATCH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What a job of two workers has left."""
    folder = tmp_path_factory.mktemp("metrics")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = Job(
        *(sys.executable, "-m", "coarse", "run", "-n", "2"),
        *(str(HERE / "metrics_worker.py"), str(folder)),
        COARSE_METRICS_PORT=str(port),
    )
    code, printed = job.finish()
    assert code == 0, printed
    (folder / "printed").write_text(printed)
    return folder


def test_a_node_of_keras_workers_is_scraped(folder):
    text = json.loads((folder / "metrics.json").read_text())["scraped"]
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]

    def of(name, **labels):
        return [each.value for each in samples if each.name == name and labels.items() <= each.labels.items()]

    assert sum(of("coarse_samples_total")) == EPOCHS * ROWS, "the workers share the rows"
    for rank in ("0", "1"):
        assert of("coarse_step_seconds_count", worker=rank) == [BATCHES - 1]
        assert sum(of("coarse_pushed_bytes_total", worker=rank)) >= BATCHES * 4 * (8 * 32 + 32 + 32 + 1)
        assert sum(of("coarse_wait_seconds_count", worker=rank)) > 0
    assert of("coarse_world_size") == [2, 2]


def test_coarse_status_knows_the_step(folder):
    said = json.loads((folder / "metrics.json").read_text())["status"]
    assert [f" step {BATCHES - 1} " in line for line in said if line.startswith("worker ")] == [True, True], (
        said
    )


def test_the_launcher_tells_the_steps_at_the_end(folder):
    assert f"coarse run: {BATCHES - 1} steps in " in (folder / "printed").read_text()


def test_the_callback_reports_to_a_function(folder):
    told = json.loads((folder / "metrics.json").read_text())["told"]
    assert {step for _, _, step in told} == {EVERY * (i + 1) for i in range(BATCHES // EVERY)}
    rates = [value for tag, value, _ in told if tag == "coarse_samples_per_second/worker0"]
    assert all(rate > 0 for rate in rates)


def test_the_callback_reports_to_tensorboard(folder):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "logs" / "coarse"))
    events.Reload()
    tag = "coarse_world_size/worker0"
    assert tag in events.Tags()["tensors"]
    assert [each.step for each in events.Tensors(tag)] == [EVERY * (i + 1) for i in range(BATCHES // EVERY)]


def test_a_callback_needs_a_target():
    from coarse.tensorflow import MetricsCallback

    with pytest.raises(ValueError, match="log_dir= for TensorBoard, write= for a function"):
        MetricsCallback()
    with pytest.raises(ValueError, match="every=0 must be at least 1 batch"):
        MetricsCallback(write=print, every=0)
