"""Sessions with every kind of memory: same results, ends and restarts as with host memory.

The machine's first NUMA node stands for a distant node, and a file for a DAX device (tests/unit/test_memory_dax.py
lists the differences).
"""

from __future__ import annotations

import os
import re
import signal

import numpy as np
import pytest
from harness import job_of_test
from test_recovery import crash, dies_at, finish, train, undisturbed  # noqa: F401
from test_snapshots import contents_now, contents_of, open_group, settings_of, take_step

from coarse.errors import (
    DeviceMemoryBusyError,
    MemoryDeviceLostError,
    OutOfDeviceMemoryError,
    RendezvousError,
)
from coarse.machine.host import read_numa_nodes
from coarse.machine.memory_name import MemoryName, parse_memory_devices
from coarse.proxy.memory.dax import DaxMemory
from coarse.schema import TensorSpec

UNIT = 2 << 20
DEVICE_BYTES = 32 * UNIT
NODE = next((node.node for node in read_numa_nodes() if node.memory_bytes), None)
LENGTHS = (300_001, 70_000, 33, 1)  # several shards of 64 KiB, one of them not a multiple of a cache line

MEMORIES = [
    pytest.param(
        f"numa:{NODE},numa:{NODE}",
        marks=pytest.mark.skipif(NODE is None, reason="this kernel knows no NUMA nodes"),
    ),
    pytest.param("dax:PATH/0", marks=pytest.mark.slow),
    "dax:PATH/0,dax:PATH/1",
    pytest.param("host,dax:PATH/0", marks=pytest.mark.slow),
]


@pytest.fixture
def job(devices):
    """Workers and memory devices, which have ended before `devices` looks whether its memory is free."""
    with job_of_test() as started:
        yield started


@pytest.fixture
def devices(tmp_path):
    """Returns a function that makes a list's memories; PATH/0 and PATH/1 stand for DAX devices."""
    for name in "01":
        (tmp_path / name).write_bytes(b"\xff" * DEVICE_BYTES)

    def named(text: str) -> tuple[MemoryName, ...]:
        return parse_memory_devices(text.replace("PATH", str(tmp_path)))

    yield named
    for name in "01":  # no process owns it or maps a part of it
        memory = DaxMemory(str(tmp_path / name))
        assert memory.available_bytes() == DEVICE_BYTES
        memory.close()


def specs():
    return [TensorSpec(name=str(i), dtype="float32", num_elements=n) for i, n in enumerate(LENGTHS)]


def reduce_steps(session, rank):
    """Result bytes of three steps of one group."""
    group = session.register("gradients", specs())
    found = []
    for step in range(3):
        for index, spec in enumerate(group.specs):
            values = np.random.default_rng([rank, step, index]).normal(size=spec.num_elements)
            np.frombuffer(group.buffer(index), np.float32)[:] = values.astype(np.float32)
            group.push(index)
        group.pull_all()
        found += [bytes(group.buffer(index)).hex() for index in range(len(LENGTHS))]
    group.close()
    return found


def reducing(devices, store="store", **settings):
    def worker(me):
        with me.join(
            store, memory_devices=devices, shard_bytes=64 << 10, profile="off", **settings
        ) as session:
            return reduce_steps(session, me.rank)

    return worker


@pytest.mark.parametrize(
    "algorithm",
    [
        "auto",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gather", "direct", "ring", "exchange")),
    ],
)
@pytest.mark.parametrize("memories", MEMORIES)
def test_results_have_the_bits_of_the_hosts_memory(job, devices, memories, algorithm):
    num_devices = len(devices(memories))
    expected = job.run(2, reducing(num_devices, algorithm=algorithm))
    assert job.run(2, reducing(devices(memories), "again", algorithm=algorithm)) == expected


@pytest.mark.parametrize("memories", MEMORIES)
def test_an_optimizer_updates_parameters_where_they_lie(job, devices, memories, undisturbed):  # noqa: F811
    results = job.run(2, lambda me: train(me, 0, memory_devices=devices(memories), keep=0.0))
    assert results == [[0, None, undisturbed]] * 2


@pytest.mark.parametrize("memories", MEMORIES)
def test_restarted_workers_go_on_from_what_is_kept(job, devices, memories, undisturbed):  # noqa: F811
    settings = {"memory_devices": devices(memories)}
    crash(job, 0, dies_at(1, 4, "backward.push 0"), **settings)
    first, _, digest = finish(job, 1, **settings)
    assert (first, digest) == (3, undisturbed)


