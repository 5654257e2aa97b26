"""LinkTable: reproduces the paper's measurements; transfers that share a switch or host contend."""

from __future__ import annotations

import dataclasses
import itertools
import re
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coarse.machine.catalogue import load_machine, machine_names
from coarse.machine.links import Bucket, LinkTable, Path
from coarse.machine.machine_file import read_machine
from coarse.machine.partition_table import MemoryDeviceEntry, PartitionTable, partition_table_names
from coarse.machine.wiring import link_table
from coarse.profiler.linked import profile_from_links
from coarse.profiler.profile import PULL, PUSH

MACHINES = {name: load_machine(name) for name in machine_names()}


def paper_table(name):
    return link_table(MACHINES[name], PartitionTable.load(name))


@st.composite
def wired(draw):
    """A machine and a partition table with any workers under any memory devices that it has room for."""
    machine = MACHINES[draw(st.sampled_from(sorted(MACHINES)))]
    room = machine.topology.num_gpus or 12
    num_workers = draw(st.integers(1, room - 1))
    num_devices = draw(st.integers(1, room - num_workers))
    owners = draw(st.lists(st.integers(0, num_devices - 1), min_size=num_workers, max_size=num_workers))
    blocks = [
        [worker for worker in range(num_workers) if owners[worker] == device] for device in range(num_devices)
    ]
    table = PartitionTable.of_workers(blocks)
    if machine.topology.num_gpus and draw(st.booleans()):
        gpus = draw(st.permutations(range(room)))
        devices = [
            MemoryDeviceEntry(workers=tuple(block), gpu=gpus[num_workers + device])
            for device, block in enumerate(blocks)
        ]
        table = PartitionTable(devices=tuple(devices), worker_gpus=tuple(gpus[:num_workers]))
    return machine, table, link_table(machine, table)


@given(wired())
def test_every_pair_has_a_path_over_buckets_that_exist(case):
    _, table, links = case
    assert (links.num_workers, links.num_devices) == (table.num_workers, table.num_devices)
    for source, target in itertools.permutations(range(links.num_endpoints), 2):
        path = links.path(source, target)
        assert all(0 <= index < len(links.buckets) for index in path.buckets)
        assert links.bandwidth_gbytes_per_s(source, target) > 0


@given(wired())
def test_both_ways_are_alike_and_no_bucket_is_unused(case):
    _, _, links = case
    for one, other in itertools.combinations(range(links.num_endpoints), 2):
        assert links.path(one, other).latency_us == links.path(other, one).latency_us
        alone = links.bandwidth_gbytes_per_s(one, other)
        assert alone == links.bandwidth_gbytes_per_s(other, one)
        assert alone <= links.duplex_gbytes_per_s(one, other) <= 2 * alone
    used = {index for row in links.paths for path in row if path for index in path.buckets}
    assert used == set(range(len(links.buckets)))


@given(wired())
def test_other_processes_read_the_same_table(case):
    _, _, links = case
    assert LinkTable.from_json(links.to_json()) == links


@pytest.mark.parametrize(("name", "local", "remote"), [("aws-p3", 9, 16), ("sdsc-p100", 25, 18)])
def test_push_and_pull_at_once_get_what_figure_8_shows(name, local, remote):
    links = paper_table(name)
    for worker, device in itertools.product(range(links.num_workers), range(links.num_devices)):
        both = links.duplex_gbytes_per_s(links.worker(worker), links.device(device))
        assert both == (local if worker == device else remote)


@pytest.mark.parametrize("name", ["aws-p3", "sdsc-p100"])
def test_the_local_proxy_has_the_lowest_latency(name):
    links = paper_table(name)
    for worker in range(links.num_workers):
        latencies = [
            links.path(links.worker(worker), links.device(device)).latency_us
            for device in range(links.num_devices)
        ]
        assert min(range(links.num_devices), key=latencies.__getitem__) == worker
        assert latencies.count(min(latencies)) == 1


def test_one_way_between_local_p100s_is_13():
    links = paper_table("sdsc-p100")
    assert links.bandwidth_gbytes_per_s(links.worker(0), links.device(0)) == 13


def test_t4s_see_no_difference_between_local_and_remote():
    links = paper_table("aws-g4dn")
    seen = {
        (
            links.path(worker, links.device(device)).latency_us,
            links.bandwidth_gbytes_per_s(worker, links.device(device)),
            links.duplex_gbytes_per_s(worker, links.device(device)),
        )
        for worker in range(4)
        for device in range(4)
    }
    assert len(seen) == 1


def shared(links, first, second):
    return {links.buckets[i].name for i in set(links.path(*first).buckets) & set(links.path(*second).buckets)}


def test_what_leaves_a_switch_shares_its_uplink():
    links = paper_table("aws-p3")
    push = (links.worker(0), links.device(1))
    reply = (links.device(0), links.worker(1))
    assert shared(links, push, reply) == {"switch 0 uplink up", "switch 1 uplink down"}
    assert shared(links, push, (links.worker(0), links.device(0))) == {"gpu 0 lane up"}
    assert shared(links, push, (links.worker(2), links.device(3))) == set()


