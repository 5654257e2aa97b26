"""The reported cause is the first failure, not a consequence; the user sees its last traceback."""

from __future__ import annotations

import pytest

from coarse.cli.workers.failure import (
    WorkerExit,
    first_failure,
    last_traceback,
    report,
    reports_own_error,
    signal_name,
)
from coarse.errors import follow_up

BOOM = """\
Traceback (most recent call last):
  File "train.py", line 5, in <module>
    raise ValueError("boom")
ValueError: boom
"""
LOST = BOOM.replace("ValueError: boom", "coarse.errors.WorkerLostError: worker 1 (pid 7) died")


def ended(
    rank: int, returncode: int = 1, stderr_tail: str = BOOM, *, was_stopped: bool = False
) -> WorkerExit:
    return WorkerExit(
        rank=rank, pid=100 + rank, returncode=returncode, stderr_tail=stderr_tail, was_stopped=was_stopped
    )


@pytest.mark.parametrize(
    ("exits", "rank"),
    [
        ([ended(2), ended(1)], 2),
        ([ended(0, 0), ended(1)], 1),
        ([ended(0, 1, LOST), ended(1)], 1),
        ([ended(0, 1, LOST), ended(1, -9, "")], 1),
        ([ended(0, 1, LOST), ended(2, 1, LOST), ended(1, 0)], 0),
        ([ended(0, 1, LOST), ended(1, -15, "", was_stopped=True)], 0),
        ([ended(0, 1, LOST), ended(1, -15, BOOM, was_stopped=True)], 1),
        ([ended(0, 1, BOOM), ended(1, -15, BOOM, was_stopped=True)], 0),
    ],
    ids=[
        "earliest",
        "no-failure",
        "own-error",
        "signal",
        "all-lost",
        "stopped",
        "stopped-late",
        "stopped-after",
    ],
)
def test_first_failure_is_the_cause(exits, rank):
    failure = first_failure(exits)
    assert failure is not None
    assert failure.rank == rank


FOLLOWS = BOOM.replace(
    "ValueError: boom", f"coarse.errors.CheckpointError: {follow_up('step 3 could not be saved', 'worker 0')}"
)


@pytest.mark.parametrize(
    "text",
    [
        FOLLOWS,
        LOST.replace("coarse.errors.", "tensorflow.python.framework.errors_impl.UnknownError: "),
        BOOM.replace("ValueError: boom", "torch.distributed.DistNetworkError: failed to recv, got 0 bytes"),
        BOOM.replace(
            "ValueError: boom", "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer"
        ),
        BOOM.replace(
            "ValueError: boom",
            "DistBackendError: rank 1, sequence number 3 (barrier): rank 0 died after 1.0 s",
        ),
    ],
    ids=["told", "tensorflow", "store", "gloo", "backend"],
)
def test_an_error_that_follows_from_another_workers_is_not_the_cause(text):
    failure = first_failure([ended(1, 1, text), ended(0)])
    assert failure is not None
    assert failure.rank == 0
    assert not reports_own_error(text)


def test_a_connection_that_a_script_lost_is_its_own_error():
    assert reports_own_error(
        BOOM.replace("ValueError: boom", "ConnectionResetError: [Errno 104] Connection reset by peer")
    )


def test_the_error_that_was_reported_first_is_the_cause_even_if_its_worker_ends_last():
    first, second = (
        WorkerExit(rank=rank, pid=100, returncode=1, stderr_tail=BOOM, failed_s=failed_s)
        for rank, failed_s in ((0, 7.0), (1, 8.0))
    )
    failure = first_failure([second, first])
    assert failure is first
    stopped = ended(2, -15, "", was_stopped=True)
    said = report(failure, [second, first, stopped, ended(3, 1, FOLLOWS)])
    told = "worker 0 (pid 100) failed with exit code 1; worker(s) 1 failed too; worker(s) 3 failed because of that"
    assert said.splitlines()[0] == told


def test_no_failure_if_all_succeed():
    assert first_failure([ended(0, 0), ended(1, 0)]) is None


@pytest.mark.parametrize(
    ("returncode", "exit_code", "text"),
    [
        (3, 3, "worker 1 (pid 101) failed with exit code 3"),
        (-9, 137, "worker 1 (pid 101) was killed by SIGKILL"),
        (-40, 168, "worker 1 (pid 101) was killed by signal 40"),
    ],
)
def test_an_exit_is_named_as_a_shell_would(returncode, exit_code, text):
    failure = ended(1, returncode)
    assert (failure.exit_code, str(failure)) == (exit_code, text)


def test_what_speaks_for_the_reason_of_a_death_is_told():
    failure = WorkerExit(rank=1, pid=101, returncode=-9, evidence="memory ran out")
    assert report(failure) == "worker 1 (pid 101) was killed by SIGKILL; memory ran out\n"


def test_the_last_traceback_is_reported_and_what_came_before_is_not():
    assert report(ended(1, stderr_tail=LOST + "retrying\n" + BOOM)).splitlines() == [
        "worker 1 (pid 101) failed with exit code 1",
        *BOOM.splitlines(),
    ]


@pytest.mark.parametrize(
    "link",
    [
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
    ],
)
def test_chained_exceptions_stay_together(link):
    chain = f"{LOST}\n{link}\n\n{BOOM}"
    assert last_traceback("warning\n" + chain) == chain
    assert not reports_own_error(chain)


def test_without_a_traceback_the_last_lines_are_reported():
    said = "".join(f"line {number}\n" for number in range(50))
    assert report(ended(1, 2, said)).splitlines()[1:] == [f"line {number}" for number in range(40, 50)]


def test_signals_have_names():
    assert signal_name(11) == "SIGSEGV"
