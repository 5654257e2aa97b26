"""`coarse run`: one failure ends all workers, and its cause is the last line for the user."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
from run_harness import LIMIT_S, coarse_run, environment, spawned

PREAMBLE = """\
import contextlib, os, signal, sys, time
rank = int(os.environ["RANK"])
def wait_for_the_end_of_rank_0(fifo):
    if rank == 0:
        os.write(os.open(fifo, os.O_WRONLY), b"%d" % os.getpid())  # closed by the end of the process alone
    else:
        pid = int(open(fifo).read())
        with contextlib.suppress(OSError):  # it is reaped
            while ") Z " not in open(f"/proc/{pid}/stat").read():  # its files are closed, but it has not ended
                time.sleep(0.001)
"""


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(PREAMBLE + text)
        return path

    return write


@pytest.fixture
def fifo(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    return str(tmp_path / "fifo")


def last_words(stderr: str) -> list[str]:
    """Returns the launcher's own last output: the unmarked lines."""
    lines = stderr.splitlines()
    return [line for line in lines if not line.startswith(("[w", "coarse run: OMP"))]


def test_the_exit_code_is_that_of_the_worker_that_failed(script):
    path = script("if rank == 1: sys.exit(7)\nsignal.pause()")
    done = coarse_run("-n", "3", path)
    assert done.returncode == 7
    assert re.fullmatch(r"worker 1 \(pid \d+\) failed with exit code 7", done.stderr.splitlines()[-1])


def test_the_first_traceback_comes_last(script):
    path = script("if rank == 1: raise ValueError('boom')\nsignal.pause()")
    done = coarse_run("-n", "2", path)
    assert done.returncode == 1
    said = last_words(done.stderr)
    assert re.fullmatch(r"worker 1 \(pid \d+\) failed with exit code 1", said[0])
    assert said[1] == "Traceback (most recent call last):"
    assert said[-1] == done.stderr.splitlines()[-1] == "ValueError: boom"


def test_a_death_by_signal_is_named(script):
    path = script("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nsignal.pause()")
    done = coarse_run("-n", "2", path)
    assert done.returncode == 137
    assert re.fullmatch(r"worker 1 \(pid \d+\) was killed by SIGKILL", last_words(done.stderr)[0])


def test_a_worker_that_lost_another_is_not_the_first_even_if_it_ends_first(script, fifo):
    path = script(
        f"wait_for_the_end_of_rank_0({fifo!r})\n"
        "from coarse.errors import WorkerLostError\n"
        "raise WorkerLostError('worker 1 left') if rank == 0 else ValueError('boom')\n"
    )
    done = coarse_run("-n", "2", path)
    assert last_words(done.stderr)[0].startswith("worker 1 ")
    assert done.stderr.splitlines()[-1] == "ValueError: boom"


def test_the_worker_that_reported_its_error_first_is_the_cause_though_it_ends_last(script, tmp_path):
    os.mkfifo(tmp_path / "reported")
    path = script(
        "import atexit, sys\n"
        "fifo = os.path.join(os.path.dirname(__file__), 'reported')\n"
        "if rank == 1:\n"
        "    open(fifo).read()\n"
        "    raise OSError('worker 0 does not answer')\n"  # the text does not show that it is a consequence
        "def report(*error):\n"
        "    sys.__excepthook__(*error)\n"
        "    open(fifo, 'w').close()\n"
        "sys.excepthook = report\n"
        "atexit.register(signal.pause)\n"  # a teardown that hangs
        "raise ValueError('boom')\n"
    )
    done = impatient_run("-n", "2", path)
    assert last_words(done.stderr)[0].startswith("worker 0 ")
    assert last_words(done.stderr)[0].endswith("; worker(s) 1 failed too")
    assert done.stderr.splitlines()[-1] == "ValueError: boom"


def test_a_worker_that_has_reported_its_error_may_finish(script):
    path = script(
        "import atexit, select\n"
        "from coarse.errors import WorkerLostError\n"
        "if rank == 0: raise WorkerLostError('worker 1 left')\n"
        "def tear_down(): select.select([], [], [], 1.5)\n"  # longer than the limit for a silent worker
        "atexit.register(tear_down)\n"
        "raise ValueError('boom')\n"
    )
    done = coarse_run("-n", "2", path)
    said = r"worker 1 \(pid \d+\) failed with exit code 1; worker\(s\) 0 failed because of that"
    assert re.fullmatch(said, last_words(done.stderr)[0])


