"""The examples run to the end under torchrun, under `coarse run` and without a launcher."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from PIL import Image

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHORT = {
    "digits": ("--epochs", "1"),
    "bert_squad": ("--epochs", "1", "--max-length", "96", "--doc-stride", "32"),
    "resnet_imagenet": ("--epochs", "1", "--small", "--image-size", "32"),
}
ENDS_WITH = {
    "digits": r"test accuracy \d+\.\d+%",
    "bert_squad": r"exact match \d+\.\d %, F1 \d+\.\d % on .*squad_small.json",
    "resnet_imagenet": r"validation accuracy \d+\.\d+%",
}
LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    "coarse run": ("coarse", "run", "-n", "2"),
    "by hand": (),
}

# Each example and each launcher once.
IN_EVERY_RUN = {("digits", "coarse run"), ("bert_squad", "by hand"), ("resnet_imagenet", "torchrun")}


def run(launcher: str, script: str, *arguments: str, timeout_s: float = 300) -> str:
    """Runs the script to its end and returns what it printed; a failure shows all of it."""
    module = ("-m", *LAUNCHERS[launcher]) if LAUNCHERS[launcher] else ()
    job = subprocess.Popen(
        [sys.executable, *module, str(EXAMPLES / script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        shown, _ = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # torchrun's workers have their own sessions and outlive it.
        for each in (*psutil.Process(job.pid).children(recursive=True), job):
            each.kill()
        job.communicate()
        raise
    assert job.returncode == 0, shown
    assert "Traceback" not in shown
    return shown


def run_ddp(launcher: str, name: str) -> str:
    """Runs an example under torch DDP, which sometimes hangs at exit.

    Seen with torch 2.13: a Reducer that is freed after destroy_process_group() joins gloo's thread while it holds
    the interpreter's lock, and that thread waits for the lock.
    """
    script = f"torch_{name}_ddp.py"
    try:
        return run(launcher, script, *SHORT[name], timeout_s=150)
    except subprocess.TimeoutExpired:
        return run(launcher, script, *SHORT[name], timeout_s=150)


@pytest.mark.slow
def test_an_example_runs_on_two_nodes_of_torchrun(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = (
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(port),
    )
    script = (str(EXAMPLES / "torch_digits.py"), "--epochs", "1", "--report", str(tmp_path / "report.json"))
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--node-rank", rank, *nodes, *script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COARSE_NODE": f"node {rank}"},
        )
        for rank in "01"
    ]
    try:
        shown = [process.communicate(timeout=300)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [0, 0], "\n".join(shown)
    reports = [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())]
    assert [entry["rank"] for entry in reports] == [0, 1]
    assert len({entry["param_hash"] for entry in reports}) == 1


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        pytest.param(name, launcher, marks=() if (name, launcher) in IN_EVERY_RUN else pytest.mark.slow)
        for name in SHORT
        for launcher in LAUNCHERS
    ],
)
def test_coarse_example_runs(name: str, launcher: str, tmp_path: Path) -> None:
    arguments = (*SHORT[name], "--report", str(tmp_path / "report.json"))
    if (name, launcher) == ("bert_squad", "coarse run"):
        arguments += ("--dtype", "bfloat16")
    shown = run(launcher, f"torch_{name}.py", *arguments)
    assert len(re.findall(ENDS_WITH[name], shown)) == 1  # only one worker prints
    workers = 1 if launcher == "by hand" else 2
    reports = [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())]
    assert [entry["rank"] for entry in reports] == list(range(workers))
    assert len({entry["param_hash"] for entry in reports}) == 1


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("digits", "by hand"),
        pytest.param("bert_squad", "torchrun", marks=pytest.mark.slow),
        pytest.param("resnet_imagenet", "torchrun", marks=pytest.mark.slow),
    ],
)
def test_ddp_example_runs(name: str, launcher: str) -> None:
    """test_train_digits.py runs the digits under `coarse run`, as the peer of `make train`."""
    shown = run_ddp(launcher, name)
    assert len(re.findall(ENDS_WITH[name], shown)) == 1


@pytest.mark.slow
def test_resnet_takes_shares_of_unequal_length(tmp_path: Path) -> None:
    """With nine pictures, two workers and batches of two, worker 0 takes three steps and worker 1 two."""
    for part in ("train", "val"):
        for label, count in (("grey", 5), ("white", 4)):
            (tmp_path / part / label).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (40, 40), label).save(tmp_path / part / label / f"{number}.png")
    size = ("--small", "--image-size", "64", "--batch", "2", "--epochs", "2")
    reports = ("--report", str(tmp_path / "report.json"))
    run("coarse run", "torch_resnet_imagenet.py", "--data", str(tmp_path), *size, *reports)
    steps, hashes = zip(
        *(
            (entry["steps"], entry["param_hash"])
            for entry in (json.loads(path.read_text()) for path in sorted(tmp_path.glob("report-*.json")))
        ),
        strict=True,
    )
    assert steps == (6, 4)
    assert len(set(hashes)) == 1


def test_bad_data_is_a_line_not_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    for script in ("torch_bert_squad_ddp.py", "torch_resnet_imagenet_ddp.py"):
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / script), "--data", str(tmp_path / "bad.json")],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: {tmp_path}/bad.json"), done.stderr
