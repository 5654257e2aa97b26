"""Emulation: the choice of links and time dilation; impossible ones are refused before anything starts."""

from __future__ import annotations

import pytest

from coarse.emulation.machine import Emulation, choose_emulation
from coarse.machine.links import Bucket, LinkTable, Path
from coarse.machine.partition_table import PartitionTable


def links(num_buckets):
    path = Path(latency_us=1.5, buckets=tuple(range(num_buckets)))
    return LinkTable(
        machine="test",
        num_workers=1,
        num_devices=1,
        buckets=tuple(Bucket(name=f"bucket {i}", gbytes_per_s=1.0 + i) for i in range(num_buckets)),
        paths=((None, path), (path, None)),
    )


def test_survives_the_way_to_another_process():
    emulation = Emulation(links=links(3), time_dilation=20.5)
    assert Emulation.from_json(emulation.to_json()) == emulation


@pytest.mark.parametrize("text", ["{}", "[]", '{"links": "{}", "time_dilation": 1}', "nonsense"])
def test_anything_else_is_no_emulation(text):
    with pytest.raises(ValueError, match=r"not a|Expecting"):
        Emulation.from_json(text)


@pytest.mark.parametrize("dilation", [0.0, -1.0, float("inf"), float("nan")])
def test_time_passes_forward(dilation):
    with pytest.raises(ValueError, match="time dilation"):
        Emulation(links=links(1), time_dilation=dilation)


def test_a_path_of_too_many_buckets_cannot_be_emulated():
    Emulation(links=links(8))
    with pytest.raises(ValueError, match="machine test: a path takes 9 buckets"):
        Emulation(links=links(9))


def test_buckets_are_found_by_name():
    emulation = Emulation(links=links(3))
    assert emulation.bucket_number("bucket 2") == 2
    with pytest.raises(ValueError, match="machine test has no bucket 'buckt 1'; did you mean bucket 1"):
        emulation.bucket_number("buckt 1")


def test_a_machine_gets_the_paths_of_the_partition_table():
    table = PartitionTable.even(num_workers=4, num_devices=4)
    emulation = choose_emulation("aws-p3", table, time_dilation=2.0)
    assert (emulation.machine, emulation.links.num_workers, emulation.links.num_devices) == ("aws-p3", 4, 4)
    assert choose_emulation("", table, time_dilation=1.0) is None
    with pytest.raises(ValueError, match="did you mean aws-p3"):
        choose_emulation("aws-p33", table, time_dilation=1.0)


def test_memory_of_a_gpu_plays_whatever_gpu_of_the_machine_the_table_says(tmp_path):
    """What a memory device owns here, and what it is over there, have nothing to do with each other."""
    devices = "".join(
        f'[[memory_device]]\nkind = "cuda"\ndevice = "cuda:0"\ngpu = {gpu}\nworkers = [{worker}]\n'
        for worker, gpu in enumerate((1, 3))
    )
    tables = []
    for name, text in {
        "gpus": devices,
        "host": devices.replace('kind = "cuda"\ndevice = "cuda:0"\n', ""),
    }.items():
        path = tmp_path / f"{name}.toml"
        path.write_text("worker_gpus = [0, 2]\n" + text)
        tables.append(PartitionTable.load(path))
    on_gpus, on_host = (choose_emulation("aws-p3", table, time_dilation=20.0) for table in tables)
    assert tables[0].memories == ("cuda:0", "cuda:0")
    assert on_gpus == on_host


def test_several_nodes_keep_the_links_of_one_beside_those_of_all():
    table = PartitionTable.even(num_workers=2, num_devices=2)
    emulation = choose_emulation("aws-p3", table, time_dilation=2.0, num_nodes=3)
    assert (emulation.links.num_workers, emulation.job_links.num_workers) == (2, 6)
    assert emulation.bucket_number("node 2 network in") >= 0
    assert Emulation.from_json(emulation.to_json()) == emulation
    alone = choose_emulation("aws-p3", table, time_dilation=2.0)
    assert alone.job_links is alone.links == emulation.links
