"""Memory on a NUMA node: all pages are on the node, which is checked; refusals contain the reason."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path

import pytest

from coarse.errors import OutOfDeviceMemoryError
from coarse.kernels import _native
from coarse.machine.host import NumaNode, read_numa_nodes
from coarse.proxy.device_process import _move_near
from coarse.proxy.memory import available_bytes, numa, open_memories, open_memory, try_memory
from coarse.proxy.memory.numa import NumaMemory, parse_numa_maps
from coarse.wire.segments import Segment

NODES = read_numa_nodes()
NODE = next((node.node for node in NODES if node.memory_bytes), None)
NUM_BYTES = 5 * mmap.PAGESIZE + 1
MISSING_NODE = 1 + max((node.node for node in NODES), default=0)

pytestmark = pytest.mark.skipif(NODE is None, reason="this kernel knows no NUMA nodes")


@pytest.fixture
def memory():
    return NumaMemory(NODE)


def pages_of(segment):
    mapping = _native.Mapping(segment.region, segment.num_bytes)
    mapping.populate()
    return parse_numa_maps(Path("/proc/self/numa_maps").read_text(), mapping.address)


def policy_of(segment):
    mapping = _native.Mapping(segment.region, segment.num_bytes)
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        begin, policy, *_ = line.split()
        if int(begin, 16) == mapping.address:
            return policy
    raise AssertionError("numa_maps does not have the mapping")


@pytest.mark.parametrize("num_bytes", [1, NUM_BYTES, 9 << 20])
def test_all_pages_are_there_from_the_start_and_on_the_node(memory, num_bytes):
    segment = memory.allocate("test", num_bytes)
    assert os.fstat(segment.fd).st_blocks * 512 >= num_bytes
    assert policy_of(segment) == f"bind:{NODE}"
    assert pages_of(segment) == {NODE: -(-num_bytes // mmap.PAGESIZE)}
    with segment.map() as view:
        assert bytes(view[:100]) == bytes(min(100, num_bytes))
    segment.close()


def test_it_is_sealed_as_the_hosts_memory_is(memory):
    segment = memory.allocate("test", NUM_BYTES)
    assert _native.sealed_bytes(segment.fd) == NUM_BYTES
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)
    segment.close()


def test_pages_that_are_taken_later_are_bound_too(memory):
    segment = memory.allocate_sparse("test", NUM_BYTES)
    assert os.fstat(segment.fd).st_blocks == 0
    os.pwrite(segment.fd, b"x" * NUM_BYTES, 0)
    assert policy_of(segment) == f"bind:{NODE}"
    assert pages_of(segment) == {NODE: -(-NUM_BYTES // mmap.PAGESIZE)}
    segment.close()


def test_pages_take_turns_where_there_are_several_nodes():
    """One of which is all that this machine may have: how many pages lie where, emulated_machines/ has."""
    segment = Segment(_native.create_bound_memory("test", NUM_BYTES, [NODE, NODE], True), NUM_BYTES)
    assert policy_of(segment) == f"interleave:{NODE}"
    segment.close()


@pytest.mark.parametrize(
    ("names", "nodes"),
    [
        (["numa:{0}", "numa:{0}"], None),
        (["numa:{0}", "host"], None),
        (["numa:{0}", "numa:{1}"], (NODE, MISSING_NODE)),
        (["numa:{1}", "numa:{0}", "numa:{1}"], (NODE, MISSING_NODE)),
        (["numa:{0}", "numa:{1}", "host"], None),
    ],
)
def test_what_a_node_has_once_lies_on_the_nodes_of_all_its_memory_devices(monkeypatch, names, nodes):
    another = NumaNode(node=MISSING_NODE, cores=(), memory_bytes=1 << 30)
    monkeypatch.setattr(numa, "read_numa_nodes", lambda: (*NODES, another))
    monkeypatch.setattr(numa, "_allowed_nodes", tuple)
    names = [name.format(NODE, MISSING_NODE) for name in names]
    for device, name in enumerate(names):
        memories = open_memories(names, device)
        assert memories.own.kind == name.partition(":")[0]
        if nodes is None:
            assert memories.common is memories.own
        else:
            assert memories.common.nodes == nodes
            assert memories.common.num_places == 2
        memories.close()


def test_where_nodes_take_turns_the_first_one_that_is_full_ends_it(monkeypatch):
    monkeypatch.setattr(numa, "_check_node", lambda *_: None)
    monkeypatch.setattr(numa, "_available_on", {2: 5 << 30, 3: 1 << 30}.get)
    memory = NumaMemory(2, 3)
    assert memory.available_bytes() == 2 << 30
    with pytest.raises(OutOfDeviceMemoryError, match=r"4096.0 MiB of NUMA nodes 2 and 3, 2048.0 MiB are"):
        memory.allocate("states of model", 4 << 30)


def test_its_processors_are_those_of_the_node(memory):
    (node,) = (each for each in NODES if each.node == NODE)
    if not node.cores:
        pytest.skip("the first node with memory has no processors")
    assert memory.cores() == node.cores


def test_a_memory_device_and_what_it_starts_run_on_the_cores_near_its_memory(memory, monkeypatch):
    """The policy of this thread alone; its threads inherit it, as sync cores do."""
    nearest = max(os.sched_getaffinity(0))
    monkeypatch.setattr(memory, "cores", lambda: (nearest, 1 << 10))
    found = []

    def work():
        _move_near(memory)
        inheriting = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        inheriting.start()
        inheriting.join()

    before = os.sched_getaffinity(0)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [{nearest}]
    assert os.sched_getaffinity(0) == before


def test_a_memory_device_stays_where_it_is_if_it_may_run_on_no_core_near_its_memory(memory, monkeypatch):
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(memory, "cores", lambda: (1 << 10,))
    _move_near(memory)
    assert os.sched_getaffinity(0) == before


def test_a_shortage_names_the_node_and_both_numbers(memory):
    with pytest.raises(
        OutOfDeviceMemoryError, match=rf"test needs 1073741824.0 MiB of NUMA node {NODE}, [0-9.]+ MiB"
    ):
        memory.allocate("test", 1 << 50)


def test_what_is_available_is_less_than_the_node_has(memory):
    (node,) = (each for each in NODES if each.node == NODE)
    assert 0 < memory.available_bytes() < node.memory_bytes
    assert available_bytes(f"numa:{NODE}") < node.memory_bytes


def test_a_node_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(
        ValueError, match=rf"no NUMA node {MISSING_NODE} on this machine; there are .*{NODE} \("
    ):
        open_memory(f"numa:{MISSING_NODE}")


def test_a_node_without_memory_is_refused(monkeypatch):
    empty = NumaNode(node=MISSING_NODE, cores=(0,), memory_bytes=0)
    monkeypatch.setattr(numa, "read_numa_nodes", lambda: (*NODES, empty))
    with pytest.raises(ValueError, match=f"NUMA node {MISSING_NODE} has no memory"):
        try_memory(f"numa:{MISSING_NODE}")


def test_a_node_that_the_control_group_withholds_is_refused(monkeypatch):
    monkeypatch.setattr(numa, "_allowed_nodes", lambda: (NODE + 1,))
    with pytest.raises(
        ValueError, match=rf"may not have memory of NUMA node {NODE}, only of {NODE + 1}: its control"
    ):
        try_memory(f"numa:{NODE}")


def test_the_kernel_refuses_to_bind_to_a_node_that_is_not_there():
    with pytest.raises(OSError, match=f"on NUMA node {MISSING_NODE}") as caught:
        _native.create_bound_memory("test", NUM_BYTES, [MISSING_NODE], True)
    assert caught.value.errno == errno.EINVAL


def test_memory_that_lies_elsewhere_is_found_out(monkeypatch, memory):
    """As if the kernel had not followed the policy: pages that are on node 0 were asked of another."""
    unbound = memory.allocate("test", NUM_BYTES)
    memory.nodes = (MISSING_NODE,)
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        memory._verify("gradients", unbound)
    assert str(caught.value) == (
        f"gradients: 6 pages were asked of NUMA node {MISSING_NODE}, and there are 6 on node {NODE}"
    )
    unbound.close()


def test_a_container_that_forbids_mbind_is_told_what_to_allow(monkeypatch, memory):
    def forbidden(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(_native, "create_bound_memory", forbidden)
    with pytest.raises(OutOfDeviceMemoryError, match="--cap-add SYS_NICE"):
        memory.allocate("test", NUM_BYTES)


def test_numa_maps_are_read_by_address():
    text = (
        "7f0000000000 default file=/usr/lib/libc.so.6 mapped=312 N0=312 kernelpagesize_kB=4\n"
        "7f1000000000 bind:2 file=/memfd:coarse-gradients\\040of\\040model\\040(deleted) dirty=1536 active=0 "
        "N0=512 N2=1024 kernelpagesize_kB=4\n"
        "7ffc00000000 default stack anon=3 dirty=3 N0=3 kernelpagesize_kB=4\n"
    )
    assert parse_numa_maps(text, 0x7F1000000000) == {0: 512, 2: 1024}
    assert parse_numa_maps(text, 0x7F0000000000) == {0: 312}
    assert parse_numa_maps(text, 0x7F2000000000) == {}