def test_the_earlier_of_two_errors_counts(script, fifo):
    path = script(f"wait_for_the_end_of_rank_0({fifo!r})\nsys.exit(10 + rank)")
    assert coarse_run("-n", "2", path).returncode == 10


def test_a_worker_that_goes_on_is_asked_to_stop(script):
    path = script(
        "if rank == 1: sys.exit(3)\n"
        "def stop(*_):\n"
        "    print('asked to stop')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "signal.pause()\n"
    )
    done = coarse_run("-n", "2", path)
    assert (done.returncode, done.stdout) == (3, "[w0] asked to stop\n")


IMPATIENT = """\
import sys
from coarse.cli.workers import supervisor
from coarse.cli.main import main
supervisor.REPORT_GRACE_S = supervisor.TEARDOWN_GRACE_S = supervisor.TERMINATE_GRACE_S = 0.2
sys.exit(main(sys.argv[1:]))
"""


def impatient_run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Like coarse_run(), but the launcher soon kills workers that do not stop."""
    command = [sys.executable, "-c", IMPATIENT, "run", *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)


def test_a_worker_that_will_not_stop_is_killed(script, fifo):
    path = script(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({fifo!r}, 'w' if rank == 0 else 'r')\n"
        "if rank == 1: sys.exit(3)\n"
        "while True: signal.pause()\n"
    )
    done = impatient_run("-n", "2", path)
    assert done.returncode == 3
    assert re.fullmatch(r"worker 1 \(pid \d+\) failed with exit code 3", last_words(done.stderr)[0])


def test_what_workers_left_behind_cannot_hold_up_the_end(script):
    path = script(
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    while True: signal.pause()\n"
        "print('done')\n"
    )
    with spawned("-n", "2", path, stdout=PIPE) as process:
        stdout, _ = process.communicate(
            timeout=LIMIT_S
        )  # returns only after all processes have closed the pipe
    assert process.returncode == 0
    assert sorted(stdout.splitlines()) == [b"[w0] done", b"[w1] done"]


# ---- restarts ----


def test_all_workers_are_started_again_and_know_it(script):
    path = script(
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "print('attempt', attempt, os.environ['TORCHELASTIC_MAX_RESTARTS'], flush=True)\n"
        "if attempt < 2 and rank == attempt: sys.exit(7)\n"
    )
    done = coarse_run("-n", "2", "--max-restarts", "5", path)
    assert done.returncode == 0, done.stderr
    said = sorted(done.stdout.splitlines())
    assert said == sorted(f"[w{rank}] attempt {attempt} 5" for rank in (0, 1) for attempt in (0, 1, 2))
    assert re.findall(r"worker (\d) .*; (restart \d of 5)", done.stderr) == [
        ("0", "restart 1 of 5"),
        ("1", "restart 2 of 5"),
    ]


def test_the_last_failure_counts_when_there_is_no_restart_left(script):
    path = script("sys.exit(3 + int(os.environ['TORCHELASTIC_RESTART_COUNT']))")
    done = coarse_run("-n", "2", "--max-restarts", "2", path)
    assert done.returncode == 5
    assert done.stderr.count("; restart ") == 2


def test_what_a_worker_has_left_is_gone_before_the_restart(script):
    path = script(
        "import subprocess, pathlib\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "    pathlib.Path(__file__).with_name('child').write_text(str(child.pid))\n"
        "    sys.exit(1)\n"
        "child = pathlib.Path(__file__).with_name('child').read_text()\n"
        "print(os.path.exists(f'/proc/{child}'))\n"
    )
    done = coarse_run("--max-restarts", "1", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "False\n"


WAYS_OF_NOT_STOPPING = {
    "ignores it": "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "saves for long": "signal.signal(signal.SIGTERM, lambda *_: signal.pause())",
    "is stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
}


@pytest.mark.parametrize("way", WAYS_OF_NOT_STOPPING.values(), ids=WAYS_OF_NOT_STOPPING)
def test_workers_are_started_again_after_one_that_had_to_be_killed(script, fifo, way):
    path = script(
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        f"    end = open({fifo!r}, 'w' if rank == 0 else 'r')\n"
        "    if rank == 1: sys.exit(3)\n"
        f"    {way}\n"
        "    while True: signal.pause()\n"
        "print('restarted')\n"
    )
    done = impatient_run("-n", "2", "--max-restarts", "1", path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[w0] restarted", "[w1] restarted"]
    assert re.search(r"worker 1 \(pid \d+\) failed with exit code 3; restart 1 of 1", done.stderr)


def test_several_nodes_cannot_be_started_again_by_one_launcher(script):
    nodes = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", "1")
    done = coarse_run(*nodes, "--max-restarts", "1", script(""))
    assert done.returncode == 2
    assert "--max-restarts is for one node" in done.stderr


# ---- with --min-workers ----


def test_others_go_on_after_a_failure_and_their_end_is_that_of_the_job(script):
    path = script(
        "import time\nif rank == 1: sys.exit(7)\ntime.sleep(2)\nif rank == 2: print('went on', flush=True)"
    )
    done = coarse_run("-n", "3", "--min-workers", "2", path)
    assert done.returncode == 0, done.stderr
    assert "[w2] went on" in done.stdout
    said = r"coarse run: worker 1 \(pid \d+\) failed with exit code 7, \d+\.\d s after the start; the other 2 go on "
    assert re.search(said + r"\(--min-workers 2\)\n", done.stderr), done.stderr


def test_a_failure_after_others_have_finished_is_one(script, fifo):
    """Such as that of worker 0, which saves the model last."""
    path = script(
        f"if rank != 1: wait_for_the_end_of_rank_0({fifo!r})\nif rank == 2: sys.exit(7)\nif rank == 1: signal.pause()"
    )
    done = coarse_run("-n", "3", "--min-workers", "1", path)
    assert done.returncode == 7, done.stderr


def test_others_are_not_ended_when_one_is_killed(script):
    """They would get a signal a second after the failure, and do not end themselves before that."""
    path = script(
        "import time\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(2)\nprint('went on')"
    )
    done = coarse_run("-n", "3", "--on-loss", "continue", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("went on") == 2


def test_a_failure_that_leaves_too_few_ends_all_and_names_the_first(script, fifo):
    path = script(
        f"wait_for_the_end_of_rank_0({fifo!r}) if rank < 2 else None\n"
        "if rank == 0: sys.exit(7)\nif rank == 1: sys.exit(8)\nsignal.pause()"
    )
    done = coarse_run("-n", "3", "--min-workers", "2", path)
    assert done.returncode == 7
    said = last_words(done.stderr)
    assert re.fullmatch(
        r"worker 0 \(pid \d+\) failed with exit code 7; worker\(s\) 1 failed too", said[-1]
    ), said


def test_without_on_loss_continue_the_first_failure_ends_all(script):
    path = script("if rank == 1: sys.exit(7)\nsignal.pause()")
    done = coarse_run("-n", "3", "--min-workers", "2", "--on-loss", "restart", path)
    assert done.returncode == 7


def test_more_workers_than_there_are_cannot_be_required(script):
    done = coarse_run("-n", "2", "--min-workers", "3", script(""))
    assert done.returncode == 2
    assert "COARSE_MIN_WORKERS=3, but the job has 2 worker(s); lower it, or start more" in done.stderr


ONE_OF_TWO_NODES = (
    *("-n", "2", "--nnodes", "2", "--node-rank", "1"),
    *("--master-addr", "127.0.0.1", "--master-port", "1", "--min-workers", "3"),
)


def test_on_several_nodes_one_worker_of_a_node_goes_on(script):
    """Memory devices count the workers of all nodes, not the launcher."""
    path = script("import time\nif rank == 3: sys.exit(7)\ntime.sleep(2)\nprint('went on', flush=True)")
    done = coarse_run(*ONE_OF_TWO_NODES, path)
    assert done.returncode == 0, done.stderr
    assert "went on" in done.stdout
    assert re.search(
        r"worker 3 \(pid \d+\) .*; the other 1 on this node go on \(--min-workers 3\)", done.stderr
    )


def test_a_worker_whose_session_has_ended_is_no_loss_without_which_others_go_on(script):
    path = script(
        "from coarse.env import notes_pipe\nfrom coarse.status.launcher_notes import tell_launcher\n"
        "if rank == 2: tell_launcher(notes_pipe(), {'over': 2})\nif rank == 2: sys.exit(7)\nsignal.pause()"
    )
    done = coarse_run(*ONE_OF_TWO_NODES, path)
    assert done.returncode == 7, done.stderr
    assert "go on" not in done.stderr
