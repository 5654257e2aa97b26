"""A session's decisions about its links: from a profile if available; manual settings have precedence."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from planning import key_of, profile_of

from coarse.profiler.link_plan import DEFAULT_SHARD_BYTES, plan_links
from coarse.profiler.profile import EMULATED, MEASURED
from coarse.profiler.routing import plan_routing
from coarse.profiler.shard_size import plan_shard_size
from coarse.settings import Settings


def plan(profile, local_devices=(0, 1), **settings):
    return plan_links(profile, "from a test", local_devices=local_devices, settings=Settings(**settings))


def routes(plan):
    return [(table.lat_proxy, table.bw_proxy) for table in plan.tables]


def test_without_a_profile_everything_stays_local():
    plan_without = plan(None, (0, 0, 1))
    assert routes(plan_without) == [(0, 0), (0, 0), (1, 1)]
    assert plan_without.shard_bytes == DEFAULT_SHARD_BYTES
    assert plan_without.decisions[0] == "links: from a test"
    assert "because no profile is available" in plan_without.decisions[1]


def test_an_emulated_profile_decides_routes_and_shard_size():
    profile = profile_of(local=(5, 4.5), remote=(10, 8), kind=EMULATED)
    made = plan(profile)
    assert made.tables == plan_routing(profile)
    assert routes(made) == [(0, 1), (1, 0)]
    assert made.shard_bytes == plan_shard_size(profile, made.tables).nbytes
    assert "w0: md0 below" in made.decisions[2]
    assert "smallest tested size" in made.decisions[-1]


def test_host_memory_keeps_the_default_shards_and_says_why():
    profile = profile_of(kind=MEASURED, local=(5, 4.5), remote=(10, 8))
    made = plan(profile, routing="profile")
    assert routes(made) == [(0, 1), (1, 0)]
    assert made.shard_bytes == DEFAULT_SHARD_BYTES
    assert "in place" in made.decisions[-1]


def test_in_host_memory_shards_stay_where_they_are():
    made = plan(profile_of(kind=MEASURED, local=(5, 4.5), remote=(10, 8)))
    assert routes(made) == [(0, 0), (1, 1)]
    assert "shards in the host's memory are not moved" in made.decisions[1]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"routing": "local"}, "COARSE_ROUTING"),
        ({"algorithm": "ring"}, "ring takes"),
        ({"algorithm": "nccl"}, "nccl takes"),
    ],
)
def test_routes_can_be_kept_local(settings, word):
    made = plan(profile_of(local=(5, 4.5), remote=(10, 8), kind=EMULATED), **settings)
    assert routes(made) == [(0, 0), (1, 1)]
    assert word in made.decisions[1]


def test_what_is_set_by_hand_wins():
    made = plan(
        profile_of(local=(5, 4.5), remote=(10, 8), kind=EMULATED),
        shard_bytes=12345,
        routing_threshold_bytes=777,
    )
    assert made.shard_bytes == 12345
    assert {table.threshold_bytes for table in made.tables} == {777}
    assert "set by COARSE_SHARD_BYTES" in made.decisions[-1]
    assert "COARSE_ROUTING_THRESHOLD_BYTES=777" in made.decisions[2]


def test_noise_of_a_host_is_no_reason_to_go_remote():
    """The remote proxy is half as fast again, but times of this host spread as widely."""
    quiet = profile_of(key_of(), local=(5, 4), remote=(5, 6), kind=MEASURED)
    assert routes(plan(quiet, routing="profile")) == [(1, 1), (0, 0)]

    def noisy(curve):
        return replace(
            curve, points=tuple(replace(point, spread_us=0.4 * point.time_us) for point in curve.points)
        )

    loud = replace(quiet, curves={path: noisy(curve) for path, curve in quiet.curves.items()})
    assert routes(plan(loud, routing="profile")) == [(0, 0), (1, 1)]


def test_a_plan_without_a_profile_costs_no_numpy():
    script = (
        "import sys\n"
        "from coarse.settings import Settings\n"
        "from coarse.profiler.link_plan import plan_links\n"
        "import coarse.profiler.start\n"
        "plan_links(None, '', local_devices=(0, 1), settings=Settings())\n"
        "print({'numpy', 'matplotlib', 'rich'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=150
    )
    assert done.stdout == "set()\n"
