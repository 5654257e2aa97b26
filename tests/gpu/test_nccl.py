"""NCCL between processes, one for each rank, with memory allocated as slots are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coarse.kernels import _native

HERE = Path(__file__).parent
LIMIT_S = 300
SHARES_GPUS = (2, 30, 0)


def run_two_ranks(nccl, gpus, **environment):
    """Output of each of two ranks, each on its own GPU."""
    unique_id = nccl.unique_id().hex()
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                HERE / "nccl_script.py",
                nccl.path,
                unique_id,
                f"{rank}",
                "2",
                f"{gpu}",
                "reduce",
            ],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, gpu in enumerate(gpus)
    ]
    return [json.loads(rank.communicate(timeout=LIMIT_S)[0].splitlines()[-1]) for rank in ranks]


def test_ranks_on_two_gpus_have_sums_and_maxima(nccl):
    if _native.cuda_num_devices() < 2:
        pytest.skip("there is one GPU")
    assert run_two_ranks(nccl, [0, 1]) == [{"is_sum": True, "is_maximum": True}] * 2


def test_ranks_on_one_gpu_have_sums_and_maxima_where_nccl_is_told(nccl):
    if nccl.version < SHARES_GPUS:
        pytest.skip("NCCL before 2.30 takes one rank on each GPU")
    found = run_two_ranks(nccl, [0, 0], NCCL_MULTI_RANK_GPU_ENABLE="1")
    assert found == [{"is_sum": True, "is_maximum": True}] * 2


def test_ranks_on_one_gpu_are_refused_with_advice(nccl):
    for message in run_two_ranks(nccl, [0, 0], NCCL_MULTI_RANK_GPU_ENABLE="0"):
        assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in message
