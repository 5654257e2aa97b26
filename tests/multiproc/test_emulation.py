"""Emulated sessions: the usual results, in no less time than the machine's links take."""

from __future__ import annotations

import hashlib
import time

import numpy as np
import pytest
from test_sync import EVERY_KIND, SMALL_SHARDS, contribution, expected, floats, slot, sync

from coarse.client.link_probes import Probe
from coarse.errors import RendezvousError
from coarse.kernels._native import ProbeKind
from coarse.profiler.routing import RoutingTable
from coarse.tuning.measure import MeasurePlan, measure_profile

MIB = 1 << 20
P3 = {"machine": "aws-p3", "time_dilation": 20.0}
RING_MESSAGE_BYTES = 64 << 10


@pytest.mark.parametrize(
    ("machine", "world_size", "memory_devices", "algorithm"),
    [
        ("aws-p3", 4, 4, "auto"),
        ("aws-g4dn", 2, 2, "auto"),
        ("sdsc-p100", 2, 1, "auto"),
        ("cxl2-switch", 3, 2, "auto"),
        ("aws-p3", 3, 3, "ring"),
        ("aws-g4dn", 4, 2, "ring"),
        ("sdsc-p100", 2, 1, "ring"),
        ("cxl2-switch", 3, 2, "direct"),
    ],
)
def test_every_dtype_op_and_length(job, machine, world_size, memory_devices, algorithm):
    def worker(me):
        settings = {"machine": machine, "algorithm": algorithm, **SMALL_SHARDS}
        with me.join(memory_devices=memory_devices, **settings) as session:
            assert session.emulation.machine == machine
            group = session.register("every kind", EVERY_KIND)
            for step in range(2):
                if algorithm != "ring":
                    # Any route is valid: a different one for each worker and step.
                    device = (me.rank * (step + 1) + step) % memory_devices
                    session.adopt_routing(RoutingTable(lat_proxy=0, bw_proxy=device, threshold_bytes=1000))
                counts = sync(
                    group, range(len(EVERY_KIND)), lambda spec: contribution(spec, me.rank, world_size)
                )
                assert counts == [world_size] * len(EVERY_KIND)
                for index, spec in enumerate(EVERY_KIND):
                    assert np.array_equal(slot(group, index), expected(spec, world_size)), (step, spec)
            session.barrier()

    job.run(world_size, worker)


def digests(job, runs):
    """All digests of four steps of noise, for runs of (settings, routing tables to use in turn)."""
    world_size = 4

    def worker(me, name, setup, tables):
        noise = np.random.default_rng(me.rank)
        with me.join(name, memory_devices=3, **setup, **SMALL_SHARDS) as session:
            group = session.register("noise", floats(["small", "large"], 50_003, op="mean"))
            digest = hashlib.sha256()
            for step in range(4):
                if tables:
                    session.adopt_routing(tables[(me.rank + step) % len(tables)])
                sync(group, (0, 1), lambda spec: noise.standard_normal(spec.num_elements, dtype=np.float32))
                digest.update(group.buffer(0))
                digest.update(group.buffer(1))
        return digest.hexdigest()

    return {
        digest
        for number, run in enumerate(runs)
        for digest in job.run(world_size, lambda me, name=str(number), run=run: worker(me, name, *run))
    }


def test_neither_routes_nor_links_change_a_bit(job):
    tables = [RoutingTable(lat_proxy=2 - i, bw_proxy=i, threshold_bytes=1 << 14) for i in range(3)]
    runs = [
        ({"algorithm": "direct"}, []),
        ({"algorithm": "exchange"}, tables[:2]),
        ({"machine": "aws-p3"}, []),
        ({"machine": "aws-p3"}, tables),
        ({"machine": "cxl2-switch", "time_dilation": 3.0}, tables[1:]),
        ({"machine": "aws-p3", "algorithm": "direct"}, tables),
    ]
    assert len(digests(job, runs)) == 1


def test_emulated_links_do_not_change_a_bit_of_a_ring(job):
    settings = {"algorithm": "ring"}
    runs = [
        (settings, []),
        ({"machine": "aws-p3", **settings}, []),
        ({"machine": "cxl2-switch", **settings}, []),
    ]
    assert len(digests(job, runs)) == 1


