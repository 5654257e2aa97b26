"""Nodes reach each other at the right addresses and ports: several interfaces, IPv6, firewalls, translation (NAT)."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_nodes import STORE_PORT, block, enter_namespace, namespaces

_TRAINS = """
import sys, torch, coarse.torch
from coarse.torch.checkpoint import Checkpointer
model = coarse.torch.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Checkpointer(sys.argv[1], model, optimizer, every=1) as checkpointer:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    checkpointer.step()
print("trained", torch.distributed.get_backend())
"""


def ip(*words):
    subprocess.run(["ip", *words], check=True)


def run_in(names, folder, *, master, workers=1, **settings):
    """Runs `coarse run` in each network namespace, for a job of two nodes; what each has printed."""
    (folder / "train.py").write_text(_TRAINS)
    launchers = [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", name, sys.executable, "-m", "coarse", "run", "-n", str(workers)),
                *("--nnodes", "2", "--node-rank", str(node), "--master-addr", master),
                *("--master-port", STORE_PORT, "train.py", str(folder / "checkpoints")),
            ],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "COARSE_TIMEOUT_S": "120",
                **settings,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node, name in enumerate(names)
    ]
    try:
        return [launcher.communicate(timeout=240)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()


def have_trained(printed, num_workers, backend="gloo"):
    return [each.count(f"trained {backend}") for each in printed] == [num_workers] * 2


@contextlib.contextmanager
def hosts_of(name, text):
    """What a namespace's processes read as /etc/hosts."""
    folder = Path("/etc/netns") / name
    folder.mkdir(parents=True)
    try:
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{text}\n")
        yield
    finally:
        shutil.rmtree(folder)
        with contextlib.suppress(OSError):  # others use it
            folder.parent.rmdir()


def test_a_machine_whose_own_name_is_loopback_to_itself_alone_leads_the_job(tmp_path):
    """As on Debian, whose /etc/hosts has 127.0.1.1 for the machine's name; others have its address."""
    with (
        namespaces() as names,
        hosts_of(names[0], "127.0.1.1 machine0"),
        hosts_of(names[1], "10.77.0.1 machine0"),
    ):
        printed = run_in(names, tmp_path, master="machine0")
        assert have_trained(printed, 1), printed


