"""Checkpoint files: the state is restored, other libraries read them, and damage is reported with the reason."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import mmap
import os
import shutil
import stat
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from saved_states import OPTIONS, TENSORS, check_contents, content, save, source

from coarse.checkpoint.catalogue import (
    find_newest,
    list_checkpoints,
    names_of,
    open_verified,
    read_back,
    unfinished_in,
)
from coarse.checkpoint.folder import Folder
from coarse.checkpoint.manifest import FORMAT_VERSION, MANIFEST_NAME, Manifest
from coarse.checkpoint.names import CheckpointName
from coarse.checkpoint.reader import open_checkpoint
from coarse.checkpoint.source import ArraySource, SavedTensor
from coarse.checkpoint.writer import SaveCancelledError, SaveDetails, WriteOptions, write_checkpoint
from coarse.errors import CheckpointError

FIRST = CheckpointName(1)


def newest(path):
    with Folder.open(path) as parent:
        return find_newest(parent)


def reason_of(path, name=FIRST):
    """The reason why a checkpoint does not load."""
    with Folder.open(path) as parent, pytest.raises(CheckpointError) as caught:
        open_verified(parent, name)
    return str(caught.value)


def test_a_state_comes_back(tmp_path):
    save(tmp_path, 7)
    with newest(tmp_path) as checkpoint:
        assert checkpoint.step == 7
        check_contents(checkpoint)
        assert len(checkpoint.manifest.tensor_files) > 1


def test_tensors_load_into_memory_in_any_order(tmp_path):
    save(tmp_path, 7)
    memory = {tensor: bytearray(tensor.nbytes) for tensor in reversed(TENSORS[1:])}
    with newest(tmp_path) as checkpoint:
        checkpoint.load({tensor: memoryview(each) for tensor, each in memory.items()})
    assert all(bytes(each) == content(tensor, 7) for tensor, each in memory.items())


def test_a_checkpoint_is_a_source(tmp_path):
    save(tmp_path / "one", 7)
    with Folder.open(tmp_path / "two", create=True) as parent:
        write_checkpoint(parent, newest(tmp_path / "one"), SaveDetails(), options=OPTIONS)
    with newest(tmp_path / "two") as copy:
        check_contents(copy)


def test_files_open_with_the_safetensors_library(tmp_path):
    numpy_files = pytest.importorskip("safetensors")
    save(tmp_path, 7)
    found = {}
    for file in sorted((tmp_path / "step-7").glob("*.safetensors")):
        for name, entry in numpy_files.deserialize(file.read_bytes()):
            found[name] = (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
    assert found == {tensor.name: (tensor.dtype, tensor.shape, content(tensor, 7)) for tensor in TENSORS}


def test_files_of_any_length_are_written_past_the_page_cache(tmp_path):
    data = np.random.default_rng(1).bytes((9 << 20) + 7)
    pieces = [data[:3], data[3 : 5 << 20], b"", data[5 << 20 : -1], data[-1:]]
    with Folder.open(tmp_path) as folder:
        for past_cache in (False, True):
            with folder.writing(f"file-{past_cache}", past_cache=past_cache) as file:
                for piece in pieces:
                    file.write(piece)
                    file.flush()
            assert (tmp_path / f"file-{past_cache}").read_bytes() == data


@pytest.mark.parametrize("past_cache", [False, True])
@given(lengths=st.lists(st.tuples(st.integers(0, 3 << 20), st.booleans()), max_size=6))
@example(lengths=[(5, False), (9 << 20, True), (7, True), (4 << 20, False), (1, True)])
@settings(max_examples=10, deadline=None)
def test_reserved_memory_and_other_pieces_are_written_in_their_order(tmp_path_factory, past_cache, lengths):
    random = np.random.default_rng(1)
    expected = []
    with Folder.open(tmp_path_factory.mktemp("files")) as folder:
        with folder.writing("file", past_cache=past_cache) as file:
            for length, is_reserved in lengths:
                expected.append(random.bytes(length))
                piece = file.reserve(length) if is_reserved else bytearray(length)
                piece[:] = expected[-1]
                file.write(piece)
        assert (folder.path / "file").read_bytes() == b"".join(expected)


def test_a_large_checkpoint_takes_no_page_cache(tmp_path):
    array = np.random.default_rng(1).integers(0, 256, (12 << 20) + 5, dtype=np.uint8)
    tensor = SavedTensor(name="model.weight", dtype="U8", shape=array.shape)
    if not is_forgotten(tmp_path, "forgotten"):
        pytest.skip("the file system of temporary files lies in the page cache")
    with Folder.open(tmp_path) as parent:
        name = write_checkpoint(parent, ArraySource(1, {tensor: array}), SaveDetails())
        read_back(parent, name)
        (file,) = (tmp_path / str(name)).glob("*.safetensors")
        # The header was read through the page cache. The end is not a whole page and was written through the cache.
        assert not is_cached(file, 4 << 20)
        assert not is_cached(file, 8 << 20)
        with open_verified(parent, name) as checkpoint:
            assert b"".join(map(bytes, checkpoint.read(tensor))) == array.tobytes()


def is_forgotten(folder, name):
    path = folder / name
    path.write_bytes(bytes(8192))
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return not is_cached(path, 0)


def is_cached(path, offset):
    """Whether a page of a file is in the page cache; the check reads no data."""
    with path.open("rb+") as file, mmap.mmap(file.fileno(), 0) as mapped:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped)) + offset
        found = (ctypes.c_ubyte * 1)()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(1), found) == 0
    return bool(found[0] & 1)


@pytest.mark.parametrize("chunk_bytes", [64, 4096])
def test_damage_on_the_disk_is_found_when_it_is_read_back(tmp_path, chunk_bytes):
    array = np.arange(5000, dtype=np.float32)
    tensor = SavedTensor(name="model.weight", dtype="F32", shape=array.shape)
    options = WriteOptions(chunk_bytes=chunk_bytes)
    with Folder.open(tmp_path) as parent:
        name = write_checkpoint(parent, ArraySource(1, {tensor: array}), SaveDetails(), options=options)
        read_back(parent, name)
        (file,) = (tmp_path / str(name)).glob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match="CRC32C does not match"):
            read_back(parent, name)
        with pytest.raises(SaveCancelledError, match="is on the disk; reading it back was stopped"):
            read_back(parent, name, lambda: True)


def test_digests_are_taken_where_they_are_wanted(tmp_path):
    for step, digests in ((1, False), (2, True)):
        options = dataclasses.replace(OPTIONS, digests=digests)
        with Folder.open(tmp_path) as parent:
            write_checkpoint(parent, source(step), SaveDetails(), options=options)
            with open_verified(parent, CheckpointName(step), digests=True) as checkpoint:
                assert checkpoint.manifest.has_digests == digests
                assert checkpoint.manifest.format_version == (1 if digests else 2)
    files = sorted((tmp_path / "step-2").glob("*.safetensors"))
    with newest(tmp_path) as checkpoint:
        assert [file.sha256 for file in checkpoint.manifest.tensor_files] == [
            hashlib.sha256(file.read_bytes()).hexdigest() for file in files
        ]


def test_files_are_the_users_own(tmp_path):
    save(tmp_path / "new", 7)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new" / "step-7").iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE((tmp_path / "new" / "step-7").stat().st_mode) == 0o700


def test_an_existing_checkpoint_is_never_replaced(tmp_path):
    save(tmp_path, 7, 7)
    with Folder.open(tmp_path) as parent:
        assert names_of(parent) == [CheckpointName(7), CheckpointName(7, 1)]
    with newest(tmp_path) as checkpoint:
        assert checkpoint.path.name == "step-7.1"
        check_contents(checkpoint)


def test_names_order_by_step():
    assert sorted(map(CheckpointName.parse, ["step-10", "step-9.2", "step-9"])) == [
        CheckpointName(9),
        CheckpointName(9, 2),
        CheckpointName(10),
    ]


@pytest.mark.parametrize(
    "text", ["step-", "step-07", "step-7.tmp", "step-7.0", "step--1", "7", "latest", "step-1e3"]
)
def test_other_names_are_no_checkpoints(text):
    assert CheckpointName.parse(text) is None


# Torn and damaged.


def boundaries(length):
    """Positions on both sides of each boundary of a file: its ends, the chunks, and the header's length."""
    marks = {0, 8, length, *range(0, length, OPTIONS.chunk_bytes)}
    return sorted({mark + side for mark in marks for side in (-1, 0, 1)} & set(range(length)))


