"""The search for persistent memory devices: only in this user's directories, despite entries of other users."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest

from coarse.env import Attempt
from coarse.machine.partition_table import PartitionTable
from coarse.process.scratch import hold
from coarse.security.local_sockets import short_address
from coarse.settings import Settings
from coarse.startup.persistent_devices import Keeping, find_persistent_devices
from coarse.wire.persistent_sessions import (
    PersistentDevices,
    find_session_directory,
    forget_job,
    leave_session_directory,
    make_session_directory,
    persistent_pids,
)
from coarse.wire.socket_directory import TOKEN_FILE, OwnSocket, socket_path


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_sessions_of_jobs_have_directories_of_their_own():
    found = {make_session_directory(job, session) for job in "ab" for session in "cd"}
    assert len(found) == 4


def test_what_is_left_there_is_found_and_forgotten(temporary):
    directory = make_session_directory("job", "session")
    assert PersistentDevices.read(directory) is None
    kept = PersistentDevices(workers=((0,), (1, 2)), memories=("host", "numa:2"), pids=(11, 12))
    kept.write(directory)
    assert PersistentDevices.read(directory) == kept
    assert persistent_pids("job") == {11, 12}
    assert persistent_pids("another job") == set()
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
        assert persistent_pids("job") == set()
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


def open_to_others(root, theirs):
    root.mkdir()
    root.chmod(0o755)


def a_link(root, theirs):
    theirs.chmod(0o700)
    root.symlink_to(theirs)


def of_another_user(root, theirs):
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory to another user")
    root.mkdir(mode=0o700)
    os.chown(root, 65534, 65534)


def a_file(root, theirs):
    root.touch()


@pytest.fixture(params=[open_to_others, a_link, of_another_user, a_file])
def taken(request, temporary):
    """The usual name, which somebody else has taken, with a session of this user's job prepared behind it."""
    root, theirs = temporary / f"coarse-{os.geteuid()}", temporary / "theirs"
    real = make_session_directory("job", "session")
    name = real.relative_to(root)
    shutil.rmtree(root)
    (theirs / "folder").mkdir(parents=True)
    (theirs / "folder" / "file").touch()
    os.utime(theirs / "folder", (1, 1))
    request.param(root, theirs)
    if root.is_dir():
        (root / name).mkdir(parents=True, mode=0o700)
        PersistentDevices(workers=((0,), (1,)), memories=("host", "host"), pids=(1, 1)).write(root / name)
        (root / "old").symlink_to(theirs)
    return root


def test_a_name_that_another_user_has_taken_stops_nobody(taken, temporary, caplog):
    """Devices are kept elsewhere, and the attempt after finds them there."""
    table = PartitionTable.even(num_workers=2, num_devices=2)
    keeping = Keeping(session="session", attempt=Attempt(job="job", number=1))
    assert find_session_directory("job", "session") is None, "what another user has prepared is nobody's"
    assert persistent_pids("job") == set()
    assert find_persistent_devices(keeping, table) is None
    directory = make_session_directory("job", "session")
    root = directory.parent.parent
    assert root != taken
    assert root.stat().st_mode & 0o777 == 0o700
    assert f"{taken} " in caplog.text
    assert f"using {root} instead" in caplog.text
    kept = PersistentDevices(workers=((0,), (1,)), memories=("host", "host"), pids=(11, 12))
    kept.write(directory)
    assert find_session_directory("job", "session") == directory
    assert persistent_pids("job") == {11, 12}
    assert make_session_directory("other job", "session").parent.parent == root
    for job in ("job", "other job"):
        forget_job(job)
    assert not root.exists()
    assert (temporary / "theirs" / "folder" / "file").exists(), (
        "nothing is removed through another user's link"
    )


def test_devices_that_are_kept_are_found_after_the_usual_name_is_free_again(taken):
    directory = make_session_directory("job", "session")
    if taken.is_dir() and not taken.is_symlink():
        shutil.rmtree(taken)
    else:
        taken.unlink()
    make_session_directory("another job", "session")
    assert find_session_directory("job", "session") == directory


def test_a_job_is_named_by_its_launcher():
    torchrun = {"TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_RESTART_COUNT": "2", "MASTER_PORT": "1"}
    assert Attempt.from_environment(torchrun) == Attempt(job="mine", number=2)
    unnamed = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    assert Attempt.from_environment(unnamed) == Attempt(job="here:1", number=0)


@pytest.mark.parametrize("other", [{"algorithm": "ring"}, {"algorithm": "exchange"}, {"machine": "aws-p3"}])
def test_distinct_memories_are_not_kept(other):
    with pytest.raises(ValueError, match="COARSE_KEEP_DEVICES cannot be combined with"):
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
        PersistentDevices(workers=((0,),), memories=("host",), pids=(os.getpid(),)).write(directory)
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
