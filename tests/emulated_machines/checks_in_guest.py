"""Checks that need several NUMA nodes and a real DAX device. boot.py runs them on an emulated machine."""

from __future__ import annotations

import mmap
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "multiproc"))

from harness import Job, job_of_test
from persistent_training import finish, join, register, train
from test_memory_kinds import LENGTHS, reducing, specs
from test_recovery import crash, dies_at

from coarse.errors import DeviceMemoryBusyError, OutOfDeviceMemoryError
from coarse.kernels import _native
from coarse.machine.host import MemoryAccess, read_dax_devices, read_numa_nodes
from coarse.machine.memory_name import parse_memory_devices
from coarse.proxy.memory import open_memory
from coarse.proxy.memory.dax import DaxMemory, dax_geometry
from coarse.proxy.memory.numa import NumaMemory, parse_numa_maps
from coarse.wire.segments import Extent

FAR = 1  # the node without processors
UNIT = 2 << 20
(DAX,) = (f"/dev/{device.name}" for device in read_dax_devices())
KINDS = [f"numa:{FAR},numa:{FAR}", f"numa:0,numa:{FAR}", f"dax:{DAX}", f"numa:{FAR},dax:{DAX}"]


@pytest.fixture
def job():
    with job_of_test() as started:
        yield started


def test_the_far_node_is_found_with_its_distance_and_what_its_firmware_says():
    near, far = read_numa_nodes()
    assert (near.is_memory_only, far.is_memory_only) == (False, True)
    assert far.distances == (17, 10)
    assert far.access == MemoryAccess(
        read_latency_ns=250, write_latency_ns=250, read_gbytes_per_s=20.48, write_gbytes_per_s=20.48
    )


def test_memory_lies_on_the_far_node_and_sync_cores_on_the_nearest():
    memory = NumaMemory(FAR)
    free = [node_free_bytes(node) for node in (0, FAR)]
    segment = memory.allocate("test", 64 << 20)
    assert free[1] - node_free_bytes(FAR) > 60 << 20
    mapping = _native.Mapping(segment.region, segment.num_bytes)
    mapping.populate()
    assert parse_numa_maps(Path("/proc/self/numa_maps").read_text(), mapping.address) == {FAR: 16384}
    assert memory.cores() == (0, 1)
    segment.close()


def test_memory_beyond_the_far_node_is_refused_although_the_machine_has_it():
    memory = NumaMemory(FAR)
    assert open_memory("host").available_bytes() > 1 << 30
    with pytest.raises(OutOfDeviceMemoryError, match=f"1024.0 MiB of NUMA node {FAR}"):
        memory.allocate("test", 1 << 30)


def test_pages_that_fell_to_the_near_node_are_found_out():
    memory = NumaMemory(FAR)
    near = NumaMemory(0).allocate("test", 10 * 4096)
    with pytest.raises(
        OutOfDeviceMemoryError, match="10 pages were asked of NUMA node 1, and there are 10 on node 0"
    ):
        memory._verify("test", near)
    near.close()


def test_the_device_tells_size_alignment_and_nearest_node():
    geometry = dax_geometry(DAX)
    assert geometry.alignment_bytes == UNIT
    assert geometry.num_bytes > 200 << 20
    assert geometry.num_bytes % UNIT == 0
    assert geometry.node == 0


def test_the_kernel_maps_whole_units_of_the_device_only():
    fd = os.open(DAX, os.O_RDWR)
    with pytest.raises(OSError, match="Invalid argument"):
        mmap.mmap(fd, 4096)
    os.close(fd)