def test_t4s_of_a_socket_share_its_host_bridge():
    links = paper_table("aws-g4dn")
    first, second = (links.worker(0), links.device(0)), (links.worker(1), links.device(1))
    assert shared(links, first, second) == {"socket 0 host up", "socket 0 host down"}


def test_expanders_behind_a_switch_share_its_uplink():
    table = PartitionTable.even(num_workers=4, num_devices=4)
    links = link_table(MACHINES["cxl2-switch"], table)
    pushes = [(links.worker(rank), links.device(rank)) for rank in range(4)]
    assert shared(links, pushes[0], pushes[3]) == {"switch uplink down"}
    apart = link_table(MACHINES["cxl2-x8"], table)
    assert shared(apart, pushes[0], pushes[3]) == set()


def test_what_is_read_from_a_memory_device_can_be_slower_than_what_is_written_to_it(tmp_path):
    """Push beats pull, as over PCIe with a GPU's memory as the source (Oden's dissertation, table 3.1)."""
    text = resources.files("coarse.machine").joinpath("presets/cxl3-x8.toml").read_text()
    announced = next(line for line in text.splitlines() if line.startswith("gbytes_per_s = { value = 72"))
    reads = 'read_gbytes_per_s = { value = 21.7, source = "968 / 3212 of writes", kind = "assumed" }'
    (tmp_path / "slow-reads.toml").write_text(text.replace(announced, f"{announced}\n{reads}"))
    machine = read_machine(tmp_path / "slow-reads.toml")
    links = link_table(machine, PartitionTable.even(num_workers=2, num_devices=2))
    worker, device, other = links.worker(0), links.device(0), links.device(1)
    assert links.bandwidth_gbytes_per_s(worker, device) == 72
    assert links.bandwidth_gbytes_per_s(device, worker) == 21.7
    assert links.bandwidth_gbytes_per_s(device, other) == 21.7, "devices read each other, too"
    profile = profile_from_links(links, [0, 1])
    push, pull = (profile.curve(kind, 0, 0) for kind in (PUSH, PULL))
    assert push.fit().beta_gbytes_per_s == pytest.approx(72)
    assert pull.fit().beta_gbytes_per_s == pytest.approx(21.7)


def test_nvlink_takes_the_place_of_pcie_where_there_is_one():
    table = PartitionTable(
        devices=(MemoryDeviceEntry(workers=(0,), gpu=1), MemoryDeviceEntry(gpu=3), MemoryDeviceEntry(gpu=4)),
        worker_gpus=(0,),
    )
    links = link_table(MACHINES["dgx1-volta"], table)
    assert [links.bandwidth_gbytes_per_s(0, links.device(d)) for d in range(3)] == [50, 25, 12]


