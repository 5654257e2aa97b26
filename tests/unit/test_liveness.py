"""The end of a process is detected on other machines; an unreachable process does not count as ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time

from coarse.process.liveness import LivenessListener, LivenessProbe

LIMIT_S = 30.0
MANY = 50


def await_end(probe):
    deadline_s = time.monotonic() + LIMIT_S
    while not probe.sees_end():
        assert time.monotonic() < deadline_s
        os.sched_yield()


def await_connection(probe):
    """In a test, loopback connections open at once."""
    for _ in range(100):
        assert not probe.sees_end()


def test_a_process_that_is_killed_is_seen_to_end_by_all_who_look():
    listener = LivenessListener(socket.create_server(("127.0.0.1", 0), backlog=MANY))
    pid = os.fork()
    if pid == 0:
        signal.pause()
    probes = [LivenessProbe(listener.host, listener.port) for _ in range(MANY)]
    listener.close()  # now only the other process has it
    for probe in probes:
        await_connection(probe)
    os.kill(pid, signal.SIGKILL)
    for probe in probes:
        await_end(probe)
        probe.close()
        assert not probe.sees_end()
    os.waitpid(pid, 0)


def test_one_that_cannot_be_reached_is_not_taken_for_one_that_has_ended():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as gone:
        port = gone.getsockname()[1]
    refused, absent, unknown = (
        LivenessProbe("127.0.0.1", port),
        LivenessProbe("", 0),
        LivenessProbe("no such host", 1),
    )
    for probe in (refused, absent, unknown):
        await_connection(probe)
        probe.close()
    assert (refused.problem, absent.problem) == ("Connection refused", "")
