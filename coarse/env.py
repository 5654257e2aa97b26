"""Settings of a session. The only module that reads them from the environment.

Explicit arguments beat the environment, the environment beats the defaults. Nothing is read at import.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coarse.errors import RendezvousError, SettingsError
from coarse.failpoints import parse_failpoints
from coarse.machine.memory_name import MemoryName, parse_memory_devices

_SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


MOST_WORKERS_OF_A_NODE = 256
"""As many as a memory device serves."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Which worker of which job this process is.

    Args:
        rank: 0 <= rank < world_size.
        world_size: Number of workers of the job.
        local_rank: Position among the workers of this node.
        local_world_size: Number of workers on this node.

    Raises:
        RendezvousError: If the numbers contradict each other.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise RendezvousError(
                f"RANK={self.rank} does not fit WORLD_SIZE={self.world_size}: ranks run from 0 to "
                f"{self.world_size - 1}. Check the launcher's variables."
            )
        if not 0 <= self.local_rank < self.local_world_size <= self.world_size:
            raise RendezvousError(
                f"worker {self.rank}: LOCAL_RANK={self.local_rank} does not fit LOCAL_WORLD_SIZE="
                f"{self.local_world_size} of WORLD_SIZE={self.world_size}. Check the launcher's variables."
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> WorkerIdentity:
        """Reads RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; a process without them is worker 0 of 1.

        Raises:
            RendezvousError: If only some of RANK and WORLD_SIZE are set, or one is no number.
        """
        environ = os.environ if environ is None else environ
        if "RANK" not in environ and "WORLD_SIZE" not in environ:
            return cls(rank=0, world_size=1, local_rank=0, local_world_size=1)
        rank = _required_int(environ, "RANK")
        world_size = _required_int(environ, "WORLD_SIZE")
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=_required_int(environ, "LOCAL_RANK", default=rank),
            local_world_size=_required_int(environ, "LOCAL_WORLD_SIZE", default=world_size),
        )


