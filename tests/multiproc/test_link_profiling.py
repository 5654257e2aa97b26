"""Link measurements of a running session: all workers get the same profile, and the measurement leaves no traces."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from coarse.client.link_probes import Probe
from coarse.errors import OutOfDeviceMemoryError
from coarse.kernels._native import ProbeKind
from coarse.profiler.profile import MEASURED, as_json
from coarse.profiler.routing import plan_routing
from coarse.proxy.memory import open_memory
from coarse.tuning.measure import MeasurePlan, gather_bytes, measure_profile

SHORT = MeasurePlan(sizes=(4096, 65536, 1 << 20), budget_s=0.2)


def resident_bytes(pid):
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as rollup:
        return sum(int(line.split()[1]) << 10 for line in rollup if line.startswith("Rss:"))


@pytest.mark.parametrize(("world_size", "memory_devices"), [(2, 2), (3, 1), (2, 3)])
def test_all_workers_hold_the_same_profile_and_plan_the_same(job, world_size, memory_devices):
    def worker(me):
        with me.join(memory_devices=memory_devices) as session:
            profile = measure_profile(session, SHORT)
            tables = plan_routing(profile)
            return as_json(profile), [
                [table.lat_proxy, table.bw_proxy, table.threshold_bytes] for table in tables
            ]

    results = job.run(world_size, worker)
    assert all(result == results[0] for result in results)
    document, tables = results[0]
    assert document["kind"] == MEASURED
    assert document["paths_share_links"] is True
    assert (len(document["key"]["local_devices"]), document["key"]["num_devices"]) == (
        world_size,
        memory_devices,
    )
    for curve in document["curves"]:
        assert [point[0] for point in curve["points"]] == list(SHORT.sizes)
    assert len(tables) == world_size


def test_the_session_works_before_and_after(job):
    def worker(me):
        with me.join() as session:
            values = np.full(100_000, 2.0**me.rank)
            session.all_reduce(values)
            measure_profile(session, SHORT)
            session.all_reduce(values)
            measure_profile(session, SHORT)
            return values.tolist() == [2 * 3.0] * 100_000

    assert job.run(2, worker) == [True, True]


def test_progress_is_told_by_the_worker_whose_turn_it_is(job):
    def worker(me):
        told = []
        with me.join() as session:
            measure_profile(session, SHORT, progress=told.append)
        return told

    first, second = job.run(2, worker)
    assert first == sorted(first)
    assert second == sorted(second)
    assert first[-1] == 0.5 < second[0]
    assert second[-1] == 1.0


def test_memory_is_given_back(job):
    """Memory of slots, which all processes map, and the memory devices' own buffers."""
    largest = 32 << 20

    def worker(me):
        with me.join() as session:
            session.barrier()
            session.release_buffers()
            devices = session.device_pids
            before = [resident_bytes(pid) for pid in (os.getpid(), *devices)]
            probes = session.open_probes(largest)
            for device in range(2):
                probes.time_s(
                    [Probe(kind=kind, device=device) for kind in (ProbeKind.PUSH, ProbeKind.PULL)], largest
                )
            session.barrier()
            during = [resident_bytes(pid) for pid in devices]
            session.barrier()
            probes.close()
            measure_profile(session, MeasurePlan(sizes=(4096, largest), budget_s=0.0))
            session.barrier()
            session.release_buffers()
            session.barrier()
            after = [resident_bytes(pid) for pid in (os.getpid(), *devices)]
            return before, during, after

    (before, during, after), _ = job.run(2, worker)
    assert min(during) > min(before) + largest, "the probes did take memory"
    for early, late in zip(before, after, strict=True):
        assert late < early + largest / 2


def test_workers_that_give_different_lengths_are_told_apart(job):
    def worker(me):
        with me.join() as session:
            return [part.decode() for part in gather_bytes(session, b"x" * me.rank + b"|")]

    assert job.run(3, worker) == [["|", "x|", "xx|"]] * 3


def test_probes_that_do_not_fit_are_refused_on_every_worker(job):
    if open_memory("host").available_bytes() > 256 << 30:
        pytest.skip("no probe of this host's memory is too large")

    def worker(me):
        with me.join() as session:
            with pytest.raises(OutOfDeviceMemoryError, match="bytes are available"):
                measure_profile(session, MeasurePlan(sizes=((1 << 32) - 64,), budget_s=0.0))
            session.barrier()

    job.run(12, worker)


def test_a_session_of_one_worker_has_no_links(job):
    def worker(me):
        with me.join() as session, pytest.raises(ValueError, match="one worker has no links"):
            measure_profile(session)

    job.run(1, worker)


def test_a_worker_that_is_killed_while_it_measures_is_named(job):
    def worker(me):
        def announce(done):
            me.tell("measuring")
            me.hear()

        with me.join() as session:
            measure_profile(session, SHORT, progress=announce if me.rank == 1 else None)

    workers = job.start(3, worker)
    assert workers[1].hear() == "measuring"
    workers[1].kill()
    for survivor in (workers[0], workers[2]):
        outcome = survivor.finish()
        assert outcome.error == "WorkerLostError"
        assert "worker 1" in outcome.message
    assert workers[1].finish().exit_code == -signal.SIGKILL


def test_each_node_measures_its_own_links(job):
    """Two nodes with two workers and one; jobs over several nodes keep local routes."""

    def worker(me):
        with me.join(node="ab"[me.rank // 2], memory_devices=1) as session:
            assert session.decisions()[0] == "links: not profiled: only jobs on one node have profiles"
            profile = measure_profile(session, SHORT)
            session.barrier()
            return as_json(profile)

    first, second, third = job.run(3, worker)
    assert first == second
    assert first["key"]["local_devices"] == [0, 0]
    assert third["key"]["local_devices"] == [0]
    assert {curve["kind"] for curve in third["curves"]} == {"push", "pull", "both"}
