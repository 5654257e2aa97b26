"""Memory of a job as the kernel counts it: all its processes, untouched shared memory, limits."""

from __future__ import annotations

import subprocess
import sys

import pytest

from coarse.bench.harness import control_group
from coarse.bench.harness.control_group import ControlGroup, NoControlGroupError
from coarse.bench.harness.job_memory import JobMemory
from coarse.bench.memory import smallest_limit

GRANDCHILD = (
    "import os, sys; block = b'x' * (48 << 20); fd = os.memfd_create('untouched'); "
    "os.posix_fallocate(fd, 0, 48 << 20); print('ready', flush=True); sys.stdin.read()"
)
CHILD = (
    "import subprocess, sys; "
    f"sys.exit(subprocess.run([sys.executable, '-c', {GRANDCHILD!r}], start_new_session=True).returncode)"
)
MIB = 1 << 20


def run_until_ready(command) -> None:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        process.stdin.close()
    assert process.returncode == 0


def test_a_jobs_peak_has_processes_of_its_processes_and_memory_that_nobody_has_touched():
    with JobMemory() as job:
        run_until_ready(job.command([sys.executable, "-c", CHILD]))
    assert job.peak_bytes > 96 * MIB
    assert ("control group" in job.how) == (job.group is not None)


def test_where_no_group_can_be_made_the_error_says_what_to_do(monkeypatch, tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/session\n")
    monkeypatch.setattr(control_group, "_ROOT", tmp_path)
    with pytest.raises(NoControlGroupError, match=r"run as root, or under systemd-run --scope"):
        ControlGroup()
    with JobMemory() as job:
        pass
    assert job.group is None


@pytest.mark.parametrize("least_mib", [500, 640, 701, 999])
def test_the_smallest_limit_is_found_by_halves(least_mib):
    tried = []

    def trains_in(limit_bytes):
        tried.append(limit_bytes)
        return limit_bytes >= least_mib * MIB

    limit_bytes, resolution_bytes = smallest_limit(1000 * MIB, trains_in)
    assert limit_bytes - resolution_bytes < least_mib * MIB <= limit_bytes
    assert resolution_bytes <= 16 * MIB
    assert len(tried) <= 6