def test_every_truncation_and_flip_falls_back_to_the_one_before(tmp_path):
    save(tmp_path, 1, 2)
    damaged = 0
    for file in sorted((tmp_path / "step-2").iterdir()):
        data = file.read_bytes()
        for position in boundaries(len(data)):
            for changed in (
                data[:position],
                data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :],
            ):
                file.write_bytes(changed)
                with newest(tmp_path) as checkpoint:
                    assert checkpoint.step == 1, (file.name, position)
                damaged += 1
        file.write_bytes(data)
    assert damaged > 100
    with newest(tmp_path) as checkpoint:
        assert checkpoint.step == 2


def test_files_that_grew_are_refused(tmp_path):
    save(tmp_path, 1)
    with (tmp_path / "step-1" / "tensors-00001.safetensors").open("ab") as file:
        file.write(b"x")
    assert "bytes instead of" in reason_of(tmp_path)


@pytest.mark.parametrize("missing", ["tensors-00001.safetensors", MANIFEST_NAME])
def test_missing_files_are_named(tmp_path, missing):
    save(tmp_path, 1)
    (tmp_path / "step-1" / missing).unlink()
    assert missing in reason_of(tmp_path)


def test_symbolic_links_are_refused(tmp_path):
    save(tmp_path, 1)
    file = tmp_path / "step-1" / "tensors-00001.safetensors"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in reason_of(tmp_path)


