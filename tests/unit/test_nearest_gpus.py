"""Memory devices on GPUs serve the workers that sit next to them."""

from types import SimpleNamespace

import pytest

from coarse.client import nearest_gpus
from coarse.client.nearest_gpus import pair_with_nearest
from coarse.errors import CoarseError
from coarse.machine.gpu_topology import Distance, GpuPlace, GpuTopology
from coarse.machine.memory_name import MemoryName
from coarse.machine.partition_table import PartitionTable


def even_table(*memories):
    return PartitionTable.even(
        num_workers=2, num_devices=2, memories=[MemoryName.parse(memory) for memory in memories]
    )


def topology():
    """GPUs 0 and 2 under one switch, 1 and 3 under another."""
    return GpuTopology(
        gpus=tuple(
            GpuPlace(name="V100", uuid=f"GPU-{n}", bus_id=f"0000:{n:02x}:00.0", numa_node=0) for n in range(4)
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
    """What the driver and NVML say; `num_gpus` and `read` may be changed."""
    machine = SimpleNamespace(num_gpus=4, reason="", read=topology)
    driver = SimpleNamespace(
        cuda_unavailable_reason=lambda: machine.reason,
        cuda_num_devices=lambda: machine.num_gpus,
        cuda_device_uuid=lambda gpu: f"GPU-{gpu}",
    )
    monkeypatch.setattr(nearest_gpus, "_native", driver)
    monkeypatch.setattr(nearest_gpus, "read_gpu_topology", lambda: machine.read())
    return machine


def test_each_worker_gets_the_memory_device_of_its_switch(machine):
    table = pair_with_nearest(even_table("cuda:3", "cuda:2"))
    assert table.memories == ("cuda:3", "cuda:2")
    assert [table.local_device(worker) for worker in (0, 1)] == [1, 0]


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
