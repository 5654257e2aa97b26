"""Settings of a session: each declared once, as a field with its default, what it may be, and a line for users.

Explicit arguments beat the environment, the environment beats the defaults. Nothing is read at import.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from coarse.errors import SettingsError
from coarse.failpoints import parse_failpoints
from coarse.machine.memory_name import MemoryName, parse_memory_devices

ALGORITHM_CHOICES = ("auto", "gather", "direct", "ring", "exchange", "nccl")
SCHEDULING_CHOICES = ("queues", "fcfs")

_PREFIX = "COARSE_"
# Read by setup.py, the Makefile, and benchmarks in images; and by coarse.env, as settings are shown.
_OTHER_VARIABLES = frozenset({"COARSE_BUILD_JOBS", "COARSE_SANITIZE", "COARSE_COMMIT", "COARSE_JOB_SECRET"})
_MOST_MEMORY_DEVICES = 64
_SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str, *, what: str = "size") -> int:
    """Reads a size such as "4MB", "256KiB" or "65536" as a number of bytes.

    Raises:
        ValueError: If `text` is anything else.
    """
    match = re.fullmatch(r"\s*(\d+)\s*([A-Za-z]*)\s*", text)
    unit = match.group(2).upper() if match else ""
    if match is None or unit not in _SIZE_UNITS:
        raise ValueError(f"{what}: {text!r} is no size; write a number with B, KB, MB, GB, KiB, MiB or GiB")
    return int(match.group(1)) * _SIZE_UNITS[unit]


# ---- what a setting may be ----

_Read: TypeAlias = Callable[[str, str], object]
"""Makes a value of the text of a variable, whose name comes first."""

_Check: TypeAlias = Callable[[str, Any], None]
"""Raises ValueError, which names the variable, if its value cannot be."""


def _read_int(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is no whole number") from None


def _read_float(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is no number") from None


def _read_bytes(name: str, text: str) -> int:
    return parse_bytes(text, what=name)


def _read_text(name: str, text: str) -> str:
    del name
    return text


def _read_memory_devices(name: str, text: str) -> int | tuple[MemoryName, ...]:
    try:
        return parse_memory_devices(text)
    except ValueError as error:
        raise ValueError(
            f"{name}={text!r} is neither a number of memory devices nor memories such as host,numa:2: {error}"
        ) from None


def _is_between(low: float, high: float, *, or_zero: bool = False) -> _Check:
    def check(name: str, value: float) -> None:
        if not (low <= value <= high or (or_zero and value == 0)):
            raise ValueError(f"{name}={value} is out of range: it must lie between {low} and {high}")

    return check


def _is_one_of(*choices: str) -> _Check:
    def check(name: str, value: str) -> None:
        if value not in choices:
            raise ValueError(f"{name}={value!r} is none of {', '.join(choices)}")

    return check


def _are_not_too_many(name: str, devices: int | tuple[MemoryName, ...]) -> None:
    count = devices if isinstance(devices, int) else len(devices)
    _is_between(0, _MOST_MEMORY_DEVICES)(name, count)


def _is_a_profile(name: str, text: str) -> None:
    if not text:
        raise ValueError(f"{name} is empty; write off, cached, auto, refresh or the name of a file")


def _are_failpoints(name: str, text: str) -> None:
    del name
    parse_failpoints(text)


def _is_a_dual_sync(name: str, text: str) -> None:
    if text not in ("off", "auto"):
        parse_bytes(text, what=f"{name} (off, auto or a size)")


def _is_anything(name: str, value: object) -> None:
    del name, value


# ---- declarations ----

_DECLARED = "setting"


def _setting(default: object, summary: str, *, read: _Read = _read_text, check: _Check = _is_anything) -> Any:
    return field(default=default, metadata={_DECLARED: (summary, read, check)})


def _choice(default: str, summary: str, *choices: str) -> Any:
    return _setting(default, f"{summary}: {', '.join(choices)}", check=_is_one_of(*choices))


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a setting is to whoever asks for it.

    Args:
        name: Of its field.
        default: Of its field.
        summary: What it is for, in a line.
        read: Makes a value of the text of its variable.
        check: Raises ValueError if its value cannot be.
    """

    name: str
    default: object
    summary: str
    read: _Read
    check: _Check

    @property
    def variable(self) -> str:
        """By which the environment has it."""
        return f"{_PREFIX}{self.name.upper()}"

    @property
    def flag(self) -> str:
        """By which `coarse run` sets its variable."""
        return "--" + self.name.removesuffix("_s").replace("_", "-")

    @property
    def default_text(self) -> str:
        """The default as users would write it; "" for none."""
        return f"{self.default:g}" if isinstance(self.default, float) else f"{self.default}"


