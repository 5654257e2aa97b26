"""`coarse bench replay`: a training step with recorded computation and real synchronisation.

Workers push real tensors through the real runtime, at the speed of another machine's links. Only the computation
between pushes is replaced by its measured time (trace.py). All figures are *emulated*, in the emulated machine's
seconds: real time divided by the time dilation.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from coarse.bench.harness.commands import WorkerJob
from coarse.bench.harness.rendezvous import join_session
from coarse.bench.harness.worker_pool import Progress, WorkerPool, time_for
from coarse.bench.pace import Paced, Pacing, keep_pace, lateness_us
from coarse.bench.replay.allreduce_tuner import describe_ways, fastest_ways_of, ways_of_shards
from coarse.bench.replay.preconditions import require_links, require_room
from coarse.bench.replay.trace import ComputeTrace, compute_until
from coarse.bench.timing import Timing, slowest_worker
from coarse.emulation.pacing import PacingReport
from coarse.profiler.direct_allreduce import RING, TREE, TWO_WAY_RING, WAYS, WAYS_OVER_NODES
from coarse.settings import Settings
from coarse.tuning.first_steps import TIMED_STEPS

_WHOLE_TENSORS = 1 << 32

BLOCKED, STEP = "blocked time", "step"
"""Purposes of runs: the time to which the pacing error relates."""

_LEAST_BLOCKED = 0.01
"""Least share of a step to which the pacing error relates: blocked time below it is as good as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One way of synchronising a step.

    Args:
        settings: Fields of coarse.settings.Settings that the scheme sets.
        is_pipelined: Whether a tensor is pushed as soon as it is ready. Otherwise first-in-first-out: its push waits
            for the pull of the tensor before it (paper, Fig 9).
        what: Description in words.
        ways: Ways of an all-reduce among the workers (coarse.profiler.direct_allreduce), the fastest for each size by
            measurement; () if the settings decide.
    """

    settings: Mapping[str, Any]
    is_pipelined: bool
    what: str
    ways: tuple[str, ...] = ()

    def ways_over(self, num_nodes: int) -> tuple[str, ...]:
        """The ways among the workers of this number of nodes."""
        return WAYS_OVER_NODES if self.ways == WAYS and num_nodes > 1 else self.ways


SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        "coarse": Scheme(
            settings={"dual_sync": "auto"}, is_pipelined=True, what="routing table, dual synchronisation"
        ),
        "offload": Scheme(
            settings={"dual_sync": "off"}, is_pipelined=True, what="routing table, all in memory devices"
        ),
        "spread": Scheme(
            settings={"dual_sync": "off", "routing": "spread"},
            is_pipelined=True,
            what="routing table, large shards in turn to both of its memory devices",
        ),
        "local": Scheme(
            settings={"dual_sync": "off", "routing": "local"},
            is_pipelined=True,
            what="always the local memory device",
        ),
        "ring": Scheme(
            settings={"dual_sync": "off", "algorithm": "ring"},
            is_pipelined=True,
            what="always the local memory device, sync cores in rings",
        ),
        "direct": Scheme(
            settings={"dual_sync": "off", "algorithm": "direct"},
            is_pipelined=True,
            what="routing table, each shard reduced by one memory device in turn",
        ),
        "workers": Scheme(
            settings={"dual_sync": "off"},
            is_pipelined=True,
            what="all by the workers, measured fastest way by size",
            ways=WAYS,
        ),
        "fifo": Scheme(
            settings={"dual_sync": "off", "shard_bytes": _WHOLE_TENSORS},
            is_pipelined=False,
            what="whole tensors, first in first out",
        ),
        "dense": Scheme(
            settings={"dense": "17,4", "memory_devices": "1", "partition_table": "", "dual_sync": "off"},
            is_pipelined=True,
            what="DENSE: one memory device, by loads and stores through CCI",
        ),
        "dense-least": Scheme(
            settings={"dense": "9,1.25", "memory_devices": "1", "partition_table": "", "dual_sync": "off"},
            is_pipelined=True,
            what="DENSE with the smallest slow-down that the paper gives",
        ),
        "allreduce": Scheme(
            settings={"dual_sync": "off"},
            is_pipelined=True,
            what="one-way ring over the workers' own links",
            ways=(RING,),
        ),
        "two-way-ring": Scheme(
            settings={"dual_sync": "off"},
            is_pipelined=True,
            what="rings in both directions over the workers' own links",
            ways=(TWO_WAY_RING,),
        ),
        "tree": Scheme(
            settings={"dual_sync": "off"},
            is_pipelined=True,
            what="double binary tree over the workers' own links",
            ways=(TREE,),
        ),
    }
)
"""Schemes by their names on the command line."""

ALL_REDUCES = ("allreduce", "two-way-ring", "tree", "workers")
"""Schemes without memory devices; the one with the shortest blocked time is the reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """The plan of one run.

    Args:
        schemes: Names in SCHEMES, in the order of their turns.
        trace: The computation.
        has_compute: False omits the computation: every gradient is ready at once, so that the run measures the
            bandwidth of synchronisation.
        machine: The machine whose links are emulated: a name or a file (coarse.machine).
        num_workers: Workers of all nodes together.
        num_nodes: Nodes, each such a machine with its share of the workers, and memory devices of its own.
        time_dilation: Real seconds per emulated second; more for a scheme whose links could not keep pace.
        memory_devices: Number of memory devices of a node; 0 for one per worker.
        partition_table: Table that assigns GPUs to roles, instead of a number; "" for none.
        steps: Timed steps in each round, after one or more that are verified.
        rounds: Turns of each scheme.
        measures: BLOCKED, or STEP where steps are compared that hardly block.
        known_ways: Fastest ways of an all-reduce by size class, of an earlier run on the same links
            (ReplayResult.ways_by_size). Schemes that choose among several ways measure only the other sizes.
        alone_steps: Timed steps without computation in each round, after the others (ReplayResult.alone); 0 for none.

    Raises:
        ValueError: If a value is out of range.
    """

    schemes: tuple[str, ...]
    trace: ComputeTrace
    machine: str
    num_workers: int
    num_nodes: int = 1
    has_compute: bool = True
    time_dilation: float = 1.0
    memory_devices: int = 0
    partition_table: str = ""
    steps: int = 3
    rounds: int = 1
    measures: str = BLOCKED
    known_ways: Mapping[int, str] = field(default_factory=dict)
    alone_steps: int = 0

    def __post_init__(self) -> None:
        unknown = [scheme for scheme in self.schemes if scheme not in SCHEMES]
        if unknown or not self.schemes:
            raise ValueError(f"schemes {', '.join(unknown) or '(none)'}: choose of {', '.join(SCHEMES)}")
        if (
            min(self.num_workers, self.steps, self.rounds) < 1
            or min(self.memory_devices, self.alone_steps) < 0
            or self.time_dilation <= 0
        ):
            raise ValueError(
                "workers, steps and rounds start at 1, memory devices and steps alone at 0, time dilation above 0"
            )
        if self.measures not in (BLOCKED, STEP):
            raise ValueError(f"a run measures {BLOCKED!r} or {STEP!r}, not {self.measures!r}")
        if self.num_nodes < 1 or self.num_workers % self.num_nodes:
            raise ValueError(
                f"{self.num_workers} workers cannot be divided evenly among {self.num_nodes} nodes"
            )

    @property
    def compute_s(self) -> float:
        """Seconds of computation in a step."""
        return self.trace.forward_s + self.trace.backward_s if self.has_compute else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Figures of one scheme, in emulated time, of the slowest worker."""

    scheme: str
    plan: ReplayPlan
    step: Timing
    decisions: tuple[str, ...]
    """Decisions of each worker's session: its routes, shard size and dual synchronisation, in words."""

    pacing: Pacing
    """How exactly its links were paced; of several rounds the worst. Its time dilation may exceed the plan's."""

    ways_by_size: Mapping[int, str] = field(default_factory=dict)
    """The ways of an all-reduce by size class (allreduce_tuner); none for schemes with memory devices."""

    alone: Timing | None = None
    """Steps without computation, if they were timed: the duration of synchronisation alone."""

    @property
    def ways(self) -> str:
        """The ways of an all-reduce by size, in words; "" for schemes with memory devices."""
        return describe_ways(self.ways_by_size)

    @property
    def blocked_us(self) -> float:
        """The step's wait for its gradients: the median step minus the computation."""
        return self.step.p50_us - self.plan.compute_s * 1e6

    @property
    def sync_gbytes_per_s(self) -> float | None:
        """Bytes of one worker's gradients divided by the median step; None if computation overlaps with it."""
        return None if self.plan.has_compute else self.plan.trace.nbytes / self.step.p50_us / 1e3

    def as_json(self) -> dict[str, Any]:
        """The fields of a record line, without provenance."""
        plan, trace = self.plan, self.plan.trace
        return {
            "bench": "replay",
            "system": self.scheme,
            "num_workers": plan.num_workers,
            "num_nodes": plan.num_nodes,
            "bytes": trace.nbytes,
            **asdict(self.step),
            "algbw_gbytes_per_s": self.sync_gbytes_per_s,
            "emulated_machine": plan.machine,
            **self.pacing.as_json(),
            "model": trace.model,
            "batch": trace.batch,
            "compute_us": plan.compute_s * 1e6,
            "compute_source": trace.source if plan.has_compute else "none",
            "blocked_us": self.blocked_us,
            "decisions": list(self.decisions),
            "ways": self.ways,
        }