def test_a_checkpoint_that_is_a_link_is_refused(tmp_path):
    save(tmp_path / "other", 1)
    (tmp_path / "step-1").symlink_to(tmp_path / "other" / "step-1")
    assert "step-1" in reason_of(tmp_path)


@pytest.mark.parametrize("make", [lambda path: os.mkfifo(path), lambda path: path.mkdir()])
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path, make):
    save(tmp_path, 1)
    file = tmp_path / "step-1" / "tensors-00001.safetensors"
    file.unlink()
    make(file)
    assert "tensors-00001" in reason_of(tmp_path)


def test_a_newer_format_is_refused(tmp_path):
    save(tmp_path, 1)
    manifest = tmp_path / "step-1" / MANIFEST_NAME
    now, newer = f'"format_version":{FORMAT_VERSION}', f'"format_version":{FORMAT_VERSION + 1}'
    manifest.write_text(manifest.read_text().replace(now, newer))
    assert f"format version {FORMAT_VERSION + 1}" in reason_of(tmp_path)


def test_a_path_that_leaves_the_folder_is_refused(tmp_path):
    save(tmp_path, 1)
    place = tmp_path / "step-1" / MANIFEST_NAME
    (tmp_path / "outside").write_bytes(b"secret")
    text = place.read_text().replace("tensors-00001.safetensors", "../outside")
    place.write_text(text)
    assert "damaged" in reason_of(tmp_path)  # test_checkpoint_manifest covers it with a correct checksum


