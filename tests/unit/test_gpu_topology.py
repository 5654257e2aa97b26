"""Topology of GPUs: NVML's data for a machine, and the pairs of workers and memory devices."""

from itertools import permutations
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coarse.machine.gpu_topology import (
    Distance,
    GpuPlace,
    GpuTopology,
    is_nvlink_disabled,
    pair_gpus,
    topology_of,
    workers_of_gpus,
)
from coarse.machine.pci import normal_bus_id


def topology_from(switch_of, socket_of_switch):
    """GPUs under switches under sockets."""

    def distance(one, other):
        if one == other:
            return Distance.SAME
        if switch_of[one] == switch_of[other]:
            return Distance.SWITCH
        same_socket = socket_of_switch[switch_of[one]] == socket_of_switch[switch_of[other]]
        return Distance.HOST_BRIDGE if same_socket else Distance.SYSTEM

    numbers = range(len(switch_of))
    return GpuTopology(
        gpus=tuple(
            GpuPlace(name="V100", uuid=f"GPU-{n}", bus_id=f"0000:{n:02x}:00.0", numa_node=None)
            for n in numbers
        ),
        distances=tuple(tuple(distance(one, other) for other in numbers) for one in numbers),
        nvlinks=tuple(tuple(0 for _ in numbers) for _ in numbers),
    )


AWS_P3 = topology_from((0, 0, 1, 1, 2, 2, 3, 3), (0, 0, 1, 1))
"""Two GPUs under each switch, two switches under each socket."""


def test_each_worker_gets_the_memory_device_under_its_switch():
    assert pair_gpus(AWS_P3, workers=(0, 2, 4, 6), devices=(7, 5, 3, 1)) == ((3,), (2,), (1,), (0,))


def test_two_workers_share_the_memory_device_of_their_socket():
    assert pair_gpus(AWS_P3, workers=(0, 1, 4, 5), devices=(6, 2)) == ((2, 3), (0, 1))


def test_who_has_none_under_its_switch_takes_the_next_nearest():
    assert pair_gpus(AWS_P3, workers=(0, 2), devices=(1, 5)) == ((0,), (1,))


def test_one_gpu_may_be_worker_and_memory_device_twice():
    assert pair_gpus(AWS_P3, workers=(0, 0), devices=(0, 0)) == ((0,), (1,))


def test_more_memory_devices_than_workers_leave_some_without():
    assert pair_gpus(AWS_P3, workers=(3,), devices=(0, 2, 4)) == ((), (0,), ())


@given(
    switch_of=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    data=st.data(),
)
def test_pairs_are_even_and_no_other_ones_are_nearer(switch_of, data):
    topology = topology_from(switch_of, (0, 0, 1, 1))
    gpus = st.integers(0, len(switch_of) - 1)
    count = data.draw(st.integers(1, 4))
    workers, devices = (data.draw(st.lists(gpus, min_size=count, max_size=count)) for _ in range(2))
    served = pair_gpus(topology, workers, devices)
    assert sorted(rank for ranks in served for rank in ranks) == list(range(count))
    assert {len(ranks) for ranks in served} == {1}

    def distances(order):
        return sorted(
            (topology.distances[workers[rank]][devices[device]] for device, rank in enumerate(order)),
            reverse=True,
        )

    chosen = distances([ranks[0] for ranks in served])
    assert sum(chosen) == min(sum(distances(order)) for order in permutations(range(count)))


def test_local_ranks_use_gpus_in_the_order_of_cuda():
    # CUDA sees the GPUs of the second socket only, the last one first.
    uuids = ["GPU-7", "GPU-6", "GPU-5", "GPU-4"]
    assert workers_of_gpus(AWS_P3, uuids, devices=(2, 0), num_workers=4) == ((2, 3), (0, 1))
    assert workers_of_gpus(AWS_P3, uuids, devices=(1,), num_workers=5) == ((0, 1, 2, 3, 4),)
    with pytest.raises(ValueError, match="there is no GPU cuda:4: CUDA finds 4"):
        workers_of_gpus(AWS_P3, uuids, devices=(4,), num_workers=4)


def test_workers_are_taken_to_be_on_gpus_without_memory_devices_where_these_suffice():
    uuids = [f"GPU-{number}" for number in range(8)]
    assert workers_of_gpus(AWS_P3, uuids, devices=(1, 3, 5, 7), num_workers=4) == ((0,), (1,), (2,), (3,))
    assert workers_of_gpus(AWS_P3, uuids, devices=(7, 1), num_workers=6) == ((3, 4, 5), (0, 1, 2))
    on_all = workers_of_gpus(AWS_P3, uuids, devices=(1, 3, 5, 7), num_workers=8)
    assert on_all == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="GPU 8 is not one of the 8 GPUs"):
        pair_gpus(AWS_P3, workers=(8,), devices=(0,))
    with pytest.raises(ValueError, match="need at least one memory device"):
        pair_gpus(AWS_P3, workers=(0,), devices=())


