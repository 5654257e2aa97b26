"""The manifest: reading returns exactly the written data; anything else is rejected with the reason."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coarse.checkpoint.manifest import FORMAT, FileEntry, Manifest
from coarse.errors import CheckpointError

SHA = hashlib.sha256(b"").hexdigest()
FILE = FileEntry(name="tensors-00001.safetensors", num_bytes=100, sha256=SHA, crc32c=(1, 2))
MANIFEST = Manifest(
    step=7,
    created="2026-01-01T00:00:00+00:00",
    coarse_version="0.1.0",
    world_size=2,
    num_tensors=3,
    schema_sha256=SHA,
    chunk_bytes=64,
    files=(FILE,),
    optimizer={"param_groups": [{"lr": 0.1}]},
    state_files=(),
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def with_body(**changed):
    """A manifest with a correct checksum of wrong contents."""
    body = {**json.loads(MANIFEST.encode())["checkpoint"], **changed}
    text = json.dumps(body, separators=(",", ":")).encode() + b"\n"
    return (
        json.dumps(
            {
                "format": FORMAT,
                "format_version": 1,
                "sha256": hashlib.sha256(text).hexdigest(),
                "checkpoint": body,
            },
            separators=(",", ":"),
        ).encode()
        + b"\n"
    )


def with_file(**changed):
    return with_body(files=[{**dataclasses.asdict(FILE), **changed}])


def test_a_manifest_comes_back():
    assert Manifest.decode(MANIFEST.encode()) == MANIFEST
    assert with_body() == MANIFEST.encode()


def test_every_flipped_bit_is_noticed():
    data = MANIFEST.encode()
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            with pytest.raises(CheckpointError):
                Manifest.decode(bytes(flipped))


def test_every_truncation_is_noticed():
    data = MANIFEST.encode()
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            Manifest.decode(data[:length])


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(data):
    with pytest.raises(CheckpointError):
        Manifest.decode(data)


@given(field=st.sampled_from([field.name for field in dataclasses.fields(Manifest)]), value=json_values)
def test_wrong_fields_are_refused_or_harmless(field, value):
    try:
        manifest = Manifest.decode(with_body(**{field: value}))
    except CheckpointError:
        return
    assert manifest.encode() == with_body(**{field: value})


@given(field=st.sampled_from([field.name for field in dataclasses.fields(FileEntry)]), value=json_values)
def test_wrong_files_are_refused_or_harmless(field, value):
    try:
        manifest = Manifest.decode(with_file(**{field: value}))
    except CheckpointError:
        return
    assert manifest.files[0].name == value or field != "name"


def test_a_newer_format_is_refused_by_name():
    newer = MANIFEST.encode().replace(b'"format_version":1', b'"format_version":3')
    with pytest.raises(CheckpointError, match=r"format version 3.*reads versions up to 2"):
        Manifest.decode(newer)


@pytest.mark.parametrize(
    "name", ["../escape", "/etc/passwd", "a/b", "..", ".", "", ".hidden", "a\0b", "a\nb", "n" * 300, 3, None]
)
def test_names_that_lead_out_of_the_folder_are_refused(name):
    with pytest.raises(CheckpointError):
        Manifest.decode(with_file(name=name))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"num_bytes": 1 << 60}, "must lie between"),
        ({"num_bytes": -1}, "must lie between"),
        ({"num_bytes": 1 << 40}, "checksums for chunks of 64 bytes"),
        ({"num_bytes": 100.0}, "must lie between"),
        ({"crc32c": [1, 1 << 32]}, "must lie between"),
        ({"crc32c": [1]}, "1 checksums"),
        ({"sha256": "0" * 63}, "SHA-256"),
        ({"surplus": 1}, "wrong"),
    ],
)
def test_absurd_files_are_refused_with_the_reason(changed, reason):
    with pytest.raises(CheckpointError, match=reason):
        Manifest.decode(with_file(**changed))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"step": -1}, "step is -1"),
        ({"step": True}, "step is True"),
        ({"world_size": 0}, "world_size is 0"),
        ({"chunk_bytes": 1 << 40}, "chunk_bytes"),
        ({"state_files": ["worker-0.json", "worker-1.json"]}, "cannot be in"),
        ({"files": [dataclasses.asdict(FILE)] * 2}, "twice"),
        ({"surplus": 1}, "fields"),
    ],
)
def test_absurd_manifests_are_refused_with_the_reason(changed, reason):
    with pytest.raises(CheckpointError, match=reason):
        Manifest.decode(with_body(**changed))


def test_nesting_without_end_is_refused():
    with pytest.raises(CheckpointError):
        Manifest.decode(b"[" * 100_000)
