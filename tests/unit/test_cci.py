"""The CCI model gives the figures of the paper's text; DENSE's links follow it."""

from __future__ import annotations

import pytest

from coarse.emulation.machine import choose_emulation
from coarse.machine import cci
from coarse.machine.catalogue import load_machine
from coarse.machine.cci import LoadStore, coherence_factor, dense_links, share_of_bus
from coarse.machine.partition_table import PartitionTable
from coarse.machine.wiring import link_table
from coarse.settings import Settings

MIB = 1 << 20
SIZES = [1, 4096, 256 << 10, MIB, 2 * MIB, 512 * MIB]


def ratio(direction, nbytes):
    """GPU direct over load/store: the smallest and the largest."""
    direct = share_of_bus(cci.GPU_DIRECT, direction, nbytes)
    access = share_of_bus(cci.LOAD_STORE, direction, nbytes)
    return direct.low / access.high, direct.high / access.low


def test_figure_3_is_the_end_of_figure_13():
    assert ratio(cci.READ, 512 * MIB) == pytest.approx((17, 17), rel=0.01)
    assert ratio(cci.WRITE, 512 * MIB) == pytest.approx((1.25, 4))


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("method", cci.METHODS)
@pytest.mark.parametrize("direction", [cci.READ, cci.WRITE])
def test_nothing_is_faster_than_the_bus(method, direction, nbytes):
    band = share_of_bus(method, direction, nbytes)
    if band is None:
        assert (method, direction) == (cci.GPU_INDIRECT, cci.WRITE)
    else:
        assert 0 < band.low <= band.high <= 1


def test_dma_is_full_from_2_mib_on():
    assert share_of_bus(cci.DMA, cci.READ, 2 * MIB).low == pytest.approx(0.9)
    assert share_of_bus(cci.DMA, cci.READ, MIB).low < 0.85


def test_loads_are_stable_and_indirect_reads_no_faster():
    loads = [share_of_bus(cci.LOAD_STORE, cci.READ, nbytes) for nbytes in SIZES[2:]]
    assert {each.low for each in loads} == {1 / 17}
    assert loads == [share_of_bus(cci.GPU_INDIRECT, cci.READ, nbytes) for nbytes in SIZES[2:]]


@pytest.mark.parametrize("arguments", [("DMAA", "read", 1), ("DMA", "reads", 1), ("DMA", "read", 0)])
def test_other_accesses_do_not_exist(arguments):
    with pytest.raises(ValueError, match="no access of"):
        share_of_bus(*arguments)


def dense(machine="aws-p3", num_workers=4):
    links = link_table(load_machine(machine), PartitionTable.even(num_workers=num_workers, num_devices=1))
    return links, dense_links(links, LoadStore())


@pytest.mark.parametrize("machine", ["aws-p3", "aws-g4dn", "cxl2-x8"])
def test_dense_slows_reads_and_writes_of_each_worker(machine):
    links, slow = dense(machine)
    device = links.device(0)
    for worker in range(4):
        assert slow.bandwidth_gbytes_per_s(worker, device) * 4 == pytest.approx(
            links.bandwidth_gbytes_per_s(worker, device)
        )
        assert slow.bandwidth_gbytes_per_s(device, worker) * 17 == pytest.approx(
            links.bandwidth_gbytes_per_s(device, worker)
        )
        assert slow.path(worker, device).latency_us == links.path(worker, device).latency_us
    assert slow.path(0, 1) == links.path(0, 1)


def test_coherence_takes_a_message_per_line_and_other_sharer():
    assert [coherence_factor(sharers) for sharers in (1, 2, 5)] == [1, 1.25, 2]
    with pytest.raises(ValueError, match="0 sharers"):
        coherence_factor(0)


def test_coherence_messages_take_of_the_links_that_sharers_share():
    links, slow = dense()
    lane = next(bucket for bucket in links.buckets if bucket.name == "gpu 4 lane up")
    beside = next(bucket for bucket in slow.buckets if bucket.name == "gpu 4 lane up beside coherence")
    assert beside.gbytes_per_s * 1.75 == pytest.approx(lane.gbytes_per_s)
    names = {slow.buckets[number].name for number in slow.path(slow.device(0), 0).buckets}
    assert beside.name in names
    assert lane.name not in names


def test_dense_has_one_memory_device():
    table = PartitionTable.even(num_workers=4, num_devices=2)
    with pytest.raises(ValueError, match=r"DENSE has one memory device, but 2 .* COARSE_MEMORY_DEVICES=1"):
        choose_emulation("aws-p3", table, time_dilation=1.0, dense="17,4")


@pytest.mark.parametrize("text", ["17", "17,4,1", "a,b", "17,0.5", "nan,4", ","])
def test_ratios_that_say_nothing(text):
    with pytest.raises(ValueError, match="COARSE_DENSE: "):
        Settings(machine="aws-p3", dual_sync="off", dense=text)


@pytest.mark.parametrize("others", [{"machine": "aws-p3"}, {"dual_sync": "off"}])
def test_dense_needs_an_emulated_machine_without_dual_synchronisation(others):
    with pytest.raises(ValueError, match="COARSE_DENSE=17,4 needs COARSE_MACHINE and COARSE_DUAL_SYNC=off"):
        Settings(dense="17,4", **others)
