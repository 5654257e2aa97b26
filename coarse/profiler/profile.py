"""The profile document: the measurements of every path of a machine, as a value, as JSON, and on disk.

A profile with any invalid part is refused as a whole: a plan made from half a measurement would be wrong on every
worker. docs/design/planning.md describes the format.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from coarse import __version__
from coarse.emulation.machine import Emulation
from coarse.env import MOST_WORKERS_OF_A_NODE
from coarse.errors import ProfileError
from coarse.machine.host import Host
from coarse.machine.partition_table import PartitionTable
from coarse.profiler.curve import Curve, CurvePoint

MEASURED, EMULATED, SIMULATED = "measured", "emulated", "simulated"
PROFILE_KINDS = (MEASURED, EMULATED, SIMULATED)
"""Figures of this machine; of the real runtime on paced links; of a model."""

HOST = "host"
"""Used as the name of this machine."""

FORMAT = "coarse-profile"
FORMAT_VERSION = 1

PUSH, PULL, BOTH, DEVICES, WORKERS = "push", "pull", "both", "devices", "workers"
PATH_KINDS = (PUSH, PULL, BOTH, DEVICES, WORKERS)
"""Worker to memory device, the way back, both at once; between memory devices; between workers."""

_ADVICE = "Measure again with `coarse profile --refresh`."
_BOTH_MARGIN = 1.25  # peaks of separate measurements differ by noise
_MAX_FILE_BYTES = 64 << 20
_MAX_DEVICES = 64  # also the limit of a session

Value = TypeVar("Value")


class ContradictoryFiguresError(ValueError):
    """Figures of a profile contradict each other."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PathId:
    """One path of a profile.

    Args:
        kind: One of PATH_KINDS.
        source, target: Worker or memory device numbers, depending on the kind: for "push", "pull" and "both" always
            the worker first.

    Raises:
        ValueError: If the kind is unknown.
    """

    kind: str
    source: int
    target: int

    def __post_init__(self) -> None:
        if self.kind not in PATH_KINDS:
            raise ValueError(f"path kind {self.kind!r} must be one of {', '.join(PATH_KINDS)}")

    def __str__(self) -> str:
        names = {DEVICES: ("md", "md"), WORKERS: ("w", "w")}.get(self.kind, ("w", "md"))
        return f"{self.kind} {names[0]}{self.source}-{names[1]}{self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """The machine and configuration of a profile, which fits only where all of these are equal.

    Args:
        machine: Name of a machine profile, or "host" for this machine.
        host: Key of the host of the measurement (host_key); "" for a simulated profile.
        local_devices: The memory device that shares a switch with each worker, by worker.
        num_devices: Number of memory devices.
        versions: Versions of software that can change a measurement, by name.

    Raises:
        ValueError: If there are no workers, a local device does not exist, or the numbers exceed a node's limits.
    """

    machine: str
    host: str
    local_devices: tuple[int, ...]
    num_devices: int
    versions: Mapping[str, str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", MappingProxyType(dict(sorted(self.versions.items()))))
        if not self.local_devices:
            raise ValueError("a profile needs at least one worker")
        if len(self.local_devices) > MOST_WORKERS_OF_A_NODE or self.num_devices > _MAX_DEVICES:
            raise ValueError(
                f"{_counts(self)}: a node has at most {MOST_WORKERS_OF_A_NODE} and {_MAX_DEVICES}"
            )
        for worker, device in enumerate(self.local_devices):
            if not 0 <= device < self.num_devices:
                raise ValueError(
                    f"worker {worker} is local to md{device} of {self.num_devices} memory devices"
                )

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self.local_devices)

    def digest(self) -> str:
        """A short name of this key: equal for equal keys, different for different keys."""
        return _digest(_key_as_json(self))

    def paths(self) -> Iterator[PathId]:
        """Every path for which a profile of this key has a curve."""
        for worker in range(self.num_workers):
            for device in range(self.num_devices):
                for kind in (PUSH, PULL, BOTH):
                    yield PathId(kind=kind, source=worker, target=device)
        for kind, count in ((DEVICES, self.num_devices), (WORKERS, self.num_workers)):
            for source in range(count):
                for target in range(count):
                    if source != target:
                        yield PathId(kind=kind, source=source, target=target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The measured curves of all paths of one machine. Immutable; the same value on every worker.

    Args:
        kind: One of PROFILE_KINDS.
        key: Machine and configuration of the profile.
        time_budget_s: Time limit of the measurement; 0 for a simulated profile.
        paths_share_links: Whether direct traffic between workers and traffic through memory devices slow each other
            down, for example if all traffic crosses one host bridge or one host memory.
        curves: Time by bytes, for every path of the key. For a "both" path: bytes each way, and the time until both
            have arrived.

    Raises:
        ValueError: If a path is missing or unknown, a number is out of range, or curves contradict each other;
            the message names the path.
    """

    kind: str
    key: ProfileKey
    time_budget_s: float
    paths_share_links: bool
    curves: Mapping[PathId, Curve]

    def __post_init__(self) -> None:
        # Sorted, so that the order of measuring does not matter.
        object.__setattr__(self, "curves", MappingProxyType(dict(sorted(self.curves.items()))))
        if self.kind not in PROFILE_KINDS:
            raise ValueError(f"kind {self.kind!r} must be one of {', '.join(PROFILE_KINDS)}")
        if not 0 <= self.time_budget_s < float("inf"):
            raise ValueError(f"time_budget_s={self.time_budget_s} must be finite and at least 0")
        expected = set(self.key.paths())
        for path in sorted(expected - set(self.curves)):
            raise ValueError(f"{path}: the profile has no curve of this path")
        for path in sorted(set(self.curves) - expected):
            raise ValueError(f"{path}: no such path exists between {_counts(self.key)}")
        for path in self.curves:
            if path.kind == BOTH:
                self._check_directions(path.source, path.target)

    @property
    def is_of_this_machine(self) -> bool:
        """Whether its links are this machine's real links, from measurements or firmware data."""
        return self.kind != EMULATED and self.key.machine == HOST

    def curve(self, kind: str, source: int, target: int) -> Curve:
        """The curve of one path.

        Raises:
            KeyError: If the path does not exist.
        """
        return self.curves[PathId(kind=kind, source=source, target=target)]

    def both_at_once(self, worker: int) -> dict[int, Curve]:
        """Curves of simultaneous push and pull between a worker and every memory device, by device."""
        return {device: self.curve(BOTH, worker, device) for device in range(self.key.num_devices)}

    def save(self, path: Path) -> None:
        """Writes the document atomically: a reader of `path` finds all of the old or all of the new file.

        A device or pipe, such as /dev/stdout can be, is not written atomically.

        Raises:
            OSError: If it cannot be written.
        """
        if path.exists() and not path.is_file():
            path.write_text(json.dumps(as_json(self), indent=1))
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path = path.resolve()  # write to the link's target, so that the link stays
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(as_json(self), file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise

    @classmethod
    def load(cls, path: Path, *, expected: ProfileKey | None = None) -> Profile:
        """Reads a document.

        Args:
            path: Path of the file.
            expected: The required key; any key by default.

        Raises:
            ProfileError: If the file cannot be read, is not a complete profile, contradicts itself, or has another
                key than `expected`. Names the file, the fault and a remedy.
        """
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_FILE_BYTES + 1)
            if len(text) > _MAX_FILE_BYTES:
                raise ValueError(f"larger than {_MAX_FILE_BYTES >> 20} MiB")
            profile = from_json(json.loads(text, parse_constant=_refuse_constant))
        except OSError as error:
            raise ProfileError(f"profile {path}: {error.strerror or error}. {_ADVICE}") from None
        except (ValueError, RecursionError) as error:  # invalid JSON raises ValueError, too
            reason = f"cut off or not JSON: {error}" if isinstance(error, json.JSONDecodeError) else error
            raise ProfileError(f"profile {path}: {reason}. {_ADVICE}") from None
        if expected is not None and profile.key != expected:
            raise ProfileError(f"profile {path}: {_difference(profile.key, expected)}. {_ADVICE}")
        return profile

    def _check_directions(self, worker: int, device: int) -> None:
        """Both directions at once cannot carry more than each of them alone."""
        push, pull, both = (self.curve(kind, worker, device) for kind in (PUSH, PULL, BOTH))
        together = 2 * both.peak_gbytes_per_s
        apart = push.peak_gbytes_per_s + pull.peak_gbytes_per_s
        if together > _BOTH_MARGIN * apart:
            raise ContradictoryFiguresError(
                f"{PathId(kind=BOTH, source=worker, target=device)}: {together:.3g} GB/s at once contradict "
                f"{push.peak_gbytes_per_s:.3g} GB/s of push and {pull.peak_gbytes_per_s:.3g} GB/s of pull alone"
            )


