"""A session that starts with a profile: found, measured, damaged or foreign, and the same on every worker."""

from __future__ import annotations

import itertools
import json
import logging
import time

import numpy as np
import pytest

from coarse.machine.host import read_host
from coarse.machine.partition_table import PartitionTable
from coarse.profiler.curve import Curve, CurvePoint
from coarse.profiler.profile import (
    MEASURED,
    Profile,
    cache_path,
    host_key,
    profile_key,
)
from coarse.schema import TensorSpec

sessions = itertools.count()
TABLE = PartitionTable.even(num_workers=2, num_devices=2)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "coarse" / "profiles"


def key_here():
    return profile_key(TABLE, host_key(read_host()))


def remote_profile():
    """A profile that routes each worker's large shards to the other worker's memory device."""
    key = key_here()

    def curve(path):
        alpha_us, us_per_kib = (5, 0.2) if path.source == path.target else (10, 0.1)
        return Curve(
            points=tuple(
                CurvePoint(nbytes=n << 10, time_us=alpha_us + n * us_per_kib) for n in (4, 1024, 65536)
            )
        )

    return Profile(
        kind=MEASURED,
        key=key,
        time_budget_s=1.0,
        paths_share_links=True,
        curves={path: curve(path) for path in key.paths()},
    )


def decide(**settings):
    """A worker that reduces one tensor and returns its session's decisions."""
    store = f"store{next(sessions)}"

    def worker(me):
        with me.join(store, memory_devices=2, **settings) as session:
            specs = [TensorSpec(name="t", dtype="float32", num_elements=1 << 20, op="sum")]
            group = session.register("tensors", specs)
            values = np.frombuffer(group.buffer(0), dtype=np.float32)
            for _ in range(3):
                values[:] = 2.0**me.rank
                group.push(0)
                group.pull(0)
                assert (values == 3).all()
            return session.decisions()

    return worker


def decisions(job, **settings):
    first, second = job.run(2, decide(**settings))
    assert first == second
    return first


def test_without_a_kept_profile_nothing_is_measured(job, cache):
    told = decisions(job)
    assert "no profile of these workers and memory devices is cached" in told[0]
    assert not cache.exists()


def test_a_kept_profile_decides_the_routes(job):
    remote_profile().save(cache_path(key_here()))
    told = decisions(job, routing="profile")
    assert told[0].startswith("links: cached measured profile")
    assert "w0: md0 below" in told[2]
    assert "md1 from there on" in told[2]
    assert decisions(job)[1].startswith("routes: local, because shards in the host's memory are not moved")
    assert decisions(job, profile="off")[0] == "links: not profiled: COARSE_PROFILE=off"
    assert decisions(job, routing="local")[1] == "routes: local, because COARSE_ROUTING is"


def test_auto_measures_once(job, cache):
    told = decisions(job, profile="auto")
    assert told[0].startswith("links: measured now (no profile")
    (kept,) = cache.iterdir()
    assert Profile.load(kept).key == key_here()
    written = kept.stat().st_mtime_ns
    assert decisions(job, profile="auto")[0].startswith("links: cached measured profile")
    assert kept.stat().st_mtime_ns == written
    assert decisions(job, profile="refresh")[0] == "links: measured now (COARSE_PROFILE=refresh)"
    assert kept.stat().st_mtime_ns > written


def test_a_damaged_cache_stops_nobody(job):
    path = cache_path(key_here())
    remote_profile().save(path)
    path.write_text(path.read_text()[:500])
    assert "the cached profile is damaged" in decisions(job)[0]
    assert decisions(job, profile="auto")[0].startswith("links: measured now (the cached profile is damaged")
    assert json.loads(path.read_text())["kind"] == MEASURED


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda text: text[:500], "cut off or not JSON"),
        (lambda text: text.replace('"host": "', '"host": "x'), "it was made for host"),
        (
            lambda text: text.replace('"num_devices": 2', '"num_devices": 3'),
            "the profile has no curve of this path",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused_on_every_worker(job, tmp_path, spoil, expected):
    path = tmp_path / "profile.json"
    remote_profile().save(path)
    path.write_text(spoil(path.read_text()))
    for outcome in job.outcomes(2, decide(profile=str(path))):
        assert outcome.error == "ProfileError"
        assert str(path) in outcome.message
        assert expected in outcome.message


def test_a_file_that_is_missing_is_named(job, tmp_path):
    for outcome in job.outcomes(2, decide(profile=str(tmp_path / "none.json"))):
        assert outcome.error == "ProfileError"
        assert "No such file" in outcome.message


def test_decisions_are_logged_once(job):
    remote_profile().save(cache_path(key_here()))

    def worker(me):
        lines = []

        class Keep(logging.Handler):
            def emit(self, record):
                lines.append(record.getMessage())

        logger = logging.getLogger("coarse.session")
        logger.setLevel(logging.INFO)
        logger.addHandler(Keep())
        with me.join(memory_devices=2) as session:
            assert me.rank != 0 or lines == [f"[w0] {line}" for line in session.decisions()]
        return len(lines)

    first, second = job.run(2, worker)
    assert first > 0
    assert second == 0


def test_a_session_of_one_worker_has_nothing_to_decide(job):
    def worker(me):
        with me.join(profile="refresh") as session:
            return session.decisions()

    assert job.run(1, worker) == [[]]


def test_finding_a_kept_profile_is_fast(job):
    """Under 50 ms, in parallel with the start of the memory devices."""
    from coarse.profiler.start import find_profile
    from coarse.settings import Settings

    remote_profile().save(cache_path(key_here()))
    took_s = []
    for _ in range(5):
        begin_s = time.monotonic()
        assert find_profile(Settings(), key_here).profile is not None
        took_s.append(time.monotonic() - begin_s)
    assert min(took_s) < 0.05
