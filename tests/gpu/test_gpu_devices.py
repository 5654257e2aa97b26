"""Memory devices on a GPU: the same bits as on the host, for any place of the workers' tensors; rejected uses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from persistent_attempts import train_in_attempts

from coarse.kernels import _native
from coarse.machine.memory_name import MemoryName
from coarse.machine.partition_table import PartitionTable
from coarse.wire.algorithms import check_nccl

HERE = Path(__file__).parent
LIMIT_S = 300
LIMIT_OF_LOSSES_S = 120
SHARES_GPUS = (2, 30, 0)


def run_job(tmp_path, memory_devices, script, *arguments, **environment):
    """Runs two workers; returns the result of `coarse run`."""
    command = [
        sys.executable,
        "-m",
        "coarse",
        "run",
        "-n",
        "2",
        "--memory-devices",
        memory_devices,
        "--no-prefix",
    ]
    return subprocess.run(
        [*command, "--log-dir", tmp_path, str(HERE / script), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def new_folder(parent, name):
    """A folder for the rendezvous."""
    folder = parent / name
    folder.mkdir()
    return str(folder)


def reports(tmp_path, memory_devices, script, *arguments, **environment):
    """Each worker's last line of output, parsed as JSON."""
    ended = run_job(tmp_path, memory_devices, script, *arguments, **environment)
    assert ended.returncode == 0, ended.stderr
    return [json.loads((tmp_path / f"worker-{rank}.log").read_text().splitlines()[-1]) for rank in range(2)]


@pytest.mark.parametrize("place", ["host", "gpu"])
@pytest.mark.parametrize("memory_devices", ["cuda:0", "cuda:0,cuda:0"])
def test_results_have_the_bits_of_the_host(cuda, tmp_path, memory_devices, place):
    expected = reports(tmp_path, "2", "reduce_script.py", new_folder(tmp_path, "expected"), "host")
    found = reports(tmp_path, memory_devices, "reduce_script.py", new_folder(tmp_path, "found"), place)
    assert found == expected


