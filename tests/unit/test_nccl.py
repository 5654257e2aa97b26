"""NCCL: found at run time, and ranks in several processes reduce with each other; by a stand-in, without GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from coarse.cli import doctor
from coarse.kernels import _native
from coarse.kernels.nccl import find_nccl

LIMIT_S = 100


def in_another_process(code, **environment):
    """What a process prints that runs `code`."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wheel_with(folder, nccl):
    """Something on sys.path in which the wheel of NCCL would have been installed."""
    library = folder / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    if nccl is None:
        library.write_text("not a library")
    else:
        library.symlink_to(nccl)
    return library


SHOW = "from coarse.kernels.nccl import *; print(describe(find_nccl()))"


def test_nccl_is_that_of_the_environment_before_that_of_the_machine(cuda_stand_ins, tmp_path):
    wheel = wheel_with(tmp_path, cuda_stand_ins / "libnccl.so.2")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); {SHOW}"
    assert in_another_process(code, LD_LIBRARY_PATH=str(cuda_stand_ins)) == f"NCCL 2.99.3 ({wheel})\n"


def test_nccl_is_that_of_the_machine_where_the_environment_has_none(cuda_stand_ins):
    alone = "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]; "
    shown = in_another_process(alone + SHOW, LD_LIBRARY_PATH=str(cuda_stand_ins))
    assert shown == "NCCL 2.99.3 (libnccl.so.2)\n"


def test_nccl_that_cannot_be_loaded_is_named_with_the_reason_and_what_to_install(monkeypatch, tmp_path):
    wheel = wheel_with(tmp_path, None)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr("coarse.kernels.nccl._SONAME", "libnccl.so.2")
    with pytest.raises(_native.NcclError) as caught:
        find_nccl()
    assert f"{wheel}: " in str(caught.value)
    assert "pip install 'coarse[nccl]'" in str(caught.value)


def test_the_doctor_finds_nccl(cuda_stand_ins, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(cuda_stand_ins))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    (finding,) = doctor.nccl_findings([])
    assert finding.value.startswith("2.")


RANK = """
import ctypes, json, sys
from coarse.kernels import _native
library, rank = _native.NcclLibrary("libnccl.so.2"), int(sys.argv[1])
context = _native.CudaContext(rank % int(sys.argv[3]))
unique_id = bytes.fromhex(sys.argv[2])
try:
    communicator = _native.NcclCommunicator(library, unique_id, rank, 2, context)
except _native.NcclError as error:
    print(json.dumps(str(error)))
else:
    print(json.dumps([communicator.rank, communicator.num_ranks]))
    communicator.check()
    communicator.abort()
"""


def join_with_two_processes(stand_ins, num_gpus):
    """What each of two ranks prints, one process each; the name of their communicator comes from a third one."""
    environment = {"LD_LIBRARY_PATH": str(stand_ins), "COARSE_STAND_IN_GPUS": "2"}
    name = in_another_process(
        "from coarse.kernels._native import NcclLibrary; print(NcclLibrary('libnccl.so.2').unique_id().hex())",
        **environment,
    ).strip()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), name, str(num_gpus)],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [json.loads(rank.communicate(timeout=LIMIT_S)[0]) for rank in ranks]
    assert not os.path.exists(bytes.fromhex(name).rstrip(b"\0"))
    return printed


def test_ranks_in_several_processes_join(cuda_stand_ins):
    assert join_with_two_processes(cuda_stand_ins, num_gpus=2) == [[0, 2], [1, 2]]


def test_ranks_in_several_processes_on_one_gpu_are_refused_with_advice(cuda_stand_ins):
    for message in join_with_two_processes(cuda_stand_ins, num_gpus=1):
        assert "Duplicate GPU" in message
        assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in message


def test_a_unique_id_of_another_length_is_refused(cuda_stand_ins):
    code = """
from coarse.kernels import _native
library, context = _native.NcclLibrary("libnccl.so.2"), _native.CudaContext(0)
try:
    _native.NcclCommunicator(library, b"short", 0, 1, context)
except ValueError as error:
    print(error)
"""
    assert "128 bytes, not 5" in in_another_process(code, LD_LIBRARY_PATH=str(cuda_stand_ins))
