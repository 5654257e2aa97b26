"""A measurement on a machine that does other work is refused."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from experiments import quiet
from experiments.quiet import ATTEMPTS, BusyMachineError, measure_in_quiet, quiet_throughout, require_quiet

refuse = quiet._refuse


def test_other_work_is_told_with_its_share():
    with subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) as busy:
        try:
            with pytest.raises(
                BusyMachineError, match=r"trial: other work takes \d+% of .* at most 1% is accepted. End it"
            ):
                require_quiet("trial", most_busy=0.01, sample_s=0.5)
        finally:
            busy.kill()


def test_other_work_during_a_measurement_is_told():
    with subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) as busy:
        try:
            with (
                pytest.raises(BusyMachineError, match=r"trial: other work takes \d+% of"),
                quiet_throughout("trial", most_busy=0.01),
            ):
                time.sleep(0.5)
        finally:
            busy.kill()


def test_a_disturbed_measurement_is_made_again(monkeypatch):
    shares = iter([0.5, 0.3, 0.0])
    monkeypatch.setattr(quiet, "_refuse", lambda what, busy, most: refuse(what, next(shares), most))
    made = []
    assert measure_in_quiet("trial", lambda: made.append(len(made)) or made[-1]) == 2
    assert made == [0, 1, 2]


def test_a_measurement_that_is_always_disturbed_is_refused():
    made = []
    with subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) as busy:
        try:
            with pytest.raises(BusyMachineError, match="trial: other work takes"):
                measure_in_quiet("trial", lambda: made.append(time.sleep(0.2)), most_busy=0.01)
        finally:
            busy.kill()
    assert len(made) == ATTEMPTS


def test_the_measurements_own_work_does_not_count(monkeypatch):
    spins = "import time; end = time.process_time() + 1.0\nwhile time.process_time() < end: pass"
    told = []
    monkeypatch.setattr(quiet, "_refuse", lambda what, busy, most_busy: told.append(busy))
    with quiet_throughout("with its child"):
        subprocess.run([sys.executable, "-S", "-c", spins], check=True)
    monkeypatch.setattr(quiet, "_own_s", lambda: 0.0)
    with quiet_throughout("as if the child were another's"):
        subprocess.run([sys.executable, "-S", "-c", spins], check=True)
    assert told[0] < told[1]


def test_the_work_of_orphans_is_the_measurements_own(monkeypatch):
    spins = "import time; end = time.process_time() + 1.0\nwhile time.process_time() < end: pass"
    leaves = f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {spins!r}])"
    before_s = quiet._own_s()
    told = []
    monkeypatch.setattr(
        quiet, "_refuse", lambda what, busy, most_busy: told.append(quiet._own_s() - before_s)
    )
    with quiet_throughout("whose child leaves a child"):
        subprocess.run([sys.executable, "-S", "-c", leaves], check=True)
    assert told[0] >= 1.0


def test_work_within_the_accepted_share_is_no_error():
    require_quiet("trial", most_busy=1.0, sample_s=0.1)
