"""Retention keeps the newest and pinned checkpoints, and removes nothing before the new one is verified."""

from __future__ import annotations

import pytest
from saved_states import begin, save, source

from coarse.checkpoint.catalogue import names_of, pin, prune, read_hint, unpin
from coarse.checkpoint.folder import Folder
from coarse.checkpoint.manifest import MANIFEST_NAME
from coarse.checkpoint.names import CheckpointName
from coarse.checkpoint.saver import Saver
from coarse.errors import CheckpointError


def steps_in(path):
    with Folder.open(path) as parent:
        return [name.step for name in names_of(parent)]


def run_saver(path, *steps, keep):
    saver = Saver(Folder.open(path, create=True), keep=keep)
    for step in steps:
        begin(saver, source(step))
        saver.wait()
    counts = saver.counts
    saver.close()
    return counts


def test_the_newest_stay(tmp_path):
    counts = run_saver(tmp_path, 1, 2, 3, 4, keep=2)
    assert counts.num_saved == 4
    assert steps_in(tmp_path) == [3, 4]
    with Folder.open(tmp_path) as parent:
        assert read_hint(parent) == CheckpointName(4)


def test_of_several_saves_of_a_step_the_last_one_stays(tmp_path):
    for attempt in range(4):
        run_saver(tmp_path, 5, keep=1)
        with Folder.open(tmp_path) as parent:
            assert names_of(parent) == [CheckpointName(5, attempt)]


def test_pinned_ones_stay_until_they_are_unpinned(tmp_path):
    save(tmp_path, 1, 2)
    with Folder.open(tmp_path) as parent:
        pin(parent, CheckpointName(1))
        pin(parent, CheckpointName(1))
    run_saver(tmp_path, 3, 4, keep=1)
    assert steps_in(tmp_path) == [1, 4]
    with Folder.open(tmp_path) as parent:
        unpin(parent, CheckpointName(1))
        assert prune(parent, keep=1) == [CheckpointName(1)]
    assert steps_in(tmp_path) == [4]


def test_what_is_not_whole_cannot_be_pinned(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step-1" / MANIFEST_NAME).unlink()
    with Folder.open(tmp_path) as parent, pytest.raises(CheckpointError, match="did not finish"):
        pin(parent, CheckpointName(1))


def test_old_ones_stay_while_the_new_one_is_damaged(tmp_path):
    damaged = []

    def damage(operation, name):
        """Changes a byte on disk directly after the checkpoint was named."""
        if (operation == "rename" and name == "latest") or name.endswith("-> latest"):
            file = tmp_path / "step-3" / "tensors-00001.safetensors"
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
            damaged.append(name)

    save(tmp_path, 1, 2)
    saver = Saver(Folder.open(tmp_path, observe=damage), keep=1)
    begin(saver, source(3))
    saver.wait()
    assert damaged
    assert "CRC32C does not match" in saver.counts.last_error
    saver.close()
    assert steps_in(tmp_path) == [1, 2, 3]
    with Folder.open(tmp_path) as parent, pytest.raises(CheckpointError, match="CRC32C does not match"):
        prune(parent, keep=1)
    assert steps_in(tmp_path) == [1, 2, 3]


def test_torn_ones_do_not_count(tmp_path):
    save(tmp_path, 1, 2, 3)
    (tmp_path / "step-3" / MANIFEST_NAME).unlink()
    run_saver(tmp_path, 4, keep=2)
    assert steps_in(tmp_path) == [2, 3, 4]


def test_a_job_that_went_back_keeps_what_it_saves(tmp_path):
    save(tmp_path, 8, 9)
    run_saver(tmp_path, 5, keep=1)
    assert steps_in(tmp_path) == [5, 9]


def test_folders_of_others_are_left_alone(tmp_path):
    save(tmp_path, 1, 2)
    (tmp_path / "step-1" / "mine").mkdir()
    with Folder.open(tmp_path) as parent, pytest.raises(CheckpointError, match="mine"):
        prune(parent, keep=1)
    assert any("mine" in str(path) for path in tmp_path.rglob("*"))


def test_at_least_one_is_kept(tmp_path):
    with Folder.open(tmp_path) as parent, pytest.raises(ValueError, match="keep must be at least 1"):
        prune(parent, keep=0)
