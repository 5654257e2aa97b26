"""Failpoints: syntax and meaning; anything else is refused when a job starts."""

from __future__ import annotations

import os
import signal

import pytest

from coarse.process.failpoints import Failpoints, parse_failpoints
from coarse.settings import Settings


def is_met(text, place, **numbers):
    (failpoint,) = parse_failpoints(text)
    return failpoint.is_met(place, numbers)


def test_a_place_alone_is_met_whatever_the_numbers():
    assert is_met("step.pull:kill", "step.pull", step=3)
    assert not is_met("step.pull:kill", "step.push", step=3)


def test_every_number_must_hold():
    text = "step.push:kill@rank=1,step=7,count=2"
    assert is_met(text, "step.push", rank=1, step=7, count=2, attempt=0)
    assert not is_met(text, "step.push", rank=1, step=7, count=3)
    assert not is_met(text, "step.push", rank=0, step=7, count=2)
    assert not is_met(text, "step.push", step=7, count=2)


def test_several_are_separated_by_semicolons():
    assert len(parse_failpoints("step.done:kill; backward.push:kill@attempt=1;")) == 2
    assert parse_failpoints("") == ()


@pytest.mark.parametrize(
    "text",
    [
        "step.push",
        "step.push:raise",
        "somewhere:kill",
        "step.push:kill@",
        "step.push:kill@rank",
        "step.push:kill@rank=x",
        "step.push:kill-md",
    ],
)
def test_anything_else_is_refused_by_the_settings(text):
    with pytest.raises(ValueError, match="COARSE_FAILPOINTS"):
        Settings(failpoints=text)


def test_a_worker_dies_at_its_failpoint_and_nowhere_else():
    pid = os.fork()
    if pid == 0:
        failpoints = Failpoints(parse_failpoints("step.push:kill@rank=1,attempt=2"), rank=1, attempt=2)
        failpoints.reach("step.pull", step=1)
        failpoints.reach("step.push", step=1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_worker_is_stopped_where_that_is_asked_for():
    pid = os.fork()
    if pid == 0:
        Failpoints(parse_failpoints("step.push:stop"), rank=0, attempt=0).reach("step.push", step=1)
        os._exit(0)
    assert os.WSTOPSIG(os.waitpid(pid, os.WUNTRACED)[1]) == signal.SIGSTOP
    os.kill(pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_memory_device_dies_instead_where_that_is_asked_for():
    asked = []
    (failpoint,) = parse_failpoints("step.pull:kill-md3@step=2")
    assert failpoint.device == 3
    pid = os.fork()
    if pid == 0:
        signal.pause()
    failpoints = Failpoints(
        (failpoint,), rank=0, attempt=0, device_pid=lambda device: asked.append(device) or pid
    )
    failpoints.reach("step.pull", step=1)
    assert asked == []
    failpoints.reach("step.pull", step=2)
    assert asked == [3]
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_there_are_none_by_default():
    assert not Failpoints(parse_failpoints(Settings().failpoints), rank=0, attempt=0)