class ReplayCommands:
    """The commands of one scheme's worker. Its options are a trace as JSON, and settings."""

    def __init__(self, job: WorkerJob) -> None:
        options = dict(job.options)
        self._trace = ComputeTrace.from_json(options.pop("trace"))
        self._has_compute = options.pop("has_compute")
        self._known_ways = {int(nbytes): way for nbytes, way in options.pop("known_ways").items()}
        self._num_nodes = options.pop("num_nodes")
        if self._num_nodes > 1:
            options["node"] = f"n{job.rank * self._num_nodes // job.num_workers}"
        self._scheme = SCHEMES[job.system]
        self._dilation = options["time_dilation"]
        # Links are measured only once, before the timed steps.
        self._job = replace(job, options={**options, **self._scheme.settings, "replan_steps": 0})
        self._session: Any = None
        self._group: Any = None
        self._ways_by_size: dict[int, str] = {}
        self._push_delays_s: list[float] = []

    def setup(self) -> int:
        self._session = join_session(self._job, Settings.from_environment())
        self._group = self._session.register("gradients", self._trace.specs())
        return self._job.rank

    def verify(self) -> list[str]:
        """Takes a step on known numbers, and the steps from which a session learns; returns its decisions.

        Chooses the ways of an all-reduce before. Only steps from which a session learns have their computation.
        Later steps keep the same numbers, because they are means of equal numbers.

        Raises:
            ValueError: If a mean is wrong.
        """
        if ways := self._scheme.ways_over(self._num_nodes):
            self._choose_ways(ways)
        expected = (2**self._job.num_workers - 1) / self._job.num_workers
        buffers = [
            np.frombuffer(self._group.buffer(i), dtype=e.dtype) for i, e in enumerate(self._trace.events)
        ]
        for each in buffers:
            each[:] = 2**self._job.rank
        for _ in range(self._learning_steps()):
            self._step(self._real(self._trace.forward_s), self._real(self._trace.backward_s))
        self._step(0.0, 0.0)
        for event, each in zip(self._trace.events, buffers, strict=True):
            if not (each == expected).all():
                raise ValueError(f"worker {self._job.rank}: {event.name} is not the mean {expected}")
        decisions: list[str] = self._session.decisions()
        return decisions

    def _choose_ways(self, ways: Sequence[str]) -> None:
        self._ways_by_size = fastest_ways_of(self._session, self._group, ways, self._known_ways)
        self._group.use_direct_allreduce(ways_of_shards(self._group.shard_sizes(), self._ways_by_size))

    def _learning_steps(self) -> int:
        learns = self._scheme.settings["dual_sync"] == "auto" and self._num_nodes == 1
        return 1 + TIMED_STEPS if learns else 0

    def run(self, steps: int, has_compute: bool) -> list[float]:
        """Takes `steps` steps, with their computation or without; returns the emulated seconds of each.

        Nothing is under way during the forward pass, so its time is added instead of waited for.
        """
        forward_s = self._trace.forward_s if has_compute else 0.0
        backward_s = self._trace.backward_s * self._dilation if has_compute else 0.0
        return [forward_s + self._step(0.0, backward_s) / self._dilation for _ in range(steps)]

    def ways_by_size(self) -> dict[int, str]:
        """The ways of an all-reduce by size class."""
        return self._ways_by_size

    def pacing(self) -> dict[str, Any]:
        """The fields of the session's PacingReport."""
        return asdict(self._session.emulation.pacing())

    def take_push_delays(self) -> float:
        """Mean delay from a ready gradient to its push, since the last call, in the emulated machine's microseconds.

        A link starts with the push, so the links' report does not contain this delay.
        """
        mean_s = float(np.mean(self._push_delays_s))
        self._push_delays_s.clear()
        return 1e6 * mean_s / float(self._dilation)

    def close(self) -> None:
        self._session.close()

    def _step(self, forward_s: float, backward_s: float) -> float:
        """Takes one step with this computation; returns its seconds. All are real seconds."""
        self._session.barrier()
        started = time.perf_counter()
        backward = started + forward_s
        last_pulled = started
        for index, event in enumerate(self._trace.events):
            ready = max(backward + event.ready * backward_s, last_pulled)
            compute_until(ready)
            self._group.push(index)
            self._group.flush()
            self._push_delays_s.append(time.perf_counter() - ready)
            if not self._scheme.is_pipelined:
                self._group.pull(index)
                last_pulled = time.perf_counter()
        compute_until(backward + backward_s)
        self._group.pull_all()
        return time.perf_counter() - started

    def _real(self, seconds: float) -> float:
        return seconds * self._dilation if self._has_compute else 0.0


