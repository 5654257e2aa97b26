"""`coarse doctor`: reports findings clearly, and how to install missing components."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from coarse.cli import doctor
from coarse.cli.measurement.sync_probe import SyncLatency, SyncProbeError
from coarse.machine.host import Cpu, DaxDevice, Gpu, Limit, MemoryAccess, NumaNode, SystemMemory, read_host
from coarse.settings import Settings

MEMORY = SystemMemory(
    total_bytes=64 << 30,
    available_bytes=32 << 30,
    cgroup_limit_bytes=None,
    cgroup_used_bytes=None,
    huge_pages=0,
    huge_page_bytes=2 << 20,
    transparent="madvise",
    transparent_shared="advise",
)

NO_COMPILER = '["cuda:0 (H200)", "need NVRTC: install it"]'

GPU = Gpu(name="NVIDIA H200", memory_bytes=139 << 30, driver="570.1")


def values(findings: list[doctor.Finding]) -> dict[str, str]:
    return {finding.name: finding.value for finding in findings}


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (24 << 30, "24 GiB"), (5 << 50, "5120 TiB")],
)
def test_sizes_are_readable(nbytes, text):
    assert doctor.format_bytes(nbytes) == text


def test_a_single_core_is_noted():
    cpu = Cpu(model="x", num_cores=64, num_cores_allowed=64, quota_cores=1.0, vector_flags=("avx2",))
    findings = doctor.cpu_findings(cpu)
    assert values(findings)["cores"] == "1 to use (64 online, 64 by affinity, 1 by cgroup quota)"
    assert [finding.status for finding in findings if finding.name == "cores"] == [doctor.NOTE]


def test_a_memory_limit_is_shown_with_its_use():
    limited = replace(MEMORY, cgroup_limit_bytes=4 << 30, cgroup_used_bytes=1 << 30)
    assert values(doctor.memory_findings(limited))["cgroup limit"] == "4 GiB, 1 GiB used"
    assert values(doctor.memory_findings(MEMORY))["cgroup limit"] == "none"


def test_huge_pages_that_are_off_come_with_the_command():
    findings = doctor.memory_findings(replace(MEMORY, transparent_shared="never"))
    (pages,) = [finding for finding in findings if finding.status == doctor.NOTE]
    assert "shmem_enabled" in pages.advice


def test_the_pool_of_snapshots_is_half_of_what_is_left():
    settings = Settings()
    assert (
        doctor.pool_finding(MEMORY, settings).value
        == "as large as a model with its state, at most 16 GiB now"
    )
    limited = replace(MEMORY, cgroup_limit_bytes=4 << 30, cgroup_used_bytes=1 << 30)
    assert "at most 1.5 GiB now" in doctor.pool_finding(limited, settings).value


def test_a_pool_of_more_than_there_is_is_noted():
    settings = Settings(snapshot_pool_bytes=8 << 30)
    assert doctor.pool_finding(MEMORY, settings).status == doctor.GOOD
    limited = replace(MEMORY, cgroup_limit_bytes=4 << 30)
    finding = doctor.pool_finding(limited, settings)
    assert finding.value == "8 GiB for each model, by COARSE_SNAPSHOT_POOL_BYTES"
    assert (finding.status, "lower COARSE_SNAPSHOT_POOL_BYTES" in finding.advice) == (doctor.NOTE, True)


def test_gradients_that_the_processor_copies_are_noted_where_somebody_said_so():
    (finding,) = doctor.transfer_findings(Settings(gpu_transfers="off"))
    assert (finding.status, finding.value) == (
        doctor.NOTE,
        "copied by the processor, by COARSE_GPU_TRANSFERS=off",
    )
    assert doctor.transfer_findings(Settings()) == []


def test_gradients_that_are_compressed_between_nodes_are_shown_where_somebody_said_so():
    (finding,) = doctor.compression_findings(Settings(node_compression="int8"))
    assert finding.status == doctor.GOOD
    assert finding.value.startswith("float32 gradients as int8, by COARSE_NODE_COMPRESSION")
    assert doctor.compression_findings(Settings()) == []


def test_a_variable_that_cannot_be_is_a_failure(monkeypatch):
    monkeypatch.setenv("COARSE_ALGORITHM", "bad")
    (finding,) = doctor.settings_findings(MEMORY)
    assert finding.status == doctor.FAILED
    assert finding.value.startswith("COARSE_ALGORITHM='bad' must be one of auto, ")


def test_memory_without_cores_is_named_as_possible_cxl():
    node = NumaNode(node=1, cores=(), memory_bytes=128 << 30)
    assert values(doctor.numa_findings([node])) == {
        "node 1": "128 GiB, no cores: possibly CXL memory (--memory-devices numa:1)"
    }


def test_what_the_firmware_says_of_memory_is_shown():
    access = MemoryAccess(read_latency_ns=250, read_gbytes_per_s=24.5, write_gbytes_per_s=18)
    node = NumaNode(node=0, cores=(0, 1), memory_bytes=128 << 30, access=access)
    assert values(doctor.numa_findings([node])) == {
        "node 0": "128 GiB, 2 cores, reads 250 ns 24.5 GB/s by its firmware, writes 18 GB/s by its firmware"
    }


def test_devices_are_listed():
    dax = DaxDevice(name="dax0.0", memory_bytes=64 << 30, node=2)
    ram = DaxDevice(name="dax1.0", memory_bytes=1 << 30, node=3, is_file=False, is_system_ram=True)
    hidden = DaxDevice(name="dax2.0", memory_bytes=1 << 30, node=None, is_file=False)
    assert values(doctor.device_findings([dax, ram, hidden], [GPU, replace(GPU, node=1)])) == {
        "dax0.0": "64 GiB, NUMA node 2 (--memory-devices dax:/dev/dax0.0)",
        "dax1.0": "1 GiB, NUMA node 3 managed as memory of that node (--memory-devices numa:3)",
        "dax2.0": "1 GiB not to be used: there is no /dev/dax2.0 (see daxctl list; containers have to be given it)",
        "GPU 0": "NVIDIA H200, 139 GiB, driver 570.1",
        "GPU 1": "NVIDIA H200, 139 GiB, driver 570.1, nearest to NUMA node 1",
    }


@pytest.mark.parametrize(
    ("gpus", "has_cuda", "status"),
    [([], False, doctor.GOOD), ([], True, doctor.NOTE), ([GPU], True, doctor.NOTE)],
)
def test_gpus_that_nvml_does_not_show_are_noted_where_there_are_some(gpus, has_cuda, status):
    note = "nvidia-ml-py is not installed"
    *_, finding = doctor.device_findings([], gpus, note, has_cuda=has_cuda)
    assert (finding.name, finding.value, finding.status) == ("GPU", note, status)


def test_gpus_are_shown_by_the_names_that_memory_devices_have(monkeypatch, cuda_stand_ins):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(cuda_stand_ins))
    monkeypatch.setenv("STAND_IN_GPUS", "2")
    (finding,) = doctor.cuda_findings()
    assert (finding.value, finding.status) == ("cuda:0 (stand-in), cuda:1 (stand-in)", doctor.GOOD)


@pytest.mark.parametrize(
    ("refuses", "variable", "missing"),
    [
        ("cuMemCreate:2:800", "STAND_IN_REFUSES", r"cuda:1 .*descriptors: cuMemCreate: .*\(800,"),
        ("cuMemExportToShareableHandle:2:801", "STAND_IN_REFUSES", "cuda:1 .*: cuMemExportToShareableHandle"),
        (
            "cuDevicePrimaryCtxRetain:1:46",
            "STAND_IN_REFUSES",
            "cuda:0: cuDevicePrimaryCtxRetain: .*for itself",
        ),
        ("103", "STAND_IN_LACKS", "cuda:0 .*by file descriptors, by its driver.*; memory device cuda:1 .*by"),
    ],
)
def test_gpus_whose_memory_cannot_be_shared_are_noted(
    monkeypatch, cuda_stand_ins, refuses, variable, missing
):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(cuda_stand_ins))
    monkeypatch.setenv("STAND_IN_GPUS", "2")
    monkeypatch.setenv(variable, refuses)
    (finding,) = doctor.cuda_findings()
    assert (finding.value, finding.status) == ("cuda:0 (stand-in), cuda:1 (stand-in)", doctor.NOTE)
    assert re.search(missing, finding.advice), finding.advice


def test_what_gpus_lack_to_be_memory_devices_is_noted(monkeypatch):
    monkeypatch.setattr(doctor, "_ask", lambda *command, **limits: (NO_COMPILER, ""))
    (finding,) = doctor.cuda_findings()
    assert (finding.status, finding.advice) == (doctor.NOTE, "need NVRTC: install it")
    monkeypatch.setattr(doctor, "_ask", lambda *command, **limits: ('["", ""]', ""))
    assert doctor.cuda_findings() == []


@pytest.mark.parametrize(
    ("code", "why_not"),
    [
        ("raise OSError('a GPU fell off the bus')", "OSError: a GPU fell off the bus"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("import time; time.sleep(60)", "no answer within 0.5 s"),
    ],
)
def test_gpus_that_cannot_be_tried_are_noted(monkeypatch, code, why_not):
    ask = doctor._ask
    monkeypatch.setattr(
        doctor, "_ask", lambda *command, limit_s: ask(sys.executable, "-c", code, limit_s=0.5)
    )
    (finding,) = doctor.cuda_findings()
    assert (finding.status, finding.value) == (doctor.NOTE, f"tried in vain: {why_not}")


@pytest.mark.parametrize("gpus", [[], [GPU, GPU]])
def test_nccl_is_shown_with_version_and_place(monkeypatch, gpus):
    monkeypatch.setattr(doctor, "_first_line", lambda *command, **limits: "NCCL 2.32.3 (/site/libnccl.so.2)")
    (finding,) = doctor.nccl_findings(gpus)
    assert (finding.name, finding.value) == ("NCCL", "2.32.3 (/site/libnccl.so.2)")
    assert finding.status == doctor.GOOD


def test_nccl_that_is_missing_is_noted_where_there_are_gpus_to_reduce_between(monkeypatch):
    monkeypatch.setattr(doctor, "_first_line", lambda *command, **limits: "")
    assert doctor.nccl_findings([]) == doctor.nccl_findings([GPU]) == []
    (finding,) = doctor.nccl_findings([GPU, GPU])
    assert (finding.status, finding.value) == (doctor.NOTE, "none")
    assert "coarse-train[nccl]" in finding.advice


def test_few_open_files_are_noted():
    (finding,) = doctor.limit_findings([Limit(name="nofile", soft=1024, hard=None)])
    assert (finding.value, finding.status) == ("1024 (hard: unlimited)", doctor.NOTE)


@pytest.fixture
def healthy(monkeypatch):
    """Leaves out the processes that a whole examination starts."""
    monkeypatch.setattr(
        doctor, "_native_module", lambda: doctor.Finding(topic="runtime", name="n", value="loads")
    )
    monkeypatch.setattr(doctor, "probe_sync", lambda: SyncLatency(p50_us=61.0, p99_us=140.0))
    monkeypatch.setattr(doctor, "_ask", lambda *command, **limits: ('["", ""]', ""))
    monkeypatch.setattr(doctor, "_first_line", lambda *command, **limits: "")


def test_a_healthy_machine_gives_exit_code_0(healthy, capsys):
    assert doctor.run(SimpleNamespace(json=False)) == 0
    assert "4 KiB in 61 us" in " ".join(capsys.readouterr().out.split())


def test_a_sync_that_fails_gives_exit_code_1_and_its_reason(healthy, monkeypatch, capsys):
    def fail() -> SyncLatency:
        raise SyncProbeError("RendezvousError: worker 1 never came")

    monkeypatch.setattr(doctor, "probe_sync", fail)
    assert doctor.run(SimpleNamespace(json=True)) == 1
    record = json.loads(capsys.readouterr().out)
    assert not record["ok"]
    assert "worker 1 never came" in record["findings"][-1]["value"]


def test_json_holds_findings_and_facts(healthy):
    record = json.loads(doctor.as_json(read_host(), doctor.examine(read_host())))
    assert record["ok"]
    assert record["coarse"] == "0.1.0"
    assert record["host"]["memory"]["total_bytes"] > 0
    assert {"topic", "name", "value", "status", "advice"} == set(record["findings"][0])
