"""Ranks survive being stopped together, their forks can end, and a group can be destroyed at any time."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from datetime import timedelta

import pytest

from coarse.kernels import _native

BUFFER_BYTES = 65536
LIMIT_S = 60.0
TIMEOUT = timedelta(seconds=4)


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


def join(memory, rank):
    """As one of two ranks of one node that watch nobody."""
    return _native.Collectives(
        fd=memory,
        rank=rank,
        num_ranks=2,
        buffer_bytes=BUFFER_BYTES,
        pidfds=[-1, -1],
        nodes=[0, 0],
        links=[],
    )


def barrier(group):
    group.run(
        kind=_native.CollectiveKind.BARRIER,
        dtype="uint8",
        element=_native.ElementType.OPAQUE,
        element_bytes=1,
        combine=_native.Combine.NONE,
        root=-1,
        dims=[0] * 9,
        piece_bytes=0,
        inputs=[],
        outputs=[],
        input_bytes=[],
        output_bytes=[],
        timeout=TIMEOUT,
    )


def test_a_collective_bears_with_a_job_that_is_stopped_for_longer_than_it_may_take():
    memory = _native.create_sealed_memory("test", _native.group_scratch_bytes(2, BUFFER_BYTES))
    (waiting, told), (may_go_on, lets_go_on) = os.pipe(), os.pipe()

    def rank(number):
        group = join(memory, number)
        os.write(told, b"x")
        if number == 1:
            os.read(may_go_on, 1)
        barrier(group)

    ranks = [start(lambda number=number: rank(number)) for number in range(2)]
    assert len(os.read(waiting, 1) + os.read(waiting, 1)) == 2
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.5 * TIMEOUT.total_seconds())
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    os.write(lets_go_on, b"x")
    assert [exit_code(pid) for pid in ranks] == [0, 0]
    for fd in (memory, waiting, told, may_go_on, lets_go_on):
        os.close(fd)


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


def test_a_group_is_dropped_that_still_waits_for_a_message():
    # The thread that waits tells Python that it gives up, and the interpreter waits for that thread's end.
    memory = _native.create_sealed_memory("test", _native.group_scratch_bytes(2, BUFFER_BYTES))
    told, heard = os.pipe()

    def drop():
        group = join(memory, 0)
        group.post(
            is_send=False,
            peer=1,
            tag=0,
            data=0,
            num_bytes=0,
            dtype="uint8",
            timeout=timedelta(seconds=LIMIT_S),
            done=lambda error, peer: os.write(heard, error.encode()),
        )
        del group

    assert exit_code(start(drop)) == 0
    assert b"closed" in os.read(told, 1000)
    for fd in (memory, told, heard):
        os.close(fd)