def as_json(profile: Profile) -> dict[str, Any]:
    """The document as JSON values."""
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "kind": profile.kind,
        "key": _key_as_json(profile.key),
        "time_budget_s": profile.time_budget_s,
        "paths_share_links": profile.paths_share_links,
        "curves": [
            {
                **asdict(path),
                "points": [
                    [point.nbytes, point.time_us, point.spread_us, point.num_repeats]
                    for point in curve.points
                ],
            }
            for path, curve in profile.curves.items()
        ],
    }


def from_json(document: Any) -> Profile:
    """Reads a document from JSON values.

    Raises:
        ValueError: If it is not a complete and consistent profile; names the first fault.
    """
    top = _object(document, "the document")
    if top.get("format") != FORMAT:
        raise ValueError(f"format is {top.get('format')!r}, not {FORMAT!r}: this is not a profile")
    if top.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"its format version is {top.get('format_version')!r}, but this COARSE reads {FORMAT_VERSION}"
        )
    curves: dict[PathId, Curve] = {}
    for number, entry in enumerate(_field(top, "curves", list, "the document")):
        path, curve = _curve(entry, f"curves[{number}]")
        if path in curves:
            raise ValueError(f"{path}: the profile has two curves of this path")
        curves[path] = curve
    if not curves:
        raise ValueError("it has no curves")
    return Profile(
        kind=_field(top, "kind", str, "the document"),
        key=_key(_field(top, "key", dict, "the document")),
        time_budget_s=_number(top.get("time_budget_s"), "time_budget_s"),
        paths_share_links=_field(top, "paths_share_links", bool, "the document"),
        curves=curves,
    )


