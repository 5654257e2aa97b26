"""Faults while a checkpoint is saved: the newest complete one always loads, and training continues."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from saved_states import OPTIONS, begin, check_contents, save, source

from coarse.checkpoint.catalogue import find_newest, names_of, remove_unfinished
from coarse.checkpoint.folder import Folder
from coarse.checkpoint.names import CheckpointName
from coarse.checkpoint.saver import Saver, SourceWriting, WorkerState
from coarse.checkpoint.writer import SaveDetails, write_worker_state
from coarse.errors import CheckpointError
from coarse.kernels import _native
from coarse.metrics.reader import MetricsReader
from coarse.metrics.writer import MetricsWriter


def operations(path: Path, work) -> list[tuple[str, str]]:
    """The operations of `work`, in order."""
    seen: list[tuple[str, str]] = []
    work(path, lambda *operation: seen.append(operation))
    return seen


def killing(number: int):
    """A failpoint that kills the process before operation `number`."""
    count = 0

    def observe(operation, name):
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return observe


def run_and_kill(path: Path, work, number: int) -> int:
    """Runs `work` in a child process, killed before operation `number`; returns how the child ended."""
    pid = os.fork()
    if pid == 0:
        try:
            work(path, killing(number))
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def save_with_retention(path, observe):
    """A job's save at step 3, after steps 1 and 2: keeps two checkpoints, so it removes step 1."""
    saver = Saver(Folder.open(path, observe=observe), keep=2)
    # In this thread: the whole process is killed anyway, and a forked child has no other threads.
    writing = SourceWriting(saver.folder, source(3), SaveDetails(has_worker_state=True), OPTIONS)
    saver._save(writing, WorkerState(step=3, save_number=0, rank=0, state={"position": 3}))


def newest_step(path: Path) -> int:
    with Folder.open(path) as parent, find_newest(parent) as checkpoint:
        check_contents(checkpoint)
        return checkpoint.step


def test_killed_at_every_operation_the_newest_complete_checkpoint_loads(tmp_path):
    save(tmp_path / "whole", 1, 2)
    done = operations(tmp_path / "whole", save_with_retention)
    kinds = {operation for operation, _ in done}
    assert kinds == {"create", "write", "fsync", "rename", "remove"}
    renamed = next(
        i for i, (kind, name) in enumerate(done, 1) if (kind, name) == ("rename", "step-3.tmp -> step-3")
    )
    for number in range(1, len(done) + 1):
        path = tmp_path / f"kill-{number}"
        save(path, 1, 2)
        assert run_and_kill(path, save_with_retention, number) == -signal.SIGKILL
        assert newest_step(path) == (3 if number > renamed else 2), done[number - 1]
        # The job continues from there without consequences.
        with Folder.open(path) as parent:
            remove_unfinished(parent)
        save_with_retention(path, None)
        assert newest_step(path) == 3
        assert not list(path.glob("*.tmp"))


def failing(number: int, code: int):
    """A failpoint that makes operation `number` fail, and all later ones except removals."""
    count = 0

    def observe(operation, name):
        nonlocal count
        count += operation != "remove"
        if count >= number and operation != "remove":
            raise OSError(code, os.strerror(code), name)

    return observe


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_any_operation_leaves_the_one_before(tmp_path, code):
    done = operations(tmp_path, lambda path, observe: save(path, 1, observe=observe))
    path = tmp_path / "job"
    save(path, 1)
    for number in range(
        1, len(done)
    ):  # all except the last fsync of the parent: by then the checkpoint has its name
        with pytest.raises(OSError, match=os.strerror(code)) as raised:
            save(path, 2, observe=failing(number, code))
        assert f"'{tmp_path}" in str(raised.value)
        assert newest_step(path) in (1, 2)
        assert not list(path.glob("*.tmp"))


def metrics_of_one_worker():
    fd = _native.create_sealed_memory("metrics", _native.metrics_bytes(0, 1))
    try:
        return MetricsReader.of_segment(fd, 0, (0,))
    finally:
        os.close(fd)


def test_training_goes_on_while_the_disk_is_full_until_too_many_saves_failed(tmp_path):
    full = threading.Event()

    def observe(operation, name):
        if full.is_set() and operation == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    reader = metrics_of_one_worker()
    saver = Saver(
        Folder.open(tmp_path, observe=observe),
        most_failures=2,
        metrics=lambda: MetricsWriter(reader.worker(0)),
    )

    def save_step(step):
        assert begin(saver, source(step))
        saver.wait()

    save_step(1)
    full.set()
    save_step(2)
    saver.check()
    assert saver.counts.num_failed_in_row == 1
    full.clear()
    save_step(3)
    assert saver.counts.num_failed_in_row == 0
    full.set()
    save_step(4)
    saver.check()
    save_step(5)
    with pytest.raises(CheckpointError, match=r"2 saves in a row.*No space left"):
        saver.check()
    assert (saver.counts.num_saved, saver.counts.num_failed) == (2, 3)
    metrics = reader.read()
    assert metrics['coarse_checkpoint_saves_total{worker="0",outcome="saved"}'] == 2
    assert metrics['coarse_checkpoint_saves_total{worker="0",outcome="failed"}'] == 3
    assert metrics['coarse_checkpoint_written_bytes_total{worker="0"}'] == 2 * saver.counts.last_bytes
    assert metrics['coarse_checkpoint_save_seconds_count{worker="0"}'] == 2
    saver.close()
    assert newest_step(tmp_path) == 3


