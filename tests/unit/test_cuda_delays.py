"""StreamDelays: a path over emulated links as the kernel reads it."""

import struct

import pytest

from coarse.kernels.cuda_delays import StreamDelays, delay_path
from coarse.machine.catalogue import load_machine
from coarse.machine.emulation import Emulation
from coarse.machine.partition_table import PartitionTable

ADDRESS = 0x7F00_0000_0000


@pytest.fixture
def emulation():
    table = PartitionTable.even(num_workers=2, num_devices=2)
    return Emulation(links=load_machine("aws-p3").link_table(table), time_dilation=20.0)


def fields_of(path):
    """takenUntil, nsPerByte, latencyNs, numBuckets of a DelayPath."""
    assert len(path) == 144  # static_assert of delay.cuh
    return (
        struct.unpack_from("=8Q", path),
        struct.unpack_from("=8d", path, 64),
        *struct.unpack_from("=dI", path, 128),
    )


def test_each_way_takes_its_own_buckets_at_their_dilated_rates(emulation):
    links = emulation.links
    for source, target in ((links.worker(0), links.device(1)), (links.device(1), links.worker(0))):
        words, ns_per_byte, latency_ns, count = fields_of(delay_path(emulation, source, target, ADDRESS))
        path = links.path(source, target)
        assert count == len(path.buckets)
        assert [(word - ADDRESS) // 8 for word in words[:count]] == list(path.buckets)
        assert set(words[count:]) <= {0}
        slowest = 20.0 / links.bandwidth_gbytes_per_s(source, target)
        assert max(ns_per_byte) == pytest.approx(slowest)
        assert latency_ns == pytest.approx(path.latency_us * 20e3)
    there = fields_of(delay_path(emulation, links.worker(0), links.device(1), ADDRESS))[0]
    back = fields_of(delay_path(emulation, links.device(1), links.worker(0), ADDRESS))[0]
    assert there != back


def test_memory_has_a_word_for_each_bucket_and_transfer(emulation):
    assert StreamDelays.num_bytes(emulation, 3) == 8 * (len(emulation.links.buckets) + 3)


def test_a_path_to_itself_is_refused(emulation):
    with pytest.raises(ValueError, match="no path from worker 0 to itself"):
        delay_path(emulation, 0, 0, ADDRESS)
