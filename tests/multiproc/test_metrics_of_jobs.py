"""Metrics of real workers and memory devices: they count known traffic exactly, and outlive a worker."""

from __future__ import annotations

import os
import signal
import socket
import time
import urllib.request

import numpy as np
import persistent_training
import pytest
from harness import LIMIT_S
from prometheus_client.parser import text_string_to_metric_families

from coarse.errors import SessionClosedError, WorkerLostError
from coarse.schema import TensorSpec

STEPS = 6
SHARD_BYTES = 64 << 10
SPECS = [
    TensorSpec(name="large", dtype="float32", num_elements=100_000, op="sum"),
    TensorSpec(name="small", dtype="float32", num_elements=10, op="sum"),
]
LARGE_BYTES, SMALL_BYTES = 400_000, 40


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def scrape(port):
    """The samples that a node serves: values by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def sample(samples, name, **labels):
    return samples[name, frozenset(labels.items())]


def compute(seconds):
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        pass


def await_gauge(session, name, value):
    limit_s = time.monotonic() + LIMIT_S
    while session.metrics().total(name) != value:
        assert time.monotonic() < limit_s, session.metrics().total(name)


def meet_forever(session):
    while True:
        session.barrier()


def train(session, steps=STEPS):
    group = session.register("weights", SPECS)
    for _ in range(steps):
        group.push(0)
        group.push(1, present=session.identity.rank == 0)
        group.pull_all()
    return group


def test_known_traffic_is_counted_exactly(job):
    """Also at the other worker, for a node's processes share the memory."""

    def worker(me):
        with me.join(memory_devices=2, shard_bytes=SHARD_BYTES, profile="off") as session:
            train(session)
            session.barrier()
            me.tell(dict(session.metrics()) if me.rank == 0 else None)
            me.hear()  # pushes nothing while the other one reads
        with pytest.raises(SessionClosedError):
            session.metrics()

    workers = job.start(2, worker)
    workers[1].hear()
    found = workers[0].hear()
    for each in workers:
        each.tell()
    for each in workers:
        outcome = each.finish()
        assert not outcome.error, outcome.details

    def total(name, **labels):
        marks = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            value
            for key, value in found.items()
            if key.startswith(f"{name}{{") and all(mark in key for mark in marks)
        )

    barrier_bytes = 4
    for rank in (0, 1):
        own = {"worker": str(rank), "device": f"md{rank}"}
        small_bytes = STEPS * SMALL_BYTES if rank == 0 else 0
        large_bytes = STEPS * LARGE_BYTES + barrier_bytes
        assert total("coarse_pushed_bytes_total", **own, algorithm="gather") == small_bytes
        assert total("coarse_pushed_bytes_total", **own, algorithm="direct") == large_bytes
        assert total("coarse_pushed_bytes_total", worker=str(rank)) == small_bytes + large_bytes
        assert total("coarse_pushed_shards_total", **own, algorithm="gather") == STEPS, "present or not"
        assert total("coarse_step_seconds_count", worker=str(rank)) == STEPS - 1
        assert total("coarse_world_size", worker=str(rank)) == 2
    assert total("coarse_reduced_bytes_total", algorithm="direct") == STEPS * LARGE_BYTES + barrier_bytes
    assert total("coarse_reduced_bytes_total", algorithm="gather") == STEPS * SMALL_BYTES
    assert total("coarse_reduced_shards_total") == total("coarse_pushed_shards_total", worker="0")
    assert total("coarse_taken_shards_total") == total("coarse_pushed_shards_total")
    assert total("coarse_queue_shards") == 0
    assert total("coarse_sync_core_busy_seconds_total") > 0
    assert total("coarse_sync_cores") >= 2