@pytest.mark.parametrize("name", sorted(partition_table_names()))
def test_tables_of_the_papers_runs_fit_their_machines(name):
    machine = MACHINES[name.removesuffix("-2to1")]
    links = link_table(machine, PartitionTable.load(name))
    expected = machine.topology.num_gpus // 2
    assert (links.num_workers, links.num_devices) == (expected, expected // (2 if "2to1" in name else 1))


def test_too_few_gpus_are_counted():
    with pytest.raises(ValueError, match="3 workers and 2 memory devices need 5 GPUs, but sdsc-p100 has 4"):
        link_table(MACHINES["sdsc-p100"], PartitionTable.even(num_workers=3, num_devices=2))


def test_a_gpu_that_the_machine_has_not_is_named():
    with pytest.raises(ValueError, match="names GPU 4, but sdsc-p100 has 4"):
        link_table(MACHINES["sdsc-p100"], PartitionTable.load("aws-p3"))


def two_endpoints(**changes):
    path = Path(latency_us=1, buckets=(0,))
    values = {
        "machine": "wire",
        "num_workers": 1,
        "num_devices": 1,
        "buckets": (Bucket(name="wire", gbytes_per_s=2.0),),
        "paths": ((None, path), (path, None)),
    }
    return LinkTable(**(values | changes))


PATH = Path(latency_us=1, buckets=(0,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_devices": 0}, "at least one of each"),
        ({"num_devices": 2}, "a square matrix for 3 endpoints"),
        ({"paths": ((None, None), (PATH, None))}, "path from worker 0 to md0"),
        ({"paths": ((PATH, PATH), (PATH, None))}, "path from worker 0 to worker 0"),
        ({"buckets": ()}, r"buckets \[0\] are not all among the 0"),
        ({"buckets": (Bucket(name="wire", gbytes_per_s=2),) * 2}, "two buckets are named 'wire'"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        two_endpoints(**changes)


@pytest.mark.parametrize("gbytes_per_s", [0, -1, float("nan"), float("inf")])
def test_buckets_hold_a_positive_capacity(gbytes_per_s):
    with pytest.raises(ValueError, match="bucket wire"):
        Bucket(name="wire", gbytes_per_s=gbytes_per_s)


@pytest.mark.parametrize(("latency_us", "buckets"), [(-1, (0,)), (float("nan"), (0,)), (1, ()), (1, (0, 0))])
def test_paths_check_themselves(latency_us, buckets):
    with pytest.raises(ValueError, match=r"latency|buckets"):
        Path(latency_us=latency_us, buckets=buckets)


def test_endpoints_have_numbers_and_names():
    links = two_endpoints()
    assert [links.endpoint_name(end) for end in (links.worker(0), links.device(0))] == ["worker 0", "md0"]
    for wrong in (lambda: links.worker(1), lambda: links.device(-1), lambda: links.path(0, 2)):
        with pytest.raises(ValueError, match=r"worker 1|memory device -1|endpoint 0 to 2"):
            wrong()
    with pytest.raises(ValueError, match="worker 0 to itself"):
        links.path(0, 0)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"machine": "x"}'])
def test_other_json_is_refused(text):
    with pytest.raises(ValueError, match=r"link table|Expecting value"):
        LinkTable.from_json(text)


def test_asymmetric_paths_add_up():
    back = Path(latency_us=1, buckets=(1,))
    links = two_endpoints(
        buckets=(Bucket(name="push", gbytes_per_s=3), Bucket(name="pull", gbytes_per_s=1)),
        paths=((None, PATH), (back, None)),
    )
    assert links.duplex_gbytes_per_s(0, 1) == 4
    assert dataclasses.replace(links, machine="other") != links


def test_memory_devices_of_aws_p3_have_an_interconnect_of_their_own() -> None:
    table = link_table(load_machine("aws-p3"), PartitionTable.even(num_workers=4, num_devices=4))
    between_devices = {table.bandwidth_gbytes_per_s(table.device(0), table.device(d)) for d in (1, 2, 3)}
    assert between_devices == {25.0}
    used_by_workers = {
        index
        for worker in range(4)
        for target in range(8)
        if target != worker
        for index in table.path(worker, target).buckets
    }
    assert used_by_workers.isdisjoint(table.path(table.device(0), table.device(1)).buckets)


# ---- several nodes ----


def nodes_of(name, num_nodes=2):
    return link_table(MACHINES[name], PartitionTable.load(name), num_nodes=num_nodes)


@pytest.mark.parametrize("name", ["aws-g4dn", "aws-p3", "sdsc-p100"])
def test_each_node_has_the_links_of_one(name):
    one, two = paper_table(name), nodes_of(name)
    workers, devices = one.num_workers, one.num_devices
    assert (two.num_workers, two.num_devices) == (2 * workers, 2 * devices)
    for node in range(2):
        own = [two.worker(node * workers + worker) for worker in range(workers)]
        own += [two.device(node * devices + device) for device in range(devices)]
        for source in range(one.num_endpoints):
            for target in range(one.num_endpoints):
                if source == target:
                    continue
                path, of_one = two.path(own[source], own[target]), one.path(source, target)
                assert path.latency_us == of_one.latency_us
                assert [two.buckets[number] for number in path.buckets] == [
                    dataclasses.replace(one.buckets[number], name=on_node(node, one.buckets[number].name))
                    for number in of_one.buckets
                ]


def on_node(node, name):
    """A bucket's name on one of several nodes."""
    return re.sub(r"(gpu|switch|socket) \d", lambda match: f"node {node} {match.group()}", name)


def test_all_traffic_between_two_nodes_shares_their_interfaces():
    two = nodes_of("aws-p3")
    there, back = two.path(two.worker(1), two.device(7)), two.path(two.device(7), two.worker(1))
    names = [two.buckets[number].name for number in there.buckets]
    assert names[:2] == ["node 0 network out", "node 1 network in"]
    assert names[2:] == [
        "node 0 gpu 2 lane up",
        "node 1 gpu 7 lane down",
        "node 0 switch 1 uplink up",
        "node 1 switch 3 uplink down",
    ]
    assert not set(there.buckets) & set(back.buckets)
    assert set(there.buckets[:2]) <= set(two.path(two.worker(0), two.worker(4)).buckets)
    assert two.bandwidth_gbytes_per_s(two.worker(1), two.device(7)) == 12.5
    assert there.latency_us == MACHINES["aws-p3"].network.latency_us.value


def test_three_nodes_have_an_interface_each():
    three = nodes_of("sdsc-p100", num_nodes=3)
    interfaces = {bucket.name for bucket in three.buckets if "network" in bucket.name}
    assert interfaces == {f"node {node} network {way}" for node in range(3) for way in ("in", "out")}


def test_a_machine_without_a_network_is_one_node():
    with pytest.raises(ValueError, match=r"dgx1-volta describes no network, but this job has 2 nodes; add a"):
        link_table(MACHINES["dgx1-volta"], PartitionTable.even(num_workers=2, num_devices=2), num_nodes=2)