def test_extents_of_the_device_are_zeroed_kept_and_given_back():
    memory = DaxMemory(DAX)
    whole = memory.available_bytes()
    first, second = memory.allocate("test", 100), memory.allocate("test", UNIT + 1)
    assert (first.extent, second.extent) == (Extent(0, UNIT), Extent(UNIT, 2 * UNIT))
    view = second.map()
    assert bytes(view) == bytes(UNIT + 1)
    view[:] = b"\xff" * (UNIT + 1)
    assert bytes(second.map(read_only=True)) == b"\xff" * (UNIT + 1)
    assert bytes(first.map()) == bytes(100)
    second.close()
    assert memory.available_bytes() == whole - 3 * UNIT  # the segment is still mapped
    view.release()
    first.close()
    assert memory.available_bytes() == whole
    again = memory.allocate("test", 3 * UNIT)
    assert bytes(again.map()) == bytes(3 * UNIT)
    again.close()
    with pytest.raises(DeviceMemoryBusyError, match=f"process {os.getpid()} "):
        DaxMemory(DAX)
    memory.close()


@pytest.mark.parametrize("memories", KINDS)
def test_results_have_the_bits_of_the_hosts_memory(job, memories):
    devices = parse_memory_devices(memories)
    expected = job.run(2, reducing(len(devices)))
    assert job.run(2, reducing(devices, "again")) == expected


@pytest.mark.parametrize("memories", [KINDS[0], KINDS[2]])
def test_restarted_workers_go_on_from_what_is_kept(memories):
    with job_of_test() as undisturbed:
        expected = undisturbed.run(2, lambda me: train(me, 0))[0][2]
    with job_of_test() as job:
        settings = {"memory_devices": parse_memory_devices(memories)}
        crash(job, 0, dies_at(1, 4, "backward.push 0"), **settings)
        first, _, digest = finish(job, 1, **settings)
        assert (first, digest) == (3, expected)


def test_slots_of_workers_lie_on_the_far_node(job):
    def worker(me):
        with me.join(memory_devices=parse_memory_devices(f"numa:{FAR}")) as session:
            group = session.register("gradients", specs())
            for index in range(len(LENGTHS)):
                np.frombuffer(group.buffer(index), np.float32)[:] = 1
            return policy_and_pages(np.frombuffer(group.buffer(0), "u1").ctypes.data)

    for policy, pages in job.run(2, worker):
        assert policy == f"bind:{FAR}"
        assert list(pages) == [str(FAR)]


def test_pages_are_on_two_nodes_by_turns():
    memory = NumaMemory(0, FAR)
    assert memory.available_bytes() <= 2 * min(NumaMemory(node).available_bytes() for node in (0, FAR))
    segment = memory.allocate("test", 64 << 20)
    mapping = _native.Mapping(segment.region, segment.num_bytes)
    mapping.populate()
    assert parse_numa_maps(Path("/proc/self/numa_maps").read_text(), mapping.address) == {0: 8192, FAR: 8192}
    segment.close()
    with pytest.raises(OutOfDeviceMemoryError, match=f"2048.0 MiB of NUMA nodes 0 and {FAR}"):
        memory.allocate("test", 2 << 30)


def test_what_an_optimizer_keeps_lies_on_the_nodes_of_all_memory_devices(job):
    """Training there gives the same bits, also after a crash."""
    with job_of_test() as undisturbed:
        expected = undisturbed.run(2, lambda me: train(me, 0))[0][2]

    def worker(me):
        with join(me, memory_devices=parse_memory_devices(f"numa:0,numa:{FAR}")) as session:
            group = register(session)
            arrays = [np.frombuffer(view, "f4") for view in (group.parameter(0), group.state(0, 0))]
            assert all(np.isfinite(array).all() for array in arrays)  # numa_maps counts only touched pages
            return [policy_and_pages(array.ctypes.data) for array in arrays]

    for found in job.run(2, worker):
        for policy, pages in found:
            assert policy == f"interleave:0-{FAR}"
            assert min(pages.values()) > 0
            assert abs(pages["0"] - pages[str(FAR)]) <= 1
    settings = {"memory_devices": parse_memory_devices(f"numa:0,numa:{FAR}")}
    with job_of_test() as disturbed:
        crash(disturbed, 0, dies_at(1, 4, "step.push 0"), **settings)
        assert finish(disturbed, 1, **settings)[2] == expected