def declarations() -> tuple[Declaration, ...]:
    """Of all settings, in the order in which users are shown them."""
    return tuple(Declaration(each.name, each.default, *each.metadata[_DECLARED]) for each in fields(Settings))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a session is set up. The same on every worker.

    Args:
        memory_devices: Memory devices on each node; 0 stands for as many as local workers. Or the memory of each.
        partition_table: A TOML file that says which memory device serves which workers, instead of `memory_devices`;
            "" for an even one.
        sync_cores: Sync cores (threads) of each memory device; 0 stands for a share of the cores available.
        shard_bytes: Partition threshold: no shard is smaller unless its tensor is; 0 stands for what the links'
            profile says, or 256 KiB.
        gather_bytes: Tensors of up to so many bytes are gathered by one sync core.
        routing_threshold_bytes: Shards below go to the lowest-latency proxy, others to the widest one.
        algorithm: "auto", "gather", "direct", "ring", "exchange" or, between GPUs, "nccl". There "auto" is what
            is measured to be fastest when tensors are first registered.
        scheduling: "queues", or "fcfs" to see first-come-first-serve deadlock.
        timeout_s: A wait longer than this is an error.
        warn_after_s: A wait that has taken so long is logged with the workers that it waits for, and again whenever
            that time has doubled; 0 for never.
        heartbeat_s: A memory device that does no work at all for so long, although its process is there, is lost;
            0 for never.
        snapshot_pool_bytes: How much memory old versions may take that snapshots refer to, for each model whose
            optimizer runs in the memory devices; 0 stands for those of one whole snapshot, at most half of the memory
            that is available.
        spin_us: How long a wait looks for its result before it sleeps, in microseconds; -1 stands for long where
            every process has a processor, and short where spinning would take it from whom it waits for.
        profile: Of the links: "off"; "cached" to use one that is kept; "auto" to measure one where none is kept;
            "refresh" to measure one in any case; or a file.
        routing: "profile" for routes by the links' profile; "local" for each worker's own memory device; "auto" for
            those of the profile where links carry the shards: not in the host's memory, and to memory devices on GPUs
            where a trial is faster; "spread" to have large shards take turns between both memory devices of the
            table, where all links of an emulated machine carry more so.
        machine: Name of a machine, or a TOML file, whose links the session emulates; "" for those that are there.
        time_dilation: Emulated links take so many times longer than the machine's.
        transfer_log: How many transfers, the first ones, an emulated session writes down for Session.transfers().
        dual_sync: "off" has the memory devices synchronise everything; "auto" has the workers reduce some tensors
            themselves, where a profile of the links says that this is faster, or a trial where models are on GPUs: by
            NCCL then, which adds in an order of its own. A size is what goes to the memory devices. Workers of one
            node can; in the host's memory, unless the algorithm is "ring".
        own_path: How they do it on an emulated machine: "ring", "all-gather", "all-to-all", or "auto" for what is
            fastest for each size. In the host's memory "all-to-all" is the only one.
        gpu_transfers: "auto" has gradients on a GPU travel on streams of their own while it computes, and stay there
            where memory devices are on it; "wait" has backward wait for their results, so that after an error no
            update has used gradients that were not averaged; "off" has the processor copy each one and wait, and
            leaves optimizers of such models to the workers.
        replan_steps: Steps between two looks at the links while training; 0 for none, -1 for what costs 1 % of them.
        keep_devices: Seconds for which memory devices outlive workers that crash, so that the next attempt goes on
            from their memory (docs/design/recovery.md); 0 for not at all.
        replicas: How many other memory devices have what each of them keeps once more, so that the next attempt goes
            on from there if a device is lost: 0 or 1. Needs `keep_devices`.
        failpoints: Faults to inject, for tests (coarse.failpoints); "" for none.
        torch_backend: What init_process_group("coarse") takes: "native" for the C++ backend, compiled at first need;
            "python" for the slower one; "auto" for that where the other cannot be compiled.
        node: Name of this worker's node, to try several nodes on one machine; "" for what the system says. This one
            and the next may differ between workers.
        node_address: Address of this machine that other nodes can reach; "" for that of the interface which leads to
            MASTER_ADDR.

    Raises:
        ValueError: If a value is out of range; the message names the variable.
    """

    memory_devices: int | tuple[MemoryName, ...] = _setting(
        0,
        "how many on this node, 0 for one per worker; or the memory of each: host,numa:2,dax:/dev/dax0.0,cuda:0",
        read=_read_memory_devices,
        check=_are_not_too_many,
    )
    partition_table: str = _setting("", "TOML file: which memory device serves which workers")
    sync_cores: int = _setting(
        0,
        "sync cores of each memory device, 0 for a share of the cores",
        read=_read_int,
        check=_is_between(0, 256),
    )
    shard_bytes: int = _setting(
        0,
        "smallest shard, such as 256KiB; 0 for what the profile says, or that",
        read=_read_bytes,
        check=_is_between(64, 1 << 32, or_zero=True),
    )
    gather_bytes: int = _setting(
        64 << 10,
        "largest tensor that one sync core gathers",
        read=_read_bytes,
        check=_is_between(0, 1 << 32),
    )
    routing_threshold_bytes: int = _setting(
        0,
        "smallest shard for the widest link, 0 for what the profile says",
        read=_read_bytes,
        check=_is_between(0, 1 << 40),
    )
    algorithm: str = _choice("auto", "how sync cores reduce", *ALGORITHM_CHOICES)
    scheduling: str = _choice("queues", "which shard comes next", *SCHEDULING_CHOICES)
    profile: str = _setting(
        "cached",
        "of the links: off, cached, auto, refresh or a file that `coarse profile` wrote",
        check=_is_a_profile,
    )
    routing: str = _choice("auto", "which memory device takes a shard", "auto", "profile", "spread", "local")
    machine: str = _setting("", "emulate the links of this machine, a name or a TOML file")
    time_dilation: float = _setting(
        1.0,
        "how many times slower than the machine emulated links are",
        read=_read_float,
        check=_is_between(0.001, 10**6),
    )
    transfer_log: int = _setting(
        0, "transfers that an emulated session writes down", read=_read_int, check=_is_between(0, 10**7)
    )
    snapshot_pool_bytes: int = _setting(
        0,
        "most memory of old versions for snapshots, 0 for one whole snapshot",
        read=_read_bytes,
        check=_is_between(0, 1 << 50),
    )
    timeout_s: float = _setting(
        600.0, "seconds after which a wait is an error", read=_read_float, check=_is_between(0.001, 10**7)
    )
    warn_after_s: float = _setting(
        30.0,
        "seconds after which a wait names the workers that it waits for, 0 for never",
        read=_read_float,
        check=_is_between(0.001, 10**7, or_zero=True),
    )
    heartbeat_s: float = _setting(
        10.0,
        "seconds for which a memory device may stand still, 0 for ever",
        read=_read_float,
        check=_is_between(0.5, 10**6, or_zero=True),
    )
    spin_us: int = _setting(
        -1,
        "microseconds that a wait looks before it sleeps, -1 for what suits the number of cores",
        read=_read_int,
        check=_is_between(-1, 10**6),
    )
    dual_sync: str = _setting(
        "auto",
        "what the workers reduce themselves: off, auto, or bytes for memory devices",
        check=_is_a_dual_sync,
    )
    own_path: str = _choice(
        "auto", "how workers reduce themselves", "auto", "ring", "all-gather", "all-to-all"
    )
    gpu_transfers: str = _choice(
        "auto",
        "gradients on a GPU: wait has backward wait for averages, off has the processor copy them",
        "auto",
        "wait",
        "off",
    )
    replan_steps: int = _setting(
        -1,
        "steps between looks at the links, 0 for none, -1 for a hundredth of the time",
        read=_read_int,
        check=_is_between(-1, 10**9),
    )
    keep_devices: float = _setting(
        0.0,
        "seconds for which memory devices outlive workers that crash, for --max-restarts",
        read=_read_float,
        check=_is_between(0, 10**6),
    )
    replicas: int = _setting(
        0,
        "1 keeps each memory device's parameters and optimizer state at its neighbour too, so that a job goes on "
        "without a checkpoint if a device is lost; with --keep-devices and --max-restarts",
        read=_read_int,
        check=_is_between(0, 1),
    )
    torch_backend: str = _choice("auto", 'of init_process_group("coarse")', "auto", "native", "python")
    failpoints: str = _setting("", "faults to inject, for tests", check=_are_failpoints)
    node: str = _setting("", "name of this node, to try several on one machine")
    node_address: str = _setting("", "address of this node that others can reach, else it is found")

    def __post_init__(self) -> None:
        for each in declarations():
            each.check(each.variable, getattr(self, each.name))
        self._check_together()

    def _check_together(self) -> None:
        """Refuses settings that do not go with each other."""
        if self.memory_devices and self.partition_table:
            raise ValueError(
                f"COARSE_MEMORY_DEVICES does not go with COARSE_PARTITION_TABLE={self.partition_table}, which says "
                "what memory devices there are; leave one of them out"
            )
        if self.machine and self.algorithm not in ("auto", "exchange"):
            raise ValueError(
                f"COARSE_ALGORITHM={self.algorithm} does not go with COARSE_MACHINE: its links carry 'exchange'"
            )
        if self.time_dilation != 1 and not self.machine:
            raise ValueError(
                f"COARSE_TIME_DILATION={self.time_dilation} needs COARSE_MACHINE: only emulated time dilates"
            )
        if self.own_path in ("ring", "all-gather") and not self.machine:
            raise ValueError(
                f"COARSE_OWN_PATH={self.own_path} needs COARSE_MACHINE: in the host's memory workers reduce "
                "all-to-all"
            )
        if self.routing == "spread" and not self.machine:
            raise ValueError(
                "COARSE_ROUTING=spread needs COARSE_MACHINE: it spreads shards over the links of an emulated machine"
            )
        if self.keep_devices and self.sync_algorithm not in ("auto", "direct", "gather"):
            raise ValueError(
                f"COARSE_KEEP_DEVICES does not go with the algorithm {self.sync_algorithm}: memory devices keep what "
                "their optimizer updates, and that needs coherent memory. Choose auto, direct or gather"
            )
        if self.replicas and not self.keep_devices:
            raise ValueError(
                f"COARSE_REPLICAS={self.replicas} needs COARSE_KEEP_DEVICES: memory devices that outlive a lost one "
                "have to wait for the workers of the next attempt. Set it to some seconds, such as 60"
            )

    @property
    def sync_algorithm(self) -> str:
        """The algorithm of this session's tensors: that of distinct memories where links are emulated."""
        return "exchange" if self.machine else self.algorithm

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Reads COARSE_MEMORY_DEVICES and so on: the names of the fields in capitals.

        Raises:
            SettingsError: If a variable cannot be read, or a variable of that prefix is not known.
        """
        try:
            return cls._read(os.environ if environ is None else environ)
        except ValueError as error:
            raise SettingsError(str(error)) from None

    @classmethod
    def _read(cls, environ: Mapping[str, str]) -> Settings:
        known = {each.variable: each for each in declarations()}
        names = {*known, *_OTHER_VARIABLES}
        for name in sorted(environ):
            if name.startswith(_PREFIX) and name not in names:
                raise ValueError(
                    f"{name} is set, but there is no such setting; there are {', '.join(sorted(names))}"
                )
        given = {name: each for name, each in known.items() if name in environ}
        values: dict[str, Any] = {each.name: each.read(name, environ[name]) for name, each in given.items()}
        return cls(**values)