def test_a_disk_that_cannot_take_the_workers_own_state_keeps_nothing_of_it(tmp_path):
    """A save writes this state first; another worker's state may arrive after the save has failed."""
    full = threading.Event()

    def observe(operation, name):
        if full.is_set() and operation == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    def own_state(step, rank):
        return WorkerState(step=step, save_number=step, rank=rank, state={})

    def details(step):
        return SaveDetails(has_worker_state=True, world_size=2, save_number=step)

    saver = Saver(Folder.open(tmp_path, observe=observe))
    late = Saver(Folder.open(tmp_path))
    full.set()
    saver.start(SourceWriting(saver.folder, source(1), details(1), OPTIONS), own_state(1, 0))
    saver.wait()
    assert saver.counts.num_failed == 1
    assert not list(tmp_path.glob("*.tmp/*"))
    late.start_worker_state(own_state(1, 1))
    late.wait()
    full.clear()
    late.start_worker_state(own_state(2, 1))
    saver.start(SourceWriting(saver.folder, source(2), details(2), OPTIONS), own_state(2, 0))
    saver.wait()
    assert saver.counts.num_saved == 1
    assert not list(tmp_path.glob("*.tmp"))
    for each in (saver, late):
        each.close()


def test_a_folder_that_was_removed_meanwhile_is_named(tmp_path):
    path = tmp_path / "checkpoints"
    path.mkdir()
    saver = Saver(Folder.open(path))
    path.rmdir()
    assert begin(saver, source(1))
    saver.wait()
    assert "the folder has been removed or renamed" in saver.counts.last_error
    saver.close()


LIMITED = """
import resource, signal, sys
from pathlib import Path
from saved_states import save
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
try:
    save(Path(sys.argv[1]), 2)
except OSError as error:
    print(error.errno)
"""


def test_a_real_limit_of_file_size(tmp_path):
    save(tmp_path, 1)
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    assert int(result.stdout) == errno.EFBIG
    assert newest_step(tmp_path) == 1
    assert not list(tmp_path.glob("*.tmp"))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 24 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk, and not in every container")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_real_disk_that_is_full(small_disk):
    step = 0

    def fill():
        nonlocal step
        while True:
            save(small_disk, step + 1)
            step += 1

    with pytest.raises(OSError, match=rf"No space left on device: '{small_disk}/step-\d+\.tmp/.*'$"):
        fill()
    assert step > 0
    assert newest_step(small_disk) == step
    assert not list(small_disk.glob("*.tmp"))


# One at a time.


class Held:
    """A source that waits in the middle of being read."""

    def __init__(self, step):
        self._source = source(step)
        self.step, self.tensors = step, self._source.tensors
        self.is_read, self.may_go_on, self.is_closed = threading.Event(), threading.Event(), False

    def read(self, tensor, reserve):
        self.is_read.set()
        assert self.may_go_on.wait(20)
        yield from self._source.read(tensor)

    def close(self):
        self.is_closed = True


def test_a_save_that_comes_too_early_is_skipped_and_counted(tmp_path):
    saver = Saver(Folder.open(tmp_path))
    first, second = Held(1), Held(2)
    assert begin(saver, first)
    assert first.is_read.wait(20)
    assert saver.is_busy
    assert not begin(saver, second)
    assert second.is_closed
    first.may_go_on.set()
    saver.wait()
    assert first.is_closed
    assert not saver.is_busy
    assert (saver.counts.num_saved, saver.counts.num_skipped, saver.counts.num_failed) == (1, 1, 0)
    saver.close()
    with Folder.open(tmp_path) as parent:
        assert names_of(parent) == [CheckpointName(1)]


def test_a_source_that_breaks_is_a_failed_save(tmp_path):
    class Broken(Held):
        def read(self, tensor, reserve):
            raise RuntimeError("the device is gone")

    saver = Saver(Folder.open(tmp_path))
    begin(saver, Broken(1))
    saver.wait()
    assert "the device is gone" in saver.counts.last_error
    saver.close()


# Workers' own state.


def test_the_state_of_all_workers_is_awaited(tmp_path):
    details = SaveDetails(world_size=2, save_number=4, has_worker_state=True)
    saver = Saver(Folder.open(tmp_path))
    with Folder.open(tmp_path) as other:
        # The remains of an earlier failed save of the same step must not count for this save.
        write_worker_state(other, step=1, save_number=3, rank=1, state="old")
        begin(saver, source(1), details, "zero")
        write_worker_state(other, step=1, save_number=4, rank=1, state="one")
    saver.wait()
    assert saver.counts.last_error == ""
    saver.close()
    with Folder.open(tmp_path) as parent, find_newest(parent) as checkpoint:
        assert checkpoint.worker_states() == ["zero", "one"]


def test_a_worker_whose_state_does_not_come_is_named(tmp_path):
    saver = Saver(Folder.open(tmp_path))
    details = SaveDetails(world_size=2, has_worker_state=True)
    begin(saver, source(1), details, "zero", replace(OPTIONS, state_timeout_s=0.01))
    saver.wait()
    assert "worker-1.json did not appear" in saver.counts.last_error
    saver.close()
    assert list(tmp_path.iterdir()) == []
