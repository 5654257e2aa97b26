"""Where kept memory devices are found: in directories of this user alone, which nobody else can have prepared."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from coarse.client.kept_devices import Keeping, find_kept_devices
from coarse.env import Attempt
from coarse.errors import RendezvousError
from coarse.machine.partition_table import PartitionTable
from coarse.proxy.kept_directory import (
    KeptDevices,
    forget_job,
    kept_pids,
    leave_session_directory,
    make_session_directory,
    session_directory,
)
from coarse.proxy.socket_directory import TOKEN_FILE, OwnSocket, short_address, socket_path
from coarse.scratch import hold
from coarse.settings import Settings


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_sessions_of_jobs_have_directories_of_their_own():
    found = {session_directory(job, session) for job in "ab" for session in "cd"}
    assert len(found) == 4


def test_what_is_left_there_is_found_and_forgotten(temporary):
    directory = make_session_directory("job", "session")
    assert KeptDevices.read(directory) is None
    kept = KeptDevices(workers=((0,), (1, 2)), memories=("host", "numa:2"), pids=(11, 12))
    kept.write(directory)
    assert KeptDevices.read(directory) == kept
    assert kept_pids("job") == {11, 12}
    assert kept_pids("another job") == set()
    assert make_session_directory("job", "session") == directory
    assert list(directory.iterdir()) == []
    forget_job("another job")
    assert directory.exists()
    forget_job("job")
    assert list(temporary.iterdir()) == []


def test_a_directory_that_only_another_user_can_enter_is_nobody_elses_business(temporary):
    """Jobs whose memory devices are not kept look for what others may have left, too."""
    user = os.geteuid()
    temporary.chmod(0)
    try:
        if user == 0:
            os.seteuid(65534)  # whom modes do stop
        forget_job("job")
        assert kept_pids("job") == set()
    finally:
        os.seteuid(user)
        temporary.chmod(0o700)


def test_what_a_job_has_left_that_was_killed_goes_with_the_next_one(temporary):
    """Unless its memory devices still wait."""
    directories = [make_session_directory(job, "session") for job in ("killed", "waiting")]
    lock = hold(directories[1])
    for directory in directories:
        (directory / TOKEN_FILE).touch()
        os.utime(directory, (1, 1))
    next_one = make_session_directory("next", "session")
    assert [path.exists() for path in directories] == [False, True]
    assert not directories[0].parent.exists()
    assert next_one.exists()
    os.close(lock)


@pytest.mark.parametrize("kind", ["open to others", "link"])
def test_a_directory_that_others_can_enter_is_refused(temporary, kind):
    root = temporary / f"coarse-{os.geteuid()}"
    if kind == "link":
        (temporary / "theirs").mkdir(mode=0o700)
        root.symlink_to(temporary / "theirs")
    else:
        root.mkdir()
        root.chmod(0o755)
    table = PartitionTable.even(num_workers=2, num_devices=2)
    with pytest.raises(RendezvousError, match="no directory of this user alone"):
        make_session_directory("job", "session")
    with pytest.raises(RendezvousError, match="no directory of this user alone"):
        find_kept_devices(Keeping(session="session", attempt=Attempt(job="job", number=1)), table)


def test_nothing_is_removed_through_a_directory_of_somebody_else(temporary):
    root, theirs = temporary / f"coarse-{os.geteuid()}", temporary / "theirs"
    (theirs / "folder").mkdir(parents=True)
    (theirs / "folder" / "file").touch()
    os.utime(theirs / "folder", (1, 1))
    root.mkdir()
    root.chmod(0o755)
    (root / "job").symlink_to(theirs)
    with pytest.raises(RendezvousError, match="no directory of this user alone"):
        make_session_directory("job", "session")
    assert (theirs / "folder" / "file").exists()


def test_a_job_is_named_by_its_launcher():
    torchrun = {"TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_RESTART_COUNT": "2", "MASTER_PORT": "1"}
    assert Attempt.from_environment(torchrun) == Attempt(job="mine", number=2)
    unnamed = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    assert Attempt.from_environment(unnamed) == Attempt(job="here:1", number=0)


@pytest.mark.parametrize("other", [{"algorithm": "ring"}, {"algorithm": "exchange"}, {"machine": "aws-p3"}])
def test_distinct_memories_are_not_kept(other):
    with pytest.raises(ValueError, match="COARSE_KEEP_DEVICES does not go with"):
        Settings(keep_devices=1.0, **other)


def listening(directory, device=0):
    """As a memory device does; returns the place, and the socket to be closed."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with short_address(socket_path(directory, device)) as address:
        listener.bind(address)
    return OwnSocket(Path(socket_path(directory, device))), listener


@pytest.mark.parametrize("is_noted", [False, True])
def test_a_device_that_ends_leaves_the_next_session_of_the_same_name_alone(is_noted):
    """Also where processes of both have the same number, and before it is noted which the new ones are."""
    ending, old = listening(make_session_directory("job", "session"))
    directory = make_session_directory("job", "session")
    new_place, new = listening(directory)
    if is_noted:
        KeptDevices(workers=((0,),), memories=("host",), pids=(os.getpid(),)).write(directory)
    leave_session_directory(ending)
    ending.abandon()
    assert new_place.path.exists()
    leave_session_directory(new_place)
    assert not directory.exists()
    for each in (old, new, ending, new_place):
        each.close()


def test_the_last_device_takes_the_directory_of_a_session_that_never_came_about_along():
    directory = make_session_directory("job", "session")
    places = [listening(directory, device) for device in range(2)]
    (directory / TOKEN_FILE).write_text("token")
    for place, listener in places:
        assert directory.exists()
        leave_session_directory(place)
        listener.close()
        place.close()
    assert not directory.exists()
