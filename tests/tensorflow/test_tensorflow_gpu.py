"""The op for tensors in a GPU's memory, with a stand-in for the GPU whose memory no processor can use as it is."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys

import pytest
from jobs import HERE, Job, environment

pytestmark = pytest.mark.timeout(1000)

FLAGS = (
    "import shlex, tensorflow as tf; from coarse.tensorflow.op_library import compile_flags; "
    "print(shlex.join([*compile_flags(), *tf.sysconfig.get_link_flags()]))"
)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """The library that gives TensorFlow a device of type GPU."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is missing, which compiles the stand-in for a GPU")
    told = subprocess.run(
        [sys.executable, "-c", FLAGS], env=environment(), capture_output=True, text=True, check=True
    )
    library = tmp_path_factory.mktemp("gpu") / "gpu_stand_in.so"
    flags = shlex.split(told.stdout.splitlines()[-1])
    command = ["g++", "-shared", str(HERE / "gpu_stand_in.cc"), "-o", str(library), *flags, "-O1"]
    subprocess.run(command, check=True)
    return library


@pytest.fixture(scope="module")
def reports(stand_in, tmp_path_factory):
    directory = tmp_path_factory.mktemp("reports")
    worker = str(HERE / "gpu_worker.py")
    job = Job(sys.executable, "-m", "coarse", "run", "-n", "2", worker, str(directory), str(stand_in))
    code, printed = job.finish()
    assert code == 0, printed
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


def test_tensors_of_a_gpu_are_summed(reports):
    for report in reports:
        for dtype, found in report.items():
            assert found["results"] == [[3.0 * number for number in range(1, 9)]] * 3, dtype


def test_floats_are_reduced_where_they_lie_and_their_sums_stay_there(reports):
    for report in reports:
        for dtype in ("float32", "float64", "float16", "bfloat16"):
            assert [each.split("/")[-1] for each in report[dtype]["devices"]] == ["device:GPU:0"], report[
                dtype
            ]
            # To the GPU and back by TensorFlow, to the host and back by the op.
            assert report[dtype]["copies"] >= 3 * 4, report[dtype]
        assert [each.split("/")[-1] for each in report["int32"]["devices"]] == ["device:CPU:0"], report[
            "int32"
        ]
