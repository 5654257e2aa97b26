"""RoutingTable: small shards go to the nearest proxy, others to the widest one."""

from __future__ import annotations

import pytest

from coarse.profiler.routing import RoutingTable


@pytest.mark.parametrize(("nbytes", "proxy"), [(0, 1), (4095, 1), (4096, 2), (1 << 40, 2)])
def test_shards_below_the_threshold_take_the_shortest_way(nbytes, proxy):
    assert RoutingTable(lat_proxy=1, bw_proxy=2, threshold_bytes=4096).route(nbytes) == proxy


def test_without_a_threshold_everything_takes_the_widest_way():
    assert RoutingTable(lat_proxy=1, bw_proxy=2).route(0) == 2


@pytest.mark.parametrize("wrong", [{"lat_proxy": -1}, {"bw_proxy": -1}, {"threshold_bytes": -1}])
def test_negative_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match="no negative numbers"):
        RoutingTable(**{"lat_proxy": 0, "bw_proxy": 0, **wrong})