def test_what_is_kept_in_one_memory_is_not_looked_for_in_another(job, devices):
    crash(job, 0, dies_at(1, 2, "backward.push 0"), memory_devices=devices("dax:PATH/0"))
    outcomes = job.outcomes(2, lambda me: train(me, 1, memory_devices=1))
    assert {outcome.error for outcome in outcomes} <= {
        RendezvousError.__name__,
        MemoryDeviceLostError.__name__,
    }
    assert "kept memory devices own dax:" in outcomes[0].message
    assert "this attempt wants host" in outcomes[0].message
    finish(job, 2, memory_devices=devices("dax:PATH/0"))


@pytest.mark.parametrize("memories", MEMORIES)
def test_stored_values_are_loaded_whole(job, devices, memories):
    def worker(me):
        with me.join(memory_devices=devices(memories)) as session:
            if me.rank == 0:
                for key in "abcd":
                    session.store(key, np.arange(1001.0))
            session.barrier()
            first = [session.load(key) for key in "abcd"]
            session.barrier()
            if me.rank == 1:
                session.store("a", np.arange(7.0))
            session.barrier()
            assert np.frombuffer(session.load("a").value).tolist() == list(range(7))
            assert all(np.array_equal(np.frombuffer(each.value), np.arange(1001.0)) for each in first)
            assert first[0].value.readonly

    job.run(2, worker)


@pytest.mark.parametrize("memories", MEMORIES)
@pytest.mark.parametrize("victim", ["worker", pytest.param("workers", marks=pytest.mark.slow), "device"])
def test_nothing_is_left_of_those_that_are_killed(job, devices, memories, victim):
    """The fixture checks that all extents are free; the job checks that the processes have ended."""

    def worker(me):
        with me.join(memory_devices=devices(memories)) as session:
            group = session.register("gradients", specs())
            me.tell("ready")
            while True:
                for index in range(len(LENGTHS)):
                    group.push(index)
                group.pull_all()

    workers = job.start(2, worker)
    for each in workers:
        assert each.hear() == "ready"
    if victim == "device":
        job.kill_device(job.device_pids()[-1])
    else:
        for each in workers[: 1 if victim == "worker" else 2]:
            each.kill()
    for each in workers:
        outcome = each.finish()
        assert outcome.exit_code == -signal.SIGKILL or outcome.error in (
            "WorkerLostError",
            "MemoryDeviceLostError",
        )
    for pid in job.device_pids():
        job.await_end(pid)


def test_a_tensor_outlives_its_session(job, devices):
    """As in host memory; the extent stays reserved until the worker releases it."""

    def worker(me):
        session = me.join(memory_devices=devices("dax:PATH/0"))
        group = session.register("gradients", specs())
        view = np.frombuffer(group.buffer(0), np.float32)
        view[:] = me.rank
        session.barrier()
        session.close()
        with me.join("second", memory_devices=devices("dax:PATH/0")) as second:
            other = second.register("gradients", specs())
            np.frombuffer(other.buffer(0), np.float32)[:] = 7
            second.barrier()
            assert set(view.tolist()) == {me.rank}

    job.run(2, worker)


