"""A job over several nodes: here, workers of one machine, which COARSE_NODE divides, over loopback connections."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from harness import LIMIT_S, PROMPT_S
from test_optimizer import ADAM_STATES, LENGTHS, digest, means, take_steps
from test_start import TellingHandler
from test_sync import (
    EVERY_KIND,
    SMALL_SHARDS,
    contribution,
    expected,
    floats,
    leave_together,
    slot,
    sync,
    together,
)

from coarse.errors import SchemaMismatchError
from coarse.rendezvous import workers as rendezvous
from coarse.startup import device_connections, node_links

SHAPES = [  # workers of each node, memory devices of each, sync cores
    ((2, 2), 2, 1),
    ((2, 2), 1, 2),
    ((1, 1, 1), 1, 1),
    pytest.param((1, 1, 1), 2, 1, marks=pytest.mark.slow),
    ((1, 3), 0, 1),
]


def node_of(rank, shape):
    """The name of a worker's node; `shape` is the number of workers of each node."""
    return next(f"n{node}" for node in range(len(shape)) if rank < sum(shape[: node + 1]))


@pytest.mark.parametrize(
    "algorithm", ["auto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gather", "direct"))]
)
@pytest.mark.parametrize(("shape", "memory_devices", "sync_cores"), SHAPES)
def test_every_dtype_op_and_length(job, algorithm, shape, memory_devices, sync_cores):
    world_size = sum(shape)

    def worker(me):
        layout = {"memory_devices": memory_devices, "sync_cores": sync_cores, "algorithm": algorithm}
        with me.join(node=node_of(me.rank, shape), **layout, **SMALL_SHARDS) as session:
            group = session.register("every kind", EVERY_KIND)
            for step in range(3):
                order = random.Random(f"{me.rank} {step}").sample(range(len(EVERY_KIND)), len(EVERY_KIND))
                counts = sync(group, order, lambda spec: contribution(spec, me.rank, world_size))
                assert counts == [world_size] * len(EVERY_KIND)
                for index, spec in enumerate(EVERY_KIND):
                    assert np.array_equal(slot(group, index), expected(spec, world_size)), (step, spec)

    job.run(world_size, worker)


@pytest.mark.parametrize("shape", [(2, 2), pytest.param((1, 3), marks=pytest.mark.slow)])
def test_an_optimizer_keeps_the_same_bits_on_every_node(job, shape):
    def worker(me):
        with me.join(node=node_of(me.rank, shape), shard_bytes=64 << 10) as session:
            group = session.register_parameters("model", means(*LENGTHS), state_names=ADAM_STATES)
            take_steps(group, me.rank)
            return digest(group)

    assert len(set(job.run(sum(shape), worker))) == 1


# ---- absent contributions, buffers that are not registered ----


def test_parameters_that_are_updated_by_name_are_registered_on_nodes_of_several_sizes(job):
    """As Keras optimizers do."""
    shape = (2, 1)

    def worker(me):
        with me.join(node=node_of(me.rank, shape), memory_devices=1) as session:
            writes = me.rank == session.node_workers[0]
            most_workers = session.most_workers_of_a_node
            assert most_workers == 2
            with contextlib.closing(session.open_async_reducer()) as reducer:
                reducer.register_parameters(
                    "model", means(*LENGTHS), ADAM_STATES, writes=writes, most_workers=most_workers
                )
                leave_together(me)

    assert [outcome.details for outcome in together(job, sum(shape), worker)] == [""] * 3


@pytest.mark.parametrize("shape", [(2, 2), (1, 1, 1)])
def test_absent_and_joined_contributions(job, shape):
    def worker(me):
        with me.join(node=node_of(me.rank, shape), **SMALL_SHARDS) as session:
            for op, result in (("sum", 1 + 4), ("mean", (1 + 4) / 3), ("max", 4)):
                group = session.register(op, floats(["small", "large"], 10_000, op=op))
                for index in range(2):
                    slot(group, index)[:] = 2**me.rank
                    group.push(index, present=me.rank != 1, joined=me.rank == 3)
                assert group.pull_all() == [2, 2]
                for index in range(2):
                    assert (slot(group, index) == np.float32(result)).all(), op
                    group.push(index, present=False)
                assert group.pull_all() == [0, 0]
                assert (slot(group, 0) == np.float32(result)).all(), op

    job.run(sum(shape), worker)