def test_waits_are_counted_by_their_cause(job):
    """A worker is blocked for as long as another one lets it wait."""

    def worker(me):
        with me.join(profile="off") as session:
            group = session.register("weights", SPECS)
            session.barrier()
            before = session.metrics()
            if me.rank == 1:
                me.hear()
                compute(0.5)
            for index in range(len(SPECS)):
                group.push(index)
            me.tell()
            group.pull_all()
            after = session.metrics()

            def seconds(cause):
                name = "coarse_wait_seconds_sum"
                labels = {"worker": str(me.rank), "cause": cause}
                return after.total(name, **labels) - before.total(name, **labels)

            results_s = seconds("results")
            elapsed_s = after.taken_s - before.taken_s
            assert results_s <= elapsed_s
            assert seconds("queue") == seconds("probe") == 0
            session.barrier()
            return results_s / elapsed_s

    workers = job.start(2, worker)
    workers[0].hear()
    workers[1].tell()
    share, _ = (each.finish() for each in workers)
    assert not share.error, share.details
    assert share.value > 0.5, "worker 0 had nothing to do but to wait"


def test_a_job_is_scraped_while_it_trains(job):
    port = free_port()

    def worker(me):
        with me.join(metrics_port=port, profile="off") as session:
            train(session)
            session.count_samples(128)
            session.barrier()
            me.tell()
            me.hear()

    workers = job.start(2, worker)
    for each in workers:
        each.hear()
    samples = scrape(port)
    for rank in ("0", "1"):
        assert sample(samples, "coarse_step_seconds_count", worker=rank) == STEPS - 1
        assert sample(samples, "coarse_step_seconds_bucket", worker=rank, le="+Inf") == STEPS - 1
        assert sample(samples, "coarse_samples_total", worker=rank) == 128
    for each in workers:
        each.tell()
    for each in workers:
        outcome = each.finish()
        assert not outcome.error, outcome.details
    for pid in job.device_pids():
        job.await_end(pid)
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def scrape_until_counted(port, name, **labels):
    """Samples with this counter above 0: memory devices learn of a loss one after the other."""
    limit_s = time.monotonic() + LIMIT_S
    while not (samples := scrape(port)).get((name, frozenset(labels.items()))):
        assert time.monotonic() < limit_s, f"{name} was not counted: {samples}"
        time.sleep(0.05)
    return samples


@pytest.mark.parametrize("killed", [0, 1])
def test_a_node_is_scraped_after_a_worker_was_killed(job, killed):
    """The endpoint and the memory are those of memory devices, which live as long as any worker."""
    port = free_port()

    def worker(me):
        session = me.join(metrics_port=port, profile="off")
        train(session)
        me.tell()
        with pytest.raises(WorkerLostError):
            meet_forever(session)
        own = session.metrics()
        assert own.total("coarse_step_seconds_count", worker=str(killed)) == STEPS - 1
        me.tell()
        me.hear()
        session.close(is_finished=False)

    workers = job.start(2, worker)
    for each in workers:
        each.hear()
    assert sum(value for (name, _), value in scrape(port).items() if name == "coarse_failures_total") == 0
    workers[killed].kill()
    survivor = workers[1 - killed]
    survivor.hear()
    samples = scrape_until_counted(port, "coarse_failures_total", device="md0", failure="worker_lost")
    assert sample(samples, "coarse_step_seconds_count", worker=str(killed)) == STEPS - 1
    assert sample(samples, "coarse_failures_total", device="md0", failure="worker_lost") == 1
    survivor.tell()
    outcome = survivor.finish()
    assert not outcome.error, outcome.details
    assert workers[killed].finish().exit_code == -9


def test_a_taken_port_does_not_stop_training(job):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]

        def worker(me):
            with me.join(metrics_port=port, profile="off") as session:
                train(session)
                assert session.metrics().total("coarse_step_seconds_count") >= STEPS - 1

        job.run(2, worker)


def test_one_worker_has_metrics_too(job):
    port = free_port()

    def worker(me):
        with me.join(metrics_port=port) as session:
            train(session)
            session.count_samples(5)
            assert session.metrics().total("coarse_step_seconds_count", worker="0") == STEPS - 1
            samples = scrape(port)
            assert sample(samples, "coarse_samples_total", worker="0") == 5
            assert sample(samples, "coarse_world_size", worker="0") == 1
        with pytest.raises(OSError, match="refused"):
            scrape(port)

    job.run(1, worker)


