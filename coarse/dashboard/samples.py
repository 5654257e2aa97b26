"""The state of a job at one moment, as plain values: `coarse dashboard` draws them, `coarse top` prints them."""

from __future__ import annotations

from dataclasses import dataclass

STARTS, TRAINS, WAITS, SILENT = "starts", "trains", "waits", "silent"
"""States of a worker: it has not joined; it trains; it waits longer than a moment; it does not answer."""

AWAITED, RUNS, OVER = "awaited", "runs", "over"
"""Phases of a job: no process has answered yet; some answer; none answers any more."""

FAULT, JOB, CHECKPOINT, ROUTE = "fault", "job", "checkpoint", "route"
"""Kinds of events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker of this node. Times are means per step over the last seconds, 0.0 before the first step.

    Args:
        rank: Its rank.
        pid: Its process; 0 on another node.
        state: STARTS, TRAINS, WAITS or SILENT.
        doing: Its activity, in words: the cause of its wait, or the place in its Python code.
        step: Finished steps.
        waits_s: Seconds for which it has been waiting; 0.0 if it does not.
        step_s: Time of a step: the sum of the following three.
        compute_s: Forward, backward and all else.
        blocked_s: Waiting for other workers and memory devices.
        optimizer_s: The optimizer's steps in the worker.
        blocked_by: Parts of `blocked_s` by cause, as in coarse_wait_seconds.
        samples_per_s: Samples that it trains on; 0.0 if nothing counts them.
        private_bytes: Resident memory without shared memory and files.
    """

    rank: int
    pid: int
    state: str
    doing: str
    step: int = 0
    waits_s: float = 0.0
    step_s: float = 0.0
    compute_s: float = 0.0
    blocked_s: float = 0.0
    optimizer_s: float = 0.0
    blocked_by: dict[str, float]
    samples_per_s: float = 0.0
    private_bytes: int = 0

    @property
    def own_s(self) -> float:
        """The part of a step in which it does not wait."""
        return self.compute_s + self.optimizer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A memory device of this node.

    Args:
        number: 1 for md1.
        pid: Its process; 0 on another node.
        doing: Its activity, in words.
        is_silent: Whether it does not answer.
        memory: Kind and place of its memory; "" if unknown.
        serves: Ranks of the workers that it serves.
        node: The address of the metrics of its node; "" for this node.
        reduced_bytes_per_s: Bytes of results, counted for one worker.
        busy: Share of its sync cores' time in which they work, from 0.0 to 1.0.
        sync_cores: Number of sync cores.
        queue_shards: Shards that wait in its queues.
        reserved_bytes: Memory reserved for tensors, parameters and states.
        pool_bytes, pool_limit_bytes: Memory of old versions to which snapshots refer, and its limit.
    """

    number: int
    pid: int
    doing: str
    is_silent: bool = False
    memory: str = ""
    serves: tuple[int, ...] = ()
    node: str = ""
    reduced_bytes_per_s: float = 0.0
    busy: float = 0.0
    sync_cores: int = 0
    queue_shards: int = 0
    reserved_bytes: int = 0
    pool_bytes: int = 0
    pool_limit_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link that gradients take.

    Args:
        source: "worker 0", or "md0" for a link to other nodes.
        target: "md1", or "other nodes".
        bytes_per_s: Its traffic now: pushed gradients, or bytes sent to other nodes.
        limit_bytes_per_s: Its capacity; 0.0 if it was not measured.
        limit_kind: "measured", "emulated" or "simulated"; "" without a limit.
        algorithms: The algorithms that reduce its traffic.
    """

    source: str
    target: str
    bytes_per_s: float
    limit_bytes_per_s: float = 0.0
    limit_kind: str = ""
    algorithms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Memory of one owner.

    Args:
        owner: "worker 0" or "md0".
        what: "private", or a memory device's use of it: "gradients", "parameters", "states", "copies"
            for recovery, "snapshots" (old versions only), "other".
        num_bytes: Resident bytes of a worker; reserved bytes of a memory device.
    """

    owner: str
    what: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """Saves of checkpoints since the workers' start, over all workers of the node.

    Args:
        saved, failed, skipped: Number of saves by outcome.
        written_bytes: Bytes of the saves.
        save_s: Mean time until a checkpoint was on disk.
    """

    saved: int = 0
    failed: int = 0
    skipped: int = 0
    written_bytes: int = 0
    save_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened.

    Args:
        time_s: Seconds since the epoch.
        kind: FAULT, JOB, CHECKPOINT or ROUTE.
        text: In words.
    """

    time_s: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The state of a job's processes on this node.

    Args:
        number: Grows by 1 with each sample.
        time_s: Seconds since the epoch.
        phase: AWAITED, RUNS or OVER.
        job: Id of the job.
        program: Name of its script; "" if unknown.
        machine: The emulated machine; "" for real links.
        world_size: Workers of the job on all nodes; 0 if unknown.
        restarts: Restarts of the workers before this attempt.
        step: Finished steps of the worker that has the fewest.
        steps_per_s: Steps of the job per second.
        samples_per_s: Samples per second of this node's workers together.
        slowest: Rank of the worker for which the others wait; -1 if none stands out.
        why_slow: The reason, in words; "" if none stands out.
        workers, devices, links, memory, checkpoints: See there.
        nodes: Ranks of the workers of each node of the job; empty if unknown.
        decisions: The session's decisions about links, routes and algorithms, with reasons, one line each.
        events: Events since the previous sample.
    """

    number: int
    time_s: float
    phase: str
    job: str
    program: str = ""
    machine: str = ""
    world_size: int = 0
    restarts: int = 0
    step: int = 0
    steps_per_s: float = 0.0
    samples_per_s: float = 0.0
    slowest: int = -1
    why_slow: str = ""
    workers: tuple[Worker, ...] = ()
    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    memory: tuple[MemoryUse, ...] = ()
    checkpoints: Checkpoints
    nodes: tuple[tuple[int, ...], ...] = ()
    decisions: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()
