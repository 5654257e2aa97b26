"""Memory devices on a GPU, tested without a GPU: all of COARSE, with stand-ins for CUDA's driver and compiler.

The stand-ins (tests/native/cuda_stand_in.cpp, nvrtc_stand_in.cpp) use memfds as device memory, threads as streams,
and kernels compiled for the host. docs/design/gpu.md lists their limits; tests/gpu runs the same scripts on a GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from persistent_attempts import train_in_attempts

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "gpu"
LIMIT_S = 300
LIMIT_OF_DEVICES_S = 30.0
MARK = "MARK_OF_A_TEST"


@pytest.fixture(scope="session")
def stand_ins(cuda_stand_ins):
    """The environment of a process that uses the stand-in for CUDA."""
    return {
        "LD_LIBRARY_PATH": str(cuda_stand_ins),
        "XDG_CACHE_HOME": str(cuda_stand_ins),
        "STAND_IN_GPUS": "2",
        "STAND_IN_HIDES_MEMORY": "1",
    }


def run_workers(tmp_path, memory_devices, script, *arguments, nodes=("", ""), **environment):
    """Runs workers to their ends; returns each one's last line, parsed if it is JSON, and the errors of all.

    `nodes` contains each worker's node.
    """
    store = tmp_path / memory_devices.replace(":", "")
    store.mkdir()
    variables = {
        "WORLD_SIZE": str(len(nodes)),
        "LOCAL_WORLD_SIZE": str(len(nodes)),
        "COARSE_MEMORY_DEVICES": memory_devices,
        MARK: str(store),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, str(SCRIPTS / script), str(store), *arguments],
            env=os.environ
            | variables
            | environment
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "COARSE_NODE": node},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, node in enumerate(nodes)
    ]
    ended = [worker.communicate(timeout=LIMIT_S) for worker in workers]
    assert not processes_left(str(store))
    reports = [json.loads(out.splitlines()[-1]) if out else None for out, _ in ended]
    codes = [f"worker {rank} ended with {worker.returncode}" for rank, worker in enumerate(workers)]
    return reports, "\n".join([*(errors for _, errors in ended), *codes])


def processes_left(mark):
    """Processes of a job that still run some time after its workers have ended."""
    deadline_s = time.monotonic() + LIMIT_OF_DEVICES_S
    while (left := [*marked_processes(mark)]) and time.monotonic() < deadline_s:
        os.sched_yield()
    return left


def marked_processes(mark):
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                yield (folder / "cmdline").read_text()
        except OSError:  # has ended meanwhile
            continue


@pytest.fixture(scope="module")
def host_results(tmp_path_factory):
    """Results of memory devices on the host."""
    results, _ = run_workers(tmp_path_factory.mktemp("host"), "2", "reduce_script.py", "host")
    return results


@pytest.mark.parametrize("memory_devices", [pytest.param("cuda:0", marks=pytest.mark.slow), "cuda:0,cuda:0"])
def test_results_have_the_bits_of_the_host(stand_ins, tmp_path, host_results, memory_devices):
    found, errors = run_workers(tmp_path, memory_devices, "reduce_script.py", "host", **stand_ins)
    assert None not in found, errors
    assert found == host_results


@pytest.mark.parametrize(
    ("memory_devices", "compression"),
    [
        pytest.param("cuda:0", "none", marks=pytest.mark.slow),
        ("cuda:0,cuda:1", "none"),
        ("cuda:0,cuda:1", "int8"),
        pytest.param("cuda:0", "bf16", marks=pytest.mark.slow),
    ],
)
def test_several_nodes_have_the_bits_of_the_host(stand_ins, tmp_path, memory_devices, compression):
    nodes = ("a", "b", "b")
    setting = {"COARSE_NODE_COMPRESSION": compression}
    expected, errors = run_workers(tmp_path, "2", "reduce_script.py", "host", nodes=nodes, **setting)
    assert None not in expected, errors
    found, errors = run_workers(
        tmp_path, memory_devices, "reduce_script.py", "host", nodes=nodes, **setting, **stand_ins
    )
    assert None not in found, errors
    assert found == expected


@pytest.mark.parametrize("algorithm", [pytest.param("ring", marks=pytest.mark.slow), "nccl"])
def test_algorithms_between_gpus_have_the_bits_of_the_host(stand_ins, tmp_path, host_results, algorithm):
    found, errors = run_workers(
        tmp_path,
        "cuda:0,cuda:1",
        "reduce_script.py",
        "host",
        COARSE_ALGORITHM=algorithm,
        NCCL_COMM_BLOCKING="0",  # as users may set it for their own communicators
        **stand_ins,
    )
    assert None not in found, errors
    assert found == host_results


@pytest.mark.parametrize(
    "algorithm",
    ["auto", *(pytest.param(each, marks=pytest.mark.slow) for each in ("direct", "ring", "nccl"))],
)
def test_gpus_that_do_not_reach_each_other_work_on_copies(stand_ins, tmp_path, host_results, algorithm):
    apart = {"STAND_IN_GPUS_ARE_APART": "all", "COARSE_ALGORITHM": algorithm, **stand_ins}
    found, errors = run_workers(tmp_path, "cuda:0,cuda:1", "reduce_script.py", "host", **apart)
    assert None not in found, errors
    assert found == host_results
    assert errors.count("cuda:0 and cuda:1 cannot reach each other's memory") == 1


def test_gpus_that_lose_what_they_copy_to_each_other_work_on_copies(stand_ins, tmp_path, host_results):
    loses = {"STAND_IN_LOSES": "0:1,1:0", "COARSE_ALGORITHM": "exchange", **stand_ins}
    found, errors = run_workers(tmp_path, "cuda:0,cuda:1", "reduce_script.py", "host", **loses)
    assert None not in found, errors
    assert found == host_results
    assert "copies from cuda:0 to cuda:1 and back arrive wrong" in errors
    assert "copies from cuda:1 to cuda:0 and back arrive wrong" in errors


def test_between_gpus_the_fastest_algorithm_is_measured(stand_ins, tmp_path, host_results):
    found, errors = run_workers(
        tmp_path, "cuda:0,cuda:1", "reduce_script.py", "host", COARSE_PROFILE="auto", **stand_ins
    )
    assert None not in found, errors
    assert found == host_results
    assert "links: not profiled: links to GPUs are measured when tensors are first registered" in errors
    choices = [line for line in errors.splitlines() if "large tensors between memory devices by" in line]
    assert len(choices) == 2  # one per worker
    assert choices[0] == choices[1]
    assert all(f"ms by {name}" in choices[0] for name in ("exchange", "direct", "ring", "nccl"))


@pytest.fixture(scope="module")
def local_results(stand_ins, tmp_path_factory):
    """Results of workers on a third GPU, whose tensors go to their own memory devices."""
    gpus = stand_ins | {"STAND_IN_GPUS": "3", "COARSE_ROUTING": "local"}
    found, errors = run_workers(
        tmp_path_factory.mktemp("local"), "cuda:0,cuda:1", "tensors_script.py", "2", "3", **gpus
    )
    assert None not in found, errors
    assert not any("along the routes" in line for line in found[0]["decisions"])
    return [each["hash"] for each in found]


@pytest.mark.parametrize(
    ("links", "settings", "route"),
    [
        ("2:0:20000:4", {}, "md1"),
        (
            "2:0:0:4,2:1:20000:0",
            {
                "COARSE_SHARD_BYTES": "1MiB",
                "COARSE_ROUTING_THRESHOLD_BYTES": "512KiB",
                "COARSE_ROUTING": "profile",
            },
            "md0 below 524288 bytes, md1 from there on",
        ),
    ],
    ids=["one link is better", "one link is wide, one is quick"],
)
def test_slots_lie_where_the_links_of_workers_are_best(
    stand_ins, tmp_path, local_results, links, settings, route
):
    gpus = stand_ins | {"STAND_IN_GPUS": "3", "STAND_IN_LINKS": links} | settings
    found, errors = run_workers(tmp_path, "cuda:0,cuda:1", "tensors_script.py", "2", "3", **gpus)
    assert None not in found, errors
    assert [each["hash"] for each in found] == local_results
    for each in found:
        told = "\n".join(each["decisions"])
        assert re.search("large tensors between memory devices by (exchange|direct) along the routes:", told)
        assert [f"w{worker} along the routes: {route};" in told for worker in range(2)] == [True, True], told


def test_shards_fill_the_links_of_workers(stand_ins, tmp_path, local_results):
    gpus = stand_ins | {"STAND_IN_LINKS": "1:0:1000:4"}
    found, errors = run_workers(tmp_path, "cuda:0,cuda:0", "tensors_script.py", "1", "3", **gpus)
    assert None not in found, errors
    assert [each["hash"] for each in found] == local_results
    assert found[0]["decisions"] == found[1]["decisions"]
    (told,) = [line for line in found[0]["decisions"] if "bytes between GPUs" in line]
    size = int(told.removeprefix("shards of at least ").split()[0])
    # 90 % of 0.25 GB/s take 9 times 1 ms * 0.25 GB/s, 2.25 MB, from the next power of two on; more on a busy machine.
    assert 1 << 20 <= size <= 8 << 20, told


def test_slots_move_to_where_links_have_become_better(stand_ins, tmp_path, local_results):
    gpus = stand_ins | {"STAND_IN_GPUS": "3", "STAND_IN_LINKS": "2:1:10000:8"}
    settings = {"COARSE_REPLAN_STEPS": "2", "COARSE_ROUTING": "profile"}
    changed = ("1", "2:0:10000:8")
    found, errors = run_workers(
        tmp_path, "cuda:0,cuda:1", "tensors_script.py", "2", "3", *changed, **gpus, **settings
    )
    assert None not in found, errors
    assert [each["hash"] for each in found] == local_results
    for each in found:
        assert any(line.startswith("w1 along the routes: md0;") for line in each["decisions"])
        assert each["decisions"][-1] == "step 2: the slots of tensors move: w0 to md1, w1 to md1"


def test_tensors_that_are_their_slots_do_not_move(stand_ins, tmp_path):
    settings = {"COARSE_REPLAN_STEPS": "1", "COARSE_ALGORITHM": "direct"}
    found, errors = run_workers(
        tmp_path, "cuda:0,cuda:1", "tensors_script.py", "own", "2", **stand_ins, **settings
    )
    assert None not in found, errors
    assert found[0]["decisions"] == found[1]["decisions"]
    reason = "not every worker has its tensors on a GPU, and its slots on another one"
    assert found[0]["decisions"][-1] == f"replanning: none in tensors: {reason}"


def test_slots_that_not_all_memory_devices_reach_lie_in_one_piece(stand_ins, tmp_path, local_results):
    gpus = stand_ins | {"STAND_IN_GPUS": "3", "STAND_IN_GPUS_ARE_APART": "0:1"}
    links = {"STAND_IN_LINKS": "2:0:0:4,2:1:20000:0", "COARSE_ROUTING_THRESHOLD_BYTES": "512KiB"}
    insists = {"COARSE_ROUTING": "profile", "COARSE_SHARD_BYTES": "1MiB"}
    found, errors = run_workers(
        tmp_path, "cuda:0,cuda:1", "tensors_script.py", "2", "3", **gpus, **links, **insists
    )
    assert None not in found, errors
    assert [each["hash"] for each in found] == local_results
    assert (
        errors.count("tensors: memory devices refuse the routes of its tensors; trying simpler routes") == 2
    ), errors


# A check of the driver alone would miss the second fault, and continue with gradients that never arrived.
@pytest.mark.parametrize("why", ["STAND_IN_GPUS_ARE_APART", "STAND_IN_LOSES"])
def test_a_worker_that_does_not_reach_its_memory_device_has_another_one(
    stand_ins, tmp_path, local_results, why
):
    gpus = stand_ins | {"STAND_IN_GPUS": "3", why: "2:1", "COARSE_ROUTING": "profile"}
    found, errors = run_workers(tmp_path, "cuda:0,cuda:1", "tensors_script.py", "2", "3", **gpus)
    assert None not in found, errors
    assert [each["hash"] for each in found] == local_results
    assert any(line.startswith("w1 along the routes: md0;") for line in found[0]["decisions"])
    assert "cannot reach" not in errors


def test_one_memory_device_reduces_by_itself_whatever_the_algorithm(stand_ins, tmp_path, host_results):
    found, errors = run_workers(
        tmp_path, "cuda:0", "reduce_script.py", "host", COARSE_ALGORITHM="nccl", **stand_ins
    )
    assert None not in found, errors
    assert found == host_results


def test_nccl_refuses_a_gpu_with_two_memory_devices(stand_ins, tmp_path):
    _, errors = run_workers(
        tmp_path, "cuda:0,cuda:0", "loss_script.py", "nobody", COARSE_ALGORITHM="nccl", **stand_ins
    )
    assert "memory devices 0 and 1 are both on cuda:0" in errors
    assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in errors


def test_training_has_the_bits_of_the_host(stand_ins, tmp_path):
    expected, _ = run_workers(tmp_path, "2", "train_script.py", "cpu")
    found, errors = run_workers(tmp_path, "cuda:0,cuda:0", "train_script.py", "cpu", **stand_ins)
    assert None not in found, errors
    assert found == expected


@pytest.fixture(scope="module")
def replicated_on_host(tmp_path_factory):
    return train_in_attempts(tmp_path_factory.mktemp("host"), "host,host", "host", (), {})["digest"]


@pytest.mark.parametrize(
    ("memory_devices", "deaths"),
    [
        ("cuda:0,cuda:1", ("0 1 4 step.push 2",)),
        ("cuda:0,cuda:1", ("1 0 3 step.pull", "0 1 5 step.push 3")),
        ("cuda:0,cuda:0", ("0 1 2 step.pull", "1 1 4 step.push 1")),
        pytest.param("cuda:0,cuda:1,cuda:0", ("2 1 2 step.pull", "0 0 4 step.pull"), marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_without_any_one_device(
    stand_ins, tmp_path, replicated_on_host, memory_devices, deaths
):
    found = train_in_attempts(tmp_path, memory_devices, "0", deaths, {MARK: str(tmp_path), **stand_ins})
    assert not processes_left(str(tmp_path))
    assert found["first"] >= int(deaths[-1].split()[2]) - 1
    assert found["digest"] == replicated_on_host


@pytest.mark.slow
def test_replicas_lie_also_on_gpus_that_do_not_reach_each_other(stand_ins, tmp_path, replicated_on_host):
    apart = {"STAND_IN_GPUS_ARE_APART": "all", MARK: str(tmp_path), **stand_ins}
    deaths = ("0 1 3 step.push 2", "1 1 4 step.pull")
    found = train_in_attempts(tmp_path, "cuda:0,cuda:1", "0", deaths, apart)
    assert not processes_left(str(tmp_path))
    assert found["first"] >= 3
    assert found["digest"] == replicated_on_host


def run_on_emulated_machine(tmp_path, memory_devices, algorithm, **environment):
    """Two workers of a machine with 1 ms for 4 MiB, started as users do; returns their output."""
    folder = tmp_path / memory_devices.replace(":", "")
    folder.mkdir()
    machine = ["--machine", "aws-p3", "--time-dilation", "20", "--memory-devices", memory_devices]
    routes = ["--shard-bytes", "4MiB", "--routing", "local", "--dual-sync", "off", "--algorithm", algorithm]
    output = ["--no-prefix", "--log-dir", str(folder)]
    script = [str(SCRIPTS / "emulated_script.py"), str(folder)]
    ended = subprocess.run(
        [sys.executable, "-m", "coarse", "run", "-n", "2", *machine, *routes, *output, *script],
        env=os.environ | environment | {MARK: str(folder)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert not processes_left(str(folder))
    return [json.loads((folder / f"worker-{rank}.log").read_text().splitlines()[-1]) for rank in range(2)]


@pytest.mark.parametrize("algorithm", ["exchange", "ring", "direct"])
def test_emulated_machines_take_their_time_and_change_no_bit(stand_ins, tmp_path, algorithm):
    expected = run_on_emulated_machine(tmp_path, "2", algorithm)
    found = run_on_emulated_machine(tmp_path, "cuda:0,cuda:0", algorithm, **stand_ins)
    assert [each["hash"] for each in found] == [each["hash"] for each in expected]
    for each in found:
        assert each["shortest_s"] >= each["dilation"] * each["least_s"] - 1e-6
        assert each["probe_s"] >= each["least_probe_s"] - 1e-9
        assert each["num_arrivals"] > 0


ALGORITHMS = pytest.mark.parametrize(
    "algorithm", ["direct", pytest.param("ring", marks=pytest.mark.slow), "nccl"]
)


@ALGORITHMS
def test_survivors_of_a_device_are_told(stand_ins, tmp_path, algorithm):
    told, _ = run_workers(
        tmp_path, "cuda:0,cuda:1", "loss_script.py", "device", COARSE_ALGORITHM=algorithm, **stand_ins
    )
    assert [each["error"] for each in told] == ["MemoryDeviceLostError"] * 2
    assert "md1" in told[0]["text"]


@pytest.mark.parametrize("algorithm", ["exchange", "direct", "ring", "nccl"])
@pytest.mark.parametrize("launch", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 13))])
def test_survivors_of_a_device_that_dies_in_any_of_its_kernels_are_told(
    stand_ins, tmp_path, algorithm, launch
):
    dies = {"COARSE_ALGORITHM": algorithm, "STAND_IN_DIES_AT": f"1:{launch}"}
    told, _ = run_workers(tmp_path, "cuda:0,cuda:1", "loss_script.py", "gpu", **dies, **stand_ins)
    assert [each["error"] for each in told] == ["MemoryDeviceLostError"] * 2, told
    assert any("SIGKILL" in each["text"] for each in told)


@ALGORITHMS
def test_survivors_of_a_worker_are_told(stand_ins, tmp_path, algorithm):
    told, _ = run_workers(
        tmp_path, "cuda:0,cuda:1", "loss_script.py", "worker", COARSE_ALGORITHM=algorithm, **stand_ins
    )
    assert told[0]["error"] == "WorkerLostError"
    assert told[1] is None


@pytest.mark.parametrize(
    ("who", "error"), [("device", "MemoryDeviceLostError"), ("worker", "WorkerLostError")]
)
def test_another_node_is_told_of_a_loss(stand_ins, tmp_path, who, error):
    told, _ = run_workers(tmp_path, "cuda:0,cuda:1", "loss_script.py", who, nodes=("a", "b"), **stand_ins)
    survivors = told if who == "device" else told[:1]
    assert [each["error"] for each in survivors] == [error] * len(survivors), told


@pytest.mark.parametrize("launch", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, *range(3, 9)))])
def test_a_gpu_that_fails_ends_the_session_on_all_nodes(stand_ins, tmp_path, launch):
    faults = {"STAND_IN_FAULTS_AT": f"0:{launch}"}
    told, errors = run_workers(
        tmp_path, "cuda:0", "loss_script.py", "gpu", nodes=("a", "b"), **faults, **stand_ins
    )
    assert [each["error"] for each in told] == ["MemoryDeviceLostError"] * 2, told
    assert "terminate called" not in errors


@pytest.mark.parametrize("algorithm", ["exchange", "direct", "ring", "nccl"])
@pytest.mark.parametrize("launch", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 9))])
def test_a_gpu_that_fails_is_told_with_its_reason(stand_ins, tmp_path, algorithm, launch):
    faults = {"COARSE_ALGORITHM": algorithm, "STAND_IN_FAULTS_AT": f"1:{launch}"}
    told, errors = run_workers(tmp_path, "cuda:0,cuda:1", "loss_script.py", "gpu", **faults, **stand_ins)
    for each in told:
        assert each["error"] == "MemoryDeviceLostError"
        assert re.search(r"failed: \w+: (CUDA_ERROR_STAND_IN|unhandled cuda error)", each["text"]), told
        assert "Start the job again from your last checkpoint" in each["text"]
    assert "terminate called" not in errors


@pytest.mark.parametrize(
    "refused",
    [
        *("cuDevicePrimaryCtxRetain:1:2", "cuModuleLoadData:1:209"),  # at the start
        *("cuMemCreate:2:800", "cuMemCreate:3:800", "cuMemExportToShareableHandle:3:800"),
        *("cuMemImportFromShareableHandle:4:999", "cuMemSetAccess:5:217"),
        *("cuMemHostRegister_v2:1:800", "cuMemHostRegister_v2:3:801"),
        *("cuLaunchKernel:3:719", "cuLaunchKernel:7:719", "cuEventQuery:3:719"),  # in a step
    ],
)
def test_what_cuda_refuses_is_told_with_call_and_device(stand_ins, tmp_path, refused):
    refuses = {"STAND_IN_REFUSES": refused, "COARSE_ALGORITHM": "ring"}
    told, errors = run_workers(tmp_path, "cuda:0,cuda:1", "loss_script.py", "gpu", **refuses, **stand_ins)
    call = refused.split(":")[0].removesuffix("_v2")
    for each in told:
        assert re.search(
            rf"memory device md[01] \(.*cuda:[01]\) .*{call}", each["text"] if each else errors
        ), told
    assert "terminate called" not in errors


@pytest.mark.parametrize(
    "refused",
    [
        *("cuMemCreate:1:800", "cuMemExportToShareableHandle:1:801", "cuMemImportFromShareableHandle:1:999"),
        *("cuMemMap:2:800", "cuMemSetAccess:2:801"),
    ],
)
def test_a_gpu_whose_memory_cannot_be_shared_is_told_of_at_the_start(stand_ins, tmp_path, refused):
    found, errors = run_workers(
        tmp_path, "cuda:0", "loss_script.py", "nobody", STAND_IN_REFUSES=refused, **stand_ins
    )
    assert found == [None, None]
    told = re.findall(
        r"MemoryDeviceLostError: worker [01]: memory device md0 \(cuda:0\) could not start: memory device cuda:0 "
        rf"\(stand-in\) cannot share memory with other processes by file descriptors: {refused.split(':')[0]}: "
        r".*In a container, .*seccomp profile have to allow it; memory devices on the host work without",
        errors,
    )
    assert len(told) == 2, errors


def test_a_gpu_whose_driver_cannot_share_memory_is_refused_before_a_memory_device_is_started(
    stand_ins, tmp_path
):
    _, errors = run_workers(tmp_path, "cuda:0", "loss_script.py", "nobody", STAND_IN_LACKS="103", **stand_ins)
    assert (
        "could not start memory devices: memory device cuda:0 (stand-in) cannot share memory with" in errors
    )
    assert "file descriptors, by its driver. In a container" in errors


def test_without_leave_to_pin_memory_workers_are_told_what_limits_it(stand_ins, tmp_path):
    refuses = {"STAND_IN_REFUSES": "cuMemHostRegister_v2:3:800", **stand_ins}
    told, _ = run_workers(tmp_path, "cuda:0,cuda:0", "loss_script.py", "gpu", **refuses)
    for each in told:
        assert "look at the memory limit of the container or cgroup, and at ulimit -l" in each["text"]


@pytest.mark.parametrize("what", ["id", "rank0", "rank1"])
def test_where_nccl_fails_another_way_is_chosen(stand_ins, tmp_path, host_results, what):
    failing = {"STAND_IN_NCCL_FAILS": what, "STAND_IN_NCCL_FOLDER": str(tmp_path), **stand_ins}
    found, errors = run_workers(tmp_path, "cuda:0,cuda:1", "reduce_script.py", "host", **failing)
    assert found == host_results, errors
    reason = "no socket interface found" if what == "id" else "No space left on device"
    assert len(re.findall(f"memory devices do not use NCCL: .*{reason}", errors)) == 1


@pytest.mark.parametrize("what", ["id", "rank1"])
def test_where_nccl_fails_that_was_asked_for_workers_are_told_why(stand_ins, tmp_path, what):
    failing = {"STAND_IN_NCCL_FAILS": what, "STAND_IN_NCCL_FOLDER": str(tmp_path), **stand_ins}
    found, errors = run_workers(
        tmp_path, "cuda:0,cuda:1", "reduce_script.py", "host", COARSE_ALGORITHM="nccl", **failing
    )
    assert found == [None, None]
    device, reason = (0, "no socket interface found") if what == "id" else (1, "No space left on device")
    told = re.findall(
        f"MemoryDeviceLostError: worker [01]: memory device md{device} .*could not start: .*{reason}", errors
    )
    assert len(told) == 2, errors


@pytest.mark.slow
def test_the_example_is_trained_as_by_memory_devices_on_the_host(stand_ins):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")

    def trained_by(memory_devices, **environment):
        command = [sys.executable, "-m", "coarse", "run", "-n", "2", "--memory-devices", memory_devices]
        ended = subprocess.run(
            [*command, str(ROOT / "examples" / "torch_digits.py"), "--epochs", "1"],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.splitlines()[-2:]  # the number of earlier lines depends on timing

    expected = trained_by("2")
    assert "step 23/23 loss" in expected[0]
    assert "test accuracy" in expected[1]
    assert trained_by("cuda:0,cuda:0", **stand_ins) == expected


def test_what_does_not_fit_is_refused_with_both_numbers(stand_ins, tmp_path):
    told, _ = run_workers(tmp_path, "cuda:0,cuda:0", "loss_script.py", "nobody", **stand_ins)
    assert [each["error"] for each in told] == ["OutOfDeviceMemoryError"] * 2
    assert (
        "MiB of device memory for 1 tensors, 1024.0 MiB are available on cuda:0 (stand-in)."
        in told[0]["text"]
    )


def test_a_gpu_that_is_not_there_is_named_with_those_that_are(stand_ins, tmp_path):
    _, errors = run_workers(tmp_path, "cuda:7", "loss_script.py", "nobody", **stand_ins)
    assert "memory device cuda:7: there is no such GPU; CUDA finds cuda:0" in errors


def test_without_a_driver_the_error_says_so(tmp_path):
    from coarse.kernels import _native

    if not _native.cuda_unavailable_reason():
        pytest.skip("there is a driver")
    _, errors = run_workers(tmp_path, "cuda:0", "loss_script.py", "nobody")
    assert "memory device cuda:0: " + _native.cuda_unavailable_reason() in errors
