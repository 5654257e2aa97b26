"""Forks can end that have a reducer without its thread."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback

import pytest

from coarse.kernels import _native

LIMIT_S = 60.0


def start(body):
    """A fork that runs `body`; its exit code is 0 if that has worked."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)
    return pid


def exit_code(pid):
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pytest.fail(f"process {pid} hangs")
        time.sleep(0.01)


def test_a_fork_drops_a_reducer_whose_thread_it_has_not():
    segment = _native.create_sealed_memory("test", _native.client_segment_bytes(1))
    doorbells = _native.create_sealed_memory("test", _native.doorbells_bytes(1))
    client = _native.Client(
        num_devices=1, segment_fd=segment, doorbells_fd=doorbells, watch_fds=[], spin_us=50, bytes_per_ring=1
    )
    held = [_native.AsyncReducer(client, 5.0, lambda *_: "") for _ in range(2)]
    time.sleep(0.1)  # until their threads wait for work

    def drop():
        held.pop()
        held[0].close()
        held.pop()

    assert exit_code(start(drop)) == 0
    for reducer in held:
        reducer.close()
    for fd in (segment, doorbells):
        os.close(fd)