def test_steps_are_those_of_the_largest_group(job):
    """Whatever else is pushed meanwhile, and also after the largest group was released."""

    def worker(me):
        with me.join(profile="off") as session:
            buffers = session.register("buffers", SPECS[1:])
            weights = train(session)
            for _ in range(10):
                buffers.push(0)
                buffers.pull(0)
            steps = "coarse_step_seconds_count"
            assert session.metrics().total(steps, worker=str(me.rank)) == STEPS - 1
            weights.close()
            for _ in range(10):
                buffers.push(0)
                buffers.pull(0)
            assert session.metrics().total(steps, worker=str(me.rank)) == STEPS - 1 + 9
            session.all_reduce(np.ones(10))

    job.run(2, worker)


def test_kept_memory_devices_serve_the_next_attempt_and_remember_failures(job):
    port = free_port()

    def worker(me, attempt):
        def reach(group, step, place):
            if attempt == 0 and (me.rank, step, place) == (1, 3, "step.prepare"):
                os.kill(os.getpid(), signal.SIGKILL)
            if attempt == 1 and (step, place) == (STEPS, "step.prepare"):
                me.tell()
                me.hear()

        return persistent_training.train(me, attempt, reach, metrics_port=port)

    first = job.outcomes(2, lambda me: worker(me, 0))
    assert sorted(each.exit_code for each in first) == [-9, 1]
    workers = job.start(2, lambda me: worker(me, 1))
    for each in workers:
        each.hear()
    samples = scrape(port)
    for rank in ("0", "1"):
        assert sample(samples, "coarse_restarts", worker=rank) == 1
    assert sample(samples, "coarse_failures_total", device="md0", failure="worker_lost") == 1
    for each in workers:
        each.tell()
    for each in workers:
        outcome = each.finish()
        assert not outcome.error, outcome.details


def test_each_node_shows_its_own_processes_and_what_travels_between_nodes(job):
    ports = [free_port(), free_port()]

    def worker(me):
        with me.join(node=f"n{me.rank}", metrics_port=ports[me.rank]) as session:
            train(session)
            session.barrier()
            me.tell()
            me.hear()

    workers = job.start(2, worker)
    for each in workers:
        each.hear()
    nodes = [scrape(port) for port in ports]
    for each in workers:
        each.tell()
    for each in workers:
        outcome = each.finish()
        assert not outcome.error, outcome.details
    for rank, samples in enumerate(nodes):
        labels = [dict(own) for _, own in samples]
        assert {own["worker"] for own in labels if "worker" in own} == {str(rank)}
        assert {own["device"] for own in labels if "device" in own} == {"md0"}
        sent = sample(samples, "coarse_node_sent_bytes_total", device="md0")
        assert sent >= STEPS * LARGE_BYTES / 2, (
            "contributions to half of the shards, and results of the others"
        )
    sent, received = (
        sum(sample(each, f"coarse_node_{what}_bytes_total", device="md0") for each in nodes)
        for what in ("sent", "received")
    )
    assert received == sent


def test_pools_of_snapshots_are_gauged(job):
    """By the home device's control loop, at least twice a second."""

    def worker(me):
        with me.join(profile="off") as session:
            group = persistent_training.register(session)
            held = group.snapshot() if me.rank == 0 else None
            session.barrier()
            persistent_training.take_step(group, me.rank, 1)
            session.barrier()
            if held is not None:
                found = group.snapshot_statistics()
                assert found.taken_bytes > 0
                await_gauge(session, "coarse_snapshot_pool_bytes", found.taken_bytes)
                await_gauge(session, "coarse_snapshot_pool_limit_bytes", found.limit_bytes)
                assert session.metrics().total("coarse_snapshots_lost_total") == 0
            session.barrier()

    job.run(2, worker)
