"""Facts about the machine: pure parsers, and readers that accept another root folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from coarse.machine import host
from coarse.machine.out_of_memory import OutOfMemoryWatch
from coarse.settings import Settings
from coarse.wire.pace import choose_pace, count_sync_cores


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8\n", (0, 1, 2, 3, 8)), ("5", (5,)), ("\n", ()), ("0-1,4-5", (0, 1, 4, 5))]
)
def test_lists_of_cores(text, cores):
    assert host.parse_cores(text) == cores


@pytest.mark.parametrize(
    ("text", "cores"), [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None), ("-1\n 100000\n", None)]
)
def test_cpu_quotas_of_both_cgroup_versions(text, cores):
    assert host.parse_cpu_max(text) == cores


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1073741824\n", 1 << 30), ("max\n", None), ("9223372036854771712\n", None), ("", None)],
)
def test_memory_limits_of_both_cgroup_versions(text, nbytes):
    assert host.parse_limit_bytes(text) == nbytes


@pytest.mark.parametrize(("text", "nbytes"), [("24684084 kB", 24684084 * 1024), ("", 0), ("12", 0)])
def test_sizes_of_meminfo(text, nbytes):
    assert host.parse_kib(text) == nbytes


@pytest.mark.parametrize(
    ("text", "choice"),
    [("always [madvise] never\n", "madvise"), ("always within_size [never]", "never"), ("", "")],
)
def test_choices(text, choice):
    assert host.parse_choice(text) == choice


def test_cgroups_by_controller():
    text = "4:memory:/jobs/a\n2:cpu,cpuacct:/jobs/b\n0::/c\n"
    assert host.parse_cgroups(text) == {"memory": "/jobs/a", "cpu": "/jobs/b", "cpuacct": "/jobs/b", "": "/c"}


def test_the_lowest_limit_on_the_way_up_counts(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/job\n",
            "sys/fs/cgroup/pod/memory.max": "2000\n",
            "sys/fs/cgroup/pod/memory.current": "700\n",
            "sys/fs/cgroup/pod/job/memory.max": "3000\n",
            "sys/fs/cgroup/pod/cpu.max": "250000 100000\n",
        },
    )
    memory = host.read_memory(root)
    assert (memory.cgroup_limit_bytes, memory.cgroup_used_bytes) == (2000, 700)
    assert host.read_cpu(root).quota_cores == 2.5


def test_limits_of_the_first_cgroup_version(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/job\n2:cpu,cpuacct:/\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "5000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert host.read_memory(root).cgroup_limit_bytes == 5000
    assert host.read_cpu(root).quota_cores == 0.5


def test_the_tightest_cgroup_allows_what_it_has_left_and_can_drop(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/job\n",
            "sys/fs/cgroup/pod/memory.max": "2000\n",
            "sys/fs/cgroup/pod/memory.current": "1900\n",
            "sys/fs/cgroup/pod/memory.stat": "anon 1500\ninactive_file 400\n",
            "sys/fs/cgroup/pod/job/memory.max": "1500\n",
            "sys/fs/cgroup/pod/job/memory.current": "100\n",
        },
    )
    assert host.read_cgroup_available_bytes(root) == 500


@pytest.mark.parametrize(
    ("cgroups", "events"),
    [("0::/pod/job\n", "pod/memory.events"), ("4:memory:/job\n", "memory/job/memory.oom_control")],
)
def test_what_the_kernel_kills_when_memory_runs_out_is_known(tmp_path, cgroups, events):
    limits = {"pod/memory.max": "2097152\n", "memory/job/memory.limit_in_bytes": "2097152\n"}
    root = tree(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in limits.items()})

    def killed(in_group, on_machine):
        return tree(
            root,
            {
                "proc/self/cgroup": cgroups,
                f"sys/fs/cgroup/{events}": f"oom 9\noom_kill {in_group}\noom_group_kill 7\n",
                "proc/vmstat": f"nr_free_pages 1\noom_kill {on_machine}\n",
            },
        )

    watch = OutOfMemoryWatch(killed(1, 4))
    assert watch.evidence() == ""
    killed(1, 5)
    assert "processes because this machine ran out of memory" in watch.evidence()
    killed(2, 6)
    assert "this control group, which reached its memory limit of 2 MiB" in watch.evidence()


def test_where_nothing_is_told_of_kills_nothing_is_said(tmp_path):
    assert OutOfMemoryWatch(tmp_path).evidence() == ""


def test_quotas_bound_sync_cores_and_how_long_they_spin(tmp_path, monkeypatch):
    """A container of a large machine may have the time of a few of its cores, and sees them all."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    assert count_sync_cores(Settings(), num_devices=2, num_workers=2) == 4
    assert choose_pace(Settings(), num_devices=2, num_workers=2).spin_us == 100
    monkeypatch.setattr(host, "_quota_cores", lambda root: 4.0)
    assert count_sync_cores(Settings(), num_devices=2, num_workers=2) == 1
    assert choose_pace(Settings(), num_devices=2, num_workers=2).spin_us == 100
    monkeypatch.setattr(host, "_quota_cores", lambda root: 2.0)
    assert choose_pace(Settings(), num_devices=2, num_workers=2).spin_us == 30


