"""Memory devices on GPUs serve the workers that sit next to them."""

from types import SimpleNamespace

import pytest

from coarse.errors import CoarseError
from coarse.machine.gpu_topology import Distance, GpuPlace, GpuTopology
from coarse.machine.host import NumaNode
from coarse.machine.memory_name import MemoryName
from coarse.machine.partition_table import PartitionTable
from coarse.startup import nearest_gpus
from coarse.startup.nearest_gpus import pair_with_nearest


def even_table(*memories):
    return PartitionTable.even(
        num_workers=2, num_devices=2, memories=[MemoryName.parse(memory) for memory in memories]
    )


def topology():
    """GPUs 0 and 2 under one switch of NUMA node 1, 1 and 3 under another one of node 0."""
    return GpuTopology(
        gpus=tuple(
            GpuPlace(name="V100", uuid=f"GPU-{n}", bus_id=f"0000:{n:02x}:00.0", numa_node=1 - n % 2)
            for n in range(4)
        ),
        distances=tuple(
            tuple(
                Distance.SAME
                if one == other
                else Distance.SWITCH
                if (one - other) % 2 == 0
                else Distance.SYSTEM
                for other in range(4)
            )
            for one in range(4)
        ),
        nvlinks=((0,) * 4,) * 4,
    )


@pytest.fixture
def machine(monkeypatch):
    """Answers of the driver and NVML, and a kernel with two NUMA nodes and a memory-only one near each."""
    nodes = [
        NumaNode(node=node, cores=cores, memory_bytes=1, distances=distances)
        for node, cores, distances in (
            (0, (0,), (10, 21, 24, 31)),
            (1, (1,), (21, 10, 31, 24)),
            (2, (), (24, 31, 10, 40)),
            (3, (), (31, 24, 40, 10)),
        )
    ]
    machine = SimpleNamespace(num_gpus=4, reason="", read=topology, nodes=nodes)
    driver = SimpleNamespace(
        cuda_unavailable_reason=lambda: machine.reason,
        cuda_num_devices=lambda: machine.num_gpus,
        cuda_device_uuid=lambda gpu: f"GPU-{gpu}",
        CudaError=RuntimeError,
    )
    monkeypatch.setattr(nearest_gpus, "_native", driver)
    monkeypatch.setattr(nearest_gpus, "read_gpu_topology", lambda: machine.read())
    monkeypatch.setattr("coarse.machine.host.read_numa_nodes", lambda: machine.nodes)
    return machine


def test_each_worker_gets_the_memory_device_of_its_switch(machine):
    table = pair_with_nearest(even_table("cuda:3", "cuda:2"))
    assert table.memories == ("cuda:3", "cuda:2")
    assert [table.local_device(worker) for worker in (0, 1)] == [1, 0]


@pytest.mark.parametrize("memories", [("numa:0", "numa:1"), ("numa:2", "numa:3")])
def test_each_worker_gets_the_memory_device_of_the_node_that_its_gpu_is_nearest_to(machine, memories):
    table = pair_with_nearest(even_table(*memories))
    assert table.memories == memories
    assert [table.local_device(worker) for worker in (0, 1)] == [1, 0]


def test_what_the_kernel_does_not_say_leaves_workers_as_they_are(machine, caplog):
    machine.nodes = []
    table = even_table("numa:0", "numa:1")
    assert pair_with_nearest(table) is table
    assert (
        "the system does not report the distance between V100 (0000:00:00.0) and NUMA node 0" in caplog.text
    )


@pytest.mark.parametrize("memories", [("host", "host"), ("numa:0", "numa:0"), ("host", "numa:1")])
def test_where_all_memory_is_as_near_nothing_changes(machine, memories):
    machine.read = None  # is not asked
    table = even_table(*memories)
    assert pair_with_nearest(table) is table


def test_on_one_gpu_nothing_changes(machine):
    machine.num_gpus = 1
    machine.read = None  # is not asked
    table = even_table("cuda:0", "cuda:0")
    assert pair_with_nearest(table) is table


def test_without_cuda_nothing_changes(machine):
    machine.reason = "there is no CUDA driver"
    table = even_table("cuda:3", "cuda:2")
    assert pair_with_nearest(table) is table


def test_without_nvml_workers_are_paired_by_number_and_told_so(machine, caplog):
    def fail():
        raise CoarseError("nvidia-ml-py is not installed")

    machine.read = fail
    table = even_table("cuda:3", "cuda:2")
    assert pair_with_nearest(table) is table
    assert "by number, not by distance: nvidia-ml-py is not installed" in caplog.text
