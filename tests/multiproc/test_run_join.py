"""`coarse run --join`: the launcher of a running job starts further workers, in its vacant places."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest
from run_harness import LIMIT_S, coarse_run, spawned

from coarse.status.address import Address, find_launchers

SCRIPT = """\
import os, signal, sys
from coarse.env import notes_pipe
from coarse.status.launcher_notes import tell_launcher
rank, fate = int(os.environ["RANK"]), sys.argv[1]
if "COARSE_INVITATION" in os.environ:
    if fate == "fail": sys.exit(3)
    tell_launcher(notes_pipe(), {"entered": rank})
elif fate != "no-session":
    tell_launcher(notes_pipe(), {"invitation": {}})
print("ready", rank, os.environ["WORLD_SIZE"], flush=True)
signal.pause()
"""
ELASTIC = ("-n", "2", "--min-workers", "1", "--max-workers", "4")


@contextlib.contextmanager
def running(
    tmp_path: Path, *options: str, fate: str = "live"
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A job whose two workers are ready, and its id; "" if it takes no workers."""
    (tmp_path / "train.py").write_text(SCRIPT)
    with spawned(*options, tmp_path / "train.py", fate, stdout=PIPE, stderr=PIPE) as job:
        assert job.stdout is not None
        for _ in range(2):
            job.stdout.readline()
        ids = [each.job for each in find_launchers() if parent_of(each) == job.pid]
        yield job, next(iter(ids), "")


def parent_of(address: Address) -> int:
    try:
        stat = Path(f"/proc/{address.pid}/stat").read_text()
    except OSError:  # it has ended
        return -1
    return int(stat.rpartition(")")[2].split()[1])


def end(job: subprocess.Popen[bytes]) -> tuple[list[str], str]:
    job.terminate()
    said, told = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 128 + signal.SIGTERM
    return said.decode().splitlines(), told.decode()


def test_workers_join_in_the_lowest_vacant_places(tmp_path: Path) -> None:
    with running(tmp_path, *ELASTIC) as (job, name):
        done = coarse_run("--join", name, "-n", "2")
        assert done.returncode == 0, done.stderr
        for rank in (2, 3):
            assert f"worker {rank} takes part in the training" in done.stderr
        refused = coarse_run("--join", name)
        assert refused.returncode == 1
        assert "all 4 places are taken" in refused.stderr
        assert "--max-workers" in refused.stderr
        said, told = end(job)
    assert sorted(said) == ["[w2] ready 2 4", "[w3] ready 3 4"]
    assert "worker 2 (pid " in told


def test_a_place_is_vacant_when_its_worker_is_lost(tmp_path: Path) -> None:
    with running(tmp_path, *ELASTIC[:-1], "2") as (job, name):
        assert coarse_run("--join", name).returncode == 1
        (launcher,) = find_launchers(name)
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        first = next(pid for pid in children if b"RANK=0" in environment_of(pid))
        os.kill(int(first), signal.SIGKILL)
        assert job.stderr is not None
        while b"the other 1 go on" not in job.stderr.readline():
            continue
        done = coarse_run("--join", name)
        assert done.returncode == 0, done.stderr
        assert "worker 0 takes part in the training" in done.stderr
        end(job)


def environment_of(pid: str) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def test_a_worker_that_fails_before_it_takes_part_is_told(tmp_path: Path) -> None:
    with running(tmp_path, *ELASTIC, fate="fail") as (job, name):
        done = coarse_run("--join", name)
        assert done.returncode == 1
        assert "worker 2 has not joined: worker 2 (pid " in done.stderr
        assert "failed with exit code 3" in done.stderr
        assert "worker 2 (pid " in coarse_run("--join", name).stderr, "its place is vacant"
        end(job)


def test_without_a_session_workers_cannot_join(tmp_path: Path) -> None:
    with running(tmp_path, *ELASTIC, fate="no-session") as (job, name):
        done = coarse_run("--join", name)
        assert done.returncode == 1
        assert "its workers have no session yet" in done.stderr
        end(job)


def test_other_jobs_take_no_workers(tmp_path: Path) -> None:
    with running(tmp_path, "-n", "2") as (job, name):
        assert name == ""
        end(job)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--join", "f00", "-n", "2"), "no job f00 of this user runs on this node"),
        (("--join", "f00", "--min-workers", "2"), "--join takes no settings, but COARSE_MIN_WORKERS"),
        (("-n", "2", "--join", "f00", "train.py"), "--join takes no SCRIPT"),
        (("-n", "2"), "the following arguments are required: SCRIPT"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: tuple[str, ...], reason: str) -> None:
    done = coarse_run(*arguments)
    assert done.returncode != 0
    assert reason in done.stderr
