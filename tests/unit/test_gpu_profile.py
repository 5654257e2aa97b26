"""`coarse profile --gpus`: its output, and its message without CUDA."""

import pytest

from coarse.cli.main import main
from coarse.cli.measurement.gpu_profile import print_links, print_topology
from coarse.kernels import _native
from coarse.machine.gpu_topology import Distance, GpuPlace, GpuTopology
from coarse.profiler.curve import Curve, CurvePoint
from coarse.profiler.gpu_links import GpuLinks, GpuPath


def test_gpus_are_shown_in_the_order_of_cuda(capsys):
    topology = GpuTopology(
        gpus=(
            GpuPlace(name="V100", uuid="GPU-a", bus_id="0000:17:00.0", numa_node=0),
            GpuPlace(name="T4", uuid="GPU-b", bus_id="0000:65:00.0", numa_node=None),
        ),
        distances=((Distance.SAME, Distance.SYSTEM), (Distance.SYSTEM, Distance.SAME)),
        nvlinks=((0, 2), (2, 0)),
    )
    print_topology(topology, ["GPU-b", "GPU-a"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "cuda:" in line]
    assert rows[1][:4] == ["cuda:0", "T4", "0000:65:00.0", "unknown"]
    assert " ".join(rows[2]) == "cuda:1 V100 0000:17:00.0 0 between NUMA nodes, 2 NVLinks -"


def test_both_directions_are_shown_in_sum(capsys):
    def curve(gbytes_per_s):
        points = (CurvePoint(nbytes=n, time_us=n / gbytes_per_s / 1e3) for n in (1 << 16, 1 << 28))
        return Curve(points=tuple(points))

    one_way, both = GpuPath(kind="device-to-host", gpu=0), GpuPath(kind="host, both", gpu=0)
    links = GpuLinks(
        gpus=("V100", "V100"), curves={one_way: curve(12.0), both: curve(11.0)}, unreachable=((0, 1),)
    )
    print_links(links)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("measured on V100, V100; ")
    assert next(line for line in lines if "cuda:0 device-to-host" in line).split()[-2:] == ["12", "12"]
    assert next(line for line in lines if "cuda:0 host, both" in line).split()[-2:] == ["22", "22"]
    assert lines[-1].startswith("cuda:0 cannot access cuda:1")


@pytest.mark.skipif(not _native.cuda_unavailable_reason(), reason="this machine has a CUDA device")
def test_without_cuda_it_says_why(capsys):
    assert main(["profile", "--gpus"]) == 1
    assert _native.cuda_unavailable_reason() in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--workers", "2"), ("--refresh", "--figures", "pictures")])
def test_what_has_no_meaning_for_gpus_is_refused(capsys, flags):
    assert main(["profile", "--gpus", *flags]) == 2
    assert ", ".join(flag for flag in flags if flag.startswith("--")) in capsys.readouterr().err


def test_links_to_memory_devices_on_gpus_are_no_links_of_a_session(capsys):
    assert main(["profile", "--memory-devices", "cuda:0,cuda:1"]) == 2
    assert "coarse profile --gpus" in capsys.readouterr().err
