"""Emulated sessions of several nodes: the usual results, over a network that all traffic between nodes shares."""

from __future__ import annotations

import re
import time
from importlib import resources

import numpy as np
import pytest
from test_nodes import node_of
from test_sync import EVERY_KIND, SMALL_SHARDS, contribution, expected, floats, slot, sync

from coarse.errors import WorkerLostError
from coarse.machine.catalogue import load_machine
from coarse.profiler.direct_allreduce import WAYS_OVER_NODES

MIB = 1 << 20
P3 = {"machine": "aws-p3", "time_dilation": 20.0, "dual_sync": "off"}
LATENCY_US = load_machine("aws-p3").network.latency_us.value
TWO_BY_TWO = (2, 2)


@pytest.mark.parametrize(
    ("shape", "memory_devices"),
    [
        (TWO_BY_TWO, 2),
        ((1, 1), 1),
        (TWO_BY_TWO, 1),
        pytest.param((1, 1, 1), 2, marks=pytest.mark.slow),
    ],
)
def test_every_dtype_op_and_length(job, shape, memory_devices):
    world_size = sum(shape)

    def worker(me):
        settings = {"machine": "aws-p3", "memory_devices": memory_devices, **SMALL_SHARDS}
        with me.join(node=node_of(me.rank, shape), **settings) as session:
            assert any("direct, the one that emulated links carry" in line for line in session.decisions())
            group = session.register("every kind", EVERY_KIND)
            for step in range(3):
                counts = sync(
                    group, range(len(EVERY_KIND)), lambda spec: contribution(spec, me.rank, world_size)
                )
                assert counts == [world_size] * len(EVERY_KIND)
                for index, spec in enumerate(EVERY_KIND):
                    assert np.array_equal(slot(group, index), expected(spec, world_size)), (step, spec)
            session.barrier()

    job.run(world_size, worker)


@pytest.mark.parametrize("way", WAYS_OVER_NODES)
def test_workers_of_two_nodes_reduce_in_every_way(job, way):
    def worker(me):
        with me.join(node=node_of(me.rank, TWO_BY_TWO), memory_devices=2, **P3, **SMALL_SHARDS) as session:
            group = session.register("gradients", floats(["small", "large"], 50_003, op="mean"))
            group.use_direct_allreduce(dict.fromkeys(range(group.num_shards), way))
            for step in range(3):
                sync(group, (0, 1), lambda spec, step=step: np.full(spec.num_elements, 2**me.rank + step))
                for index in range(2):
                    assert (slot(group, index) == 15 / 4 + step).all()

    job.run(4, worker)


def crossing(session):
    """The transfers between nodes that carried gradients, in the order of their arrival."""
    links = session.emulation.job_links
    interfaces = {number for number, bucket in enumerate(links.buckets) if "network" in bucket.name}
    return sorted(
        (
            each
            for each in session.emulation.transfers()
            if each.nbytes > 4096 and interfaces & set(links.path(each.source, each.target).buckets)
        ),
        key=lambda each: each.due_us,
    )


SLOW_GBYTES_PER_S = 0.1  # so that the host's delays weigh little


