"""Links of GPUs: the measured paths, and the use of their times."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coarse.profiler.gpu_links import GpuPath, gpu_paths, measure_gpu_links

LATENCY_US, HOST_GBYTES_PER_S, PEER_GBYTES_PER_S = 8.0, 25.0, 18.0


class ModelCopier:
    """Links with a latency and a bandwidth for each direction; the first copy of a size is slow."""

    def __init__(self):
        self.seen = set()

    def time_us(self, path, nbytes):
        is_first = (path, nbytes) not in self.seen
        self.seen.add((path, nbytes))
        bandwidth = HOST_GBYTES_PER_S if path.peer is None else PEER_GBYTES_PER_S
        return LATENCY_US + nbytes / bandwidth / 1e3 + 1000.0 * is_first


def test_pairs_without_access_copy_through_the_host():
    paths = gpu_paths(3, lambda gpu, peer: {gpu, peer} == {0, 1})
    assert [str(path) for path in paths if path.gpu == 0] == [
        "cuda:0 host-to-device",
        "cuda:0 device-to-host",
        "cuda:0 host, both",
        "cuda:0 device-to-device cuda:0",
        "cuda:0 device-to-device cuda:1",
        "cuda:0 peers, both cuda:1",
        "cuda:0 device-to-host-to-device cuda:2",
        "cuda:0 through the host, both cuda:2",
    ]
    assert [str(path) for path in paths if path.gpu > 0 and path.peer not in (None, path.gpu)] == [
        "cuda:1 device-to-device cuda:0",
        "cuda:1 device-to-host-to-device cuda:2",
        "cuda:1 through the host, both cuda:2",
        "cuda:2 device-to-host-to-device cuda:0",
        "cuda:2 device-to-host-to-device cuda:1",
    ]


def test_times_are_medians_without_the_first_copy():
    sizes = (1 << 16, 1 << 28)
    links = measure_gpu_links(["a", "b"], lambda gpu, peer: gpu < peer, ModelCopier(), sizes=sizes, repeats=3)
    alone = links.curves[GpuPath(kind="host-to-device", gpu=1)]
    assert alone.latency_us == pytest.approx(LATENCY_US + (1 << 16) / HOST_GBYTES_PER_S / 1e3)
    assert alone.peak_gbytes_per_s == pytest.approx(HOST_GBYTES_PER_S, rel=0.01)
    both = GpuPath(kind="host, both", gpu=0)
    assert links.peak_gbytes_per_s(both) == pytest.approx(2 * HOST_GBYTES_PER_S, rel=0.01)
    assert links.unreachable == ((1, 0),)


def test_figures_are_written_as_measured():
    links = measure_gpu_links(["a"], lambda gpu, peer: False, ModelCopier(), sizes=(1 << 20,), repeats=1)
    values = json.loads(links.to_json())
    assert values["kind"] == "measured"
    assert values["gpus"] == ["a"]
    assert {path["kind"] for path in values["paths"]} == {
        "host-to-device",
        "device-to-host",
        "host, both",
        "device-to-device",
    }
    assert all(point["nbytes"] == 1 << 20 for path in values["paths"] for point in path["points"])


def test_progress_ends_with_all_of_it():
    done = []
    measure_gpu_links(
        ["a"], lambda gpu, peer: False, ModelCopier(), sizes=(1,), repeats=1, progress=done.append
    )
    assert done == [0.25, 0.5, 0.75, 1.0]


def test_nothing_to_measure_is_refused():
    with pytest.raises(ValueError, match="0 GPUs, 13 sizes, 11 repeats"):
        measure_gpu_links([], lambda gpu, peer: False, ModelCopier())


def test_the_driver_copies_on_every_path(cuda_stand_ins):
    gpus = {"STAND_IN_GPUS": "3", "STAND_IN_GPUS_ARE_APART": "0:2,1:2"}
    libraries = {"LD_LIBRARY_PATH": str(cuda_stand_ins), "XDG_CACHE_HOME": str(cuda_stand_ins)}
    script = Path(__file__).with_name("gpu_links_script.py")
    done = subprocess.run(
        [sys.executable, script],
        env=os.environ | libraries | gpus,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "cuda:0 peers, both cuda:1" in done.stdout
    assert "cuda:1 through the host, both cuda:2" in done.stdout
