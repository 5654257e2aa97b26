"""The algorithms with which memory devices can reduce, and those from which measurements choose."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from coarse.client.gpu.algorithm_choice import AlgorithmChoice, Way
from coarse.kernels import _native
from coarse.machine.memory_name import MemoryName
from coarse.machine.partition_table import PartitionTable
from coarse.profiler.routing import RoutingTable
from coarse.profiler.shard_size import ShardSize
from coarse.settings import Settings
from coarse.wire import algorithms


def table(*memories):
    names = [MemoryName.parse(memory) for memory in memories]
    return PartitionTable.even(num_workers=len(names), num_devices=len(names), memories=names)


@pytest.fixture
def nccl(monkeypatch):
    """Has NCCL be there, in a version."""

    def install(*version):
        library = SimpleNamespace(version=version, path="libnccl.so.2")
        monkeypatch.setattr(algorithms, "find_nccl", lambda: library)

    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    install(2, 27, 3)
    return install


@pytest.fixture
def no_nccl(monkeypatch):
    def fail():
        raise _native.NcclError("there is no NCCL: install it")

    monkeypatch.setattr(algorithms, "find_nccl", fail)


@pytest.mark.parametrize("memories", [("host",), ("host", "numa:0"), ("cuda:0",), ("cuda:0", "cuda:0")])
def test_in_one_memory_there_is_nothing_to_choose(nccl, memories):
    assert algorithms.algorithms_of(Settings(), table(*memories)) == ("direct",)


def test_between_gpus_all_are_tried(nccl):
    found = algorithms.algorithms_of(Settings(), table("cuda:0", "cuda:1"))
    assert sorted(found) == ["direct", "exchange", "nccl", "ring"]


def test_without_nccl_the_others_are_tried(no_nccl):
    found = algorithms.algorithms_of(Settings(), table("cuda:0", "cuda:1"))
    assert sorted(found) == ["direct", "exchange", "ring"]


def test_where_gpus_have_several_memory_devices_nccl_is_not_tried(nccl):
    assert "nccl" not in algorithms.algorithms_of(Settings(), table("cuda:0", "cuda:1", "cuda:0"))


def test_devices_that_are_kept_need_coherent_memory(nccl):
    settings = Settings(keep_devices=60)
    assert algorithms.algorithms_of(settings, table("cuda:0", "cuda:1")) == ("direct",)


@pytest.mark.parametrize("algorithm", ["gather", "ring", "nccl"])
def test_what_was_asked_for_is_not_measured(nccl, algorithm):
    settings = Settings(algorithm=algorithm)
    assert algorithms.algorithms_of(settings, table("cuda:0", "cuda:1")) == (algorithm,)


def test_nccl_needs_gpus(nccl):
    with pytest.raises(ValueError, match="memory devices are in host, numa:0, but NCCL reduces between GPUs"):
        algorithms.check_nccl(table("host", "numa:0"))


def test_nccl_needs_a_library(no_nccl):
    with pytest.raises(ValueError, match="COARSE_ALGORITHM=nccl: there is no NCCL: install it"):
        algorithms.check_nccl(table("cuda:0", "cuda:1"))


def test_nccl_takes_several_devices_on_one_gpu_where_it_can(nccl, monkeypatch):
    memories = table("cuda:1", "cuda:0", "cuda:1")
    with pytest.raises(ValueError, match=r"memory devices 0 and 2 are both on cuda:1, which NCCL 2\.27\.3"):
        algorithms.check_nccl(memories)
    nccl(2, 30, 0)
    with pytest.raises(ValueError, match="NCCL_MULTI_RANK_GPU_ENABLE=1"):
        algorithms.check_nccl(memories)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    algorithms.check_nccl(memories)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        (Settings(), ("exchange", "direct")),
        (Settings(routing="profile"), ("exchange", "direct")),
        (Settings(algorithm="direct"), ("direct",)),
        (Settings(routing="local"), ()),
        (Settings(algorithm="ring"), ()),
        (Settings(algorithm="nccl"), ()),
        (Settings(keep_devices=60), ()),
        (Settings(machine="aws-p3"), ()),
    ],
)
def test_between_gpus_some_algorithms_follow_routes(nccl, settings, found):
    assert algorithms.routable_algorithms(settings, table("cuda:0", "cuda:1")) == found


@pytest.mark.parametrize("memories", [("host", "host"), ("numa:0", "numa:1"), ("cuda:0", "cuda:0")])
def test_where_no_link_differs_none_does(memories):
    assert algorithms.routable_algorithms(Settings(), table(*memories)) == ()


@pytest.mark.parametrize(
    ("settings", "memories", "num_nodes", "measures"),
    [
        ({}, ("cuda:0", "cuda:1"), 1, True),
        ({"algorithm": "ring", "routing": "local"}, ("cuda:0", "cuda:0"), 1, True),
        ({}, ("cuda:0", "cuda:1"), 2, False),
        ({}, ("host", "numa:0"), 1, False),
        ({"keep_devices": 60}, ("cuda:0", "cuda:1"), 1, False),
        ({"machine": "aws-p3"}, ("cuda:0", "cuda:1"), 1, False),
    ],
)
def test_links_are_measured_between_gpus_of_a_node(settings, memories, num_nodes, measures):
    found = algorithms.measures_gpu_links(Settings(**settings), table(*memories), num_nodes=num_nodes)
    assert found == measures


def test_a_choice_tells_the_size_of_shards_and_its_reason():
    size = ShardSize(
        nbytes=1 << 20, gbytes_per_s=9.0, peak_gbytes_per_s=10.0, full_fraction=0.9, reason="why"
    )
    choice = AlgorithmChoice(seconds={Way("direct"): 0.0}, shard_size=size)
    assert choice.describe()[-1] == "shards of at least 1048576 bytes between GPUs: why"


def test_a_choice_names_all_times():
    choice = AlgorithmChoice(seconds={Way("exchange"): 0.002, Way("nccl"): 0.0015})
    assert choice.fastest() == Way("nccl")
    (line,) = choice.describe()
    assert line.endswith("by nccl: 32 MiB took 2.00 ms by exchange, 1.50 ms by nccl")


def test_a_single_way_was_not_measured():
    choice = AlgorithmChoice(seconds={Way("direct"): 0.0})
    assert choice.describe() == ["large tensors between memory devices by direct"]


def test_a_choice_knows_where_slots_lie_by_each_way():
    routes = (
        RoutingTable(lat_proxy=1, bw_proxy=1),
        RoutingTable(lat_proxy=1, bw_proxy=0, threshold_bytes=99),
    )
    seconds = {Way("direct"): 0.002, Way("direct", is_routed=True): 0.001, Way("nccl"): 0.0005}
    choice = AlgorithmChoice(seconds=seconds, routes=routes)
    assert choice.routes_of(choice.fastest()) == ()
    assert choice.routes_of(choice.fastest("direct")) == routes
    assert choice.fastest("gather") == Way("gather")
    assert choice.describe()[1:] == [
        "w0 along the routes: md1",
        "w1 along the routes: md1 below 99 bytes, md0 from there on",
    ]


@pytest.mark.parametrize(
    ("settings", "memories", "words"),
    [
        ({}, ("host", "host"), "gather for tensors of up to 65536 bytes, direct for larger ones"),
        ({"algorithm": "ring"}, ("host", "host"), "ring, set by COARSE_ALGORITHM"),
        ({"machine": "aws-p3"}, ("host", "host"), "exchange, the default on emulated machines"),
        ({"machine": "aws-p3", "algorithm": "ring"}, ("host", "host"), "ring, set by COARSE_ALGORITHM"),
        ({}, ("cuda:0", "cuda:1"), "for larger ones the fastest of exchange, direct, ring, measured at"),
    ],
)
def test_the_algorithm_is_named_with_its_reason(no_nccl, settings, memories, words):
    assert words in algorithms.describe_algorithm(Settings(**settings), table(*memories))
