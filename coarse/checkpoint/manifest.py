"""The manifest of a checkpoint: its files with checksums of every byte, including the manifest's own."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from coarse.checkpoint.folder import check_name
from coarse.checkpoint.source import SavedTensor
from coarse.errors import CheckpointError

MANIFEST_NAME = "manifest.json"
FORMAT = "coarse-checkpoint"
FORMAT_VERSION = 2
LONGEST_MANIFEST_BYTES = 64 << 20
SMALLEST_CHUNK_BYTES, LARGEST_CHUNK_BYTES = 64, 64 << 20
_MOST_FILES = 100_000
_LARGEST_FILE_BYTES = 1 << 50
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint.

    Args:
        name: Name in the checkpoint's folder.
        num_bytes: Length of the file.
        sha256: SHA-256 of the whole file, in hexadecimal digits; "" if not computed.
        crc32c: CRC32C of each chunk.

    Raises:
        CheckpointError: If the name leads out of the folder, or a number is out of range.
    """

    name: str
    num_bytes: int
    sha256: str
    crc32c: tuple[int, ...]

    def __post_init__(self) -> None:
        check_name(self.name)
        _check_number(f"length of {self.name}", self.num_bytes, 0, _LARGEST_FILE_BYTES)
        if self.sha256 != "" and not _SHA256.fullmatch(self.sha256):
            raise CheckpointError(f"SHA-256 of {self.name} is {self.sha256[:80]!r}")
        for crc in self.crc32c:
            _check_number(f"CRC32C of {self.name}", crc, 0, 0xFFFFFFFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Description of a checkpoint's contents.

    Args:
        step: Number of updates that the state includes.
        created: Time of writing, in UTC by ISO 8601.
        coarse_version: Version of the package that wrote it.
        world_size: Number of workers of the job that wrote it.
        num_tensors: Number of tensors in all files.
        schema_sha256: schema_hash() of the tensors.
        chunk_bytes: Number of bytes that each CRC32C covers.
        files: All files except the manifest.
        optimizer: The optimizer's settings, in the form of to_json(); None without an optimizer.
        state_files: Names of the files with the workers' own state, by rank; empty without such state.

    Raises:
        CheckpointError: If the fields contradict each other; names them and the reason.
    """

    step: int
    created: str
    coarse_version: str
    world_size: int
    num_tensors: int
    schema_sha256: str
    chunk_bytes: int
    files: tuple[FileEntry, ...]
    optimizer: Any
    state_files: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_number("step", self.step, 0, 1 << 62)
        _check_number("world_size", self.world_size, 1, 1 << 24)
        _check_number("num_tensors", self.num_tensors, 0, 1 << 32)
        _check_number("chunk_bytes", self.chunk_bytes, SMALLEST_CHUNK_BYTES, LARGEST_CHUNK_BYTES)
        _check_number("number of files", len(self.files), 0, _MOST_FILES)
        if not _SHA256.fullmatch(self.schema_sha256):
            raise CheckpointError(f"schema_sha256 is {self.schema_sha256[:80]!r}")
        names = {file.name for file in self.files}
        if len(names) < len(self.files) or MANIFEST_NAME in names:
            raise CheckpointError("the manifest names a file twice, or itself")
        if len(self.state_files) not in (0, self.world_size) or not set(self.state_files) <= names:
            raise CheckpointError(
                f"the state of {self.world_size} workers cannot be in {list(self.state_files)}"
            )
        for file in self.files:
            if len(file.crc32c) != -(-file.num_bytes // self.chunk_bytes):
                raise CheckpointError(
                    f"{file.name} of {file.num_bytes} bytes has {len(file.crc32c)} checksums for chunks of "
                    f"{self.chunk_bytes} bytes"
                )

    @property
    def tensor_files(self) -> tuple[FileEntry, ...]:
        """The safetensors files."""
        return tuple(file for file in self.files if file.name not in self.state_files)

    @property
    def has_digests(self) -> bool:
        """Whether the manifest has the SHA-256 of every file."""
        return all(file.sha256 for file in self.files)

    @property
    def format_version(self) -> int:
        """The first version of the format that supports this manifest's contents."""
        return 1 if self.has_digests else 2

    @property
    def num_bytes(self) -> int:
        """Length of all files together, without the manifest."""
        return sum(file.num_bytes for file in self.files)

    def encode(self) -> bytes:
        """The file's contents."""
        body = asdict(self)
        return _canonical(
            {
                "format": FORMAT,
                "format_version": self.format_version,
                "sha256": _digest(body),
                "checkpoint": body,
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Reads a manifest from an untrusted source.

        Raises:
            CheckpointError: If any byte differs from encode()'s output, or its version is newer; gives the reason.
        """
        if len(data) > LONGEST_MANIFEST_BYTES:
            raise CheckpointError(f"its manifest has {len(data)} bytes, more than {LONGEST_MANIFEST_BYTES}")
        try:
            envelope = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"its manifest is not JSON: {error}") from None
        if not isinstance(envelope, dict) or envelope.get("format") != FORMAT:
            raise CheckpointError(f"its manifest does not have the format {FORMAT}")
        version = envelope.get("format_version")
        if type(version) is int and version > FORMAT_VERSION:
            raise CheckpointError(
                f"it has format version {version}, but this version of coarse reads versions up to "
                f"{FORMAT_VERSION}; load it with the version that wrote it or a newer one"
            )
        try:
            body = envelope["checkpoint"]
            if type(version) is not int or envelope["sha256"] != _digest(body):
                raise CheckpointError("its manifest is damaged: its checksum does not match")
            manifest = cls(**_fields_of(body))
            # A flipped bit that changes no value also counts as damage.
            if manifest.encode() != data:
                raise CheckpointError("its manifest is damaged: it differs from the one written")
            return manifest
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"its manifest is wrong: {error!r}") from None


def schema_hash(tensors: Iterable[SavedTensor]) -> str:
    """SHA-256 of names, dtypes and shapes, independent of their order."""
    lines = sorted(f"{tensor.name} {tensor.dtype} {list(tensor.shape)}" for tensor in tensors)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _fields_of(body: dict[str, Any]) -> dict[str, Any]:
    known = {field.name: field.type for field in fields(Manifest)}
    if set(body) != set(known):
        raise CheckpointError(f"its manifest has the fields {sorted(body)} instead of {sorted(known)}")
    for name in ("created", "coarse_version", "schema_sha256"):
        if not isinstance(body[name], str):
            raise CheckpointError(f"its manifest's {name} is not a string")
    files = tuple(FileEntry(**{**file, "crc32c": tuple(file["crc32c"])}) for file in body["files"])
    return {**body, "files": files, "state_files": tuple(body["state_files"])}


def _canonical(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _digest(body: Any) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()


def _check_number(what: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise CheckpointError(f"{what} is {str(value)[:40]}, which must lie between {low} and {high}")
