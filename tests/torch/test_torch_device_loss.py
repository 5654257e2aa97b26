"""A job that loses a memory device is restarted, and resumes from its newest checkpoint, bitwise equal."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from device_loss_script import EVERY, KILLED_IN
from launching import COARSE_RUN, LIMIT_S, WORKERS, launch

import coarse

SCRIPT = Path(__file__).parent / "device_loss_script.py"


def ends(folder: Path) -> list[list[str]]:
    """Digest, attempt and the step it went on from, by rank."""
    return [(folder / f"end-{rank}").read_text().split() for rank in range(WORKERS)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    launch(COARSE_RUN, SCRIPT, (str(folder), "-1"))
    return folder


KEPT = ("--keep-devices", "60")


@pytest.mark.parametrize(
    ("device", "options", "how"),
    [
        (0, (), ()),
        pytest.param(1, KEPT, (), marks=pytest.mark.slow),
        pytest.param(1, (), ("overlap",), marks=pytest.mark.slow),
        pytest.param(0, KEPT, ("overlap",), marks=pytest.mark.slow),
    ],
    ids=["0", "1 kept", "1 overlap", "0 kept overlap"],
)
def test_what_it_held_comes_back_from_the_newest_checkpoint(
    undisturbed: Path, tmp_path: Path, device: int, options: tuple[str, ...], how: tuple[str, ...]
) -> None:
    printed = launch(COARSE_RUN, SCRIPT, (str(tmp_path), str(device), *how), "--max-restarts", "1", *options)
    assert f"memory device md{device}" in printed
    for (digest, attempt, went_on_from), (expected, *_) in zip(
        ends(tmp_path), ends(undisturbed), strict=True
    ):
        assert (digest, attempt) == (expected, "1"), printed
        # The second one is skipped if the first is still being written.
        assert int(went_on_from) in range(EVERY, KILLED_IN, EVERY)


def start_nodes(folder: Path, device: int) -> list[subprocess.Popen[str]]:
    """The same by torchrun on two nodes of one worker each, where the optimizer runs on the workers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{probe.getsockname()[1]}"
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--rdzv-id", folder.name)
    options = ("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2", *meet)
    script = (str(SCRIPT), str(folder), str(device))
    folder.mkdir()
    return [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, "--node-rank", node, *script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(coarse.__file__).parents[1]),
                "OMP_NUM_THREADS": "1",
                "COARSE_PROFILE": "off",
                "COARSE_NODE": f"node {node}",
            },
        )
        for node in "01"
    ]


@pytest.mark.slow
def test_a_job_on_two_nodes_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    folders = {tmp_path / "undisturbed": -1, tmp_path / "disturbed": 0}
    running = [process for folder, device in folders.items() for process in start_nodes(folder, device)]
    try:
        printed = [process.communicate(timeout=LIMIT_S)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(printed)
    undisturbed, disturbed = map(ends, folders)
    for (digest, attempt, went_on_from), (expected, *_) in zip(disturbed, undisturbed, strict=True):
        assert (digest, attempt) == (expected, "1"), "\n".join(printed)
        assert int(went_on_from) in range(EVERY, KILLED_IN, EVERY)