@pytest.mark.parametrize("shape", [(2, 2), (1, 1, 1)])
def test_all_reduce_broadcast_and_barrier_of_arrays(job, shape):
    world_size = sum(shape)

    def worker(me):
        with me.join(node=node_of(me.rank, shape)) as session:
            for num_elements in (1, 1_001, (5 << 20) // 4):
                position = np.arange(num_elements) % 1000
                array = (position * 2**me.rank).astype(np.int64)
                session.all_reduce(array)
                assert np.array_equal(array, position * (2**world_size - 1))
                for root in range(world_size):
                    array = (position * 2.0**me.rank).astype(np.float32)
                    session.broadcast(array, root=root)
                    assert np.array_equal(array, position * 2.0**root)
                session.barrier()

    job.run(world_size, worker)


# ---- models and settings that differ ----


def test_models_that_differ_between_nodes_are_refused_on_every_worker(job):
    def worker(me):
        with me.join(node=node_of(me.rank, (2, 2))) as session:
            names = "ac" if me.rank >= 2 else "ab"
            with pytest.raises(SchemaMismatchError) as caught:
                session.register("model", floats(names))
            # A refusal is not a lost process: the session continues.
            group = session.register("model", floats("ab"))
            group.push(0)
            assert group.pull(0) == 4
            session.barrier()
        return str(caught.value)

    for message in job.run(4, worker):
        assert message.startswith("model: workers 0 and 2 differ: tensor 1 is 'b' of 1000 x float32 (sum)")
        assert "on worker 0, 'c' of" in message


def test_models_that_differ_within_a_node_are_refused_on_the_others_too(job):
    def worker(me):
        with me.join(node=node_of(me.rank, (2, 2))) as session:
            with pytest.raises(SchemaMismatchError) as caught:
                session.register("model", floats("ac" if me.rank == 3 else "ab"))
            session.barrier()
        return str(caught.value)

    messages = job.run(4, worker)
    assert "workers 2 and 3 differ" in messages[2]
    assert messages[2] == messages[3]
    assert messages[0] == messages[1] == f"node 1 (worker(s) 2, 3) refused: {messages[2]}"


def test_workers_of_different_nodes_that_disagree_on_an_array_are_told(job):
    def worker(me):
        with me.join(node=node_of(me.rank, (2, 1))) as session:
            try:
                session.all_reduce(np.ones(10 + me.rank // 2, dtype=np.float32))
            finally:
                leave_together(me)

    for outcome in together(job, 3, worker):
        assert outcome.error == "SchemaMismatchError", outcome
        assert "worker(s) 2 gave 11 elements" in outcome.message
        assert "worker(s) 0, 1 gave 10 elements" in outcome.message


def test_memory_that_one_node_cannot_have_is_refused_on_all(job, monkeypatch):
    def worker(me):
        if me.rank == 2:  # its memory devices inherit the setting
            paths = [str(small_memory), *filter(None, [os.environ.get("PYTHONPATH")])]
            monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
        with me.join(node=node_of(me.rank, (2, 1))) as session:
            with pytest.raises(MemoryError) as caught:
                session.register("model", floats("ab", 2_000_000))
            session.barrier()
        return str(caught.value)

    small_memory = job.directory / "small"
    small_memory.mkdir()
    (small_memory / "sitecustomize.py").write_text(
        "from coarse.proxy.memory import HostMemory\nHostMemory.available_bytes = lambda self: 10_000_000\n"
    )
    messages = job.run(3, worker)
    assert messages[2].startswith("model: 1 workers need")
    assert messages[0] == messages[1] == f"node 1 (worker(s) 2) refused: {messages[2]}"


def test_rings_across_nodes_are_refused(job):
    def worker(me):
        me.join(node=f"n{me.rank}", algorithm="ring")

    for outcome in job.outcomes(2, worker):
        assert outcome.error == "RendezvousError"
        assert (
            "'ring' works only within one node, but this job has 2 nodes; set COARSE_ALGORITHM"
            in outcome.message
        )


# ---- lost processes ----


def training(shape, **settings):
    """A worker that synchronises until it fails; the test learns when all workers synchronise."""

    def worker(me):
        with me.join(node=node_of(me.rank, shape), **settings) as session:
            group = session.register("weights", floats("ab"))
            session.barrier()
            me.tell(session.device_pids)
            while True:
                group.push(0)
                group.push(1)
                group.pull_all()

    return worker


def started(job, shape, worker):
    """Running workers that synchronise, and the pids of the memory devices of each node."""
    workers = job.start(sum(shape), worker)
    pids = [running.hear() for running in workers]
    return workers, [of_worker for of_worker in pids if of_worker]


@pytest.mark.parametrize("shape", [(2, 2), (1, 1, 1)])
@pytest.mark.parametrize("victim", [0, 2])
def test_the_death_of_a_worker_is_told_on_all_nodes(job, shape, victim):
    workers, _ = started(job, shape, training(shape))
    killed_s = workers[victim].kill()
    for survivor in workers:
        if survivor.rank == victim:
            continue
        outcome = survivor.finish()
        assert outcome.error == "WorkerLostError", outcome
        assert outcome.message.startswith(
            f"worker {survivor.rank}: worker {victim} (pid {workers[victim].pid}) died; its last"
        )
        assert outcome.ended_s - killed_s < PROMPT_S


@pytest.mark.parametrize("shape", [(2, 2), (1, 1, 1)])
def test_the_death_of_a_memory_device_is_told_on_all_nodes(job, shape):
    workers, device_pids = started(job, shape, training(shape, memory_devices=2))
    killed_s = job.kill_device(device_pids[1][1])
    for running in workers:
        outcome = running.finish()
        assert outcome.error == "MemoryDeviceLostError", outcome
        assert re.search(r"memory device (md1 .*|of )node 1|md1 \(pid", outcome.message)
        assert "Start the job again from your last checkpoint" in outcome.message
        assert outcome.ended_s - killed_s < PROMPT_S


def test_a_node_that_is_killed_whole_is_told_at_once(job):
    """Its kernel resets connections on which data was under way, which firewalls do too; but nobody listens there."""
    shape = (1, 1, 1)
    workers, device_pids = started(job, shape, training(shape))
    killed_s = job.kill_device(device_pids[1][0])
    workers[1].kill()
    for survivor in workers[::2]:
        outcome = survivor.finish()
        assert outcome.error in ("MemoryDeviceLostError", "WorkerLostError"), outcome
        assert outcome.ended_s - killed_s < PROMPT_S


@pytest.mark.parametrize("use", ["register", "all_reduce"])
def test_a_death_ends_every_kind_of_wait(job, use):
    shape = (1, 2)

    def worker(me):
        with me.join(node=node_of(me.rank, shape)) as session:
            session.barrier()
            me.tell()
            if me.rank == 2:
                me.hear()
            if use == "register":
                session.register("more", floats("ab"))
            else:
                session.all_reduce(np.ones(1000))

    workers = job.start(3, worker)
    for running in workers:
        running.hear()
    killed_s = workers[2].kill()
    for survivor in workers[:2]:
        outcome = survivor.finish()
        assert outcome.error == "WorkerLostError", outcome
        assert f"worker 2 (pid {workers[2].pid}) died" in outcome.message
        assert outcome.ended_s - killed_s < PROMPT_S


@pytest.mark.parametrize("shape", [(2, 1), pytest.param((1, 1, 1), marks=pytest.mark.slow)])
@pytest.mark.parametrize("use", ["pull", "register", "all_reduce"])
def test_a_worker_that_leaves_while_other_nodes_go_on_is_told(job, use, shape):
    def worker(me):
        with me.join(node=node_of(me.rank, shape)) as session:
            group = session.register("weights", floats("ab"))
            session.barrier()
            if me.rank == 2:
                return
            me.tell()
            me.hear()
            if use == "register":
                session.register("more", floats("ab"))
            elif use == "all_reduce":
                session.all_reduce(np.ones(10))
            else:
                group.push(0)
                group.push(1)
                group.pull_all()

    workers = job.start(3, worker)
    workers[2].finish()
    for running in workers[:2]:
        running.hear()
        running.tell()
    for running in workers[:2]:
        outcome = running.finish()
        assert outcome.error == "WorkerLostError", outcome
        assert "worker(s) 2 closed the session while others still" in outcome.message


@pytest.mark.parametrize("shape", [(2, 2), pytest.param((1, 1, 1), marks=pytest.mark.slow)])
def test_workers_may_leave_one_after_the_other(job, shape):
    """A complete last step is not lost because another worker left earlier."""
    world_size = sum(shape)

    def worker(me):
        with me.join(node=node_of(me.rank, shape), memory_devices=2) as session:
            group = session.register("weights", floats("abc", 100_000))
            for _ in range(10):
                for index in range(3):
                    group.push(index)
                assert group.pull_all() == [world_size] * 3

    for _ in range(5):
        job.run(world_size, worker)
        for path in (job.directory / "store").iterdir():
            path.unlink()


@pytest.mark.parametrize("first", [0, 1])
def test_a_memory_device_that_ends_before_another_one_of_its_node_is_no_loss(job, first):
    """A leaving worker signs off from one device after the other; the other nodes must not report a death."""

    def worker(me):
        with me.join(node=f"n{me.rank}", memory_devices=2) as session:
            session.store("value", np.arange(3))
            session.barrier()
            if me.rank == 0:
                device = session._client.linked()._connections[first]
                device.send({"type": "bye", "is_finished": True})
                job.await_end(device.pid)
                return
            me.hear()
            while 0 not in session._client.linked()._groups._departed():
                pass
            assert np.array_equal(np.frombuffer(session.load("value").value, np.int64), np.arange(3))

    workers = job.start(2, worker)
    outcomes = [workers[0].finish()]
    workers[1].tell()
    outcomes.append(workers[1].finish())
    assert [outcome.details for outcome in outcomes] == [""] * 2


def test_a_worker_that_stands_still_is_named_after_the_time_out(job):
    def worker(me):
        with me.join(node=f"n{me.rank}", timeout_s=2.0) as session:
            group = session.register("weights", floats("ab"))
            session.barrier()
            me.tell()
            if me.rank == 1:
                me.hear()
            group.push(0)
            try:
                group.pull_all()
            finally:
                me.tell()
                me.hear()

    workers = job.start(2, worker)
    for running in workers:
        running.hear()
    workers[0].hear()
    workers[0].tell()
    outcome = workers[0].finish()
    assert outcome.error == "SyncTimeoutError"
    assert "'a' of weights (pushed by worker(s) 0; not pushed by, or not received from, 1)" in outcome.message


# ---- the start ----


def test_a_node_that_never_connects_is_named_after_the_time_out(job, monkeypatch):
    def worker(me):
        if me.rank == 2:
            monkeypatch.setattr(device_connections, "link_nodes", lambda *_, **__: me.hear())
        me.join(node=f"n{me.rank}", timeout_s=2.0)

    workers = job.start(3, worker)
    for running in workers[:2]:
        outcome = running.finish()
        assert outcome.error == "RendezvousError", outcome
        assert "waits for node 2 (worker(s) 2)" in outcome.message


@pytest.mark.parametrize(
    "refused", [{"algorithm": "ring"}, {"keep_devices": 60.0}, {"partition_table": "/nowhere/table.toml"}]
)
def test_settings_that_one_node_refuses_end_the_start_on_the_others(job, refused):
    def worker(me):
        me.join(node=f"n{me.rank}", **(refused if me.rank == 1 else {}))

    told, own = job.outcomes(2, worker)
    assert told.error == "RendezvousError"
    assert told.message.startswith(f"worker 0: worker 1 failed at the start: {own.message}")
    assert told.message.endswith("This follows from an error of worker 1; see that error.")


def test_who_is_waited_for_is_told(job, monkeypatch):
    def worker(me):
        if me.rank == 1:
            link_nodes = device_connections.link_nodes
            monkeypatch.setattr(
                device_connections, "link_nodes", lambda *a, **named: me.hear() or link_nodes(*a, **named)
            )
        else:
            logging.getLogger("coarse").addHandler(TellingHandler(me))
        with me.join(node=f"n{me.rank}") as session:
            session.barrier()

    monkeypatch.setattr(node_links, "PROGRESS_INTERVAL_S", 0.1)
    workers = job.start(2, worker)
    assert workers[0].hear().endswith("s: node 0 waits for node 1 (worker(s) 1) to publish its address")
    workers[1].tell()
    assert [running.finish().details for running in workers] == ["", ""]


def test_a_worker_that_dies_before_its_node_is_linked_is_told_on_the_others(job, monkeypatch):
    def worker(me):
        def link_late(*arguments, **named):
            me.tell("linking")
            me.hear()

        if me.rank == 2:
            monkeypatch.setattr(device_connections, "link_nodes", link_late)
        me.join(node=node_of(me.rank, (2, 2)))

    workers = job.start(4, worker)
    assert workers[2].hear() == "linking"
    killed_s = workers[2].kill()
    for running in (workers[0], workers[1], workers[3]):
        outcome = running.finish()
        assert outcome.error in ("WorkerLostError", "MemoryDeviceLostError"), outcome
        assert f"worker 2 (pid {workers[2].pid}) died" in outcome.message, outcome
        assert outcome.ended_s - killed_s < PROMPT_S


@pytest.mark.parametrize("place", ["roll call", "linking"])
def test_the_end_of_a_whole_node_at_the_start_is_told_on_the_others(job, place, monkeypatch):
    """No process of that node is left to report it."""

    def worker(me):
        if place == "roll call" and me.rank == 2:
            me.hear()  # never arrives
        if place == "linking" and me.rank == 1:
            monkeypatch.setattr(device_connections, "link_nodes", lambda *_, **__: me.hear())
        if me.rank == 0:
            check = rendezvous.PeerWatch.check
            looks = iter(["looked"])

            def tell(watch):
                check(watch)
                if 1 in watch._probes and (said := next(looks, "")):
                    me.tell(said)

            monkeypatch.setattr(rendezvous.PeerWatch, "check", tell)
        me.join(node=f"n{me.rank}")

    workers = job.start(3, worker)
    assert workers[0].hear() == "looked"
    killed_s = workers[1].kill()
    for running in workers[:1] if place == "roll call" else workers[::2]:
        outcome = running.finish()
        assert outcome.error == "WorkerLostError", outcome
        assert f"worker 1 (pid {workers[1].pid}) died while" in outcome.message
        assert outcome.ended_s - killed_s < PROMPT_S


def test_a_stranger_is_turned_away_and_the_others_are_served(job, monkeypatch):
    """A client that cannot prove the secret is rejected and does not delay others."""

    def worker(me):
        def call_as_a_stranger(address, hello, secret):
            refused = []
            for greeting in (b"GET / HTTP/1.1\r\n" * 10, node_links._HELLO.pack(*hello, bytes(32)), b""):
                stranger = socket.create_connection((address.host, address.port), timeout=LIMIT_S)
                stranger.sendall(greeting + bytes(node_links._PROOF_BYTES))
                if greeting:
                    with contextlib.suppress(ConnectionError):
                        while stranger.recv(100):
                            pass
                    stranger.close()
                refused.append(stranger)  # the last one sends nothing more and stays connected
            with pytest.raises(node_links._StrangerError, match="does not have the secret"):
                call(address, hello, bytes(32))
            strangers.extend(refused)
            return call(address, hello, secret)

        strangers = []
        if me.rank == 1:
            monkeypatch.setattr(node_links, "_call", call_as_a_stranger)
        else:
            logging.getLogger("coarse").addHandler(TellingHandler(me))
        with me.join(node=f"n{me.rank}", memory_devices=1) as session:
            session.barrier()
        for stranger in strangers:
            stranger.close()

    call = node_links._call
    workers = job.start(2, worker)
    said = [workers[0].hear() for _ in range(3)]
    assert all(text.startswith("refused a connection from ('127.0.0.1', ") for text in said)
    for reason in ("it speaks another protocol", "it does not have the secret of this job"):
        assert sum(reason in text for text in said) == 1, said
    assert [running.finish().details for running in workers] == ["", ""]


def _sockets_of(pid):
    """Numbers of a process's open sockets."""
    targets = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor used for the listing itself
            targets.append(os.readlink(link))
    return {
        target.removeprefix("socket:[").rstrip("]") for target in targets if target.startswith("socket:[")
    }


def test_no_device_listens_once_the_job_has_started(job):
    def worker(me):
        with me.join(node=f"n{me.rank}") as session:
            session.barrier()
            me.tell(session.device_pids)
            me.hear()

    workers = job.start(2, worker)
    pids = [pid for running in workers for pid in (running.pid, *running.hear())]
    # Workers are forks: they inherit this process's listening sockets of other tests.
    inodes = set().union(*map(_sockets_of, pids)) - _sockets_of(os.getpid())
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert not [line for line in listening if line[3] == "0A" and line[9] in inodes]
    for running in workers:
        running.tell()
    assert [running.finish().details for running in workers] == ["", ""]


# ---- several machines ----


@contextlib.contextmanager
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2, connected by a virtual cable."""
    if shutil.which("ip") is None:
        pytest.skip("`ip` is missing; install iproute2")
    names = [f"coarse-{os.getpid()}-{node}" for node in range(2)]
    commands = [f"netns add {name}" for name in names]
    commands.append(f"-n {names[0]} link add cable type veth peer name cable netns {names[1]}")
    for node, name in enumerate(names):
        commands.append(f"-n {name} addr add 10.77.0.{node + 1}/24 dev cable")
        commands.append(f"-n {name} link set cable up")
        commands.append(f"-n {name} link set lo up")
    try:
        for command in commands:
            made = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
            if made.returncode != 0:
                pytest.skip(f"network namespaces cannot be made: ip {command}: {made.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def enter_namespace(name: str) -> None:
    clone_new_net = 0x40000000
    with open(f"/run/netns/{name}") as namespace:
        assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), clone_new_net) == 0


STORE_PORT = "29555"

_TRAINS = """
import torch, coarse.torch
model = coarse.torch.DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
print("trained")
"""


def launchers_in(names, folder, *, timeout_s, script=_TRAINS):
    """`coarse run` for one worker in each network namespace, of a job of two nodes."""
    (folder / "train.py").write_text(script)
    launch = [sys.executable, "-m", "coarse", "run", "-n", "1", "--nnodes", "2", "--master-port", STORE_PORT]
    return [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", name, *launch),
                *("--master-addr", "10.77.0.1", "--node-rank", str(node), "train.py"),
            ],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COARSE_TIMEOUT_S": str(timeout_s)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node, name in enumerate(names)
    ]


def test_two_machines_that_know_themselves_as_loopback_train(tmp_path):
    """As on Debian, whose /etc/hosts maps the machine's name to 127.0.1.1."""
    with namespaces() as names:
        launchers = launchers_in(names, tmp_path, timeout_s=60)
        assert ["trained" in launcher.communicate(timeout=120)[0] for launcher in launchers] == [True, True]


def test_ports_that_a_firewall_blocks_end_the_start_at_the_time_limit(tmp_path):
    """Only the store is reached; what is sent to any other port is dropped without an answer."""
    if shutil.which("iptables") is None:
        pytest.skip("`iptables` is missing; install iptables")
    with namespaces() as names:
        for name in names:
            for store in ("--dport", "--sport"):
                block(name, "-p", "tcp", store, STORE_PORT, "-j", "ACCEPT")
            block(name, "-i", "cable", "-p", "tcp", "-j", "DROP")
        launchers = launchers_in(names, tmp_path, timeout_s=10)
        printed = [launcher.communicate(timeout=100)[0] for launcher in launchers]
        assert all(launcher.returncode for launcher in launchers), printed
        for each in printed:
            assert "has not answered within 10.0 s (COARSE_TIMEOUT_S)" in each, printed
            assert "a firewall may drop the messages" in each, printed


def block(name: str, *rule: str) -> None:
    subprocess.run(["ip", "netns", "exec", name, "iptables", "-A", "INPUT", *rule], check=True)


def allow_all(name: str) -> None:
    """Undoes block()."""
    subprocess.run(["ip", "netns", "exec", name, "iptables", "-F", "INPUT"], check=True)


def test_a_machine_that_vanishes_while_data_is_under_way_is_lost(job):
    with namespaces() as names:

        def worker(me):
            enter_namespace(names[me.rank])
            os.environ["MASTER_ADDR"] = "10.77.0.1"
            with me.join(node=f"n{me.rank}", node_timeout_s=10.0) as session:
                session.barrier()
                me.tell()
                while True:
                    session.all_reduce(np.ones(1_000_000))

        workers = job.start(2, worker)
        for running in workers:
            running.hear()
        subprocess.run(["ip", "-n", names[0], "link", "set", "cable", "down"], check=True)
        for running in workers:
            outcome = running.finish()
            assert outcome.error == "MemoryDeviceLostError", outcome
            assert (
                "or the connection to it, is lost: its machine has answered nothing for 1" in outcome.message
            )


def sums_of_steps(session, rank):
    """Digest of many sums of numbers that differ on every worker and step."""
    seen = hashlib.sha256()
    for step in range(100):
        array = np.random.default_rng((rank, step)).standard_normal(500_000).astype(np.float32)
        session.all_reduce(array)
        seen.update(array.tobytes())
    return seen.hexdigest()


def ride_out(job, disturb):
    """Runs a job of two nodes, whose network `disturb` disturbs, and checks that the bits do not change.

    Args:
        job: Starts the workers.
        disturb: Receives the namespaces of the nodes, while data is under way; returns when the network is whole.
    """
    with namespaces() as names:

        def worker(me):
            enter_namespace(names[me.rank])
            os.environ["MASTER_ADDR"] = "10.77.0.1"
            with me.join(node=f"n{me.rank}") as session:
                undisturbed = sums_of_steps(session, me.rank)
                session.barrier()
                me.tell()
                return undisturbed, sums_of_steps(session, me.rank)

        workers = job.start(2, worker)
        for running in workers:
            running.hear()
        disturb(names)
        whole_again_s = time.monotonic()
        outcomes = [running.finish() for running in workers]
    assert [outcome.details for outcome in outcomes] == [""] * 2
    assert all(outcome.ended_s > whole_again_s for outcome in outcomes)
    assert len({digest for outcome in outcomes for digest in outcome.value}) == 1


SILENCE_S = 9.0
"""A silence is told after 5 s, at a look that comes each second."""


def cut(names, silence_s):
    """Cuts the cable for a time."""
    subprocess.run(["ip", "-n", names[0], "link", "set", "cable", "down"], check=True)
    time.sleep(silence_s)
    subprocess.run(["ip", "-n", names[0], "link", "set", "cable", "up"], check=True)


@pytest.mark.parametrize("silence_s", [SILENCE_S, pytest.param(60.0, marks=pytest.mark.slow)])
def test_a_partition_is_ridden_out_with_the_bits_of_an_undisturbed_run(job, capfd, silence_s):
    ride_out(job, lambda names: cut(names, silence_s))
    said = capfd.readouterr().err
    assert re.search(
        r"node [01] \(worker\(s\) [01]\): its machine has answered nothing for \d+\.\d s\. The job", said
    )
    assert "answers again; the job goes on" in said


_REDUCES = """
import hashlib, torch, coarse.torch

def digest():
    seen = hashlib.sha256()
    for step in range(100):
        numbers = torch.Generator().manual_seed(1000 * torch.distributed.get_rank() + step)
        values = torch.randn(300_000, generator=numbers)
        torch.distributed.all_reduce(values)
        seen.update(values.numpy().tobytes())
    return seen.hexdigest()

torch.distributed.init_process_group("coarse")
undisturbed = digest()
print("under way", flush=True)
assert digest() == undisturbed
print("the same bits")
torch.distributed.destroy_process_group()
"""


def test_a_process_group_rides_out_a_partition_with_the_same_bits(tmp_path):
    with namespaces() as names:
        launchers = launchers_in(names, tmp_path, timeout_s=90, script=_REDUCES)
        for launcher in launchers:
            while "under way" not in (line := launcher.stdout.readline()):
                assert line, "the job has ended"
        cut(names, SILENCE_S)
        printed = [launcher.communicate(timeout=100)[0] for launcher in launchers]
    for node, text in enumerate(printed):
        assert "the same bits" in text, printed
        assert (
            f"rank {node}: node {1 - node} (rank(s) {1 - node}): its machine has answered nothing for" in text
        )
        assert f"rank {node}: node {1 - node} (rank(s) {1 - node}) answers again; the job goes on" in text


def test_a_network_that_carries_one_direction_only_is_waited_for(job, capfd):
    if shutil.which("iptables") is None:
        pytest.skip("`iptables` is missing; install iptables")

    def drop(names):
        block(names[0], "-i", "cable", "-j", "DROP")
        time.sleep(SILENCE_S)
        allow_all(names[0])

    ride_out(job, drop)
    assert "its machine has answered nothing for" in capfd.readouterr().err


def test_connections_that_a_firewall_resets_are_made_anew_with_the_same_bits(job, capfd):
    if shutil.which("iptables") is None:
        pytest.skip("`iptables` is missing; install iptables")

    def reset(names):
        block(names[0], "-i", "cable", "-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset")
        time.sleep(0.3)
        allow_all(names[0])

    ride_out(job, reset)
    said = capfd.readouterr().err
    assert "the connection broke: Connection reset by peer. The job stands still" in said
    assert "answers again; the job goes on" in said


def test_a_node_that_is_stopped_for_long_while_data_is_under_way_goes_on(job):
    """Stopped for longer than the limit for unanswered requests, with more data than connection buffers hold."""
    silence_s = 6.0

    def worker(me):
        with me.join(node=f"n{me.rank}", algorithm="direct", node_timeout_s=4.0) as session:
            group = session.register("gradients", floats("abcdefgh", 8_000_000))
            me.tell([connection.pid for connection in session._client.linked()._connections])
            me.hear()
            for index in range(8):
                slot(group, index)[:] = 1 + me.rank
                group.push(index)
            assert group.pull_all() == [2] * 8
            assert (slot(group, 7) == np.float32(3)).all()

    workers = job.start(2, worker)
    _, (device,) = (running.hear() for running in workers)
    workers[1].stop()
    job.stop_device(device)
    workers[0].tell()
    time.sleep(silence_s)
    job.signal_device(device, signal.SIGCONT)
    workers[1].signal(signal.SIGCONT)
    workers[1].tell()
    assert [running.finish().details for running in workers] == [""] * 2


def test_nodes_in_network_namespaces_of_their_own_find_each_other(job):
    """Each node has its own network, and reaches the other through the interface towards MASTER_ADDR."""
    with namespaces() as names:

        def worker(me):
            enter_namespace(names[me.rank // 2])
            os.environ["MASTER_ADDR"] = "10.77.0.1"
            with me.join(node=node_of(me.rank, (2, 2)), memory_devices=2) as session:
                array = np.full(1_000_000, 2**me.rank)
                session.all_reduce(array)
                assert (array == 15).all()

        job.run(4, worker)