def test_an_interface_that_was_chosen_carries_the_data(job):
    num_bytes = 40_000_000

    def worker(me):
        enter_namespace(names[me.rank])
        os.environ["MASTER_ADDR"] = "10.77.0.1"
        with me.join(node=f"n{me.rank}", node_address="second") as session:
            array = np.full(num_bytes // 4, 2**me.rank, np.int32)
            session.all_reduce(array)
            assert (array == 3).all()
            sent = [line.split() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
            return {words[0].rstrip(":"): int(words[9]) for words in sent}

    with namespaces() as names:
        ip(
            "-n",
            names[0],
            "link",
            "add",
            "second",
            "type",
            "veth",
            "peer",
            "name",
            "second",
            "netns",
            names[1],
        )
        for node, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.78.0.{node + 1}/24", "dev", "second")
            ip("-n", name, "link", "set", "second", "up")
        for sent in job.run(2, worker):
            assert sent["second"] > num_bytes / 2
            assert sent["cable"] < num_bytes / 100


@contextlib.contextmanager
def ipv6_namespaces():
    """Two namespaces, fd77::1 and fd77::2, without IPv4 between them."""
    with namespaces() as names:
        for node, name in enumerate(names):
            ip("-n", name, "addr", "flush", "dev", "cable", "scope", "global")
            added = subprocess.run(
                ["ip", "-n", name, "addr", "add", f"fd77::{node + 1}/64", "dev", "cable", "nodad"],
                capture_output=True,
                text=True,
            )
            if added.returncode:
                pytest.skip(f"network namespaces have no IPv6 here: {added.stderr.strip()}")
        yield names


@pytest.mark.parametrize(
    ("settings", "backend"),
    [
        ({}, "gloo"),
        pytest.param(
            {"COARSE_NODE_PORTS": "20000-20009", "COARSE_NODE_ADDRESS": "cable"},
            "coarse",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_machines_with_ipv6_alone_train(tmp_path, settings, backend):
    with ipv6_namespaces() as names:
        printed = run_in(names, tmp_path, master="fd77::1", **settings)
        assert have_trained(printed, 1, backend), printed


def test_arrays_are_reduced_over_ipv6(job):
    def worker(me):
        enter_namespace(names[me.rank // 2])
        os.environ["MASTER_ADDR"] = "fd77::1"
        with me.join(node=f"n{me.rank // 2}", memory_devices=2) as session:
            array = np.full(1_000_000, 2**me.rank)
            session.all_reduce(array)
            assert (array == 15).all()

    with ipv6_namespaces() as names:
        job.run(4, worker)


# ---- ports ----

HOST = "127.0.0.9"  # no other test listens there


def allow_only(name, *ports):
    for port in ports:
        for direction in ("--dport", "--sport"):
            block(name, "-p", "tcp", direction, port, "-j", "ACCEPT")
    block(name, "-i", "cable", "-p", "tcp", "-j", "DROP")


@pytest.fixture
def firewall():
    if shutil.which("iptables") is None:
        pytest.skip("`iptables` is missing; install iptables")
    return allow_only


def test_a_job_needs_no_ports_but_those_that_were_given(tmp_path, firewall):
    """Two workers on a node, and six ports: with MASTER_PORT all that the firewall lets through."""
    with namespaces() as names:
        for name in names:
            firewall(name, STORE_PORT, "20000:20005")
        printed = run_in(names, tmp_path, master="10.77.0.1", workers=2, COARSE_NODE_PORTS="20000-20005")
        assert have_trained(printed, 2, "coarse"), printed


def test_too_few_ports_end_the_start_with_the_number_that_is_needed(job):
    def worker(me):
        node = me.rank // 2
        me.join(node=f"n{node}", node_address=f"127.0.0.{9 + node}", node_ports=f"20000-{20_005 - node}")

    messages = [outcome.message for outcome in job.outcomes(4, worker)]
    for message in messages:
        assert "COARSE_NODE_PORTS=20000-20004 has 5 port(s), but a node of 2 worker(s) needs 6" in message
    assert messages[0].startswith("worker 0: worker ")


def test_ports_that_others_have_taken_are_told(job):
    def worker(me):
        me.join(node=f"n{me.rank}", node_address=HOST, node_ports="20000-20003" if me.rank else "")

    with contextlib.ExitStack() as stack:
        for port in range(20_000, 20_004):
            stack.enter_context(socket.create_server((HOST, port)))
        for outcome in job.outcomes(2, worker):
            assert outcome.error == "RendezvousError"
            assert "all 4 ports of COARSE_NODE_PORTS=20000-20003 are taken on this machine" in outcome.message


# ---- translation of addresses ----


@contextlib.contextmanager
def translated_namespaces():
    """Two namespaces. What the second sends comes from 10.77.0.99, as if a router stood before it."""
    if shutil.which("iptables") is None:
        pytest.skip("`iptables` is missing; install iptables")
    with namespaces() as names:
        ip("-n", names[1], "addr", "add", "10.77.0.99/24", "dev", "cable")
        rule = "-t nat -A POSTROUTING -o cable -p tcp -j SNAT --to-source 10.77.0.99"
        made = subprocess.run(
            ["ip", "netns", "exec", names[1], "iptables", *rule.split()], capture_output=True, text=True
        )
        if made.returncode:
            pytest.skip(f"addresses cannot be translated here: {made.stderr.strip()}")
        yield names


TRANSLATED = (
    "addresses are translated (NAT) between node 1 (worker(s) 1) and node 0 (worker(s) 0): its address "
    "is 10.77.0.2, but its connection comes from 10.77.0.99."
)


def test_a_node_behind_a_router_that_translates_addresses_is_refused_with_both(job):
    def worker(me):
        enter_namespace(names[me.rank])
        os.environ["MASTER_ADDR"] = "10.77.0.1"
        me.join(node=f"n{me.rank}")

    with translated_namespaces() as names:
        for outcome in job.outcomes(2, worker):
            assert outcome.error == "RendezvousError"
            assert TRANSLATED in outcome.message


def test_so_it_is_before_gloo_connects(tmp_path):
    with translated_namespaces() as names:
        for printed in run_in(names, tmp_path, master="10.77.0.1"):
            assert TRANSLATED in printed, printed


def test_an_address_that_this_machine_does_not_have_is_told(job):
    """Such as the public one of a router in front of it."""

    def worker(me):
        me.join(node=f"n{me.rank}", node_address="203.0.113.5" if me.rank else "")

    for outcome in job.outcomes(2, worker):
        assert "node 1 (worker(s) 1) cannot listen on 203.0.113.5: " in outcome.message
        assert "a router that translates addresses (NAT) is none of them" in outcome.message