class NvmlError(Exception):
    pass


class Nvml:
    """NVML of a machine with four GPUs: two under a switch with two NVLinks between them, two with a link to an
    NVSwitch each, and one to a GPU that this container does not see; as pynvml answers."""

    NVMLError = NvmlError
    NVML_NVLINK_MAX_LINKS = 18
    _BUS_IDS = ("00000000:17:00.0", "00000000:18:00.0", "00000000:65:00.0", "00000001:66:00.0")
    _SWITCH = "00000000:A0:00.0"
    _HIDDEN = "00000000:B0:00.0"
    _BROKEN = ""
    _FAR_ENDS = (
        (_BUS_IDS[1],) * 2,
        (_BROKEN, *(_BUS_IDS[0],) * 2),
        (_SWITCH, _HIDDEN),
        (_HIDDEN, _BROKEN, _SWITCH),
    )
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 4

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return f"gpu {index}"

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return f"model of {handle}"

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return f"GPU-{handle[-1]}".encode()

    def nvmlDeviceGetPciInfo(self, handle):  # noqa: N802
        return SimpleNamespace(busId=self._BUS_IDS[int(handle[-1])].encode())

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):  # noqa: N802
        return 10 if {one, other} == {"gpu 0", "gpu 1"} else 50

    def nvmlDeviceGetNvLinkState(self, handle, link):  # noqa: N802
        ends = self._FAR_ENDS[int(handle[-1])]
        if link > len(ends) or ends[link : link + 1] == (self._BROKEN,):
            raise NvmlError
        return int(link < len(ends))

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, link):  # noqa: N802
        return 2 if self._FAR_ENDS[int(handle[-1])][link] == self._SWITCH else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, link):  # noqa: N802
        return SimpleNamespace(busId=self._FAR_ENDS[int(handle[-1])][link])


def test_topology_is_read_from_nvml_and_sysfs(tmp_path):
    for bus_id, node in (("0000:17:00.0", "1\n"), ("0000:65:00.0", "-1\n")):
        folder = tmp_path / "sys/bus/pci/devices" / bus_id
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(node)
    topology = topology_of(Nvml(), tmp_path)
    assert [gpu.bus_id for gpu in topology.gpus] == [
        "0000:17:00.0",
        "0000:18:00.0",
        "0000:65:00.0",
        "0001:66:00.0",
    ]
    assert [gpu.numa_node for gpu in topology.gpus] == [1, None, None, None]
    assert topology.distances[0] == (Distance.SAME, Distance.SWITCH, Distance.SYSTEM, Distance.SYSTEM)
    assert topology.nvlinks == ((0, 2, 0, 0), (2, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0))
    assert topology.find("GPU-3") == 3


def test_what_is_no_bus_id_is_refused():
    assert normal_bus_id("00000000:17:00.0") == "0000:17:00.0"
    with pytest.raises(ValueError, match="'17' is not a PCI bus id"):
        normal_bus_id("17")
    with pytest.raises(ValueError, match="NVML has no GPU GPU-8"):
        AWS_P3.find("GPU-8")


def test_tables_that_contradict_themselves_are_refused():
    gpus = (GpuPlace(name="a", uuid="GPU-a", bus_id="0000:01:00.0", numa_node=0),) * 2
    zeros = ((0, 0), (0, 0))
    with pytest.raises(ValueError, match="distances between GPUs 0 and 1 differ"):
        GpuTopology(
            gpus=gpus,
            distances=((Distance.SAME, Distance.SWITCH), (Distance.SYSTEM, Distance.SAME)),
            nvlinks=zeros,
        )
    with pytest.raises(ValueError, match="distances are not a square matrix for 2 GPUs"):
        GpuTopology(gpus=gpus, distances=((Distance.SAME,),), nvlinks=zeros)


@pytest.mark.parametrize(
    ("parameters", "expected"), [("NvLinkDisable: 1\n", True), ("NvLinkDisable: 0\n", False), (None, False)]
)
def test_nvlink_that_the_driver_was_told_to_do_without(tmp_path, parameters, expected):
    if parameters is not None:
        file = tmp_path / "proc/driver/nvidia/params"
        file.parent.mkdir(parents=True)
        file.write_text(f'Mobile: 4294967295\n{parameters}RmMsg: ""\n')
    assert is_nvlink_disabled(tmp_path) is expected