@pytest.mark.parametrize("way", ["", "two-level", "ring"])
def test_the_network_reaches_its_rate_and_never_exceeds_it(job, way):
    """Both directions are busy from the first transfer to the last, for memory devices ("") and for all-reduces."""

    def worker(me):
        settings = {"transfer_log": 20_000, "shard_bytes": MIB // 4, **P3}
        with me.join(node=node_of(me.rank, TWO_BY_TWO), memory_devices=2, **settings) as session:
            if me.rank == 0:
                for node in range(2):
                    for direction in ("in", "out"):
                        session.emulation.set_bandwidth(f"node {node} network {direction}", SLOW_GBYTES_PER_S)
            group = session.register("gradients", floats(["weights"], 4 * MIB // 4))
            if way:
                group.use_direct_allreduce(dict.fromkeys(range(group.num_shards), way))
            session.barrier()
            begin = time.monotonic()
            group.push(0)
            group.pull_all()
            elapsed_s = time.monotonic() - begin
            session.barrier()
            factor = 2 * 3 / 4 if way == "ring" else 1  # of the bytes of the tensor, each way
            for node in range(2):
                sent = [each for each in crossing(session) if is_of(session, each.source, node)]
                assert sum(each.nbytes for each in sent) == factor * 4 * MIB
                busy_us = sent[-1].due_us - LATENCY_US - min(each.requested_us for each in sent)
                least_us = factor * 4 * MIB / SLOW_GBYTES_PER_S / 1e3
                assert busy_us >= least_us - 0.01
                if way != "ring":  # whose iterations wait for the slowest of their transfers
                    assert busy_us == pytest.approx(least_us, rel=0.02)
            assert elapsed_s >= P3["time_dilation"] * factor * 4 * MIB / SLOW_GBYTES_PER_S / 1e9

    job.run(4, worker)


def is_of(session, endpoint, node):
    """Whether a worker or memory device is on a node of TWO_BY_TWO, with as many memory devices."""
    return endpoint % session.emulation.job_links.num_workers // 2 == node


def test_a_hop_over_the_network_has_its_latency_once(job):
    def worker(me):
        with me.join(node=node_of(me.rank, (1, 1)), memory_devices=1, transfer_log=1000, **P3) as session:
            group = session.register("gradients", floats(["weights"], 4096))
            session.barrier()
            group.push(0)
            group.pull_all()
            session.barrier()
            partial, result = crossing(session)
            for hop in (partial, result):
                assert hop.due_us - hop.begin_us == pytest.approx(LATENCY_US + hop.nbytes / 12.5e3, abs=0.01)
            assert result.requested_us == pytest.approx(partial.due_us, abs=0.01)

    job.run(2, worker)


def test_a_node_that_ends_has_still_sent_its_results(job):
    """The owner's worker has its result, and leaves, while the network still carries that of the other node."""

    def worker(me):
        settings = {**P3, "time_dilation": 5000.0}
        with me.join(node=node_of(me.rank, (1, 1)), memory_devices=1, **settings) as session:
            session.barrier()

    job.run(2, worker)


def test_a_lost_worker_of_another_node_ends_the_session(job):
    def worker(me):
        with me.join(node=node_of(me.rank, (1, 1)), memory_devices=1, **P3) as session:
            group = session.register("gradients", floats(["weights"], 4096))
            session.barrier()
            if me.rank == 1:
                return
            group.push(0)
            with pytest.raises(WorkerLostError, match=r"worker\(s\) 1 closed the session"):
                group.pull_all()

    job.run(2, worker)


# ---- refusals ----


def refusals(job, shape, **settings):
    def worker(me):
        with me.join(node=node_of(me.rank, shape), **settings):
            pass

    outcomes = [each.finish() for each in job.start(sum(shape), worker)]
    assert {each.error for each in outcomes} == {"RendezvousError"}
    return outcomes[0].message


def test_a_machine_without_a_network_has_one_node(job):
    text = resources.files("coarse.machine").joinpath("presets/aws-p3.toml").read_text()
    path = job.directory / "alone.toml"
    path.write_text(re.sub(r"\[network\].*", "", text, flags=re.DOTALL))
    message = refusals(job, (1, 1), machine=str(path))
    assert (
        "the file of machine alone describes no network, but this job has 2 nodes; add a [network]" in message
    )


@pytest.mark.parametrize(
    ("shape", "settings", "message"),
    [
        ((1, 2), {}, "emulated nodes are alike, but those of this job have 1, 2 workers"),
        ((1, 1), {"algorithm": "ring"}, "'ring' works only within one node, but this job has 2"),
        ((1, 1), {"algorithm": "exchange"}, "set COARSE_ALGORITHM to auto or direct"),
        (
            (1, 1),
            {"dense": "17,4", "memory_devices": 1},
            "DENSE has one memory device for all workers, but this job has 2 nodes",
        ),
    ],
)
def test_jobs_that_cannot_be_emulated_are_refused(job, shape, settings, message):
    assert message in refusals(job, shape, **{**P3, **settings})
