"""Memory devices that are forks (preloaded_devices.py) inherit what others do."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from harness import job_of_test


def described(pid: int) -> dict[str, object]:
    """A process as seen by others."""
    process = Path(f"/proc/{pid}")
    environment = (process / "environ").read_text().strip("\0").split("\0")
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
    kept = ("SigBlk", "SigIgn", "SigCgt", "Umask", "Cpus_allowed", "Groups", "CapEff")
    return {
        "environment": sorted(each for each in environment if not each.startswith("TMPDIR=")),
        "has_folder_of_job": any(each.startswith("TMPDIR=") for each in environment),
        "is_own_group": os.getpgid(pid) == pid,
        "session": os.getsid(pid),
        "status": {name: status[name].strip() for name in kept},
        "limits": (process / "limits").read_text().splitlines(),
        "folder": os.readlink(process / "cwd"),
        "streams": [os.readlink(process / "fd" / name) for name in "012"],
        "descriptors": len(os.listdir(process / "fd")),
    }


def devices_of(job, *, is_limited: bool = False) -> list[tuple[int, dict[str, object]]]:
    """The memory devices of worker 0, of two: whether each is its child, and how others see it."""

    def worker(me):
        if is_limited:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with me.join(memory_devices=2) as session:
            session.barrier()
            seen = []
            for pid in session.device_pids:
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                seen.append([parent == os.getpid(), described(pid)])
            session.barrier()
            return seen

    return job.run(2, worker)[0]


def test_forks_are_as_devices_that_are_started_as_for_users(job):
    with job_of_test() as as_for_users:
        first, *_ = devices_of(as_for_users)
    second, *_ = devices_of(job)
    assert [first[0], second[0]] == [True, False], "only one is a child of its worker"
    assert second[1] == first[1]


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_CORE)[1] == 0, reason="the limit is 0 already")
def test_a_worker_that_has_another_limit_starts_its_devices_as_for_users(job):
    for is_child, device in devices_of(job, is_limited=True):
        assert is_child
        (line,) = (line for line in device["limits"] if line.startswith("Max core file size"))
        assert line.split()[4:6] == ["0", "0"]
