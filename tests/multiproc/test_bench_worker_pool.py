"""WorkerPool: workers that die, fail or hang are named, with their output; nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from coarse.bench.harness.commands import BenchError, WorkerJob, name_of
from coarse.bench.harness.worker_pool import WorkerPool
from coarse.bench.sync.systems import sync_commands
from coarse.errors import SyncTimeoutError, WorkerLostError

pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def private_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The parent of pools' directories; empty again after each test. A short path, because it contains a socket."""
    previous = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="b-") as directory:
        tempfile.tempdir = directory
        yield Path(directory)
        tempfile.tempdir = previous
        assert list(Path(directory).iterdir()) == []


def workers_of(pool: WorkerPool) -> list[psutil.Process]:
    return [each for each in pool.descendants() if "coarse.bench.harness.worker_process" in each.cmdline()]


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []


def test_workers_answer_in_rank_order_and_leave() -> None:
    with WorkerPool("gloo", sync_commands, 3) as pool:
        workers = workers_of(pool)
        assert len(workers) == 3
        pool.ask("prepare", nbytes=4096, dtype="float32")
        assert pool.ask("verify") == [None, None, None]
        assert [len(seconds) for seconds in pool.ask("run", iterations=5)] == [5, 5, 5]
        pool.ask("release")
    assert_gone(workers)
    pool.close()


def test_private_directory_is_entered_by_its_owner_only(private_directory: Path) -> None:
    with WorkerPool("gloo", sync_commands, 1):
        (directory,) = private_directory.iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700


def test_killed_worker_is_named_with_its_signal_and_the_others_are_ended() -> None:
    with WorkerPool("gloo", sync_commands, 2) as pool:
        workers = workers_of(pool)
        pool.ask("prepare", nbytes=4096, dtype="float32")
        threading.Timer(0.3, workers[1].kill).start()
        with pytest.raises(WorkerLostError, match=r"(worker|process) \d died during run.*SIGKILL"):
            pool.ask("run", iterations=1_000_000)
    assert_gone(workers)


def test_error_of_a_worker_comes_with_its_traceback() -> None:
    with (
        WorkerPool("gloo", sync_commands, 2) as pool,
        pytest.raises(BenchError, match=r"verify failed on worker \d: .*prepare comes first") as caught,
    ):
        pool.ask("verify")
    assert "Traceback" in str(caught.value)


ECHO = """
from coarse.bench.harness.worker_pool import WorkerPool

class Echo:
    def __init__(self, job):
        self.rank = job.rank

    def setup(self):
        return self.rank

    def say(self, words):
        return [self.rank, words]

    def close(self):
        pass

if __name__ == "__main__":
    with WorkerPool("echo", Echo, 2) as pool:
        print(pool.ask("say", words="hello"))
"""


@pytest.mark.parametrize("start", [["echo.py"], ["-m", "echo"]])
def test_a_script_may_contain_the_commands_of_its_workers(start: list[str], tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(ECHO)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    printed = subprocess.check_output([sys.executable, *start], cwd=tmp_path, env=environment, text=True)
    assert printed == "[[0, 'hello'], [1, 'hello']]\n"


def test_a_worker_executes_its_commands_alone() -> None:
    with WorkerPool("gloo", sync_commands, 1) as pool:
        for name in ("fly", "_tensor", "__class__"):
            with pytest.raises(BenchError, match=f"SyncCommands has no command '{name}'"):
                pool.ask(name)


def test_worker_that_cannot_start_says_why() -> None:
    pool = WorkerPool("no-such-system", sync_commands, 1)
    with pytest.raises(BenchError, match=r"start failed on a worker: .*unknown system"):
        pool.__enter__()


def test_worker_that_does_not_answer_is_named() -> None:
    with WorkerPool("gloo", sync_commands, 2) as pool:
        (stopped, _) = workers = sorted(workers_of(pool), key=lambda worker: worker.pid)
        stopped.suspend()
        with pytest.raises(SyncTimeoutError, match=r"no answer of workers \[0(, 1)?\]"):
            pool.ask("prepare", timeout_s=0.5, nbytes=4096, dtype="float32")
    assert_gone(workers)


@pytest.mark.parametrize(
    "how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_workers_end_with_their_driver(how: signal.Signals, private_directory: Path) -> None:
    code = (
        "import signal, sys, tempfile\n"
        "from coarse.bench.harness.worker_pool import WorkerPool\n"
        "from coarse.bench.sync.systems import sync_commands\n"
        "from coarse.cli.main import told_to_end_as_by_ctrl_c\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "with told_to_end_as_by_ctrl_c(), WorkerPool('gloo', sync_commands, 2) as pool:\n"
        "    print(*(each.pid for each in pool.descendants()), flush=True)\n"
        "    signal.pause()\n"
    )
    command = [sys.executable, "-c", code, os.fspath(private_directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        assert driver.stdout is not None
        line = driver.stdout.readline()
        workers = [psutil.Process(int(pid)) for pid in line.split()]
        driver.send_signal(how)
    assert len(workers) == 2
    assert driver.returncode != 0
    assert_gone(workers)


def test_a_worker_that_is_being_set_up_ends_with_its_driver(private_directory: Path) -> None:
    """The worker would otherwise wait for a second one."""
    directory = private_directory / "job"
    directory.mkdir()
    job = WorkerJob(system="gloo", rank=0, num_workers=2, directory=directory, options={})
    path = os.fspath(private_directory / "socket")
    options = ["--commands", name_of(sync_commands), "--socket", path, "--job", job.to_json()]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(1)
        with subprocess.Popen(
            [sys.executable, "-m", "coarse.bench.harness.worker_process", *options]
        ) as worker:
            try:
                listener.accept()[0].close()
                assert worker.wait(timeout=20) == 1
            finally:
                worker.kill()
    os.unlink(path)
