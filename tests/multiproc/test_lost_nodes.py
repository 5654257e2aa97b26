"""Whole nodes are lost, and the others go on: equal results over exactly the whole contributions that had arrived."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from harness import PROMPT_S
from test_lost_workers import die, specs
from test_node_losses import join, others_than, sum_without, take_step, training
from test_nodes import enter_namespace, namespaces
from test_optimizer import ADAM_STATES, LENGTHS, array, digest, means, write_settings

from coarse.client.tensor_group import UpdateKind
from coarse.errors import WorkerLostError
from coarse.profiler.routing import RoutingTable

STEPS_AFTER = 5


def register(session, memory_devices=2):
    group = session.register("weights", specs())
    # With several devices, large tensors go to another one than small ones; shards belong to all nodes.
    session.adopt_routing(RoutingTable(lat_proxy=0, bw_proxy=memory_devices - 1, threshold_bytes=10_000))
    return group


def all_of(shape):
    return sum_without(shape=shape)


def train_until_a_node_is_lost(me, session, group):
    """Results of the last step with all workers, of the first without some, and of steps after it."""
    num_before = len(session.members)
    last = []
    while len(session.members) == num_before:
        last = [*last[-1:], take_step(me, group)]
    return [*last, *(take_step(me, group) for _ in range(STEPS_AFTER))], session.members


def losing_a_node(shape, *, memory_devices=2, **settings):
    def worker(me):
        with join(me, shape, memory_devices=memory_devices, **settings) as session:
            group = register(session, memory_devices)
            for _ in range(3):
                assert take_step(me, group) == [[all_of(shape), sum(shape)]] * 2
            me.tell(session.device_pids)
            taken = train_until_a_node_is_lost(me, session, group)
            session.barrier()
            return taken

    return worker


def kill_node(workers, device_pids, *, seed):
    """SIGKILL of all processes of a node, in any order; returns when the first one was killed."""
    pids = [*(worker.pid for worker in workers), *device_pids]
    random.Random(seed).shuffle(pids)
    killed_s = time.monotonic()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # devices end when another one of their node has
            os.kill(pid, signal.SIGKILL)
    return killed_s


def check_survivors(outcomes, shape, lost):
    """Results are over whole contributions of all survivors, and of lost workers or not; equal on all survivors."""
    members = others_than(*lost, shape=shape)
    others = sum_without(*lost, shape=shape)
    assert not any(outcome.error for outcome in outcomes), [outcome.details for outcome in outcomes]
    for outcome in outcomes:
        assert outcome.value == outcomes[0].value
        taken, left = outcome.value
        assert left == members
        for sums, _ in (each for step in taken for each in step):
            for value in sums if isinstance(sums, list) else [sums]:
                assert int(value) & int(others) == others, "a survivor's contribution is missing"
                assert value == int(value) <= all_of(shape)
        assert taken[-STEPS_AFTER:] == [[[others, len(members)]] * 2] * STEPS_AFTER


@pytest.mark.parametrize("memory_devices", [1, 2])
@pytest.mark.parametrize(("shape", "lost"), [((1, 1, 1), 2), ((1, 1, 1), 0), ((1, 1), 1), ((1, 2, 1), 1)])
def test_the_others_go_on_when_a_node_is_killed_whole(job, shape, lost, memory_devices):
    """Nodes 0 and 2 own shards, and node 0 has the worker that the others found each other by."""
    workers = job.start(sum(shape), losing_a_node(shape, memory_devices=memory_devices))
    device_pids = [running.hear() for running in workers]
    first = sum(shape[:lost])
    victims = range(first, first + shape[lost])
    time.sleep(random.Random(f"{shape} {lost}").random() / 20)
    killed_s = kill_node([workers[rank] for rank in victims], device_pids[first], seed=lost)
    outcomes = [workers[rank].finish() for rank in others_than(*victims, shape=shape)]
    check_survivors(outcomes, shape, victims)
    # 2.5 s until a port that refuses counts as closed for good; the rest is the steps afterwards.
    assert max(outcome.ended_s for outcome in outcomes) - killed_s < 2.5 + 2 * PROMPT_S


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 1), (1, 1)])
@pytest.mark.parametrize("seed", range(6))
def test_the_others_go_on_wherever_a_node_is_killed(job, shape, seed):
    generator = random.Random(f"{shape} {seed}")
    workers = job.start(sum(shape), losing_a_node(shape, memory_devices=1 + seed % 2))
    device_pids = [running.hear() for running in workers]
    lost = generator.randrange(len(shape))
    first = sum(shape[:lost])
    victims = range(first, first + shape[lost])
    time.sleep(generator.random() / 10)
    kill_node([workers[rank] for rank in victims], device_pids[first], seed=seed)
    check_survivors([workers[rank].finish() for rank in others_than(*victims, shape=shape)], shape, victims)


def test_nodes_are_lost_one_after_the_other_until_one_is_left(job):
    shape = (1, 1, 1)

    def worker(me):
        with join(me, shape) as session:
            group = register(session)
            me.tell(session.device_pids)
            for _ in range(2):
                taken = train_until_a_node_is_lost(me, session, group)
                me.tell([taken[0][-1], session.members])
            return taken[0][-1]

    workers = job.start(3, worker)
    device_pids = [running.hear() for running in workers]
    kill_node([workers[0]], device_pids[0], seed=0)
    assert [workers[rank].hear() for rank in (1, 2)] == [[[[6.0, 2]] * 2, [1, 2]]] * 2
    kill_node([workers[2]], device_pids[2], seed=1)
    assert workers[1].hear() == [[[2.0, 1]] * 2, [1]]
    assert workers[1].finish().value == [[2.0, 1]] * 2


@pytest.mark.parametrize("lost", [0, 1])
def test_the_loss_of_a_memory_device_ends_its_node_only(job, lost):
    shape = (1, 1, 1)
    workers = job.start(3, losing_a_node(shape, memory_devices=2))
    device_pids = [running.hear() for running in workers]
    job.kill_device(device_pids[lost][1])
    assert workers[lost].finish().error == "MemoryDeviceLostError"
    check_survivors([workers[rank].finish() for rank in others_than(lost, shape=shape)], shape, [lost])


@pytest.mark.parametrize("shape", [(2, 1), (1, 1, 1)])
def test_the_loss_of_the_last_worker_of_a_node_is_that_of_its_node(job, shape):
    lost = sum(shape) - 1
    workers = job.start(sum(shape), training(shape=shape, lose=die, lost=lost))
    outcomes = [running.finish() for running in workers]
    assert outcomes.pop(lost).exit_code == -signal.SIGKILL
    for outcome in outcomes:
        assert not outcome.error, outcome.details
        taken, changes = outcome.value
        assert taken[:2] == [[[all_of(shape), sum(shape)]] * 2] * 2
        assert taken[2:] == [[[sum_without(lost, shape=shape), sum(shape) - 1]] * 2] * 4
        assert changes == [[3, *others_than(lost, shape=shape)]], "all learn of it after the same step"


def test_too_few_workers_end_the_job_and_say_which_node_was_lost(job):
    shape = (1, 1, 1)
    workers = job.start(3, losing_a_node(shape, min_workers=3))
    device_pids = [running.hear() for running in workers]
    kill_node([workers[1]], device_pids[1], seed=0)
    for survivor in workers[::2]:
        outcome = survivor.finish()
        assert outcome.error == "WorkerLostError"
        assert "worker 1 was lost with node 1" in outcome.message or "worker 1 (pid" in outcome.message
        assert "2 worker(s) are left, and COARSE_MIN_WORKERS=3" in outcome.message


# ---- parameters and states in the memory devices of each node ----


def train_adam(me, group, step, *, by_mean, dies):
    """A step; by a mean that is pulled first, or in one push. `dies` runs between two pushes."""
    for index, spec in enumerate(group.specs):
        generator = np.random.default_rng([me.rank, step, index])
        array(group.buffer(index))[:] = generator.normal(size=spec.num_elements).astype(np.float32)
    if by_mean:
        for index in range(len(LENGTHS)):
            group.push(index, update=UpdateKind.MEASURE)
        group.pull_all()
        group.continue_step()
    write_settings(group, step)
    for index in range(len(LENGTHS)):
        group.push(index, update=UpdateKind.UPDATE_BY_MEAN if by_mean else UpdateKind.UPDATE)
        group.flush()
        dies(step, index)
    group.pull_all()


@pytest.mark.parametrize("by_mean", [False, True])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_parameters_and_states_stay_equal_on_all_nodes(job, by_mean, lost):
    """The worker of the lost node kills its memory devices, then itself, between two pushes of an update."""
    shape = (1, 1, 1)

    def worker(me):
        with join(me, shape, shard_bytes=64 << 10) as session:

            def dies(step, index):
                if (me.rank, step, index) == (lost, 3, 1):
                    for pid in (*session.device_pids, os.getpid()):
                        os.kill(pid, signal.SIGKILL)

            group = session.register_parameters("model", means(*LENGTHS), state_names=ADAM_STATES)
            members = []
            for step in range(1, 7):
                train_adam(me, group, step, by_mean=by_mean, dies=dies)
                members.append(session.members)
            digests = digest(group)
            session.barrier()
            return digests, members

    outcomes = [running.finish() for running in job.start(3, worker)]
    assert outcomes.pop(lost).exit_code == -signal.SIGKILL
    assert not any(outcome.error for outcome in outcomes), [outcome.details for outcome in outcomes]
    assert outcomes[0].value == outcomes[1].value, "equal bits, equal members"
    assert outcomes[0].value[1][-1] == others_than(lost, shape=shape)


# ---- what survivors can do ----


@pytest.mark.parametrize("lost", [0, 2])
def test_survivors_register_groups_while_the_store_lives(job, lost):
    """In this job the store is a directory, which no worker serves."""
    shape = (1, 1, 1)

    def worker(me):
        with join(me, shape) as session:
            group = register(session)
            me.tell(session.device_pids)
            train_until_a_node_is_lost(me, session, group)
            again = session.register("again", group.specs)
            result = take_step(me, again)
            sums = np.full(1000, 2.0**me.rank)
            session.all_reduce(sums)
            with pytest.raises(WorkerLostError, match="nobody has contributed"):
                session.broadcast(np.zeros(10), root=lost)
            return result, float(sums[0])

    workers = job.start(3, worker)
    device_pids = [running.hear() for running in workers]
    kill_node([workers[lost]], device_pids[lost], seed=lost)
    outcomes = [workers[rank].finish() for rank in others_than(lost, shape=shape)]
    assert not any(outcome.error for outcome in outcomes), [outcome.details for outcome in outcomes]
    expected = sum_without(lost, shape=shape)
    assert [outcome.value for outcome in outcomes] == [[[[expected, 2]] * 2, expected]] * 2


# ---- several machines ----


@contextlib.contextmanager
def three_namespaces():
    """Three network namespaces, 10.77.0.1 to 10.77.0.3, connected by a switch in one of its own."""
    if shutil.which("ip") is None:
        pytest.skip("`ip` is missing; install iproute2")
    switch, *names = [f"coarse-{os.getpid()}-{name}" for name in ("switch", 0, 1, 2)]
    commands = [f"netns add {name}" for name in (switch, *names)]
    commands += [f"-n {switch} link add bridge type bridge", f"-n {switch} link set bridge up"]
    for node, name in enumerate(names):
        commands += [
            f"-n {name} link add cable type veth peer name port{node} netns {switch}",
            f"-n {switch} link set port{node} master bridge",
            f"-n {switch} link set port{node} up",
            f"-n {name} addr add 10.77.0.{node + 1}/24 dev cable",
            f"-n {name} link set cable up",
            f"-n {name} link set lo up",
        ]
    try:
        for command in commands:
            made = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
            if made.returncode != 0:
                pytest.skip(f"network namespaces cannot be made: ip {command}: {made.stderr.strip()}")
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_two_machines_go_on_without_one_that_is_out_of_reach_which_ends(job, lost):
    """The machine that the others cannot reach lives, and must not go on by itself."""
    with three_namespaces() as names:
        train = losing_a_node((1, 1, 1), node_timeout_s=8.0, memory_devices=1)

        def worker(me):
            enter_namespace(names[me.rank])
            os.environ["MASTER_ADDR"] = "10.77.0.1"
            return train(me)

        workers = job.start(3, worker)
        for running in workers:
            running.hear()
        subprocess.run(["ip", "-n", names[lost], "link", "set", "cable", "down"], check=True)
        cut_s = time.monotonic()
        survivors = [workers[rank].finish() for rank in others_than(lost, shape=(1, 1, 1))]
        check_survivors(survivors, (1, 1, 1), [lost])
        # A second until the machine counts as silent, and one until devices look.
        assert max(each.ended_s for each in survivors) - cut_s < 8 + 2 + 2 * PROMPT_S
        assert workers[lost].finish().error == "MemoryDeviceLostError"


@pytest.mark.slow
def test_of_two_machines_that_are_out_of_reach_of_each_other_none_goes_on(job):
    with namespaces() as names:
        train = losing_a_node((1, 1), node_timeout_s=8.0, memory_devices=1)

        def worker(me):
            enter_namespace(names[me.rank])
            os.environ["MASTER_ADDR"] = "10.77.0.1"
            return train(me)

        workers = job.start(2, worker)
        for running in workers:
            running.hear()
        subprocess.run(["ip", "-n", names[0], "link", "set", "cable", "down"], check=True)
        for running in workers:
            outcome = running.finish()
            assert outcome.error == "MemoryDeviceLostError", outcome
            assert (
                "It may live, and only more than half of the 2 nodes go on without such a node"
                in outcome.message
            )
