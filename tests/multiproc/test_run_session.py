"""`coarse run` and `coarse doctor` with real sessions: faults are named, memory devices end with the job."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from subprocess import PIPE

import pytest
from run_harness import LIMIT_S, all_end_within, coarse_run, environment, read_pidfds, spawned

from coarse.cli.measurement import sync_probe

pytest.importorskip("coarse.kernels._native", reason="needs the native module")

TRAIN = """\
import os, pathlib, signal, sys
import numpy as np
from coarse.env import WorkerIdentity
from coarse.schema import TensorSpec
from coarse.session import Session
from coarse.store import DirectoryStore

identity = WorkerIdentity.from_environment()
session = Session.join(identity=identity, store=DirectoryStore(sys.argv[1]))
values = np.ones(1024, dtype=np.float32)
session.all_reduce(values)
for child in pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
    os.write(1, f"device{child} {child}\\n".encode())
os.write(1, f"worker{identity.rank} {os.getpid()}\\n".encode())
if sys.argv[2] == "kill" and identity.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "wait":
    signal.pause()
if sys.argv[2] == "steps":
    group = session.register("weights", [TensorSpec(name="a", dtype="float32", num_elements=8, op="mean")])
    for _ in range(3):
        group.push(0)
        group.pull_all()
    group.close()
session.all_reduce(values)
"""
NUM_PROCESSES = 4


@pytest.fixture
def train(tmp_path):
    (tmp_path / "store").mkdir(mode=0o700)
    (tmp_path / "train.py").write_text(TRAIN)
    return ("-n", "2", tmp_path / "train.py", tmp_path / "store")


def test_a_worker_that_is_killed_is_the_one_that_is_named(train):
    done = coarse_run(*train, "kill")
    said = [line for line in done.stderr.splitlines() if not line.startswith(("[w", "coarse run: "))]
    assert done.returncode == 137, done.stderr
    named = r"worker 1 \(pid \d+\) was killed by SIGKILL(; worker\(s\) 0 failed because of that)?"
    assert re.fullmatch(named, said[0])  # the other worker may be ended before it reports
    assert "WorkerLostError" in done.stderr


def test_two_launchers_start_two_nodes_of_one_job(train):
    """A store in a directory stands for a shared one, and loopback for the network between the nodes."""
    nodes = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", "1")
    with contextlib.ExitStack() as stack:
        launchers = [
            stack.enter_context(
                spawned(
                    "--node-rank", rank, "--node", f"n{rank}", *nodes, *train, "go", stdout=PIPE, stderr=PIPE
                )
            )
            for rank in "01"
        ]
        said = [launcher.communicate(timeout=LIMIT_S) for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], said
    for first, (stdout, _) in zip((0, 2), said, strict=True):
        assert len(re.findall(rb"\[w\d\] device\d+ ", stdout)) == 2
        assert set(re.findall(rb"\[w(\d)\] worker(\d)", stdout)) == {
            (b"%d" % rank, b"%d" % rank) for rank in (first, first + 1)
        }


def test_memory_devices_go_with_a_launcher_that_is_killed(train):
    with spawned(*train, "wait", stdout=PIPE, stderr=PIPE) as launcher:
        pidfds = read_pidfds(launcher.stdout, NUM_PROCESSES)
        launcher.kill()
        assert all_end_within(LIMIT_S, pidfds) == []


def test_memory_devices_go_with_a_launcher_that_is_told_to_stop(train):
    with spawned(*train, "wait", stdout=PIPE, stderr=PIPE) as launcher:
        pidfds = read_pidfds(launcher.stdout, NUM_PROCESSES)
        launcher.send_signal(signal.SIGTERM)
        assert all_end_within(LIMIT_S, pidfds) == []
        assert launcher.wait(timeout=LIMIT_S) == 143


def test_the_probe_of_doctor_measures_a_sync():
    latency = sync_probe.probe_sync(limit_s=LIMIT_S)
    assert 0 < latency.p50_us <= latency.p99_us


def test_the_probe_of_doctor_tells_why_it_failed(monkeypatch):
    monkeypatch.setenv("COARSE_ALGORITHM", "magic")
    with pytest.raises(sync_probe.SyncProbeError, match="COARSE_ALGORITHM='magic' must be one of"):
        sync_probe.probe_sync(limit_s=LIMIT_S)


def test_an_emulated_job_says_so(train):
    done = coarse_run("--machine", "aws-p3", "--time-dilation", "2", *train, "end")
    assert done.returncode == 0, done.stderr
    assert "coarse run: emulated: links of aws-p3, 2 times slower" in done.stderr


def test_a_machine_that_is_unknown_starts_nothing(train):
    done = coarse_run("--machine", "aws-p4", *train, "end")
    assert done.returncode == 2
    assert "no machine is named 'aws-p4'; did you mean aws-p3" in done.stderr
    assert "worker" not in done.stdout


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs PYTHONSAFEPATH")
def test_files_of_the_current_folder_are_not_imported(train, tmp_path):
    """This holds for memory devices and for the workers that `coarse doctor` starts."""
    here = tmp_path / "here"
    for module in ("coarse/__init__.py", "inspect.py", "numpy.py"):
        (here / module).parent.mkdir(parents=True, exist_ok=True)
        (here / module).write_text("raise SystemExit('this is not what was meant')")
    command = tmp_path / "command.py"
    command.write_text("from coarse.cli.main import main\nraise SystemExit(main())")
    for arguments in (("run", *train, "end"), ("doctor", "--json")):
        done = subprocess.run(
            [sys.executable, command, *arguments],
            cwd=here,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
        assert "not what was meant" not in done.stdout + done.stderr


def test_a_job_says_what_it_has_decided_and_how_it_went(train):
    done = coarse_run(*train, "end")
    said = [line for line in done.stderr.splitlines() if "OMP_NUM_THREADS" not in line]
    assert re.fullmatch(
        r"coarse run: job [0-9a-f]{8}: 2 workers on 1 node\(s\), md0 in host, md1 in host", said[0]
    )
    assert said[1].startswith("coarse run: links: ")
    assert re.match(r"coarse run: algorithm: .*; shards of at least \d+ bytes: ", said[2])
    assert re.fullmatch(
        r"coarse run: 0 steps in \d+\.\d s; peak memory [\d.]+ MiB per worker, [\d.]+ MiB per memory device; "
        r"faults: none",
        said[3],
    )
    assert len(said) == 4


def test_steps_of_a_model_that_is_gone_are_counted(train):
    assert "coarse run: 3 steps in " in coarse_run(*train, "steps").stderr


def test_a_quiet_job_says_nothing_of_itself(train):
    done = coarse_run("-q", *train, "end")
    assert (done.returncode, done.stderr) == (0, "")