# ---- the cache ----


def host_key(host: Host) -> str:
    """A short key of a host's name and all its properties that can change a measurement."""
    facts = asdict(host)
    for volatile in ("available_bytes", "cgroup_used_bytes"):
        del facts["memory"][volatile]
    del facts["limits"]
    return _digest({"node": platform.node(), **facts})


def profile_key(table: PartitionTable, host: str, emulation: Emulation | None = None) -> ProfileKey:
    """The key of a profile of these memory devices.

    Args:
        table: The workers and memories of the devices.
        host: Key of the host (host_key).
        emulation: The emulated links, whose figures and dilation are part of the key; None without emulation.
    """
    versions = current_versions()
    if any(name != HOST for name in table.memories):
        versions["memories"] = ", ".join(table.memories)
    if emulation is not None:
        versions["links"] = _digest(emulation.links.to_json())
        versions["time_dilation"] = repr(emulation.time_dilation)
    return ProfileKey(
        machine=HOST if emulation is None else emulation.machine,
        host=host,
        local_devices=tuple(table.local_device(worker) for worker in range(table.num_workers)),
        num_devices=table.num_devices,
        versions=versions,
    )


def current_versions() -> dict[str, str]:
    """Versions of software that can change a measurement."""
    return {"coarse": __version__, "kernel": platform.release()}


