"""benchmarks/nodes.py, for real: the smallest case, a cable that delays and loses, and an end by a signal."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("psutil")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import node_network
import node_table
from node_contest import measure_link
from node_network import Link, NetworkError, Networks

SCRIPT = Path(node_network.__file__).with_name("nodes.py")
LIMIT_S = 300


@pytest.fixture(autouse=True)
def needs_namespaces():
    """Skips where no namespace can be made; afterwards none may be left."""
    try:
        node_network.require_tools()
        node_network.has_netem()
    except NetworkError as error:
        pytest.skip(str(error))
    yield
    assert not namespaces_of(os.getpid())


def namespaces_of(pid):
    return [name for name in os.listdir("/run/netns") if name.startswith(f"coarse-{pid}-")]


@pytest.fixture
def networks(tmp_path):
    if shutil.which(os.environ.get("CXX", "c++").split()[0]) is None:
        pytest.skip("a compiler is missing")
    return lambda link: Networks([link], tmp_path)


def start(results, *words):
    smallest = ("--nodes", "2", "--workers", "1", "--sizes", "1MiB", "--rounds", "1", "--budget", "0.05")
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), "--results", str(results), *smallest, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_smallest_case(tmp_path):
    results = tmp_path / "results.jsonl"
    systems = ("--systems", "coarse,gloo,compute,mpich,mpich-ucx")
    ended = start(results, "--rates", "1gbit", "--delays", "0", "--losses", "0", *systems)
    printed, said = ended.communicate(timeout=LIMIT_S)
    assert ended.returncode == 0, said
    step, all_reduce = (json.loads(line) for line in results.read_text().splitlines())
    assert {"coarse", "gloo", "compute"} == set(step["rounds_ms"]), said
    assert {"coarse", "gloo"} <= set(all_reduce["rounds_ms"]), said
    assert step["failures"] == all_reduce["failures"] == {}
    limit_ms = node_table.limit_ms(all_reduce)
    for name, rounds_ms in all_reduce["rounds_ms"].items():  # all of them used the cable
        assert rounds_ms[0] > limit_ms / 2, name
    assert all(time_ms > 0 for (time_ms,) in step["rounds_ms"].values())
    assert 0.5e9 < step["link_bits_per_s"] < 1.1e9
    assert re.search(r"\[1 of 2, about .* left\] 1gbit, 0 ms, 2 x 1, step of 1 MiB, ms: COARSE", printed)
    assert "| 2 x 1 | all_reduce | 1 MiB |" in printed


def test_a_signal_ends_it_and_leaves_nothing(tmp_path):
    running = start(tmp_path / "results.jsonl", "--rates", "1gbit", "--delays", "0", "--systems", "gloo")
    until_s = time.monotonic() + LIMIT_S
    while f"coarse-{running.pid}-1" not in namespaces_of(running.pid):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < until_s
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=LIMIT_S)
    assert running.returncode == 128 + signal.SIGTERM
    assert not namespaces_of(running.pid)


def test_cables_have_the_rate_and_the_delay_that_were_asked_for(networks):
    link = Link(rate="100mbit", delay_ms=20)
    with networks(link).nodes(link, 3) as names:
        found = measure_link(names)
    assert 20 <= found["round_trip_ms"] < 30
    assert 50e6 < found["link_bits_per_s"] < 105e6


def test_cables_lose_frames(networks):
    link = Link(rate="1gbit", delay_ms=1, loss_percent=20)
    with networks(link).nodes(link, 2) as names:
        sender, receiver = (socket_in(name) for name in names)
        with sender, receiver:
            address = (node_network.address_of(1), receiver.getsockname()[1])
            while not send_some(sender, receiver, address, 1):  # the receiver has to be found first
                pass
            received = sum(send_some(sender, receiver, address, 50) for _ in range(40))
    assert 1500 < received < 1700  # 1600 of 2000, by five standard deviations


def test_lost_segments_of_long_frames_are_sent_again_and_leave_no_trace(networks):
    link = Link(rate="1gbit", delay_ms=1, loss_percent=1)
    sent = os.urandom(30_000_000)
    with networks(link).nodes(link, 2) as names:
        listener = socket_in(names[1], socket.SOCK_STREAM)
        with listener, socket_in(names[0], socket.SOCK_STREAM) as sender:
            listener.listen()
            sender.connect((node_network.address_of(1), listener.getsockname()[1]))
            receiver, _ = listener.accept()
            with receiver:
                thread = threading.Thread(target=sender.sendall, args=(sent,))
                thread.start()
                received = receiver.recv(len(sent), socket.MSG_WAITALL)
                thread.join()
            segments_sent_again = struct.unpack_from(
                "I", sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 100
            )
    assert received == sent
    assert 140 < segments_sent_again[0] < 600  # of 20 700


def socket_in(name, kind=socket.SOCK_DGRAM):
    """A socket of a namespace; only a thread of its own moves there."""
    made = []

    def make():
        node_network.enter_namespace(name)
        made.append(socket.socket(socket.AF_INET, kind))
        made[0].bind(("", 0))
        made[0].settimeout(LIMIT_S)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


def send_some(sender, receiver, address, count):
    """Sends some datagrams; returns how many arrive."""
    for _ in range(count):
        sender.sendto(b"x", address)
    received = 0
    receiver.settimeout(0.05)
    try:
        while received < count:
            received += len(receiver.recv(1))
    except TimeoutError:
        pass
    return received


def test_a_process_that_cannot_delay_says_why(tmp_path):
    link = Link(rate="1gbit", delay_ms=5)
    program = node_network.compile_forwarder(tmp_path)
    with (
        pytest.raises(NetworkError, match=r"ended with code 1: frame_delay: /run/netns/no-such"),
        node_network._forwarder(program, link, ["no-such", "no-other"]),
    ):
        pass
