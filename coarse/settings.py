"""Settings of a session: each declared once, as a field with its default, its valid values and a line for users.

Explicit arguments beat the environment, the environment beats the defaults. Nothing is read at import.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from coarse.env import MOST_WORKERS_OF_A_NODE, process_environment
from coarse.errors import SettingsError
from coarse.machine.cci import LoadStore
from coarse.machine.memory_name import MemoryName, parse_memory_devices
from coarse.process.failpoints import parse_failpoints
from coarse.security.node_ports import NodePorts

ALGORITHM_CHOICES = ("auto", "gather", "direct", "ring", "exchange", "nccl")
SCHEDULING_CHOICES = ("queues", "fcfs")
NODE_COMPRESSIONS = ("none", "bf16", "fp16", "int8")
"""In the order of Compression (coarse/kernels/include/coarse/reduce/compression.hpp)."""

_UNPACED = {
    "gather": "the device of the last contribution would reduce each tensor alone, and direct takes turns",
    "nccl": "NCCL sends over the links of this machine, which nothing paces",
}
"""Algorithms that emulated links do not carry, with the reason."""

_PREFIX = "COARSE_"
# Read by setup.py, the Makefile, and benchmarks in images; and by coarse.env, as settings are shown.
_OTHER_VARIABLES = frozenset(
    {
        "COARSE_BUILD_JOBS",
        "COARSE_SANITIZE",
        "COARSE_COMMIT",
        "COARSE_JOB_SECRET",
        "COARSE_NOTES_PIPE",
        "COARSE_INVITATION",
    }
)
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
        raise ValueError(
            f"{what}: {text!r} is not a size; write a number with B, KB, MB, GB, KiB, MiB or GiB"
        )
    return int(match.group(1)) * _SIZE_UNITS[unit]


# ---- valid values ----

_Read: TypeAlias = Callable[[str, str], object]
"""Makes a value of the text of a variable, whose name comes first."""

_Check: TypeAlias = Callable[[str, Any], None]
"""Raises ValueError, which names the variable, if its value cannot be."""


def _read_int(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a whole number") from None


def _read_float(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a number") from None


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
            raise ValueError(f"{name}={value} is out of range: it must be between {low} and {high}")

    return check


def _is_one_of(*choices: str) -> _Check:
    def check(name: str, value: str) -> None:
        if value not in choices:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(choices)}")

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


def _are_modules(name: str, text: str) -> None:
    for module in filter(None, text.split(",")):
        if not all(part.isidentifier() for part in module.split(".")):
            raise ValueError(
                f"{name}={text!r}: {module!r} is no name of a module; write names such as torch,numpy"
            )


def _are_load_store_ratios(name: str, text: str) -> None:
    try:
        _ = LoadStore.parse(text) if text else None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _are_ports(name: str, text: str) -> None:
    try:
        NodePorts.parse(text)
    except ValueError as error:
        raise ValueError(f"{name}={error}") from None


def _is_anything(name: str, value: object) -> None:
    del name, value


# ---- declarations ----

_DECLARED = "setting"


def _setting(
    default: object,
    summary: str,
    *,
    read: _Read = _read_text,
    check: _Check = _is_anything,
    is_advanced: bool = False,
) -> Any:
    return field(default=default, metadata={_DECLARED: (summary, read, check, is_advanced)})


def _choice(default: str, summary: str, *choices: str, is_advanced: bool = False) -> Any:
    text = f"{summary}: {', '.join(choices)}"
    return _setting(default, text, check=_is_one_of(*choices), is_advanced=is_advanced)


@dataclass(frozen=True, slots=True)
class Declaration:
    """A setting as the command line and the documentation present it.

    Args:
        name: Name of its field.
        default: Default of its field.
        summary: Its purpose in one line.
        read: Parses the text of its variable.
        check: Raises ValueError if a value is out of range.
        is_advanced: Whether only researchers and tests need it.
    """

    name: str
    default: object
    summary: str
    read: _Read
    check: _Check
    is_advanced: bool

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return f"{_PREFIX}{self.name.upper()}"

    @property
    def flag(self) -> str:
        """Its flag of `coarse run`."""
        return "--" + self.name.removesuffix("_s").replace("_", "-")

    @property
    def default_text(self) -> str:
        """The default as users write it; "" if there is none."""
        return f"{self.default:g}" if isinstance(self.default, float) else f"{self.default}"


def _nearest(name: str, known: Iterable[str]) -> str:
    """Which of the known variables may be meant; the prefix makes none more similar."""
    names = sorted(each.removeprefix(_PREFIX) for each in known)
    found = difflib.get_close_matches(name.removeprefix(_PREFIX), names, n=1)
    return (
        f"did you mean {_PREFIX}{found[0]}?"
        if found
        else "docs/settings.md and coarse run --help-all list all settings"
    )


def declarations() -> tuple[Declaration, ...]:
    """All settings, in the order in which users see them."""
    return tuple(Declaration(each.name, each.default, *each.metadata[_DECLARED]) for each in fields(Settings))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The configuration of a session, the same on every worker except for `node`, `node_address` and `node_ports`.

    Args:
        memory_devices: Number of memory devices per node, 0 for one per local worker; or the memory of each.
        partition_table: TOML file that assigns workers to memory devices, instead of `memory_devices`; "" assigns
            them evenly.
        sync_cores: Sync cores (threads) per memory device; 0 takes a share of the available cores.
        shard_bytes: Partition threshold: the smallest shard of a larger tensor. 0 takes the value of the links,
            emulated or between GPUs, or 256 KiB.
        gather_bytes: Largest tensor that a single sync core reduces.
        routing_threshold_bytes: Smallest shard for the widest link; smaller ones go to the proxy with the lowest
            latency. 0 takes the value of the links' profile.
        algorithm: "auto", "gather", "direct", "ring", "exchange" or, between GPUs, "nccl". Between GPUs "auto"
            measures the algorithms when tensors are first registered.
        scheduling: "queues"; or "fcfs", which demonstrates the deadlock of first-come-first-serve.
        timeout_s: Seconds after which a wait fails.
        warn_after_s: Seconds after which a wait logs the workers it waits for, and again each time its duration
            doubles; 0 disables.
        node_timeout_s: Seconds without an answer or a connection after which another node counts as lost; until then
            the job waits. 0 takes `timeout_s`.
        heartbeat_s: Seconds without progress before a running memory device counts as lost; 0 disables.
        snapshot_pool_bytes: Memory limit for old versions that snapshots refer to, for each model whose optimizer
            runs in the memory devices. 0 allows one whole snapshot, and at most half of the available memory.
        spin_us: Microseconds that a wait spins before it sleeps. -1 spins long if every process has a core of its
            own, and briefly if spinning would starve the process being waited on.
        profile: Links' profile: "off"; "cached" uses a stored one; "auto" measures if none is stored; "refresh"
            always measures; or a file.
        routing: "profile" routes by the links' profile; "local" uses each worker's own memory device; "auto" follows
            the profile where links carry the shards: not in host memory, and on GPUs only if a trial is faster;
            "spread" alternates large shards between the two memory devices of the table, on emulated machines.
        machine: Machine whose links the session emulates, by name or TOML file; "" uses the real links.
        time_dilation: Factor by which emulated links are slower than the machine's.
        dense: The paper's DENSE on an emulated machine: one memory device, which workers reach by loads and stores
            through CCI. Two numbers, "17,4": how many times slower than the link reads and writes are; "" for COARSE.
        transfer_log: Number of transfers, from the first on, that an emulated session records for
            Session.emulation.transfers().
        dual_sync: "off" synchronises everything in the memory devices; "auto" lets workers reduce some tensors
            directly where a profile, or on GPUs a trial, shows that it is faster (on GPUs by NCCL, which adds in its
            own order); a size sets the bytes that go to the memory devices. For workers of one node; in host memory
            not with the algorithm "ring".
        own_path: Algorithm of that direct reduction on emulated machines: "ring", "all-gather", "all-to-all",
            "two-way-ring", "tree", or "auto" for the fastest at each size. Host memory supports only "all-to-all".
        gpu_transfers: "auto" moves gradients of a GPU on separate streams during backward, and leaves them there if
            a memory device is on that GPU; "wait" makes backward wait for their averages, so that no update uses
            unaveraged gradients after an error; "off" copies each one synchronously through the processor, and
            leaves optimizers of such models to the workers.
        replan_steps: Steps between two checks of the links; 0 disables, -1 spends 1 % of the time on them, but
            checks no links between GPUs, for which the processor would wait in each step.
        keep_devices: Seconds that memory devices outlive crashed workers, so that the next attempt continues from
            their memory (docs/design/recovery.md); 0 disables.
        replicas: Extra copies of each memory device's contents, 0 or 1, so that the next attempt continues if a
            device is lost. Needs `keep_devices`.
        min_workers: Number of workers that go on when others are lost (docs/guides/elastic.md); with fewer the
            attempt ends. 0 ends it with the first loss.
        on_loss: "continue" lets the remaining workers go on, at least one if `min_workers` is 0; "replace" also
            starts a new worker in place of each lost one; "restart" ends the attempt; "auto" continues if
            `min_workers` is above 0.
        max_workers: Places for workers, of which those above the number at the start are vacant until others join by
            `coarse run --join`; 0 for as many as start. Needs `min_workers`.
        preload: Modules, separated by commas, that `coarse run` imports once, in a process from which it forks all
            workers; "" imports them in each worker.
        metrics_port: Port at which each node serves its metrics (docs/metrics.md); 0 disables.
        metrics_address: Address at which it does; the default is reachable from the same machine only.
        failpoints: Faults to inject, for tests (coarse.process.failpoints); "" for none.
        timeline: File for a trace of the whole job, compressed if it ends in ".gz"; "" records none.
        timeline_events: Events that each process keeps for it, rounded up to a power of two; 64 bytes each.
        node: Name of this worker's node, to run several nodes on one machine; "" asks the system.
        node_address: Address by which other nodes reach this machine, or the name of the network interface that has
            it; "" takes that of the interface that leads to MASTER_ADDR.
        node_ports: Range of ports at which a node listens for other nodes, such as "20000-20099"; "" takes any free
            ones.
        node_compression: How float32 gradients travel between nodes: "none" sends them as they are, "bf16" and "fp16"
            in 16 bits, and "int8" in blocks with scales and with error feedback (docs/design/nodes.md#compression).

    Raises:
        ValueError: If a value is out of range; the message names the variable.
    """

    memory_devices: int | tuple[MemoryName, ...] = _setting(
        0,
        "memory devices per node, 0 for one per worker; or the memory of each: host,numa:2,dax:/dev/dax0.0,cuda:0",
        read=_read_memory_devices,
        check=_are_not_too_many,
    )
    partition_table: str = _setting("", "TOML file that assigns workers to memory devices")
    sync_cores: int = _setting(
        0,
        "sync cores (threads) per memory device, 0 for a share of the cores",
        read=_read_int,
        check=_is_between(0, 256),
    )
    shard_bytes: int = _setting(
        0,
        "smallest shard of a larger tensor; 0 takes the value of the links, or 256KiB",
        read=_read_bytes,
        check=_is_between(64, 1 << 32, or_zero=True),
        is_advanced=True,
    )
    gather_bytes: int = _setting(
        64 << 10,
        "largest tensor that a single sync core reduces",
        read=_read_bytes,
        check=_is_between(0, 1 << 32),
        is_advanced=True,
    )
    routing_threshold_bytes: int = _setting(
        0,
        "smallest shard for the widest link; 0 takes the profile's value",
        read=_read_bytes,
        check=_is_between(0, 1 << 40),
        is_advanced=True,
    )
    algorithm: str = _choice(
        "auto", "reduction algorithm of the sync cores", *ALGORITHM_CHOICES, is_advanced=True
    )
    scheduling: str = _choice(
        "queues", "order in which shards are served", *SCHEDULING_CHOICES, is_advanced=True
    )
    profile: str = _setting(
        "cached",
        "links' profile: off, cached, auto, refresh, or a file written by `coarse profile`",
        check=_is_a_profile,
    )
    routing: str = _choice(
        "auto",
        "choice of the memory device for a shard",
        "auto",
        "profile",
        "spread",
        "local",
        is_advanced=True,
    )
    machine: str = _setting("", "machine whose links are emulated, a name or a TOML file")
    time_dilation: float = _setting(
        1.0,
        "slow-down of emulated links",
        read=_read_float,
        check=_is_between(0.001, 10**6),
    )
    dense: str = _setting(
        "",
        "emulates the paper's DENSE: slow-down of reads and writes by loads and stores, such as 17,4",
        check=_are_load_store_ratios,
        is_advanced=True,
    )
    transfer_log: int = _setting(
        0,
        "number of transfers that an emulated session records",
        read=_read_int,
        check=_is_between(0, 10**7),
        is_advanced=True,
    )
    snapshot_pool_bytes: int = _setting(
        0,
        "memory limit for old versions of snapshots; 0 allows one whole snapshot",
        read=_read_bytes,
        check=_is_between(0, 1 << 50),
        is_advanced=True,
    )
    timeout_s: float = _setting(
        600.0, "seconds after which a wait fails", read=_read_float, check=_is_between(0.001, 10**7)
    )
    warn_after_s: float = _setting(
        30.0,
        "seconds after which a wait logs the workers it waits for; 0 disables",
        read=_read_float,
        check=_is_between(0.001, 10**7, or_zero=True),
    )
    node_timeout_s: float = _setting(
        0.0,
        "seconds without an answer after which another node counts as lost; 0 takes --timeout",
        read=_read_float,
        check=_is_between(1, 10**6, or_zero=True),
    )
    heartbeat_s: float = _setting(
        10.0,
        "seconds without progress before a device counts as lost; 0 disables",
        read=_read_float,
        check=_is_between(0.5, 10**6, or_zero=True),
        is_advanced=True,
    )
    spin_us: int = _setting(
        -1,
        "microseconds that a wait spins before it sleeps; -1 adapts to the number of cores",
        read=_read_int,
        check=_is_between(-1, 10**6),
        is_advanced=True,
    )
    dual_sync: str = _setting(
        "auto",
        "direct reduction by the workers: off, auto, or the bytes that go to memory devices",
        check=_is_a_dual_sync,
        is_advanced=True,
    )
    own_path: str = _choice(
        "auto",
        "algorithm of the direct reduction by the workers",
        "auto",
        "ring",
        "all-gather",
        "all-to-all",
        "two-way-ring",
        "tree",
        is_advanced=True,
    )
    gpu_transfers: str = _choice(
        "auto",
        "transfer of GPU gradients; wait: backward waits for averages, off: synchronous copies",
        "auto",
        "wait",
        "off",
        is_advanced=True,
    )
    replan_steps: int = _setting(
        -1,
        "steps between checks of the links; 0 disables, -1 spends 1 % of the time",
        read=_read_int,
        check=_is_between(-1, 10**9),
        is_advanced=True,
    )
    keep_devices: float = _setting(
        0.0,
        "seconds that memory devices outlive crashed workers, for --max-restarts",
        read=_read_float,
        check=_is_between(0, 10**6),
    )
    replicas: int = _setting(
        0,
        "extra copies of each memory device's contents, 0 or 1; with --keep-devices and --max-restarts",
        read=_read_int,
        check=_is_between(0, 1),
    )
    min_workers: int = _setting(
        0,
        "workers that suffice to go on after others are lost; 0 ends the job with the first",
        read=_read_int,
        check=_is_between(0, MOST_WORKERS_OF_A_NODE),
    )
    on_loss: str = _choice(
        "auto",
        "reaction to the loss of a worker; auto continues if --min-workers is given, replace also starts another "
        "worker in its place, restart ends the attempt",
        "auto",
        "continue",
        "replace",
        "restart",
    )
    max_workers: int = _setting(
        0,
        "places for workers; further ones join by --join; 0 for as many as start",
        read=_read_int,
        check=_is_between(0, MOST_WORKERS_OF_A_NODE),
    )
    preload: str = _setting(
        "",
        "modules to import once, in a process from which all workers are forked, such as torch,transformers",
        check=_are_modules,
    )
    metrics_port: int = _setting(
        0,
        "port at which each node serves its metrics to Prometheus; 0 disables",
        read=_read_int,
        check=_is_between(0, 65535),
    )
    metrics_address: str = _setting("127.0.0.1", "address at which nodes serve their metrics")
    timeline: str = _setting(
        "", "file for a trace of the whole job, which Perfetto opens; .json, or .json.gz for a compressed one"
    )
    timeline_events: int = _setting(
        1 << 18,
        "events that each process keeps for the timeline, the newest ones",
        read=_read_int,
        check=_is_between(1, 1 << 28),
        is_advanced=True,
    )
    failpoints: str = _setting("", "faults to inject, for tests", check=_are_failpoints, is_advanced=True)
    node: str = _setting("", "name of this node, to run several on one machine", is_advanced=True)
    node_address: str = _setting(
        "", "address by which other nodes reach this one, or its network interface; detected by default"
    )
    node_ports: str = _setting(
        "", "ports at which a node listens for others, such as 20000-20099; any by default", check=_are_ports
    )
    node_compression: str = _choice("none", "how float32 gradients travel between nodes", *NODE_COMPRESSIONS)

    def __post_init__(self) -> None:
        for each in declarations():
            each.check(each.variable, getattr(self, each.name))
        self._check_together()

    def _check_together(self) -> None:
        """Rejects settings that exclude each other."""
        if self.memory_devices and self.partition_table:
            raise ValueError(
                f"COARSE_MEMORY_DEVICES cannot be combined with COARSE_PARTITION_TABLE={self.partition_table}, "
                "which already defines the memory devices; unset one of them"
            )
        self._check_emulation()
        self._check_recovery()
        self._check_membership()

    def _check_emulation(self) -> None:
        if self.machine and self.algorithm in _UNPACED:
            raise ValueError(
                f"COARSE_ALGORITHM={self.algorithm} cannot be combined with COARSE_MACHINE: "
                f"{_UNPACED[self.algorithm]}. Choose exchange, ring or direct"
            )
        if self.machine and self.keep_devices:
            raise ValueError(
                "COARSE_KEEP_DEVICES cannot be combined with COARSE_MACHINE: the optimizer whose values memory "
                "devices keep does not run over emulated links; unset one of them"
            )
        if self.machine and self.node_compression != "none":
            raise ValueError(
                f"COARSE_NODE_COMPRESSION={self.node_compression} cannot be combined with COARSE_MACHINE: emulated "
                "links carry gradients as they are; unset one of them"
            )
        if self.time_dilation != 1 and not self.machine:
            raise ValueError(
                f"COARSE_TIME_DILATION={self.time_dilation} needs COARSE_MACHINE: only emulated time dilates"
            )
        if self.dense and (not self.machine or self.dual_sync != "off"):
            raise ValueError(
                f"COARSE_DENSE={self.dense} needs COARSE_MACHINE and COARSE_DUAL_SYNC=off: workers reach an emulated "
                "memory device by loads and stores, and reduce nothing themselves"
            )
        if self.own_path not in ("auto", "all-to-all") and not self.machine:
            raise ValueError(
                f"COARSE_OWN_PATH={self.own_path} needs COARSE_MACHINE: workers in the host's memory reduce "
                "all-to-all"
            )
        if self.routing == "spread" and not self.machine:
            raise ValueError(
                "COARSE_ROUTING=spread needs COARSE_MACHINE: it spreads shards over the links of an emulated machine"
            )
        if self.routing == "spread" and self.algorithm == "ring":
            raise ValueError(
                "COARSE_ROUTING=spread cannot be combined with COARSE_ALGORITHM=ring: a ring takes each "
                "contribution from the worker's own memory device; choose exchange or direct"
            )

    def _check_recovery(self) -> None:
        if self.keep_devices and self.sync_algorithm not in ("auto", "direct", "gather"):
            raise ValueError(
                f"COARSE_KEEP_DEVICES cannot be combined with the algorithm {self.sync_algorithm}: memory "
                "devices keep the values that their optimizer updates, and that needs coherent memory. Choose "
                "auto, direct or gather"
            )
        if self.replicas and not self.keep_devices:
            raise ValueError(
                f"COARSE_REPLICAS={self.replicas} needs COARSE_KEEP_DEVICES: the remaining memory devices must "
                "wait for the workers of the next attempt. Set it to a number of seconds, such as 60"
            )

    def _check_membership(self) -> None:
        if self.max_workers and not self.least_workers:
            raise ValueError(
                f"COARSE_MAX_WORKERS={self.max_workers} needs COARSE_MIN_WORKERS, and not COARSE_ON_LOSS=restart: "
                "workers join a job only if it also goes on when they are lost"
            )
        if self.max_workers and self.max_workers < self.min_workers:
            raise ValueError(
                f"COARSE_MAX_WORKERS={self.max_workers} is below COARSE_MIN_WORKERS={self.min_workers}; raise it"
            )
        if self.least_workers and (reason := self._cannot_continue()):
            raise ValueError(
                f"COARSE_MIN_WORKERS={self.min_workers}, COARSE_ON_LOSS={self.on_loss}: a job cannot go on without "
                f"lost workers if {reason}, or set COARSE_ON_LOSS=restart"
            )

    def _cannot_continue(self) -> str:
        """The setting that prevents a job from going on without its lost workers, with advice; "" if none does."""
        reasons = {
            "links are emulated (COARSE_MACHINE); unset it": bool(self.machine),
            "shards are served in turn (COARSE_SCHEDULING=fcfs); set it to queues": self.scheduling == "fcfs",
            f"COARSE_ALGORITHM is {self.algorithm}; set it to auto, direct or gather": self.algorithm
            not in ("auto", "direct", "gather"),
            "workers reduce tensors themselves (COARSE_DUAL_SYNC); set it to auto or off": self.dual_sync
            not in ("auto", "off"),
            "all workers check the links (COARSE_REPLAN_STEPS); set it to 0": self.replan_steps > 0,
            "backward waits on a GPU (COARSE_GPU_TRANSFERS=wait); set it to auto or off": self.gpu_transfers
            == "wait",
            "memory devices wait for all workers (COARSE_KEEP_DEVICES); unset it": self.keep_devices > 0,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    @property
    def least_workers(self) -> int:
        """Workers that suffice to go on after a loss; 0 if any loss of a worker ends the attempt."""
        if self.on_loss == "restart":
            return 0
        return self.min_workers or int(self.on_loss in ("continue", "replace"))

    @property
    def replaces_workers(self) -> bool:
        """Whether new workers may take the places of lost ones, and vacant ones."""
        return self.on_loss == "replace" or self.max_workers > 0

    @property
    def preloaded_modules(self) -> tuple[str, ...]:
        """Modules that are imported before workers are forked."""
        return tuple(filter(None, self.preload.split(",")))

    @property
    def node_patience_ms(self) -> int:
        """Milliseconds without an answer after which another node counts as lost."""
        return round(1000 * (self.node_timeout_s or self.timeout_s))

    @property
    def sync_algorithm(self) -> str:
        """The algorithm of this session's tensors: `exchange` by default where links are emulated."""
        return "exchange" if self.machine and self.algorithm == "auto" else self.algorithm

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Reads COARSE_MEMORY_DEVICES and so on: the names of the fields in capitals.

        Raises:
            SettingsError: If a variable cannot be read, or a variable of that prefix is not known.
        """
        try:
            return cls._read(process_environment() if environ is None else environ)
        except ValueError as error:
            raise SettingsError(str(error)) from None

    @classmethod
    def _read(cls, environ: Mapping[str, str]) -> Settings:
        known = {each.variable: each for each in declarations()}
        names = {*known, *_OTHER_VARIABLES}
        for name in sorted(environ):
            if name.startswith(_PREFIX) and name not in names:
                raise ValueError(f"{name} is set, but no such setting exists; {_nearest(name, known)}")
        given = {name: each for name, each in known.items() if name in environ}
        values: dict[str, Any] = {each.name: each.read(name, environ[name]) for name, each in given.items()}
        return cls(**values)