def test_without_a_limit_cgroups_say_nothing(tmp_path):
    root = tree(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"})
    assert host.read_cgroup_available_bytes(root) is None


@pytest.mark.parametrize(("quota_cores", "granted"), [(None, 8), (2.5, 2), (0.5, 1), (32.0, 8)])
def test_mask_and_quota_both_bound_the_cores(quota_cores, granted):
    cpu = host.Cpu(model="", num_cores=16, num_cores_allowed=8, quota_cores=quota_cores, vector_flags=())
    assert cpu.num_cores_granted == granted


def test_memory_and_huge_pages(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 8 kB\nMemAvailable: 6 kB\nHugePages_Total: 3\nHugepagesize: 2048 kB\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "[always] madvise never\n",
            "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always advise [never]\n",
        },
    )
    memory = host.read_memory(root)
    assert (memory.total_bytes, memory.available_bytes) == (8192, 6144)
    assert (memory.huge_pages, memory.huge_page_bytes) == (3, 2 << 20)
    assert (memory.transparent, memory.transparent_shared) == ("always", "never")


def test_a_node_with_memory_and_no_cores_stands_out(tmp_path):
    root = tree(
        tmp_path,
        {
            "sys/devices/system/node/node0/cpulist": "0-1\n",
            "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:       4 kB\n",
            "sys/devices/system/node/node10/cpulist": "\n",
            "sys/devices/system/node/node10/meminfo": "Node 10 MemTotal:       8 kB\n",
        },
    )
    near, far = host.read_numa_nodes(root)
    assert (near.node, near.cores, near.memory_bytes, near.is_memory_only) == (0, (0, 1), 4096, False)
    assert (far.node, far.cores, far.memory_bytes, far.is_memory_only) == (10, (), 8192, True)


def test_what_the_firmware_says_of_a_nodes_memory(tmp_path):
    folder = "sys/devices/system/node/node2"
    root = tree(
        tmp_path,
        {
            f"{folder}/distance": "17 28 10\n",
            f"{folder}/access0/initiators/read_latency": "250\n",
            f"{folder}/access0/initiators/read_bandwidth": "24000\n",
            f"{folder}/access0/initiators/write_bandwidth": "0\n",
        },
    )
    (node,) = host.read_numa_nodes(root)
    assert node.distances == (17, 28, 10)
    assert node.access == host.MemoryAccess(read_latency_ns=250, read_gbytes_per_s=24)


def test_figures_of_processors_come_before_those_of_whatever_is_nearest(tmp_path):
    folder = "sys/devices/system/node/node2"
    root = tree(
        tmp_path,
        {
            f"{folder}/access0/initiators/read_latency": "80\n",
            f"{folder}/access0/initiators/node7/uevent": "",
            f"{folder}/access1/initiators/read_latency": "250\n",
            f"{folder}/access1/initiators/node1/uevent": "",
        },
    )
    (node,) = host.read_numa_nodes(root)
    assert (node.access, node.initiators) == (host.MemoryAccess(read_latency_ns=250), (1,))


def numa_node(number, cores, distances, initiators=()):
    return host.NumaNode(
        node=number, cores=cores, memory_bytes=1 << 30, distances=distances, initiators=initiators
    )


@pytest.mark.parametrize(
    ("node", "cores"),
    [(0, (0, 1)), (1, (2, 3)), (3, (2, 3)), (4, (0, 1, 2, 3))],
)
def test_the_nearest_cores_of_a_node_are_its_own_or_those_at_the_least_distance(node, cores):
    nodes = (
        numa_node(0, (0, 1), (10, 21, 24, 14)),
        numa_node(1, (2, 3), (21, 10, 14, 24)),
        numa_node(3, (), (24, 14, 10, 26)),  # numbers have gaps, distances have none
        numa_node(4, (), (17, 17, 26, 10)),
    )
    assert host.nearest_cores(nodes, node) == cores


def test_the_nearest_cores_of_memory_without_any_are_those_that_its_firmware_names():
    """Memory that was plugged in later has no distances of its own: all processors seem equally far."""
    nodes = (
        numa_node(0, (0, 1), (10, 20, 10)),
        numa_node(1, (2, 3), (20, 10, 10)),
        numa_node(2, (), (10, 10, 10), (1,)),
    )
    assert host.nearest_cores(nodes, 2) == (2, 3)
    assert host.nearest_cores((*nodes[:2], numa_node(2, (), (), (0,))), 2) == (0, 1)