def cache_path(key: ProfileKey) -> Path:
    """The file of a key's profile, in the user's cache folder (XDG_CACHE_HOME)."""
    return _cache_folder() / f"{key.machine}-{key.num_workers}x{key.num_devices}-{key.digest()}.json"


def load_cached(key: ProfileKey) -> Profile | None:
    """The cached profile of a key; None if none exists.

    Raises:
        ProfileError: If the cached profile is damaged.
    """
    path = cache_path(key)
    return Profile.load(path, expected=key) if path.exists() else None


def newest_cached(host: str, versions: Mapping[str, str]) -> Path | None:
    """The newest profile file of this host and these versions; None if none exists.

    Skips unreadable files, because their keys are unknown.
    """
    with suppress(OSError):
        by_age = sorted(
            _cache_folder().glob("*.json"), key=lambda path: (-path.stat().st_mtime_ns, path.name)
        )
        for path in by_age:
            with suppress(ProfileError):
                key = Profile.load(path).key
                if key.host == host and dict(key.versions) == dict(versions):
                    return path
    return None


def _cache_folder() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("coarse") / "profiles"


# ---- reading ----


def _curve(entry: Any, where: str) -> tuple[PathId, Curve]:
    fields = _object(entry, where)
    path = PathId(
        kind=_field(fields, "kind", str, where),
        source=_field(fields, "source", int, where),
        target=_field(fields, "target", int, where),
    )
    rows = _field(fields, "points", list, where)
    return path, _named(str(path), lambda: Curve(points=tuple(_point(row) for row in rows)))


def _point(row: Any) -> CurvePoint:
    if not isinstance(row, list) or len(row) != 4:
        raise ValueError(f"{row!r} is not [bytes, time_us, spread_us, repeats]")
    nbytes, time_us, spread_us, num_repeats = row
    return CurvePoint(
        nbytes=_whole(nbytes, "bytes"),
        time_us=_number(time_us, "time_us"),
        spread_us=_number(spread_us, "spread_us"),
        num_repeats=_whole(num_repeats, "repeats"),
    )


def _key(fields: dict[str, Any]) -> ProfileKey:
    versions = _field(fields, "versions", dict, "key")
    local_devices = _field(fields, "local_devices", list, "key")
    return ProfileKey(
        machine=_field(fields, "machine", str, "key"),
        host=_field(fields, "host", str, "key"),
        local_devices=tuple(_whole(device, "key.local_devices") for device in local_devices),
        num_devices=_field(fields, "num_devices", int, "key"),
        versions={name: _text(version, f"key.versions.{name}") for name, version in versions.items()},
    )


def _named(name: str, make: Callable[[], Value]) -> Value:
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {type(value).__name__}, not an object")
    return value


def _field(fields: Mapping[str, Any], name: str, kind: type[Value], where: str) -> Value:
    value = fields.get(name)
    if type(value) is not kind:  # isinstance counts True as an int
        raise ValueError(f"{where}: {name} is {value!r:.80}, not {kind.__name__}")
    return value


def _whole(value: Any, name: str) -> int:
    if type(value) is not int:
        raise ValueError(f"{name} is {value!r:.80}, not a whole number")
    return value


def _number(value: Any, name: str) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{name} is {value!r:.80}, not a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large") from None


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r:.80}, not text")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a measurement")


# ---- words and digests ----


def _key_as_json(key: ProfileKey) -> dict[str, Any]:
    return {
        "machine": key.machine,
        "host": key.host,
        "local_devices": list(key.local_devices),
        "num_devices": key.num_devices,
        "versions": dict(key.versions),
    }


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _counts(key: ProfileKey) -> str:
    return f"{key.num_workers} workers and {key.num_devices} memory devices"


def _difference(found: ProfileKey, expected: ProfileKey) -> str:
    ours, theirs = _key_as_json(found), _key_as_json(expected)
    name = next(name for name in ours if ours[name] != theirs[name])
    return f"it was made for {name} {ours[name]!r}, but this job has {theirs[name]!r}"
