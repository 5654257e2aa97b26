"""A job goes on without a lost node, under a `coarse run` on each: the others end with equal bits."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from launching import LIMIT_S

import coarse

SCRIPT = Path(__file__).parent / "elastic_script.py"


def run_nodes(folder: Path, num_nodes: int, *arguments: str, failpoints: str = "") -> list[tuple[int, str]]:
    """Exit code and output of `coarse run` on each node, of one worker each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    # Sockets have short names: pytest's own temporary directories are too long for them.
    with tempfile.TemporaryDirectory(prefix="coarse-test-") as temporary:
        running = []
        for node in range(num_nodes):
            own = Path(temporary) / f"n{node}"
            own.mkdir()
            command = [
                *(sys.executable, "-m", "coarse", "run", "-n", "1", "--nnodes", str(num_nodes)),
                *("--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", port),
                *("--min-workers", "1", "--failpoints", failpoints, str(SCRIPT), str(folder), *arguments),
            ]
            environment = {
                **os.environ,
                "PYTHONPATH": str(Path(coarse.__file__).parents[1]),
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(own),
                "COARSE_PROFILE": "off",
                "COARSE_NODE": f"node {node}",
            }
            running.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=environment,
                )
            )
        try:
            printed = [process.communicate(timeout=LIMIT_S)[0] for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait()
    return [(process.returncode, text) for process, text in zip(running, printed, strict=True)]


def check_survivors(folder: Path, ended: list[tuple[int, str]], lost: int, code: int) -> None:
    assert [status for status, _ in ended] == [code if node == lost else 0 for node in range(len(ended))], (
        ended
    )
    members = [node for node in range(len(ended)) if node != lost]
    ends = {int(path.name.partition("-")[2]): json.loads(path.read_text()) for path in folder.glob("end-*")}
    assert sorted(ends) == members
    assert len({digest for digest, _, _ in ends.values()}) == 1, "the same parameters, buffers and states"
    for _, left, changes in ends.values():
        assert left == members
        assert changes == ends[members[0]][2], "all learn of it after the same step"
        ((step, old, new),) = changes
        assert step in (4, 5)
        assert (old, new) == (list(range(len(ended))), members)
    for node in members:
        assert f"goes on without node {lost} (worker(s) {lost})" in ended[node][1]


@pytest.mark.parametrize(
    ("num_nodes", "mode", "fate", "lost"),
    [
        (3, "plain", "node", 1),
        (3, "optimizer", "node", 0),
        (2, "overlap", "node", 1),
        (2, "optimizer", "die", 0),
        pytest.param(2, "plain", "node", 0, marks=pytest.mark.slow),
        pytest.param(3, "overlap", "node", 2, marks=pytest.mark.slow),
        pytest.param(3, "optimizer", "raise", 1, marks=pytest.mark.slow),
    ],
)
def test_others_go_on_after_the_loss_of_a_node_in_backward(
    tmp_path: Path, num_nodes: int, mode: str, fate: str, lost: int
) -> None:
    """Worker 0 serves the job's rendezvous."""
    code = {"node": -signal.SIGKILL, "die": 128 + signal.SIGKILL, "raise": 1}[fate]
    ended = run_nodes(tmp_path, num_nodes, mode, fate, str(lost))
    check_survivors(tmp_path, ended, lost, code)


@pytest.mark.parametrize(
    ("failpoint", "lost"),
    [
        ("step.push:kill@rank=1,step=4,count=3", 1),
        pytest.param("backward.push:kill@rank=0,step=4,count=0", 0, marks=pytest.mark.slow),
        pytest.param("backward.push:kill@rank=2,step=4,count=2", 2, marks=pytest.mark.slow),
        pytest.param("step.prepare:kill@rank=1,step=4", 1, marks=pytest.mark.slow),
        pytest.param("step.pull:kill@rank=0,step=4", 0, marks=pytest.mark.slow),
        pytest.param("step.done:kill@rank=2,step=4", 2, marks=pytest.mark.slow),
    ],
)
def test_others_go_on_after_the_loss_of_a_node_s_last_worker_in_a_step(
    tmp_path: Path, failpoint: str, lost: int
) -> None:
    ended = run_nodes(tmp_path, 3, "optimizer", failpoints=failpoint)
    check_survivors(tmp_path, ended, lost, 128 + signal.SIGKILL)
