"""Dual synchronisation of workers on GPUs, tested without GPUs: some shards use memory devices, others NCCL.

Uses the stand-ins for CUDA's driver and NCCL (tests/native). docs/design/gpu.md lists their limits.
"""

from __future__ import annotations

import pytest
from test_gpu_devices_stand_in import run_workers, stand_ins  # noqa: F401, a fixture

STEPS = "7"  # four steps until the plan of dual synchronisation, and some with it
MIB = 1 << 20


def run_steps(tmp_path, memory_devices, environment, *, place="own"):
    """The results and decisions of two workers, and the errors of both."""
    environment = {"COARSE_SHARD_BYTES": "256KiB"} | environment  # what is split depends on it
    found, errors = run_workers(tmp_path, memory_devices, "tensors_script.py", place, STEPS, **environment)
    assert None not in found, errors
    assert found[0]["decisions"] == found[1]["decisions"]
    return found, errors


@pytest.fixture(scope="module")
def expected_hash(stand_ins, tmp_path_factory):  # noqa: F811
    """Hash of the results with memory devices alone."""
    found, _ = run_steps(tmp_path_factory.mktemp("off"), "2", {**stand_ins, "COARSE_DUAL_SYNC": "off"})
    assert not any("dual synchronisation" in line for line in found[0]["decisions"])
    return found[0]["hash"]


SIZES = {"0": 0, "8MiB": 8 * MIB, "1GiB": 22 * MIB}
QUICK = {("2", "8MiB"), ("cuda:0,cuda:1", "0"), ("cuda:1,cuda:1", "1GiB")}


@pytest.mark.parametrize(
    ("memory_devices", "dual_sync"),
    [
        pytest.param(devices, size, marks=() if (devices, size) in QUICK else pytest.mark.slow)
        for devices in ("2", "cuda:0,cuda:1", "cuda:1,cuda:1")
        for size in SIZES
    ],
)
def test_a_size_is_what_goes_to_the_memory_devices(
    stand_ins,  # noqa: F811
    tmp_path,
    expected_hash,
    memory_devices,
    dual_sync,
):
    found, _ = run_steps(tmp_path, memory_devices, {**stand_ins, "COARSE_DUAL_SYNC": dual_sync})
    assert {each["hash"] for each in found} == {expected_hash}, "two numbers have one sum"
    (split,) = [line for line in found[0]["decisions"] if line.startswith("dual synchronisation")]
    num_bytes = int(split.split(" bytes, ")[0].split(", ")[1].split(" of ")[0])
    assert abs(num_bytes - SIZES[dual_sync]) <= 2 * MIB, split


def test_what_takes_long_through_memory_devices_goes_by_nccl(stand_ins, tmp_path, expected_hash):  # noqa: F811
    links = {"STAND_IN_LINKS": "0:1:20000:0"}
    found, _ = run_steps(tmp_path, "cuda:1,cuda:1", {**stand_ins, **links})
    assert {each["hash"] for each in found} == {expected_hash}
    timed, split = found[0]["decisions"][-2:]
    assert "32 MiB took" in timed
    assert "offloading does not pay" in split, (timed, split)


def test_workers_on_one_gpu_leave_it_all_to_memory_devices(stand_ins, tmp_path, expected_hash):  # noqa: F811
    found, _ = run_steps(tmp_path, "2", stand_ins, place="0")
    assert {each["hash"] for each in found} == {expected_hash}
    assert "none in tensors: worker 0: is on one GPU with worker 1" in found[0]["decisions"][-1]


def test_workers_on_one_gpu_reduce_by_nccl_where_it_is_told(stand_ins, tmp_path, expected_hash):  # noqa: F811
    told = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "COARSE_DUAL_SYNC": "0"}
    found, _ = run_steps(tmp_path, "2", {**stand_ins, **told}, place="0")
    assert {each["hash"] for each in found} == {expected_hash}
    assert "0 of 82 shards" in found[0]["decisions"][-1]


IN_TRIAL = "worker 0: worker 0: trial of dual synchronisation: ncclAllReduce"


@pytest.mark.parametrize(
    ("memory_devices", "what", "told"),
    [
        pytest.param("2", "id", "worker 0: ncclGetUniqueId", marks=pytest.mark.slow),
        ("2", "rank1", "worker 1: ncclCommInitRank"),
        # dies while it connects
        pytest.param("2", "operation1:2", "worker 1: ncclAllReduce", marks=pytest.mark.slow),
        pytest.param("2", "operation0:6", IN_TRIAL, marks=pytest.mark.slow),
        ("cuda:1,cuda:1", "operation0:6", IN_TRIAL),
    ],
)
def test_where_nccl_fails_memory_devices_go_on(
    stand_ins,  # noqa: F811
    tmp_path,
    expected_hash,
    memory_devices,
    what,
    told,
):
    fails = {"STAND_IN_NCCL_FAILS": what, "COARSE_TIMEOUT_S": "12", "COARSE_DUAL_SYNC": "1MiB"}
    found, _ = run_steps(tmp_path, memory_devices, {**stand_ins, **fails})
    assert {each["hash"] for each in found} == {expected_hash}
    reason = found[0]["decisions"][-1]
    assert "dual synchronisation: none in tensors: worker" in reason
    assert told in reason
