"""Every worker reports faults immediately; started with TF_CONFIG."""

from __future__ import annotations

import json
import signal
import socket
import sys

import pytest
from jobs import HERE, Job

pytestmark = pytest.mark.timeout(1000)


@pytest.fixture(scope="module")
def port():
    """A free one that stays so until worker 0 listens there: bound, which SO_REUSEADDR allows twice."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture(scope="module")
def said(tmp_path_factory, port):
    """What worker 0 has to say, after worker 1 has died."""
    directory = tmp_path_factory.mktemp("faults")
    workers = [f"127.0.0.1:{port}", "127.0.0.1:1"]  # the second one serves nothing
    jobs = []
    for index in range(2):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        worker = (sys.executable, str(HERE / "fault_worker.py"), str(directory))
        jobs.append(Job(*worker, TF_CONFIG=json.dumps(config)))
    (code, printed), (killed, other) = (job.finish() for job in jobs)
    assert code == 0, printed + other
    assert killed == -signal.SIGKILL, other
    return {
        **json.loads((directory / "0.json").read_text()),
        "died": float((directory / "died").read_text()),
    }


def test_a_worker_that_dies_in_fit_ends_it_on_the_others(said):
    assert "WorkerLostError" in said["fit"]
    assert "worker 1" in said["fit"]
    assert said["over"] - said["died"] < 20.0  # a second, and what a busy machine takes


def test_the_error_of_a_graph_says_what_happened_without_the_way_through_keras(said):
    assert "Detected at node" not in said["fit"]
    assert "{{node" not in said["fit"]
    assert said["fit"].partition(": ")[2].startswith("WorkerLostError: worker 0: worker 1 ")


def test_what_is_asked_for_later_says_the_same(said):
    assert "worker 1" in said["after"]


def test_two_strategies_of_a_process_have_sessions_of_their_own(said):
    assert said["two strategies"] == [3.0, 10.0]
    assert not set(said["devices"][0]) & set(said["devices"][1])


def test_an_unknown_operation_is_refused(said):
    assert "SUM or MEAN" in said["unknown operation"]


def test_strings_are_refused(said):
    assert "cannot be gathered" in said["strings"]


def test_a_metric_that_one_worker_alone_reads_ends_with_what_to_do(said):
    assert said["metric"].startswith("SyncTimeoutError: worker 0: ")
    assert "not pushed by worker(s) 1" in said["metric"]
    assert "reading a metric" in said["metric"]


def test_a_variable_that_one_worker_alone_creates_ends_with_its_name(said):
    assert said["variable"].startswith("SyncTimeoutError: worker 0: ")
    assert "creating variable 'of_one_worker'" in said["variable"]
    assert "All workers must take part in each reduction" in said["variable"]


def test_workers_that_create_different_variables_are_told_which(said):
    assert "worker 0 is creating variable 'of_worker_0': float32[2]" in said["different variables"]
    assert "worker 1 is creating variable 'of_worker_1': float32[3]" in said["different variables"]
