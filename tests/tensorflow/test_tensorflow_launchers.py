"""torchrun also starts Keras workers, on one node and on two, which COARSE_NODE separates here."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys

import pytest
from jobs import HERE, Job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1000),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torchrun comes with PyTorch"),
]

SCENARIOS = ["dense", "embedding", "own_loop", "several_steps_per_execution_and_batch_norm", "offloaded_fit"]


def start(folder, *arguments, scenarios=SCENARIOS, **variables):
    folder.mkdir(exist_ok=True)
    worker = (str(HERE / "scenario_worker.py"), str(folder), *scenarios)
    return Job(sys.executable, *arguments, *worker, **variables)


def finish(*jobs):
    for code, printed in [job.finish() for job in jobs]:
        assert code == 0, printed


def found_in(folder, num_workers=2):
    return [json.loads((folder / f"{num_workers}-{rank}.json").read_text()) for rank in range(num_workers)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What each scenario returned in one process."""
    folder = tmp_path_factory.mktemp("alone")
    finish(start(folder))
    return found_in(folder, 1)[0]


def check_like_one_process(workers, alone):
    for name in SCENARIOS:
        for worker in workers:
            assert "error" not in worker[name], worker[name]["error"]
            assert worker[name]["loss"] == pytest.approx(alone[name]["loss"], rel=1e-6)
            assert worker[name]["weights"] == pytest.approx(alone[name]["weights"], rel=1e-5)
        assert len({worker[name]["digest"] for worker in workers}) == 1
    assert [worker["launched by"] for worker in workers] == [["RANK"], ["RANK"]]


def test_torchrun_starts_workers_of_keras(tmp_path, alone):
    finish(start(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"))
    check_like_one_process(found_in(tmp_path), alone)


def test_workers_of_two_nodes_train_what_one_process_does(tmp_path, alone):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{probe.getsockname()[1]}"
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--rdzv-id", tmp_path.name)
    options = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *meet)
    finish(*(start(tmp_path, *options, COARSE_NODE=f"node {node}") for node in range(2)))
    check_like_one_process(found_in(tmp_path), alone)