def num_progress_steps(plan: ReplayPlan) -> int:
    """Number of calls of the progress function by run_replay()."""
    return len(plan.schemes) * plan.rounds


def run_replay(plan: ReplayPlan, progress: Progress = lambda _: None) -> tuple[ReplayResult, ...]:
    """Verifies and times the schemes, each alone on the machine, because emulated links need its processors.

    A scheme whose links do not keep pace is timed again with more time dilation (coarse.bench.pace).

    Raises:
        ValueError: If the machine does not have the workers or memory devices of a scheme. Nothing has started then.
        PaceError: If the links of a scheme do not keep pace with the largest dilation either.
        CoarseError: If this host lacks the memory, a worker dies or answers too late, or a result is wrong.
    """
    check_replay(plan)
    turns: dict[str, list[Paced[_Turn]]] = {scheme: [] for scheme in plan.schemes}
    for turn in range(plan.rounds):
        for scheme in plan.schemes:
            progress(f"{scheme}  round {turn + 1} of {plan.rounds}")
            turns[scheme].append(
                keep_pace(
                    f"{scheme} on {plan.machine}",
                    partial(_take_turn, plan, scheme),
                    time_dilation=plan.time_dilation,
                )
            )
    return tuple(_result(plan, scheme, turns[scheme]) for scheme in plan.schemes)


