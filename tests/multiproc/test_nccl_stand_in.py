"""NCCL between processes, without GPUs: the search for the library, and the rank scripts of tests/gpu.

Uses the stand-ins for CUDA's driver and NCCL (tests/native/cuda_stand_in.cpp, nccl_stand_in.cpp).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coarse.cli import doctor

SCRIPT = Path(__file__).parents[1] / "gpu" / "nccl_script.py"
LIMIT_S = 100
SHOW = "from coarse.kernels.nccl import *; print(describe(find_nccl()))"


@pytest.fixture
def stand_ins(cuda_stand_ins):
    """The environment of a process that uses the stand-ins for CUDA and NCCL."""
    return {"LD_LIBRARY_PATH": str(cuda_stand_ins), "STAND_IN_GPUS": "3"}


def printed_by(code, environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def run_ranks(stand_ins, gpus, tasks, **environment):
    """Runs a process for each rank; returns its output, or the signal that killed it. Another one makes the id."""
    code = (
        "from coarse.kernels._native import NcclLibrary; print(NcclLibrary('libnccl.so.2').unique_id().hex())"
    )
    name = printed_by(code, stand_ins)
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, "libnccl.so.2", name, f"{rank}", f"{len(gpus)}", f"{gpu}", task],
            env=os.environ | stand_ins | environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, (gpu, task) in enumerate(zip(gpus, tasks, strict=True))
    ]
    printed = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    assert not os.path.exists(bytes.fromhex(name).rstrip(b"\0"))
    return [json.loads(text) if text else -rank.returncode for rank, text in zip(ranks, printed, strict=True)]


def test_nccl_is_that_of_the_environment_before_that_of_the_machine(stand_ins, cuda_stand_ins, tmp_path):
    wheel = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    wheel.parent.mkdir(parents=True)
    wheel.symlink_to(cuda_stand_ins / "libnccl.so.2")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {SHOW}"
    assert printed_by(code, stand_ins) == f"NCCL 2.99.3 ({wheel})"


def test_nccl_is_that_of_the_machine_where_the_environment_has_none(stand_ins):
    code = f"import sys; from coarse.kernels import nccl; sys.path.clear(); {SHOW}"
    assert printed_by(code, stand_ins) == "NCCL 2.99.3 (libnccl.so.2)"


def test_the_doctor_finds_nccl(stand_ins, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", stand_ins["LD_LIBRARY_PATH"])
    (finding,) = doctor.nccl_findings([])
    assert (finding.name, finding.value[:2]) == ("NCCL", "2.")


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_have_sums_and_maxima(stand_ins, num_ranks):
    found = run_ranks(stand_ins, range(num_ranks), ["reduce"] * num_ranks)
    assert found == [{"is_sum": True, "is_maximum": True}] * num_ranks


def test_ranks_on_one_gpu_have_sums_and_maxima_where_nccl_is_told(stand_ins):
    found = run_ranks(stand_ins, [1, 1], ["reduce"] * 2, NCCL_MULTI_RANK_GPU_ENABLE="1")
    assert found == [{"is_sum": True, "is_maximum": True}] * 2


def test_ranks_on_one_gpu_are_refused_with_advice(stand_ins):
    for message in run_ranks(stand_ins, [1, 1], ["reduce"] * 2):
        assert "Duplicate GPU" in message
        assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in message


def test_a_rank_whose_peer_was_killed_waits_until_it_aborts(stand_ins):
    assert run_ranks(stand_ins, [0, 1], ["wait", "die"]) == [{"was_waiting": True}, signal.SIGKILL]


def test_a_unique_id_of_another_length_is_refused(stand_ins):
    code = """
from coarse.kernels import _native
library, context = _native.NcclLibrary("libnccl.so.2"), _native.CudaContext(0)
try:
    _native.NcclCommunicator(library, b"short", 0, 1, context)
except ValueError as error:
    print(error)
"""
    assert "128 bytes, not 5" in printed_by(code, stand_ins)
