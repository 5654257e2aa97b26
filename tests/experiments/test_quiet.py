"""A measurement on a machine that does other work is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from experiments.quiet import BusyMachineError, require_quiet


def test_other_work_is_told_with_its_share():
    with subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) as busy:
        try:
            with pytest.raises(
                BusyMachineError, match=r"trial: other work takes \d+% of .* at most 1% is accepted. End it"
            ):
                require_quiet("trial", most_busy=0.01, sample_s=0.5)
        finally:
            busy.kill()


def test_work_within_the_accepted_share_is_no_error():
    require_quiet("trial", most_busy=1.0, sample_s=0.1)