def test_a_session_starts_from_what_the_firmware_says(job):
    def worker(me):
        devices = parse_memory_devices(f"numa:0,numa:{FAR}")
        with me.join(memory_devices=devices, routing="profile") as session:
            return session.decisions()

    for decisions in job.run(2, worker):
        assert "simulated from the firmware's figures (HMAT)" in decisions[0]
        assert any(each.startswith("w1: md0") for each in decisions), (
            decisions
        )  # the near node is faster in every respect


def test_the_device_is_whole_again_when_everybody_was_killed(job: Job):
    def worker(me):
        with me.join(memory_devices=parse_memory_devices(f"dax:{DAX}")) as session:
            session.register("gradients", specs())
            me.tell("ready")
            signal.pause()

    workers = job.start(2, worker)
    assert [each.hear() for each in workers] == ["ready"] * 2
    devices = job.device_pids()
    for pid in devices:
        job.kill_device(pid)
    for each in workers:
        each.kill()
    for each in workers:
        each.finish()
    for pid in devices:
        job.await_end(pid)
    memory = DaxMemory(DAX)
    assert memory.available_bytes() == dax_geometry(DAX).num_bytes
    memory.close()


def test_doctor_names_both_for_the_command_line():
    done = subprocess.run([sys.executable, "-m", "coarse", "doctor"], capture_output=True, text=True)
    text = " ".join(done.stdout.split())
    assert f"no cores: possibly CXL memory (--memory-devices numa:{FAR}), reads 250 ns 20.48 GB/s" in text
    assert f"(--memory-devices dax:{DAX})" in text


def test_a_device_file_of_a_containers_own_is_told(tmp_path, caplog):
    """A device file like that of `docker run --device`, on a file system that allows devices."""
    DaxMemory(DAX).close()
    assert not caplog.messages
    own = str(tmp_path / "dax0.0")
    os.mknod(own, 0o600 | stat.S_IFCHR, os.stat(DAX).st_rdev)
    with_locks_of_its_own = DaxMemory(own)
    assert f"{own} was made for this container" in caplog.text
    DaxMemory(DAX).close()  # the subject of the warning
    with_locks_of_its_own.close()


def test_memory_that_the_system_takes_over_becomes_a_node(job):
    """Must be the last test: afterwards the DAX device is gone."""
    before = {node.node for node in read_numa_nodes()}
    target = read_dax_devices()[0].node
    name = Path(DAX).name
    given = ["daxctl", "reconfigure-device", "--mode=system-ram", "--force", name]
    done = subprocess.run(given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (device,) = read_dax_devices()
    assert device.is_system_ram  # its file may still exist
    (node,) = (node for node in read_numa_nodes() if node.node == target)
    assert node.is_memory_only
    assert node.memory_bytes > 100 << 20
    with pytest.raises(ValueError, match=f"of NUMA node {target}: use numa:{target}"):
        DaxMemory(DAX)
    assert NumaMemory(target).cores() == (0, 1)
    printed = subprocess.run(
        [sys.executable, "-m", "coarse", "doctor"], capture_output=True, text=True
    ).stdout
    assert f"managed as memory of that node (--memory-devices numa:{target})" in " ".join(printed.split())
    memories = parse_memory_devices(f"numa:{target},numa:{FAR}")
    assert job.run(2, reducing(memories)) == job.run(2, reducing(2, "again"))
    assert before <= {node.node for node in read_numa_nodes()}


def policy_and_pages(address):
    """Policy and pages of this process's mapping that contains an address."""
    maps = Path("/proc/self/numa_maps").read_text()
    found = [line.split() for line in maps.splitlines() if "memfd:coarse-" in line]
    begin, policy = max((int(begin, 16), policy) for begin, policy, *_ in found if int(begin, 16) <= address)
    return policy, parse_numa_maps(maps, begin)


def node_free_bytes(node):
    for line in Path(f"/sys/devices/system/node/node{node}/meminfo").read_text().splitlines():
        if "MemFree" in line:
            return int(line.split()[-2]) * 1024
    raise AssertionError(node)