@pytest.mark.parametrize("num_devices", [2, 3])
def test_a_ring_takes_the_time_of_its_steps(job, num_devices):
    p, chunks = num_devices, 4
    nbytes = chunks * p * RING_MESSAGE_BYTES
    steps = chunks * 2 * (p - 1)

    def worker(me):
        settings = {"algorithm": "ring", "shard_bytes": nbytes, "transfer_log": 1000, **P3}
        with me.join(memory_devices=p, **settings) as session:
            group = session.register("gradients", floats(["weights"], nbytes // 4))
            session.barrier()
            begin = time.monotonic()
            group.push(0)
            group.pull_all()
            elapsed_s = time.monotonic() - begin
            session.barrier()
            links = session.emulation.links
            one, other = links.device(0), links.device(1)
            latency_us = links.path(one, other).latency_us
            expected_us = 2 * (p - 1) / p * nbytes / (links.bandwidth_gbytes_per_s(one, other) * 1e3)
            expected_us += steps * latency_us
            sent = [
                each
                for each in session.emulation.transfers()
                if min(each.source, each.target) >= p and each.nbytes == RING_MESSAGE_BYTES
            ]
            assert len(sent) == p * steps
            took_us = max(each.due_us for each in sent) - min(each.requested_us for each in sent)
            assert took_us == pytest.approx(expected_us, rel=0.02)
            assert elapsed_s >= P3["time_dilation"] * expected_us * 1e-6

    job.run(p, worker)


def test_a_ring_keeps_to_the_workers_own_memory_devices(job):
    def worker(me):
        with me.join(memory_devices=2, algorithm="ring", **P3) as session:
            decisions = session.decisions()
            assert any(line.startswith("algorithm: ring, set by") for line in decisions)
            assert any(
                "ring takes each contribution from its own memory device" in line for line in decisions
            )
            assert any(line.startswith("dual synchronisation: none: ring needs") for line in decisions)
            with pytest.raises(ValueError, match="a ring takes the contributions of worker"):
                session.adopt_routing(RoutingTable(lat_proxy=me.rank, bw_proxy=1 - me.rank))
            assert "not paced to the links of aws-p3" in session.cannot_update()

    job.run(2, worker)


def test_dense_loads_and_stores_at_its_ratios(job):
    """Loads take 17 times as long as the link, stores 4 times; means are the usual ones."""
    nbytes = 2 * MIB
    dense = {"dense": "17,4", "memory_devices": 1, "dual_sync": "off"}

    def worker(me):
        with me.join(**dense, **P3) as session:
            group = session.register("gradients", floats(["weights"], nbytes // 4, op="mean"))
            sync(group, (0,), lambda spec: np.full(spec.num_elements, me.rank, np.float32))
            assert (slot(group, 0) == 0.5).all()
            session.barrier()
            begin = time.monotonic()
            group.push(0)
            group.pull_all()
            elapsed_s = time.monotonic() - begin
            links = session.emulation.links
            push_s, pull_s = (
                20.0 * nbytes / 1e9 / links.bandwidth_gbytes_per_s(*ends)
                for ends in ((me.rank, links.device(0)), (links.device(0), me.rank))
            )
            return elapsed_s, push_s, pull_s

    link_s = 20.0 * nbytes / 8.32e9
    for elapsed_s, push_s, pull_s in job.run(2, worker):
        assert (push_s, pull_s) == pytest.approx((4 * link_s, 17 * link_s))
        assert 0.98 * pull_s <= elapsed_s <= 1.5 * (push_s + pull_s)


def test_a_step_takes_no_less_than_the_links(job):
    def worker(me):
        with me.join(memory_devices=2, routing="local", **P3) as session:
            links = session.emulation.links
            group = session.register("gradients", floats(["weights"], 4 * MIB // 4))
            session.barrier()
            begin = time.monotonic()
            group.push(0)
            group.pull_all()
            elapsed_s = time.monotonic() - begin
            one_way = links.bandwidth_gbytes_per_s(links.worker(me.rank), links.device(me.rank))
            # All of it to the local memory device, half between the devices, all of it back; ideally all at once.
            assert elapsed_s >= P3["time_dilation"] * 4 * MIB / (one_way * 1e9)
            pacing = session.emulation.pacing()
            assert pacing.num_arrivals > 0
            assert pacing.mean_lateness_us >= 0

    job.run(2, worker)


def test_links_can_degrade_while_training(job):
    def worker(me):
        with me.join(memory_devices=2, machine="sdsc-p100") as session:
            group = session.register("gradients", floats(["weights"], MIB // 4))
            session.barrier()
            group.push(0)
            group.pull_all()
            session.barrier()
            if me.rank == 0:
                for bucket in session.emulation.links.buckets:
                    session.emulation.set_bandwidth(bucket.name, 0.02)
            session.barrier()
            begin = time.monotonic()
            group.push(0)
            group.pull_all()
            assert time.monotonic() - begin >= 2 * MIB / 0.02e9
            with pytest.raises(ValueError, match="no bucket 'gpu 0 lane upp'; did you mean gpu 0 lane up"):
                session.emulation.set_bandwidth("gpu 0 lane upp", 1)
            with pytest.raises(ValueError, match="not positive"):
                session.emulation.set_bandwidth(session.emulation.links.buckets[0].name, 0)

    job.run(2, worker)


def test_probes_take_what_the_links_take(job):
    def worker(me):
        with me.join(memory_devices=2, routing="local", **P3) as session:
            links = session.emulation.links
            probes = session.open_probes(2 * MIB)
            session.barrier()
            other = 1 - me.rank
            own = links.worker(me.rank)
            for device in range(2):
                end, peer = links.device(device), 1 - device
                push, pull = (Probe(kind=kind, device=device) for kind in (ProbeKind.PUSH, ProbeKind.PULL))
                devices = Probe(kind=ProbeKind.BETWEEN_DEVICES, device=device, target=peer, slot_owner=peer)
                workers = Probe(kind=ProbeKind.BETWEEN_WORKERS, device=device, target=other)
                for probe, source, target in (
                    (push, own, end),
                    (pull, end, own),
                    (devices, end, links.device(peer)),
                    (workers, own, links.worker(other)),
                ):
                    latency_s = links.path(source, target).latency_us * 1e-6
                    least_s = MIB / (links.bandwidth_gbytes_per_s(source, target) * 1e9) + latency_s
                    assert probes.time_s([probe], MIB) >= least_s - 1e-9
                duplex = links.duplex_gbytes_per_s(own, end) * 1e9
                assert probes.time_s([push, pull], 2 * MIB) >= 4 * MIB / duplex
            session.barrier()
            probes.close()

    job.run(2, worker)


def test_real_links_are_no_emulated_machine(job):
    def worker(me):
        with me.join(memory_devices=1) as session:
            assert session.emulation is None
            with pytest.raises(
                ValueError, match="names a memory device that does not exist; the session has 1"
            ):
                session.adopt_routing(RoutingTable(lat_proxy=0, bw_proxy=1))

    job.run(2, worker)


def test_the_profiler_finds_the_machine(job):
    """Checks that no link is faster than the machine's; the exact figures would need an idle host."""

    def worker(me):
        with me.join(memory_devices=2, **P3) as session:
            profile = measure_profile(session, MeasurePlan(sizes=(64 << 10, MIB), budget_s=1.0))
            assert (profile.kind, profile.key.machine) == ("emulated", "aws-p3")
            links = session.emulation.links
            for worker in range(2):
                for device in range(2):
                    one_way = links.bandwidth_gbytes_per_s(links.worker(worker), links.device(device))
                    time_us = profile.curve("push", worker, device).points[-1].time_us
                    assert time_us >= MIB / one_way / 1e3

    job.run(2, worker)


def test_unknown_machines_end_every_worker_before_anything_starts(job):
    workers = job.start(2, lambda me: me.join(machine="aws-p4"))
    outcomes = [worker.finish() for worker in workers]
    assert "did you mean aws-p3" in outcomes[0].message
    assert "did you mean aws-p3" in outcomes[1].message


def test_one_worker_has_no_links(job):
    def worker(me):
        with pytest.raises(RendezvousError, match="no links, so it cannot emulate those of aws-p3"):
            me.join(machine="aws-p3")

    job.run(1, worker)