def test_without_distances_no_cores_are_near_to_a_node_that_has_none():
    nodes = (numa_node(0, (0, 1), ()), numa_node(1, (), ()))
    assert host.nearest_cores(nodes, 1) == ()
    assert host.nearest_cores(nodes, 2) == ()
    assert host.nearest_cores(nodes, None) == ()


def test_dax_devices(tmp_path):
    root = tree(
        tmp_path,
        {
            "sys/bus/dax/devices/dax0.0/size": "68719476736\n",
            "sys/bus/dax/devices/dax0.0/target_node": "2\n",
            "sys/bus/dax/devices/dax1.0/size": "1024\n",
            "sys/bus/dax/devices/dax1.0/target_node": "-1\n",
            "sys/bus/dax/devices/dax2.0/size": "4096\n",
            "sys/bus/dax/devices/dax2.0/target_node": "3\n",
            "sys/bus/dax/drivers/kmem/bind": "",
            "dev/dax0.0": "",
        },
    )
    (root / "sys/bus/dax/devices/dax2.0/driver").symlink_to("../../drivers/kmem")
    assert host.read_dax_devices(root) == (
        host.DaxDevice(name="dax0.0", memory_bytes=64 << 30, node=2),
        host.DaxDevice(name="dax1.0", memory_bytes=1024, node=None, is_file=False),
        host.DaxDevice(name="dax2.0", memory_bytes=4096, node=3, is_file=False, is_system_ram=True),
    )


def test_dax_devices_of_old_kernels_are_a_class(tmp_path):
    files = {"sys/class/dax/dax0.0/size": "4096\n", "sys/class/dax/dax0.0/target_node": "1\n"}
    device = host.DaxDevice(name="dax0.0", memory_bytes=4096, node=1, is_file=False)
    assert host.read_dax_devices(tree(tmp_path, files)) == (device,)
    both = {name.replace("class/dax", "bus/dax/devices"): text for name, text in files.items()}
    assert host.read_dax_devices(tree(tmp_path, both)) == (device,)


def test_memory_without_cores_is_cxl(tmp_path):
    nodes = {
        "sys/devices/system/node/node0/cpulist": "0-1\n",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 4 kB\n",
        "sys/devices/system/node/node1/cpulist": "\n",
        "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal: 8 kB\n",
        "sys/devices/system/node/node2/cpulist": "\n",
        "sys/devices/system/node/node2/meminfo": "Node 2 MemTotal: 0 kB\n",
    }
    assert [node.node for node in host.read_host(tree(tmp_path, nodes)).cxl_nodes] == [1]


def test_a_kernel_that_tells_nothing_is_no_error(tmp_path):
    facts = host.read_host(tmp_path)
    assert facts.memory.total_bytes == 0
    assert facts.numa_nodes == facts.dax_devices == ()
    assert facts.cpu.num_cores_granted >= 1


class LostError(Exception):
    """What NVML raises for a GPU that does not answer."""


class TwoGpus:
    """The calls of NVML that are used, answering for two GPUs of which the first is lost."""

    NVMLError = LostError

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return "570.1"

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        if index == 0:
            raise LostError("GPU is lost")
        return index

    def nvmlDeviceGetName(self, device):  # noqa: N802
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, device):  # noqa: N802
        return SimpleNamespace(total=139 << 30)

    def nvmlDeviceGetPciInfo(self, device):  # noqa: N802
        return SimpleNamespace(busId=b"00000000:AF:00.0")


def test_gpus_that_answer_are_listed_and_others_noted(tmp_path):
    root = tree(tmp_path, {"sys/bus/pci/devices/0000:af:00.0/numa_node": "1\n"})
    gpus, note = host._nvml_gpus(TwoGpus(), root)
    assert gpus == (host.Gpu(name="NVIDIA H200", memory_bytes=139 << 30, driver="570.1", node=1),)
    assert note == "GPU 0: GPU is lost"


def test_without_nvml_there_are_no_gpus_and_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gpus, note = host.read_gpus()
    assert gpus == ()
    assert "pip install 'coarse-train[gpu]'" in note


def test_without_a_driver_there_are_no_gpus_and_a_reason(monkeypatch):
    pynvml = pytest.importorskip("pynvml")

    def no_driver():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    assert host.read_gpus() == ((), "NVML: NVML Shared Library Not Found")


def test_limits_of_this_process():
    assert [limit.name for limit in host.read_limits()] == ["nofile", "memlock", "core"]
