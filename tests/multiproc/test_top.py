"""`coarse top`: what it shows of a real job, and that it leaves the terminal as it was."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time

import observed_jobs
import pytest
from harness import LIMIT_S
from run_harness import environment

pytest.importorskip("coarse.kernels._native", reason="needs the native module")

TOP = (sys.executable, "-m", "coarse", "top")
ALTERNATE_SCREEN, LEFT_ALTERNATE_SCREEN = "\x1b[?1049h", "\x1b[?1049l"
SHOWN_CURSOR, HIDDEN_CURSOR = "\x1b[?25h", "\x1b[?25l"
HOME = "\x1b[H"
STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def training(tmp_path):
    """A job whose worker 1 is slower in each step; its id, and a function that ends it."""
    with observed_jobs.on_one_node(tmp_path) as job:
        yield job.job, job.end


@pytest.fixture
def two_nodes(tmp_path):
    """A job of two nodes."""
    with observed_jobs.on_two_nodes(tmp_path) as job:
        yield job


class Terminal:
    """A command in a terminal of 100 x 30, which is the one of its session.

    Args:
        command: The command.
    """

    def __init__(self, *command):
        self._outside, self._inside = os.openpty()
        self.resize(30, 100)
        self.modes = termios.tcgetattr(self._inside)
        self.shown = ""
        variables = environment(TERM="xterm-256color", ENV="", PS1="ready> ")
        for size in ("COLUMNS", "LINES"):  # which pytest-xdist sets; they would count more than the terminal
            variables.pop(size, None)
        self.process = subprocess.Popen(
            command,
            stdin=self._inside,
            stdout=self._inside,
            stderr=self._inside,
            env=variables,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def resize(self, rows, columns):
        fcntl.ioctl(self._inside, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def await_text(self, pattern, *, after=0):
        """Waits until the output beyond `after` characters has the pattern; returns where it ends."""
        until_s = time.monotonic() + LIMIT_S
        while not (found := re.compile(pattern).search(self.shown, after)):
            left_s = until_s - time.monotonic()
            assert select.select([self._outside], [], [], max(0.0, left_s))[0], self.shown[after:]
            self.shown += os.read(self._outside, 1 << 16).decode(errors="replace")
        return found.end()

    def await_screen(self, rows, columns):
        """Waits until a whole screen of this size has been drawn; returns its lines."""
        until_s = time.monotonic() + LIMIT_S
        while [len(line) for line in self.screen()] != rows * [columns]:
            left_s = until_s - time.monotonic()
            assert select.select([self._outside], [], [], max(0.0, left_s))[0], self.screen()
            self.shown += os.read(self._outside, 1 << 16).decode(errors="replace")
        return self.screen()

    def screen(self):
        """The lines that were drawn last, without colours."""
        return STYLE.sub("", self.shown.rpartition(HOME)[2]).split("\r\n")

    def type(self, keys):
        os.write(self._outside, keys)

    def is_as_before(self):
        """Whether cursor, screen and modes are those of a shell."""
        has_cursor = self.shown.rfind(SHOWN_CURSOR) > self.shown.rfind(HIDDEN_CURSOR)
        has_left = self.shown.rfind(LEFT_ALTERNATE_SCREEN) > self.shown.rfind(ALTERNATE_SCREEN)
        return has_cursor and has_left and termios.tcgetattr(self._inside) == self.modes

    def check_end(self):
        """That it ends without an error, and leaves the terminal as it was."""
        self.await_text(re.escape(LEFT_ALTERNATE_SCREEN))
        assert self.process.wait(timeout=LIMIT_S) == 0
        while select.select([self._outside], [], [], 0)[0]:
            self.shown += os.read(self._outside, 1 << 16).decode()
        assert self.is_as_before()

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
    with contextlib.closing(Terminal(*TOP, training[0], "--every", "0.2")) as top:
        top.await_text("slow: ")
        top.type(key)
        top.check_end()


def test_it_ends_with_the_job(training):
    job, end = training
    with contextlib.closing(Terminal(*TOP, job, "--every", "0.2")) as top:
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


def test_the_screen_follows_the_size_of_the_terminal_at_once(training):
    """Also between two readings, a minute apart."""
    with contextlib.closing(Terminal(*TOP, training[0], "--every", "60")) as top:
        top.await_screen(30, 100)
        for rows, columns in ((24, 80), (24, 40), (10, 40), (50, 132)):
            top.resize(rows, columns)
            lines = top.await_screen(rows, columns)
            assert lines[0].startswith(f"job {training[0]}: train.py")
            assert re.match(r"1 +\d+ +[\d.]+ [mu]s ", lines[4]), (
                "worker 1, its step and time, whatever the width"
            )
        top.type(b"q")
        top.check_end()


@pytest.mark.parametrize("stop", ["Ctrl-Z", "SIGSTOP"])
def test_a_shell_gets_its_terminal_while_the_command_is_stopped(training, stop):
    with contextlib.closing(Terminal("/bin/sh", "-i")) as shell:
        at = shell.await_text("ready> ")
        modes = termios.tcgetattr(shell._inside)
        shell.type(f"{shlex.join(TOP)} {training[0]} --every 0.2\n".encode())
        at = shell.await_text("slow: ", after=at)
        if stop == "Ctrl-Z":
            shell.type(b"\x1a")
            at = shell.await_text(re.escape(LEFT_ALTERNATE_SCREEN), after=at)
            at = shell.await_text("Stopped[^>]*ready> ", after=at)
            assert shell.is_as_before()
            assert termios.tcgetattr(shell._inside) == modes
        else:
            os.killpg(os.tcgetpgrp(shell._outside), signal.SIGSTOP)
            at = shell.await_text("Stopped[^>]*ready> ", after=at)
        shell.type(b"fg\n")
        at = shell.await_text(re.escape(ALTERNATE_SCREEN), after=at)
        at = shell.await_text("slow: ", after=at)
        shell.type(b"q")
        shell.await_text("ready> ", after=at)
        assert shell.is_as_before()
        shell.type(b"exit\n")
        assert shell.process.wait(LIMIT_S) == 0


def top_once(*arguments):
    done = subprocess.run(
        [*TOP, *arguments], env=environment(), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_nodes_that_are_not_shown_are_named(two_nodes):
    job = two_nodes.job
    lines = top_once(job)
    assert "not shown: node 1 (worker 1); run coarse top there, or see --metrics" in lines
    assert [line.split()[0] for line in lines[3 : lines.index("", 3)]] == ["0"]


def test_other_nodes_are_shown_by_their_metrics(two_nodes):
    job, node = two_nodes.job, two_nodes.metrics
    lines = top_once(job, "--metrics", node, "--metrics", "127.0.0.1:1")
    rows = {line.split()[0]: line for line in lines if line}
    assert f"slow: on {node}" in rows["1"]
    assert re.search(r"^1 +\d+ +[\d.]+ ms +[\d.]+ ms +\d+% +\d+ ", rows["1"])
    assert any(re.match(rf"{node} md0 +- +\d+% ", line) for line in lines)
    assert any(re.match(r"worker 1 to 127\S+ md0 +[\d.]+ [kM]B/s", line) for line in lines)
    assert not any(line.startswith("not shown") for line in lines)
    assert any("no metrics from 127.0.0.1:1: " in line and "refused" in line for line in lines)
