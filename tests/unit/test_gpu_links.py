"""Links of GPUs: which paths are measured, and what becomes of the times."""

import json

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


def test_pairs_without_access_are_left_out():
    paths = gpu_paths(3, lambda gpu, peer: {gpu, peer} == {0, 1})
    assert [str(path) for path in paths if path.gpu == 0] == [
        "cuda:0 host-to-device",
        "cuda:0 device-to-host",
        "cuda:0 host, both",
        "cuda:0 device-to-device cuda:0",
        "cuda:0 device-to-device cuda:1",
        "cuda:0 peers, both cuda:1",
    ]
    assert [str(path) for path in paths if path.peer not in (None, path.gpu)] == [
        "cuda:0 device-to-device cuda:1",
        "cuda:0 peers, both cuda:1",
        "cuda:1 device-to-device cuda:0",
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
