"""The search for the largest batch, and its memory limit."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coarse.bench.harness.control_group import ControlGroup
from experiments.fig16_largest_batch.run import Trial, largest

MIB = 1 << 20


@given(fitting=st.integers(0, 40), most=st.integers(1, 32))
def test_the_largest_batch_is_found_and_none_tried_twice(fitting, most):
    tried = []

    def attempt(batch):
        tried.append(batch)
        return Trial(batch=batch, steps_s=(1.0,), peak_bytes=0) if batch <= fitting else None

    found = largest(attempt, most)
    assert (found.batch if found else 0) == min(fitting, most)
    assert len(set(tried)) == len(tried)
    assert all(1 <= batch <= most for batch in tried)


@pytest.fixture
def limit():
    try:
        group = ControlGroup(64 * MIB)
    except PermissionError as error:
        pytest.skip(str(error))
    with group:
        yield group


def take(limit, num_mib):
    command = limit.command([sys.executable, "-S", "-c", f"print(len(bytearray({num_mib} << 20)))"])
    return subprocess.run(command, capture_output=True, text=True, timeout=150)


def test_what_stays_within_the_limit_lives(limit):
    assert take(limit, 16).stdout == f"{16 * MIB}\n"
    assert limit.num_killed == 0
    assert 16 * MIB <= limit.peak_bytes <= 64 * MIB


def test_what_goes_beyond_the_limit_is_killed(limit):
    assert take(limit, 128).returncode == -9
    assert limit.num_killed == 1


def test_nothing_is_left_of_a_limit():
    try:
        group = ControlGroup(64 * MIB)
    except PermissionError as error:
        pytest.skip(str(error))
    with group:
        command = group.command([sys.executable, "-S", "-c", "print(flush=True); input()"])
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process.stdout.readline()
    assert process.wait(timeout=30) == -9
    process.stdin.close()
    process.stdout.close()
    assert not group._group.exists()