def reports_of_two_nodes(folder, memory_devices, place):
    """The reports of one worker on each of two nodes; this machine is both nodes."""
    folder.mkdir()
    command = [sys.executable, str(HERE / "reduce_script.py"), str(folder), place]
    job = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "COARSE_MEMORY_DEVICES": memory_devices,
    }
    workers = [
        subprocess.Popen(
            command,
            env=os.environ | job | {"RANK": str(rank), "COARSE_NODE": f"node {rank}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return [json.loads(each.communicate(timeout=LIMIT_S)[0].splitlines()[-1]) for each in workers]


@pytest.mark.parametrize("place", ["host", "gpu"])
def test_several_nodes_have_the_bits_of_the_host(cuda, tmp_path, place):
    expected = reports_of_two_nodes(tmp_path / "expected", "1", "host")
    assert reports_of_two_nodes(tmp_path / "found", "cuda:0", place) == expected


def test_training_goes_on_without_any_one_device(cuda, tmp_path):
    expected, found = Path(new_folder(tmp_path, "expected")), Path(new_folder(tmp_path, "found"))
    memory_devices = "cuda:0,cuda:1" if cuda.device_count() > 1 else "cuda:0,cuda:0"
    deaths = ("0 1 3 step.push 2", "1 1 4 step.pull")
    assert (
        train_in_attempts(found, memory_devices, "0", deaths, {})["digest"]
        == train_in_attempts(expected, "host,host", "host", (), {})["digest"]
    )


@pytest.mark.parametrize("algorithm", ["exchange", "ring", "nccl"])
def test_algorithms_between_devices_have_the_bits_of_the_host(cuda, tmp_path, monkeypatch, algorithm):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    memory_devices = "cuda:0,cuda:1" if cuda.device_count() > 1 else "cuda:0,cuda:0"
    if algorithm == "nccl":
        memories = [MemoryName.parse(name) for name in memory_devices.split(",")]
        try:
            check_nccl(PartitionTable.even(num_workers=2, num_devices=2, memories=memories))
        except ValueError as error:
            pytest.skip(str(error))
    expected = reports(tmp_path, "2", "reduce_script.py", new_folder(tmp_path, "expected"), "host")
    folder = new_folder(tmp_path, "found")
    assert (
        reports(tmp_path, memory_devices, "reduce_script.py", folder, "host", COARSE_ALGORITHM=algorithm)
        == expected
    )


def test_training_has_the_bits_of_memory_devices_on_the_host(cuda, tmp_path):
    expected = reports(tmp_path, "2", "train_script.py", str(tmp_path), "cuda:0")
    (tmp_path / "gloo").unlink(missing_ok=True)
    assert reports(tmp_path, "cuda:0,cuda:0", "train_script.py", str(tmp_path), "cuda:0") == expected


def test_the_example_comes_to_the_results_of_the_processor(cuda, tmp_path):
    pytest.importorskip("sklearn")
    example = str(HERE.parents[1] / "examples" / "torch_digits.py")

    def trained(memory_devices, device):
        ended = run_job(tmp_path, memory_devices, example, "--epochs", "8", "--device", device)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.splitlines()[-2:]  # the last training loss, and the accuracy

    def accuracy(lines):
        return float(re.findall(r"test accuracy ([\d.]+)%", lines[-1])[0])

    expected = trained("2", "cpu")
    assert "loss" in expected[0]
    assert trained("cuda:0,cuda:0", "cpu") == expected
    # Dropout draws other numbers on a GPU, so the bits differ.
    assert accuracy(trained("cuda:0,cuda:0", "cuda:0")) == pytest.approx(accuracy(expected), abs=3.0)


def test_the_optimizer_gives_all_workers_the_same_parameters(cuda, tmp_path):
    first, second = reports(tmp_path, "cuda:0,cuda:0", "train_script.py", str(tmp_path), "cuda:0", "offload")
    assert first == second


def test_parameters_on_several_gpus_have_the_bits_of_those_on_one(cuda, tmp_path):
    if cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    arguments = ("train_script.py", str(tmp_path), "cuda:0", "offload", "wide")
    expected = reports(tmp_path, "cuda:0,cuda:0", *arguments)
    (tmp_path / "gloo").unlink(missing_ok=True)
    assert reports(tmp_path, "cuda:0,cuda:1", *arguments) == expected


def test_slots_along_routes_have_the_bits_of_those_with_the_own_memory_device(cuda, tmp_path):
    if cuda.device_count() < 3:
        pytest.skip("needs three GPUs")

    def reduced(routing):
        folder = new_folder(tmp_path, routing)
        found = reports(
            tmp_path, "cuda:0,cuda:1", "tensors_script.py", folder, "2", "3", COARSE_ROUTING=routing
        )
        return [each["hash"] for each in found]

    assert reduced("profile") == reduced("local")


@pytest.mark.parametrize("memory_devices", ["2", "cuda:0,cuda:0"])
@pytest.mark.parametrize("dual_sync", ["0", "8MiB"])
def test_what_workers_reduce_by_nccl_has_the_bits_of_memory_devices(
    cuda, nccl, tmp_path, memory_devices, dual_sync
):
    place = "own" if cuda.device_count() > 1 else "0"
    if place == "0" and nccl.version < SHARES_GPUS:
        pytest.skip("NCCL before 2.30 takes one rank on each GPU, and there is one")

    def reduced(split):
        folder = new_folder(tmp_path, split)
        settings = {"COARSE_DUAL_SYNC": split, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        return reports(tmp_path, memory_devices, "tensors_script.py", folder, place, "7", **settings)

    expected, found = reduced("off"), reduced(dual_sync)
    assert [each["hash"] for each in found] == [each["hash"] for each in expected]
    assert "the others by NCCL between the workers" in found[0]["decisions"][-1]


def test_emulated_machines_take_their_time_and_change_no_bit(cuda, tmp_path):
    machine = {"COARSE_MACHINE": "aws-p3", "COARSE_TIME_DILATION": "20"}
    routes = {"COARSE_SHARD_BYTES": "4MiB", "COARSE_ROUTING": "local", "COARSE_DUAL_SYNC": "off"}
    setup = machine | routes
    expected = reports(tmp_path, "2", "emulated_script.py", new_folder(tmp_path, "expected"), **setup)
    found = reports(tmp_path, "cuda:0,cuda:0", "emulated_script.py", new_folder(tmp_path, "found"), **setup)
    assert [each["hash"] for each in found] == [each["hash"] for each in expected]
    for each in found:
        assert each["shortest_s"] >= each["dilation"] * each["least_s"] - 1e-6


def told_by_loss(tmp_path, who, **environment):
    """The error that each of two workers reports, None if it was killed; no launcher ends the survivors."""
    memory_devices = "cuda:0,cuda:1" if _native.cuda_num_devices() > 1 else "cuda:0,cuda:0"
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "COARSE_MEMORY_DEVICES": memory_devices}
    folder = new_folder(tmp_path, "store")
    workers = [
        subprocess.Popen(
            [sys.executable, str(HERE / "loss_script.py"), folder, who],
            env=os.environ | shared | environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [worker.communicate(timeout=LIMIT_OF_LOSSES_S)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return [json.loads(text.splitlines()[-1]) if text else None for text in printed]


LOSSES = pytest.mark.parametrize("algorithm", ["exchange", "direct", "ring"])


@LOSSES
def test_survivors_of_a_memory_device_are_told(cuda, tmp_path, algorithm):
    told = told_by_loss(tmp_path, "device", COARSE_ALGORITHM=algorithm)
    assert [each["error"] for each in told] == ["MemoryDeviceLostError"] * 2
    assert all("md1" in each["text"] for each in told)


@LOSSES
def test_survivors_of_a_worker_are_told(cuda, tmp_path, algorithm):
    told = told_by_loss(tmp_path, "worker", COARSE_ALGORITHM=algorithm)
    assert told[0]["error"] == "WorkerLostError"
    assert told[1] is None


def test_what_does_not_fit_is_refused_with_both_numbers(cuda, tmp_path):
    told = told_by_loss(tmp_path, "nobody")
    assert [each["error"] for each in told] == ["OutOfDeviceMemoryError"] * 2
    needs = r"workers need [\d.]+ MiB of device memory for 1 tensors, [\d.]+ MiB are available on cuda:0"
    assert re.search(needs, told[0]["text"])


def test_a_gpu_that_is_not_there_is_named_with_those_that_are(cuda, tmp_path):
    ended = run_job(tmp_path, "cuda:77", "reduce_script.py", new_folder(tmp_path, "store"), "host")
    assert ended.returncode != 0
    assert "cuda:77: there is no such GPU; CUDA finds cuda:0" in ended.stderr
