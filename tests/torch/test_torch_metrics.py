"""Metrics of PyTorch jobs under both launchers, of checkpoints and restarts, and TensorBoard's adapter."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
from launching import COARSE_RUN, TORCHRUN, launch
from metrics_script import BATCH, STEPS
from prometheus_client.parser import text_string_to_metric_families

SCRIPT = Path(__file__).parent / "metrics_script.py"
PARAMETER_BYTES = 4 * (64 * 256 + 256 + 256 + 1)


def train(launcher, folder, *arguments, options=(), **variables):
    """What worker 0 found, with the scraped samples by name, and what the job said."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    said = launch(
        launcher,
        SCRIPT,
        (str(folder), *arguments),
        *options,
        COARSE_METRICS_PORT=str(port),
        COARSE_DUAL_SYNC="off",
        **variables,
    )
    found = json.loads((folder / "metrics.json").read_text())
    found["said"] = said
    found["scraped"] = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(found["scraped"])
        for sample in family.samples
    }
    return found


def total(found, name, **labels):
    return sum(
        value
        for (sample, own), value in found["scraped"].items()
        if sample == name and labels.items() <= dict(own).items()
    )


def check_training(found):
    for rank in ("0", "1"):
        assert total(found, "coarse_step_seconds_count", worker=rank) == STEPS - 1
        assert total(found, "coarse_samples_total", worker=rank) == STEPS * BATCH
        assert total(found, "coarse_optimizer_seconds_count", worker=rank) == 0, "it runs in memory devices"
        pushed = total(found, "coarse_pushed_bytes_total", worker=rank)
        assert STEPS * PARAMETER_BYTES <= pushed < (STEPS + 2) * PARAMETER_BYTES, (
            "gradients, and parameters once"
        )
        assert total(found, "coarse_pushed_shards_total", worker=rank, algorithm="update") >= STEPS
    assert total(found, "coarse_memory_bytes", device="md0") > 3 * PARAMETER_BYTES, (
        "parameters and two states"
    )
    scraped = {(name, own) for name, own in found["scraped"] if not name.endswith("_bucket")}
    read = {
        (name.partition("{")[0], frozenset(re.findall(r'(\w+)="([^"]*)"', name))) for name in found["read"]
    }
    assert scraped == read


@pytest.mark.parametrize("launcher", [COARSE_RUN, TORCHRUN], ids=["coarse run", "torchrun"])
def test_a_job_is_counted_scraped_and_reported(tmp_path, launcher):
    pytest.importorskip("tensorboard")
    found = train(launcher, tmp_path)
    check_training(found)
    if launcher == COARSE_RUN:
        assert f"coarse run: {STEPS} steps in " in found["said"], (
            "an update belongs to the step of its gradients"
        )
    assert total(found, "coarse_checkpoint_saves_total", worker="0", outcome="saved") == 1
    assert total(found, "coarse_checkpoint_saves_total") == 1
    assert total(found, "coarse_checkpoint_save_seconds_count", worker="0") == 1
    written = total(found, "coarse_checkpoint_written_bytes_total", worker="0")
    assert written >= 3 * PARAMETER_BYTES
    told = {(tag, step): value for tag, value, step in found["told"]}
    assert {step for _, step in told} == {4, STEPS}
    assert told["coarse_samples_per_second/worker0", 4] > 0
    assert told["coarse_world_size/worker1", STEPS] == 2
    assert told["coarse_step_seconds_mean/worker0", STEPS] > 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    (event,) = events.Scalars("coarse_world_size/worker0")
    assert (event.step, event.value) == (STEPS, 2)


def test_steps_of_an_optimizer_in_the_worker_are_timed(tmp_path):
    found = train(COARSE_RUN, tmp_path, "local")
    assert f"coarse run: {STEPS} steps in " in found["said"]
    for rank in ("0", "1"):
        assert total(found, "coarse_optimizer_seconds_count", worker=rank) == STEPS
        seconds = total(found, "coarse_optimizer_seconds_sum", worker=rank)
        assert 0 < seconds < total(found, "coarse_step_seconds_sum", worker=rank)


def test_a_restarted_job_is_scraped_at_the_same_port(tmp_path):
    """Kept memory devices remember failures; what workers count starts anew."""
    found = train(COARSE_RUN, tmp_path, "crash", options=("--max-restarts", "1"), COARSE_KEEP_DEVICES="600")
    check_training(found)
    assert total(found, "coarse_restarts", worker="0") == 1
    assert total(found, "coarse_failures_total", device="md0", failure="worker_lost") == 1
