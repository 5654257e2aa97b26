"""Calls that are abandoned at their deadline."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

from coarse.torch.deadlines import _EXIT_LIMIT_S

# A call of C++ code, whose return to Python takes the interpreter's lock, as torch's clients do.
# The first function that is registered runs last.
ABANDONED = """
import atexit, sys, time
atexit.register(lambda: print(time.monotonic() - left_s))
import torch.distributed as dist
from datetime import timedelta
from coarse.torch.deadlines import Call
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
call = Call(lambda: store.wait(["never"], timedelta(seconds={seconds})))
try:
    call.result(0.1)
except TimeoutError:
    left_s = time.monotonic()
    sys.exit(3)
"""


def exit_seconds(call_seconds):
    """Seconds that a process takes to leave while an abandoned call lasts `call_seconds`."""
    command = [sys.executable, "-c", ABANDONED.format(seconds=call_seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    return float(done.stdout)


def test_a_process_waits_for_an_abandoned_call_that_is_about_to_end():
    assert 1.0 < exit_seconds(1.5) < _EXIT_LIMIT_S


def test_a_process_does_not_wait_long_for_one_that_does_not_end():
    assert _EXIT_LIMIT_S - 0.1 < exit_seconds(300) < 2 * _EXIT_LIMIT_S