def test_a_renamed_checkpoint_is_refused(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step-1").rename(tmp_path / "step-3")
    assert "was renamed" in reason_of(tmp_path, CheckpointName(3))


def test_a_file_of_another_checkpoint_is_noticed(tmp_path):
    save(tmp_path, 1, 2)
    name = "tensors-00001.safetensors"
    shutil.copy(tmp_path / "step-2" / name, tmp_path / "step-1" / name)
    assert "CRC32C does not match" in reason_of(tmp_path)


def test_headers_with_absurd_lengths_are_refused(tmp_path):
    save(tmp_path, 1)
    with (tmp_path / "step-1" / "tensors-00001.safetensors").open("r+b") as file:
        file.write((1 << 62).to_bytes(8, "little"))
    assert "does not fit" in reason_of(tmp_path)


def test_where_no_checkpoint_is_whole_nothing_starts_from_scratch(tmp_path):
    save(tmp_path, 1, 2)
    for step in (1, 2):
        (tmp_path / f"step-{step}" / MANIFEST_NAME).unlink()
    with (
        Folder.open(tmp_path) as parent,
        pytest.raises(CheckpointError, match=r"step-2.*step-1.*did not finish"),
    ):
        find_newest(parent)


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    assert newest(tmp_path) is None


def test_a_hint_without_a_checkpoint_is_an_error(tmp_path):
    (tmp_path / "latest").write_text("step-5\n")
    with Folder.open(tmp_path) as parent, pytest.raises(CheckpointError, match="step-5"):
        find_newest(parent)


@pytest.mark.parametrize("hint", ["step-1\n", "step-9\n", "nonsense", "", "../../etc"])
def test_the_hint_is_never_trusted(tmp_path, hint):
    save(tmp_path, 1, 2)
    (tmp_path / "latest").write_text(hint)
    with newest(tmp_path) as checkpoint:
        assert checkpoint.step == 2


def test_listing_says_why_one_is_not_whole(tmp_path):
    save(tmp_path, 1, 2)
    (tmp_path / "step-1" / MANIFEST_NAME).write_text(json.dumps({"format": "other"}))
    with Folder.open(tmp_path) as parent:
        torn, whole = list_checkpoints(parent)
    assert torn.manifest is None
    assert "does not have the format coarse-checkpoint" in torn.reason
    assert isinstance(whole.manifest, Manifest)
    assert whole.reason == ""


# Writing.


def test_a_save_takes_little_memory(tmp_path):
    """The state is created while it is read, and is ten times larger than the memory allowed for writing."""

    class Large:
        step = 1
        tensors = tuple(SavedTensor(name=f"model.{i}", dtype="F32", shape=(1 << 20,)) for i in range(10))

        def read(self, tensor, reserve):
            piece = np.full(1 << 16, int(tensor.name[6:]), dtype=np.float32)
            for _ in range(16):
                yield piece.view(np.uint8).data

        def close(self):
            pass

    tracemalloc.start()
    try:
        with Folder.open(tmp_path) as parent:
            write_checkpoint(parent, Large(), SaveDetails(), options=WriteOptions(file_bytes=8 << 20))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 << 20
    with newest(tmp_path) as checkpoint:
        assert checkpoint.manifest.num_bytes > 40 << 20


def test_a_save_can_be_stopped(tmp_path):
    pieces = iter(range(3))
    with Folder.open(tmp_path) as parent, pytest.raises(SaveCancelledError, match="step 1"):
        write_checkpoint(
            parent, source(1), SaveDetails(), options=OPTIONS, should_stop=lambda: next(pieces, None) is None
        )
    assert list(tmp_path.iterdir()) == []


def test_progress_ends_at_the_whole(tmp_path):
    told = []
    with Folder.open(tmp_path) as parent:
        write_checkpoint(
            parent, source(1), SaveDetails(), options=OPTIONS, progress=lambda *now: told.append(now)
        )
    total = sum(tensor.nbytes for tensor in TENSORS)
    assert told[-1] == (total, total)
    assert told == sorted(told)


def test_a_source_that_gives_too_little_is_an_error(tmp_path):
    class Short(ArraySource):
        def read(self, tensor, reserve):
            yield from list(super().read(tensor))[:-1]

    tensor = SavedTensor(name="model.x", dtype="U8", shape=(5 << 20,))
    short = Short(1, {tensor: np.zeros(5 << 20, dtype=np.uint8)})
    with Folder.open(tmp_path) as parent, pytest.raises(CheckpointError, match=r"model\.x"):
        write_checkpoint(parent, short, SaveDetails())
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_save_left_does_not_get_into_the_next(tmp_path):
    left = tmp_path / "step-1.tmp"
    left.mkdir()
    (left / "tensors-00009.safetensors").write_bytes(b"old")
    (left / "worker-5.json").write_bytes(b"old")
    with Folder.open(tmp_path) as parent:
        assert unfinished_in(parent) == ["step-1.tmp"]
    save(tmp_path, 1)
    assert not {"tensors-00009.safetensors", "worker-5.json"} & {
        path.name for path in (tmp_path / "step-1").iterdir()
    }


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        Folder.open(tmp_path / "nowhere")
    with Folder.open(tmp_path) as parent, pytest.raises(CheckpointError, match="step-4: is missing"):
        open_checkpoint(parent, CheckpointName(4))


def test_the_disk_knows_of_every_folder_that_was_made(tmp_path):
    seen = []
    for _ in range(2):
        Folder.open(
            tmp_path / "a" / "b", create=True, observe=lambda *operation: seen.append(operation)
        ).close()
    assert sorted(seen) == sorted([("fsync", f"{tmp_path.name}/"), ("fsync", "a/")])
