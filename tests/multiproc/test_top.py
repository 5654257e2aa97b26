"""`coarse top`: what it shows of a real job, and that it leaves the terminal as it was."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from subprocess import PIPE

import pytest
from harness import LIMIT_S
from run_harness import environment, spawned

from coarse.status.address import find_addresses

pytest.importorskip("coarse.kernels._native", reason="needs the native module")

TRAIN = """\
import os, sys, time
import numpy as np
from coarse.env import WorkerIdentity
from coarse.schema import TensorSpec
from coarse.session import Session
from coarse.store import DirectoryStore

store, end = sys.argv[1:]
identity = WorkerIdentity.from_environment()
session = Session.join(identity=identity, store=DirectoryStore(store))
group = session.register("weights", [TensorSpec(name="a", dtype="float32", num_elements=1 << 18, op="mean")])

def read_batch():
    time.sleep(0.03 * identity.rank)
    session.count_samples(4)

is_over = np.zeros(1, dtype=np.int32)
for step in range(100_000):
    read_batch()
    group.push(0)
    group.pull_all()
    if step == 20:
        os.write(1, f"worker {os.getpid()}\\n".encode())
    is_over[0] = os.path.exists(end)
    session.all_reduce(is_over, op="max")
    if is_over[0]:
        break
session.close()
"""

TOP = (sys.executable, "-m", "coarse", "top")
LEFT_ALTERNATE_SCREEN, SHOWN_CURSOR = "\x1b[?1049l", "\x1b[?25h"


@pytest.fixture
def training(tmp_path):
    """A job whose worker 1 is slower in each step; its id, and a function that ends it."""
    (tmp_path / "store").mkdir(mode=0o700)
    script, end = tmp_path / "train.py", tmp_path / "end"
    script.write_text(TRAIN)
    with spawned("-n", "2", "-q", script, tmp_path / "store", end, stdout=PIPE) as launcher:
        pid = int(launcher.stdout.readline().split()[-1])
        (job,) = {each.job for each in find_addresses() if each.pid == pid}
        yield job, end.touch


class Terminal:
    """`coarse top` in a terminal of 100 x 30.

    Args:
        arguments: Of the command.
    """

    def __init__(self, *arguments):
        self._outside, self._inside = os.openpty()
        fcntl.ioctl(self._inside, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self._modes = termios.tcgetattr(self._inside)
        self.shown = ""
        self.process = subprocess.Popen(
            [*TOP, *arguments],
            stdin=self._inside,
            stdout=self._inside,
            stderr=self._inside,
            env=environment(TERM="xterm-256color"),
            start_new_session=True,
        )

    def await_text(self, pattern):
        until_s = time.monotonic() + LIMIT_S
        while not re.search(pattern, self.shown):
            left_s = until_s - time.monotonic()
            assert select.select([self._outside], [], [], max(0.0, left_s))[0], self.shown
            self.shown += os.read(self._outside, 1 << 16).decode()

    def type(self, keys):
        os.write(self._outside, keys)

    def check_end(self):
        """That it ends without an error, and leaves the terminal as it was."""
        self.await_text(re.escape(LEFT_ALTERNATE_SCREEN))
        assert self.process.wait(timeout=LIMIT_S) == 0
        while select.select([self._outside], [], [], 0)[0]:
            self.shown += os.read(self._outside, 1 << 16).decode()
        assert self.shown.rfind(SHOWN_CURSOR) > self.shown.rfind("\x1b[?25l")
        assert termios.tcgetattr(self._inside) == self._modes

    def close(self):
        self.process.kill()
        self.process.wait(timeout=LIMIT_S)
        os.close(self._outside)
        os.close(self._inside)


def test_without_a_terminal_it_prints_once(training):
    job, _ = training
    done = subprocess.run([*TOP, job], env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert re.match(
        rf"job {job}: train.py, step \d+, [\d.]+ steps/s, [\d.]+ samples/s  \d\d:\d\d:\d\d", said[0]
    )
    names = ("0", "1", "md0", "md1", "worker 0 to md0", "worker 1 to md1")
    rows = {name: line for name in names for line in said if line.startswith(f"{name} ")}
    assert rows.keys() == set(names), done.stdout
    assert "slow: " in rows["1"]
    assert "slow: " not in rows["0"]
    own_ms, blocked = re.search(r" ([\d.]+) (?:ms|us) +(\d+)%", rows["1"]).groups()
    assert float(own_ms) >= 29
    assert int(blocked) < 50 < int(re.search(r"(\d+)%", rows["0"])[1])
    assert re.search(r"[\d.]+ [kM]B/s", rows["worker 1 to md1"])
    assert re.search(r"MiB", rows["md0"])
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_a_key_ends_it_and_the_terminal_is_as_before(training, key):
    with contextlib.closing(Terminal(training[0], "--every", "0.2")) as top:
        top.await_text("slow: ")
        if key == b"\x03":
            os.killpg(
                top.process.pid, signal.SIGINT
            )  # the terminal is not the session's, which would send it
        else:
            top.type(key)
        top.check_end()


def test_it_ends_with_the_job(training):
    job, end = training
    with contextlib.closing(Terminal(job, "--every", "0.2")) as top:
        top.await_text("slow: ")
        end()
        top.check_end()
        assert f"coarse top: job {job} has ended" in top.shown


def test_without_a_job_it_says_so():
    done = subprocess.run(
        [*TOP, "ffffffff"], env=environment(), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "coarse top: no job ffffffff of this user runs on this node\n"
