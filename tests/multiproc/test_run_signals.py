"""`coarse run`: if any process is stopped or killed, no part of the job outlives it."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import termios
import time
from pathlib import Path
from subprocess import PIPE

import pytest
from run_harness import LIMIT_S, all_end_within, read_pidfds, spawned

GONE_WITHIN_S = 20.0
GONE_AT_ONCE_S = 15.0  # much shorter than the default of --shutdown-timeout

FAMILY = """\
import os, signal, sys
rank = os.environ["RANK"]
if sys.argv[1] == "stubborn":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
if rank == "0":
    os.write(1, b"supervisor %d\\n" % os.getppid())
if os.fork() == 0:
    os.setsid()
    name = "grandchild"
else:
    name = "worker"
os.write(1, f"{name}{rank} {os.getpid()}\\n".encode())
while True:
    signal.pause()
"""
NUM_PROCESSES = 5


@pytest.fixture
def family(tmp_path):
    """Returns the arguments of a job whose workers wait, with waiting children in their own sessions."""
    path = tmp_path / "family.py"
    path.write_text(FAMILY)
    return ("-n", "2", path)


@pytest.mark.parametrize("manner", ["willing", "stubborn"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_everything(family, manner, number):
    with spawned("--shutdown-timeout", "1", *family, manner, stdout=PIPE, stderr=PIPE) as launcher:
        pidfds = read_pidfds(launcher.stdout, NUM_PROCESSES)
        launcher.send_signal(number)
        assert all_end_within(GONE_WITHIN_S, pidfds) == []
        stderr = launcher.communicate(timeout=LIMIT_S)[1].decode()
    assert launcher.returncode == 128 + number
    assert stderr.splitlines()[-1] == f"coarse run: stopped by {number.name}; no worker is left"


@pytest.mark.parametrize("manner", ["willing", "stubborn"])
def test_nothing_outlives_a_launcher_that_is_killed(family, manner):
    with spawned(*family, manner, stdout=PIPE, stderr=PIPE) as launcher:
        pidfds = read_pidfds(launcher.stdout, NUM_PROCESSES)
        launcher.kill()
        assert all_end_within(GONE_WITHIN_S, pidfds) == []


def test_nothing_outlives_a_supervisor_that_is_killed(family):
    with spawned(*family, "stubborn", stdout=PIPE, stderr=PIPE) as launcher:
        pidfds = read_pidfds(launcher.stdout, NUM_PROCESSES)
        signal.pidfd_send_signal(pidfds["supervisor"], signal.SIGKILL)
        assert all_end_within(GONE_WITHIN_S, pidfds) == []
        stderr = launcher.communicate(timeout=LIMIT_S)[1].decode()
    assert launcher.returncode == 137
    assert "was killed by SIGKILL, as the kernel does when memory runs out; the job ends" in stderr


def test_a_signal_ends_everything_although_nobody_reads_the_output(tmp_path):
    path = tmp_path / "flood.py"
    path.write_text("import os\nprint('worker', os.getpid())\nwhile True: print('x' * 1000)\n")
    with spawned("--shutdown-timeout", "1", "--log-dir", tmp_path, path, stdout=PIPE) as launcher:
        pidfds = read_pidfds(launcher.stdout, 1)
        wait_until_full(launcher.stdout.fileno())
        launcher.terminate()
        assert all_end_within(GONE_WITHIN_S, pidfds) == []
        by_itself, by_its_front = 143, 137  # depends on whether the supervisor could still write its input
        assert launcher.wait(timeout=LIMIT_S) in (by_itself, by_its_front)


def wait_until_full(pipe: int) -> None:
    """Waits until the writer of a 64 KiB pipe blocks."""
    while struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))[0] < 60_000:
        select.select([], [], [], 0.001)


def test_a_second_signal_kills_at_once(family):
    with spawned(*family, "stubborn", stdout=PIPE, stderr=PIPE) as launcher:
        pidfds = read_pidfds(launcher.stdout, NUM_PROCESSES)
        launcher.send_signal(signal.SIGINT)
        launcher.send_signal(signal.SIGTERM)
        assert all_end_within(GONE_AT_ONCE_S, pidfds) == []


def test_a_worker_that_is_told_to_stop_may_save_first(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import os, signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(3)\n"  # longer than the limit for workers after their launcher was killed
        "    print('saved')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('worker', os.getpid())\n"
        "while True: signal.pause()\n"
    )
    with spawned(path, stdout=PIPE, stderr=PIPE) as launcher:
        read_pidfds(launcher.stdout, 1)
        launcher.terminate()
        stdout, _ = launcher.communicate(timeout=LIMIT_S)
    assert (launcher.returncode, stdout) == (143, b"saved\n")


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_means_something_to_workers_reaches_them_all(tmp_path, number):
    """As batch systems send it before the time limit; the job continues."""
    script = tmp_path / "notified.py"
    script.write_text(
        "import os, signal\n"
        f"signal.signal({int(number)}, lambda *_: None)\n"
        f"signal.pthread_sigmask(signal.SIG_BLOCK, [{int(number)}])\n"
        "os.write(1, b'ready\\n')\n"
        f"assert signal.sigtimedwait([{int(number)}], 60).si_signo == {int(number)}\n"
        "os.write(1, b'notified\\n')\n"
    )
    with spawned("-n", "3", "--no-prefix", script, stdout=PIPE, stderr=PIPE) as launcher:
        assert all(b"ready" in launcher.stdout.readline() for _ in range(3))
        launcher.send_signal(number)
        stdout, stderr = launcher.communicate(timeout=LIMIT_S)
    assert (launcher.returncode, stdout.count(b"notified")) == (0, 3), stderr


def test_ctrl_c_reaches_each_worker_once(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import os, signal\n"
        "try:\n"
        "    print('worker' + os.environ['RANK'], os.getpid())\n"
        "    signal.pause()\n"
        "except KeyboardInterrupt: print('interrupted')\n"
    )
    with spawned("-n", "2", path, stdout=PIPE, stderr=PIPE) as launcher:
        read_pidfds(launcher.stdout, 2)
        os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does
        stdout, _ = launcher.communicate(timeout=LIMIT_S)
    assert sorted(stdout.splitlines()) == [b"[w0] interrupted", b"[w1] interrupted"]
    assert launcher.returncode == 130


def state_of(pidfd: int) -> str:
    """State of a process as in proc(5): T if stopped."""
    about = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    pid = int(next(line.split()[1] for line in about.splitlines() if line.startswith("Pid:")))
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def stop_at_the_terminal(launcher, pidfds):
    launcher.send_signal(signal.SIGTSTP)
    os.waitid(os.P_PID, launcher.pid, os.WSTOPPED)
    wait_for_states(pidfds, lambda states: states.pop("supervisor") == "S" and {*states.values()} == {"T"})


def wait_for_states(pidfds, are_as_wanted):
    """Waits for the states: a process stops only when it is scheduled next."""
    deadline_s = time.monotonic() + LIMIT_S
    while not are_as_wanted({name: state_of(pidfd) for name, pidfd in pidfds.items()}):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_ctrl_z_stops_everything_and_fg_continues_it(family):
    with spawned(*family, "willing", stdout=PIPE, stderr=PIPE) as launcher:
        pidfds = read_pidfds(launcher.stdout, NUM_PROCESSES)
        for _ in range(2):
            stop_at_the_terminal(launcher, pidfds)
            launcher.send_signal(signal.SIGCONT)
            wait_for_states(pidfds, lambda states: "T" not in states.values())
        launcher.terminate()
        assert all_end_within(GONE_WITHIN_S, pidfds) == []
        assert launcher.wait(timeout=LIMIT_S) == 143


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_launcher_that_is_ended_while_it_is_stopped(family, number):
    with spawned(*family, "willing", stdout=PIPE, stderr=PIPE) as launcher:
        pidfds = read_pidfds(launcher.stdout, NUM_PROCESSES)
        stop_at_the_terminal(launcher, pidfds)
        launcher.send_signal(number)
        launcher.send_signal(signal.SIGCONT)  # as shells do at `kill %1`
        assert all_end_within(GONE_WITHIN_S, pidfds) == []


def test_a_hangup_that_is_ignored_stays_ignored(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import os, signal\nprint('worker', os.getpid(), flush=True)\nsignal.sigwait({signal.SIGUSR1})\n"
    )
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with spawned(path, stdout=PIPE, stderr=PIPE) as launcher:
            pidfds = read_pidfds(launcher.stdout, 1)
            launcher.send_signal(signal.SIGHUP)
            signal.pidfd_send_signal(pidfds["worker"], signal.SIGUSR1)
            launcher.communicate(timeout=LIMIT_S)
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert launcher.returncode == 128 + signal.SIGUSR1