def _required_int(environ: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is not None:
            return default
        raise RendezvousError(
            f"{name} is not set although other launcher variables are. Start the script with "
            "`coarse run -n N script.py` or `torchrun --nproc-per-node N script.py`."
        )
    try:
        return int(text)
    except ValueError:
        raise RendezvousError(f"{name}={text!r} is no whole number") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Which start of a job this is: launchers that restart workers count.

    Args:
        job: The same for all attempts of a job, and for no other one that this user runs here at the same time.
        number: 0 for the first attempt.
    """

    job: str
    number: int = 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Attempt:
        """Reads TORCHELASTIC_RUN_ID (or else MASTER_ADDR and MASTER_PORT) and TORCHELASTIC_RESTART_COUNT.

        torchrun sets them, and so does `coarse run`.

        Raises:
            RendezvousError: If the count is no number.
        """
        environ = os.environ if environ is None else environ
        run_id = environ.get("TORCHELASTIC_RUN_ID", "")
        if run_id in ("", "none"):  # the latter is torchrun's default, for every job
            run_id = f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"
        return cls(job=run_id, number=_required_int(environ, "TORCHELASTIC_RESTART_COUNT", default=0))


_PREFIX = "COARSE_"
# Read by setup.py, the Makefile, and benchmarks in images.
_OTHER_VARIABLES = frozenset({"COARSE_BUILD_JOBS", "COARSE_SANITIZE", "COARSE_COMMIT"})

ALGORITHM_CHOICES = ("auto", "gather", "direct", "ring", "exchange", "nccl")
SCHEDULING_CHOICES = ("queues", "fcfs")
ROUTING_CHOICES = ("auto", "profile", "spread", "local")
OWN_PATH_CHOICES = ("auto", "ring", "all-gather", "all-to-all")
GPU_TRANSFERS_CHOICES = ("auto", "wait", "off")
TORCH_BACKEND_CHOICES = ("auto", "native", "python")


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

    memory_devices: int | tuple[MemoryName, ...] = 0
    partition_table: str = ""
    sync_cores: int = 0
    shard_bytes: int = 0
    gather_bytes: int = 64 << 10
    routing_threshold_bytes: int = 0
    algorithm: str = "auto"
    scheduling: str = "queues"
    snapshot_pool_bytes: int = 0
    timeout_s: float = 600.0
    heartbeat_s: float = 10.0
    spin_us: int = -1
    profile: str = "cached"
    routing: str = "auto"
    machine: str = ""
    time_dilation: float = 1.0
    transfer_log: int = 0
    dual_sync: str = "auto"
    own_path: str = "auto"
    gpu_transfers: str = "auto"
    replan_steps: int = -1
    keep_devices: float = 0.0
    replicas: int = 0
    failpoints: str = ""
    torch_backend: str = "auto"
    node: str = ""
    node_address: str = ""

    def __post_init__(self) -> None:
        self._check_each()
        self._check_together()

    def _check_each(self) -> None:
        _check_memory_devices(self.memory_devices)
        _check_range("COARSE_SYNC_CORES", self.sync_cores, 0, 256)
        _check_range("COARSE_SHARD_BYTES", self.shard_bytes, 64 if self.shard_bytes else 0, 1 << 32)
        _check_range("COARSE_GATHER_BYTES", self.gather_bytes, 0, 1 << 32)
        _check_range("COARSE_ROUTING_THRESHOLD_BYTES", self.routing_threshold_bytes, 0, 1 << 40)
        _check_range("COARSE_SNAPSHOT_POOL_BYTES", self.snapshot_pool_bytes, 0, 1 << 50)
        _check_range("COARSE_TIMEOUT_S", self.timeout_s, 0.001, 10**7)
        _check_range("COARSE_HEARTBEAT_S", self.heartbeat_s, 0.5 if self.heartbeat_s else 0, 10**6)
        _check_range("COARSE_SPIN_US", self.spin_us, -1, 10**6)
        _check_choice("COARSE_ALGORITHM", self.algorithm, ALGORITHM_CHOICES)
        _check_choice("COARSE_SCHEDULING", self.scheduling, SCHEDULING_CHOICES)
        _check_choice("COARSE_ROUTING", self.routing, ROUTING_CHOICES)
        _check_choice("COARSE_OWN_PATH", self.own_path, OWN_PATH_CHOICES)
        _check_choice("COARSE_GPU_TRANSFERS", self.gpu_transfers, GPU_TRANSFERS_CHOICES)
        _check_choice("COARSE_TORCH_BACKEND", self.torch_backend, TORCH_BACKEND_CHOICES)
        if not self.profile:
            raise ValueError(
                "COARSE_PROFILE is empty; write off, cached, auto, refresh or the name of a file"
            )
        _check_range("COARSE_TIME_DILATION", self.time_dilation, 0.001, 10**6)
        _check_range("COARSE_TRANSFER_LOG", self.transfer_log, 0, 10**7)
        _check_range("COARSE_REPLAN_STEPS", self.replan_steps, -1, 10**9)
        _check_range("COARSE_KEEP_DEVICES", self.keep_devices, 0, 10**6)
        _check_range("COARSE_REPLICAS", self.replicas, 0, 1)
        parse_failpoints(self.failpoints)
        if self.dual_sync not in ("off", "auto"):
            parse_bytes(self.dual_sync, what="COARSE_DUAL_SYNC (off, auto or a size)")

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
        readers: dict[str, Callable[[str, str], object]] = {
            "memory_devices": _read_memory_devices,
            "partition_table": _read_text,
            "sync_cores": _read_int,
            "shard_bytes": _read_bytes,
            "gather_bytes": _read_bytes,
            "routing_threshold_bytes": _read_bytes,
            "algorithm": _read_text,
            "scheduling": _read_text,
            "snapshot_pool_bytes": _read_bytes,
            "timeout_s": _read_float,
            "heartbeat_s": _read_float,
            "spin_us": _read_int,
            "profile": _read_text,
            "routing": _read_text,
            "machine": _read_text,
            "time_dilation": _read_float,
            "transfer_log": _read_int,
            "dual_sync": _read_text,
            "own_path": _read_text,
            "gpu_transfers": _read_text,
            "replan_steps": _read_int,
            "keep_devices": _read_float,
            "replicas": _read_int,
            "failpoints": _read_text,
            "torch_backend": _read_text,
            "node": _read_text,
            "node_address": _read_text,
        }
        values: dict[str, Any] = {}
        for field, read in readers.items():
            name = f"{_PREFIX}{field.upper()}"
            if name in environ:
                values[field] = read(name, environ[name])
        known = {f"{_PREFIX}{field.upper()}" for field in readers} | _OTHER_VARIABLES
        for name in sorted(environ):
            if name.startswith(_PREFIX) and name not in known:
                raise ValueError(
                    f"{name} is set, but there is no such setting; there are {', '.join(sorted(known))}"
                )
        return cls(**values)


def master_address(environ: Mapping[str, str] | None = None) -> str:
    """MASTER_ADDR, where the launcher says that worker 0 can be reached; "" if it says nothing."""
    environ = os.environ if environ is None else environ
    return environ.get("MASTER_ADDR", "")


def own_process_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a Python process that runs COARSE's own code alone.

    It imports nothing from the current folder, where users' files have any name (from Python 3.11 on), unless COARSE
    itself lies there.
    """
    environ = os.environ if environ is None else environ
    is_in_current_folder = Path(__file__).parents[1].samefile(".")
    return {**environ, **({} if is_in_current_folder else {"PYTHONSAFEPATH": "1"})}


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}={value} is out of range: it must lie between {low} and {high}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is none of {', '.join(choices)}")


def _check_memory_devices(devices: int | tuple[MemoryName, ...]) -> None:
    count = devices if isinstance(devices, int) else len(devices)
    _check_range("COARSE_MEMORY_DEVICES", count, 0, 64)


def _read_memory_devices(name: str, text: str) -> int | tuple[MemoryName, ...]:
    try:
        return parse_memory_devices(text)
    except ValueError as error:
        raise ValueError(
            f"{name}={text!r} is neither a number of memory devices nor memories such as host,numa:2: {error}"
        ) from None


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