def check_replay(plan: ReplayPlan) -> None:
    """Refuses what cannot run, before anything starts.

    Raises:
        ValueError: If the machine does not have the workers or memory devices of a scheme.
        BenchError: If this host lacks the memory.
    """
    for scheme in plan.schemes:
        settings = {**_settings(plan), **SCHEMES[scheme].settings}
        require_links(scheme, plan.num_workers, plan.num_nodes, settings)
    require_room(plan.trace, plan.num_workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """Seconds of each step of the slowest worker, in emulated time, and the decisions of all workers."""

    seconds: np.ndarray[Any, np.dtype[np.float64]]
    alone: np.ndarray[Any, np.dtype[np.float64]]
    decisions: tuple[str, ...]
    ways_by_size: Mapping[int, str]


def _take_turn(plan: ReplayPlan, scheme: str, time_dilation: float) -> Paced[_Turn]:
    plan = replace(plan, time_dilation=time_dilation)
    with _pool(plan, scheme) as pool:
        decisions = tuple(line for answer in pool.ask("verify") for line in answer)
        ways = {int(nbytes): way for nbytes, way in pool.ask("ways_by_size")[0].items()}
        pool.ask("take_push_delays")
        before = PacingReport(**pool.ask("pacing")[0])
        seconds = _seconds(pool, plan, plan.steps, has_compute=plan.has_compute)
        alone = _seconds(pool, plan, plan.alone_steps, has_compute=False) if plan.alone_steps else seconds[:0]
        late_us = lateness_us(before, PacingReport(**pool.ask("pacing")[0]), plan.time_dilation)
        late_us += max(pool.ask("take_push_delays"))
    measured_s = min([_measured_s(plan, float(np.median(seconds))), *alone])
    return Paced(
        value=_Turn(seconds=seconds, alone=alone, decisions=decisions, ways_by_size=ways),
        pacing=Pacing(
            lateness_us=late_us, error=late_us * 1e-6 / measured_s, time_dilation=plan.time_dilation
        ),
    )


def _seconds(
    pool: WorkerPool, plan: ReplayPlan, steps: int, *, has_compute: bool
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Emulated seconds of each step on its slowest worker."""
    limit_s = time_for(steps, stretch=plan.time_dilation)
    return slowest_worker(pool.ask("run", limit_s, steps=steps, has_compute=has_compute))


def _measured_s(plan: ReplayPlan, step_s: float) -> float:
    """The time to which the pacing error relates."""
    return step_s if plan.measures == STEP else max(step_s - plan.compute_s, _LEAST_BLOCKED * step_s)


def _result(plan: ReplayPlan, scheme: str, turns: Sequence[Paced[_Turn]]) -> ReplayResult:
    pacings = [turn.pacing for turn in turns]
    worst = max(pacings, key=lambda pacing: pacing.error)
    alone = np.concatenate([turn.value.alone for turn in turns])
    return ReplayResult(
        scheme=scheme,
        plan=plan,
        step=Timing.from_seconds(np.concatenate([turn.value.seconds for turn in turns])),
        decisions=turns[-1].value.decisions,
        ways_by_size=turns[-1].value.ways_by_size,
        alone=Timing.from_seconds(alone) if plan.alone_steps else None,
        pacing=replace(worst, time_dilation=max(pacing.time_dilation for pacing in pacings)),
    )


def _pool(plan: ReplayPlan, scheme: str) -> WorkerPool:
    options = {
        "trace": plan.trace.to_json(),
        "has_compute": plan.has_compute,
        "known_ways": dict(plan.known_ways),
        "num_nodes": plan.num_nodes,
        **_settings(plan),
    }
    return WorkerPool(scheme, ReplayCommands, plan.num_workers, options)


def _settings(plan: ReplayPlan) -> dict[str, Any]:
    """Fields of coarse.settings.Settings that all schemes share, unless they set them."""
    return {
        "machine": plan.machine,
        "time_dilation": plan.time_dilation,
        "memory_devices": "0" if plan.partition_table else str(plan.memory_devices),
        "partition_table": plan.partition_table,
    }
