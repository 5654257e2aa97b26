"""The first failure is the cause, not its loudest consequence; its last traceback is what the user reads."""

from __future__ import annotations

import pytest

from coarse.cli.failure import (
    WorkerExit,
    first_failure,
    last_traceback,
    report,
    reports_own_error,
    signal_name,
)

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
