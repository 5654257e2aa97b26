"""A job of two nodes goes on without lost workers, under a `coarse run` on each: the others end with equal bits."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from launching import LIMIT_S

import coarse

SCRIPT = Path(__file__).parent / "elastic_script.py"
RANKS = range(4)  # two on each node


def run_nodes(
    folder: Path, *arguments: str, min_workers: int = 1, failpoints: str = ""
) -> list[tuple[int, str]]:
    """Exit code and output of `coarse run` on each node."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    # Sockets have short names: pytest's own temporary directories are too long for them.
    with tempfile.TemporaryDirectory(prefix="coarse-test-") as temporary:
        running = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "coarse", "run", "-n", "2", "--nnodes", "2", "--node-rank", node),
                    *("--master-addr", "127.0.0.1", "--master-port", port, "--memory-devices", "2"),
                    *("--min-workers", str(min_workers), "--failpoints", failpoints),
                    *(str(SCRIPT), str(folder), *arguments),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={
                    **os.environ,
                    "PYTHONPATH": str(Path(coarse.__file__).parents[1]),
                    "OMP_NUM_THREADS": "1",
                    "TMPDIR": temporary,
                    "COARSE_PROFILE": "off",
                    "COARSE_NODE": f"node {node}",
                },
            )
            for node in "01"
        ]
        try:
            printed = [process.communicate(timeout=LIMIT_S)[0] for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait()
        left = [path.name for path in Path(temporary).iterdir() if path.name.startswith("coarse")]
        assert not left, "nothing is left behind"
    return [(process.returncode, text) for process, text in zip(running, printed, strict=True)]


def check_survivors(folder: Path, ended: list[tuple[int, str]], *lost: int, steps: tuple[int, ...]) -> None:
    assert [code for code, _ in ended] == [0, 0], ended
    members = [rank for rank in RANKS if rank not in lost]
    ends = {int(path.name.partition("-")[2]): json.loads(path.read_text()) for path in folder.glob("end-*")}
    assert sorted(ends) == members
    assert len({digest for digest, _, _ in ends.values()}) == 1, "the same parameters, buffers and states"
    for _, left, changes in ends.values():
        assert left == members
        assert changes == ends[members[0]][2], "all learn of it after the same step"
        assert len(changes) == len(lost)
        assert [step for step, *_ in changes] in ([*steps], [step + 1 for step in steps])
    for rank in lost:
        (_, own), (_, other) = ended if rank < 2 else ended[::-1]
        assert re.search(rf"coarse run: worker {rank} \(pid \d+\) .*; the other 1 on this node go on", own), (
            own
        )
        assert f"faults: worker {rank} lost" in own
        assert re.search(rf"\[md0\] worker {rank} \(pid \d+\) .*The other \d go on", other), other


@pytest.mark.parametrize(
    ("mode", "fate", "lost"),
    [
        ("plain", "die", 1),
        pytest.param("plain", "raise", 2, marks=pytest.mark.slow),
        pytest.param("optimizer", "die", 0, marks=pytest.mark.slow),
        ("optimizer", "raise", 2),
        ("overlap", "die", 0),
        pytest.param("overlap", "die", 3, marks=pytest.mark.slow),
    ],
)
def test_others_go_on_after_a_loss_in_backward(tmp_path: Path, mode: str, fate: str, lost: int) -> None:
    """Worker 0 serves the job's rendezvous; workers 0 and 2 have started the memory devices."""
    check_survivors(tmp_path, run_nodes(tmp_path, mode, fate, str(lost)), lost, steps=(4,))


FAILPOINTS = (
    # At the start of a step, while gradients are pushed, before settings are written, between pushes of updates,
    # before and after they are pulled.
    ("backward.push:kill@rank=0,step=4,count=0", 0),
    ("backward.push:kill@rank=3,step=4,count=2", 3),
    ("step.prepare:kill@rank=1,step=4", 1),
    ("step.push:kill@rank=2,step=4,count=3", 2),
    ("step.pull:kill@rank=0,step=4", 0),
    ("step.done:kill@rank=3,step=4", 3),
)


@pytest.mark.parametrize(
    ("failpoint", "lost"),
    [
        FAILPOINTS[1],
        FAILPOINTS[3],
        *(pytest.param(*FAILPOINTS[each], marks=pytest.mark.slow) for each in (0, 2, 4, 5)),
    ],
)
def test_others_go_on_after_a_loss_in_a_step(tmp_path: Path, failpoint: str, lost: int) -> None:
    ended = run_nodes(tmp_path, "optimizer", failpoints=failpoint)
    check_survivors(tmp_path, ended, lost, steps=(4,))


def test_a_worker_of_each_node_is_lost_until_too_few_are_left(tmp_path: Path) -> None:
    failpoints = "step.push:kill@rank=1,step=3,count=1;backward.push:kill@rank=2,step=6,count=1"
    ended = run_nodes(tmp_path, "optimizer", min_workers=3, failpoints=failpoints)
    assert [code for code, _ in ended] == [137, 137], ended
    for _, printed in ended:
        assert "WorkerLostError" in printed
        assert "2 worker(s) are left, and COARSE_MIN_WORKERS=3" in printed
        for rank in (1, 2):
            assert re.search(
                rf"worker {rank} \(pid \d+\) died at .*; its last contribution was step \d+", printed
            )


@pytest.mark.slow
def test_the_other_node_goes_on_without_the_last_worker_of_one(tmp_path: Path) -> None:
    failpoints = "step.push:kill@rank=2,step=3,count=1;backward.push:kill@rank=3,step=6,count=1"
    ended = run_nodes(tmp_path, "optimizer", failpoints=failpoints)
    assert [code for code, _ in ended] == [0, 137], ended
    assert "No worker is left on node 1 (worker(s) 2, 3)" in ended[1][1]
    assert "goes on without node 1 (worker(s) 2, 3)" in ended[0][1]
