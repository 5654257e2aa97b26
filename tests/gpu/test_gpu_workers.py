"""Workers on a GPU, memory devices in host memory: the same bits as torch DDP, and an error type for each fault."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "torch"))

torch = pytest.importorskip("torch")
comparison = pytest.importorskip("comparison")
parity_pool = pytest.importorskip("parity_pool")
parity_scenarios = pytest.importorskip("parity_scenarios")
optimizer_scenarios = pytest.importorskip("optimizer_scenarios")
narrow_optimizer_scenarios = pytest.importorskip("narrow_optimizer_scenarios")

PARITY = (
    "averages_gradients",
    "trains_convolutions_and_batch_norm",
    "trains_float64",
    "trains_bfloat16",
    "trains_float16",
    "trains_mixed_dtypes",
    "starts_from_worker_0_with_large_and_strided_parameters",
    "broadcasts_buffers_before_each_forward",
    "no_sync_accumulates_locally",
    "branches_may_differ_between_workers",
    "two_models_trained_in_turn",
)
OPTIMIZER_PARITY = (
    "adamw_in_step",
    "adamw_overlapped",
    "adamw_bfloat16_in_step",
    "adamw_float16_overlapped",
    "sgd_with_momentum_in_step",
    "accumulates_gradients_overlapped",
    "leaves_unused_parameters_alone_in_step",
    "clamps_weights_in_step",
    "unscales_and_clips_within_the_update",
)
CHECKPOINTS = (
    "adamw_resumed_on_workers",
    "adamw_resumed_in_memory_devices",
    "adamw_resumed_overlapped",
    "sgd_resumed_in_memory_devices",
    "master_weights_come_back",
    "snapshots_hold_what_a_copy_would_hold",
    "what_is_loaded_does_not_get_into_a_snapshot",
)
LOSS_SCRIPT = ROOT / "tests" / "torch" / "gpu_loss_script.py"
SHORTAGE_SCRIPT = ROOT / "tests" / "torch" / "gpu_shortage_script.py"
WORKERS = 2
LIMIT_S = 300


@pytest.fixture(scope="module")
def ddp_pool(cuda):
    pool = parity_pool.WorkerPool("ddp, cuda")
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def coarse_pool(cuda):
    pool = parity_pool.WorkerPool("coarse, cuda")
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def slots_too_pool(cuda):
    pool = parity_pool.WorkerPool("coarse, slots too, cuda")
    yield pool
    pool.close()


def run(script: Path, *arguments: str, **variables: str) -> str:
    """Output of two workers."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "coarse", "run", "-n", str(WORKERS), str(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            env={**os.environ, "PYTHONPATH": path, **variables},
        )
    except subprocess.TimeoutExpired as expired:
        pytest.fail(f"not done after {LIMIT_S} s:\n{(expired.output or b'').decode(errors='replace')}")
    return done.stdout.decode(errors="replace")


@pytest.mark.parametrize("name", PARITY)
def test_equals_torch_on_a_gpu(name, ddp_pool, coarse_pool):
    tolerance = parity_scenarios.PARITY_SCENARIOS[name].tolerance
    comparison.assert_equal_results(name, ddp_pool, coarse_pool, tolerance)


@pytest.mark.parametrize("name", OPTIMIZER_PARITY)
def test_an_optimizer_in_the_memory_devices_equals_torch_on_a_gpu(name, ddp_pool, coarse_pool):
    scenarios = optimizer_scenarios.OPTIMIZER_SCENARIOS | narrow_optimizer_scenarios.NARROW_SCENARIOS
    tolerance = scenarios[name].tolerance
    comparison.assert_equal_results(name, ddp_pool, coarse_pool, tolerance)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_an_optimizer_in_the_memory_devices_comes_back_from_a_checkpoint(name, coarse_pool):
    coarse_pool.submit(name)
    coarse_pool.collect()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_an_optimizer_in_memory_devices_on_the_gpu_comes_back_from_a_checkpoint(name, slots_too_pool):
    slots_too_pool.submit(name)
    slots_too_pool.collect()


RUNS = ("plain", "amp", "bfloat16", "compiled", "compiled_graphs", "many_streams", "graphed", "replayed")


@pytest.mark.parametrize(
    ("memory_devices", "what"), [*(("2", what) for what in RUNS), ("cuda:0,cuda:0", "replayed")]
)
def test_parameters_stay_those_of_torch_ddp(cuda, memory_devices, what):
    script = Path(__file__).with_name("worker_script.py")
    printed = run(script, what, COARSE_MEMORY_DEVICES=memory_devices)
    assert printed.count(f"{what}: equal") == WORKERS, printed


def test_other_threads_copy_behind_what_streams_were_given(cuda):
    printed = run(Path(__file__).with_name("stream_script.py"))
    assert printed.count("streams: in order") == WORKERS, printed


def test_the_capture_of_a_step_is_refused(cuda):
    printed = run(Path(__file__).with_name("worker_script.py"), "capture")
    assert printed.count("capture: refused") == WORKERS, printed


# On the host, and on the workers' GPU, where gradients are slots that memory devices exported.
EVERYWHERE = pytest.mark.parametrize("memory_devices", ["2", "cuda:0,cuda:0"])
UPDATES = {"averaging": (), "in step": ("offload",), "overlapped": ("offload", "overlap")}


@EVERYWHERE
@pytest.mark.parametrize("options", UPDATES.values(), ids=UPDATES)
def test_a_memory_device_that_is_killed_in_a_step_is_told_by_its_type(cuda, memory_devices, options):
    printed = run(LOSS_SCRIPT, "cuda:0", *options, COARSE_MEMORY_DEVICES=memory_devices)
    assert printed.count("raised MemoryDeviceLostError after ") == WORKERS, printed
    assert printed.count("all streams have ended") == WORKERS, printed
    assert "SIGKILL" in printed


@EVERYWHERE
def test_a_worker_that_is_killed_in_a_step_is_told_by_its_type(cuda, memory_devices):
    printed = run(LOSS_SCRIPT, "cuda:0", "worker", COARSE_MEMORY_DEVICES=memory_devices)
    assert "raised WorkerLostError after " in printed
    assert "all streams have ended" in printed


def test_a_model_too_large_for_its_gpus_memory_devices_is_refused_with_both_numbers(cuda):
    printed = run(SHORTAGE_SCRIPT, "cuda:0", COARSE_MEMORY_DEVICES="cuda:0,cuda:0")
    refusal = (
        r"OutOfDeviceMemoryError: .* need [\d.]+ MiB of device memory for 1 tensors, [\d.]+ MiB are available"
    )
    assert len(re.findall(refusal, printed)) == WORKERS, printed
    assert printed.count("trains as before") == WORKERS, printed
