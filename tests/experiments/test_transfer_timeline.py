"""Figure 9: a worker's times of its shards become transfers on a link, one after the other."""

from __future__ import annotations

import pytest

from coarse.bench.pace import Paced, Pacing
from coarse.profiler.figures import Transfer
from coarse.profiler.routing import RoutingTable
from experiments.fig09_timeline import run as fig09
from experiments.fig09_timeline.run import Shard, Task, Times, cut, transfers_of

MIB = 1 << 20


def test_tensors_are_cut_into_equal_shards_of_at_least_the_shard_size():
    shards = cut([8 * MIB, 5 * MIB, MIB], 2 * MIB)
    assert [(shard.tensor, shard.nbytes) for shard in shards] == [
        *[(0, 2 * MIB)] * 4,
        *[(1, 5 * MIB // 2)] * 2,
        (2, MIB),
    ]
    assert cut([8 * MIB, MIB], fig09.WHOLE_TENSORS) == (
        Shard(tensor=0, nbytes=8 * MIB),
        Shard(tensor=1, nbytes=MIB),
    )


def test_a_transfer_begins_when_the_link_is_free_for_it():
    shards = (Shard(tensor=0, nbytes=MIB), Shard(tensor=1, nbytes=MIB))
    times = [
        Times(posted=10.0, arrived=12.0, complete=13.0, pulled=15.0),
        Times(posted=10.0, arrived=14.0, complete=14.5, pulled=16.0),
    ]
    found = transfers_of(shards, times, time_dilation=1e6)
    assert [(t.link, t.tensor, round(t.start_us, 6), round(t.end_us, 6)) for t in found] == [
        ("push", 0, 0, 2),
        ("push", 1, 2, 4),
        ("pull", 0, 3, 5),
        ("pull", 1, 5, 6),
    ]


def spans(link, *bounds):
    return [Transfer(link=link, tensor=0, nbytes=1, start_us=start, end_us=end) for start, end in bounds]


def paced(transfers, error=0.0):
    return Paced(value=transfers, pacing=Pacing(lateness_us=0.0, error=error, time_dilation=200.0))


def test_a_pipeline_with_idle_directions_is_not_what_the_paper_says():
    in_turn = paced(spans("push", (0, 10)) + spans("pull", (10, 20)))
    pipeline = paced(spans("push", (0, 9)) + spans("pull", (0, 10)))
    assert fig09.compare(in_turn, pipeline, MIB).deviations == []
    assert fig09.compare(in_turn, in_turn, MIB).deviations == ["shards: both directions busy lower"]
    assert fig09.compare(pipeline, pipeline, MIB).deviations == ["whole tensors: both directions busy higher"]
    assert (
        "shards 2.00x as fast; push and pull busy 90% and 100%" in fig09.compare(in_turn, pipeline, MIB).found
    )


def test_the_overlap_is_the_time_in_which_both_directions_are_busy():
    assert fig09.overlap(spans("push", (0, 4), (6, 8)) + spans("pull", (2, 7), (8, 10))) == pytest.approx(0.3)


@pytest.mark.parametrize("middle", [0.1 * k for k in range(1, 30)])
def test_directions_in_turn_do_not_overlap_by_less_than_nothing(middle):
    in_turn = spans("push", (0, middle), (3.7, 4.1)) + spans("pull", (middle, 3.7), (4.1, 9.3))
    assert fig09.overlap(in_turn) >= 0
    assert fig09._percent_busy(paced(in_turn)).value == pytest.approx(0, abs=1e-9)


def test_the_spread_of_an_overlap_grows_with_the_pacing_error():
    half = spans("push", (0, 10)) + spans("pull", (5, 10))
    assert [fig09._percent_busy(paced(half, error)).high for error in (0.0, 0.005, 0.02)] == [52, 52, 54]


def test_an_event_is_seen_late_by_half_a_gap_and_most_often_in_long_ones():
    assert fig09.mean_delay([0.0, 1.0, 2.0, 3.0]) == pytest.approx(0.5)
    assert fig09.mean_delay([0.0, 1.0, 10.0]) == pytest.approx((1 + 81) / 20)
    assert fig09.mean_delay([5.0]) == 0


def test_whole_tensors_are_on_the_link_one_at_a_time():
    """A real run on emulated links takes as long as the links of both directions, and not less."""
    tables = tuple(RoutingTable(lat_proxy=worker, bw_proxy=worker) for worker in range(4))
    task = Task(
        shards=cut([MIB, 2 * MIB], fig09.WHOLE_TENSORS), most_pushing=1, most_pending=1, tables=tables
    )
    transfers = sorted(fig09._watch(task, 20.0).value, key=lambda transfer: transfer.start_us)
    assert [(t.link, t.tensor) for t in transfers] == [("push", 0), ("pull", 0), ("push", 1), ("pull", 1)]
    for push, pull in (transfers[:2], transfers[2:]):
        one_way_us = push.nbytes / 4.68e3  # local, one direction: Fig 8a and III-E
        assert push.end_us - push.start_us >= one_way_us
        assert push.end_us <= pull.start_us
        assert pull.end_us - push.start_us >= 2 * one_way_us
    assert transfers[1].end_us <= transfers[2].start_us