def test_memory_that_does_not_suffice_is_refused_and_the_session_goes_on(job, devices):
    def worker(me):
        with me.join(memory_devices=devices("dax:PATH/0")) as session:
            large = [TensorSpec(name="large", dtype="float32", num_elements=DEVICE_BYTES // 4)]
            with pytest.raises(OutOfDeviceMemoryError, match=r"2 workers need 128\.0 MiB .* on /.*0\."):
                session.register("large", large)
            return reduce_steps(session, me.rank)

    assert job.run(2, worker) == job.run(2, reducing(1, "again"))


def test_each_memory_has_to_hold_what_its_own_workers_need(job, devices):
    """Two devices of 64 MiB hold two workers' 40 MiB; one does not."""

    def worker(me, memories):
        with me.join(memories.replace("/", ""), memory_devices=devices(memories)) as session:
            session.register(
                "large", [TensorSpec(name="large", dtype="float32", num_elements=10 << 20)]
            ).close()
            return True

    assert job.run(2, lambda me: worker(me, "dax:PATH/0,dax:PATH/1")) == [True, True]
    outcomes = job.outcomes(2, lambda me: worker(me, "dax:PATH/0"))
    assert {outcome.error for outcome in outcomes} == {"OutOfDeviceMemoryError"}


@pytest.mark.parametrize(
    ("memories", "message"),
    [
        ("numa:9999", "there is no NUMA node 9999 on this machine"),
        ("dax:PATH/none", "No such file or directory; this machine has"),
        ("host,dax:/dev/null", "is a character device, but no DAX device"),
        ("dax:PATH/0,dax:PATH/0", "which only one can use; give all its workers to one memory device"),
    ],
)
def test_a_memory_that_is_not_there_is_told_to_every_worker(job, devices, memories, message):
    def worker(me):
        me.join(memory_devices=devices(memories))

    outcomes = job.outcomes(2, worker)
    assert [outcome.error for outcome in outcomes] in (
        ["ValueError", "MemoryDeviceLostError"],
        ["FieldError", "MemoryDeviceLostError"],
    )
    assert message in outcomes[0].message
    assert message in outcomes[1].message


def test_a_device_that_is_in_use_is_told_with_its_user(job, devices, monkeypatch, tmp_path):
    monkeypatch.setattr("coarse.proxy.memory.dax._PATIENCE_S", 0.0)
    held = DaxMemory(str(tmp_path / "0"))
    try:
        outcomes = job.outcomes(2, lambda me: me.join(memory_devices=devices("dax:PATH/0")))
    finally:
        held.close()
    assert outcomes[0].error == "DeviceMemoryBusyError"
    assert f"process {os.getpid()} (" in outcomes[0].message
    assert outcomes[1].error == "MemoryDeviceLostError"


@pytest.mark.skipif(NODE is None, reason="this kernel knows no NUMA nodes")
def test_slots_parameters_and_control_words_are_bound_to_the_node(job):
    """According to the kernel's information about the worker's mappings."""

    def worker(me):
        with me.join(memory_devices=parse_memory_devices(f"numa:{NODE}")) as session:
            group = session.register("gradients", specs())
            np.frombuffer(group.buffer(0), np.float32)[:] = 1
            with open("/proc/self/numa_maps") as maps:
                ours = [line.split() for line in maps if "memfd:coarse-" in line]
            assert len(ours) >= 3
            return sorted({words[1] for words in ours})

    assert job.run(2, worker) == [[f"bind:{NODE}"]] * 2


@pytest.mark.parametrize("memories", [f"numa:{NODE}", "dax:PATH/NODE"])
def test_nodes_with_memories_of_their_own_come_to_the_same(job, devices, memories):
    def worker(me, store, memory_devices):
        settings = {"memory_devices": memory_devices, "node": f"n{me.rank}", "shard_bytes": 64 << 10}
        with me.join(store, **settings) as session:
            return reduce_steps(session, me.rank)

    def own(me):
        return devices(memories.replace("NODE", str(me.rank)))

    expected = job.run(2, lambda me: worker(me, "host", 1))
    assert job.run(2, lambda me: worker(me, "own", own(me))) == expected


@pytest.mark.parametrize("memories", MEMORIES)
def test_links_of_another_machine_are_emulated_over_it(job, devices, memories):
    expected = job.run(2, reducing(len(devices(memories))))
    settings = {"machine": "sdsc-p100", "time_dilation": 1.0}
    assert job.run(2, reducing(devices(memories), "again", **settings)) == expected


@pytest.mark.parametrize("memories", MEMORIES)
def test_a_snapshot_holds_its_step_while_training_goes_on(job, devices, memories):
    def worker(me):
        with me.join(**settings_of(devices(memories))) as session:
            group = open_group(session)
            take_step(group, me.rank, 1)
            if me.rank == 0:
                expected, snapshot = contents_now(group), group.snapshot()
            session.barrier()
            for step in (2, 3):
                take_step(group, me.rank, step)
            if me.rank == 0:
                assert contents_of(snapshot) == expected != contents_now(group)
                snapshot.release()
            session.barrier()

    job.run(2, worker)


def test_workers_are_told_why_a_memory_device_cannot_start(job, devices, tmp_path):
    named = devices("dax:PATH/0,dax:PATH/2")
    os.link(tmp_path / "0", tmp_path / "2")

    def worker(me):
        with pytest.raises(DeviceMemoryBusyError) as caught:
            me.join(memory_devices=named)
        return str(caught.value)

    for told in job.run(2, worker):
        assert re.match(
            r"worker [01]: memory device md[01] \(dax:/.*\) could not start: /.* is for one memory device alone",
            told,
        )
