"""Runs kernels under a protocol: compute units issue, messages queue for links, memory answers."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from coarse.simulator.studies.coherence.operations import (
    CoherenceProtocol,
    Hop,
    Kind,
    Operation,
)


@dataclass(frozen=True, slots=True)
class Instruction:
    """Accesses that a wavefront issues together.

    Args:
        lines: The lines that its lanes touch.
        is_write: Whether it stores.
        cycles: Computation before it, in cycles of the CU; each line takes one more.
        waits: Whether it needs what its wavefront has read before.
        is_fenced: Whether all that its wavefront has issued must have ended.
    """

    lines: tuple[int, ...]
    is_write: bool = False
    cycles: int = 0
    waits: bool = False
    is_fenced: bool = False


Wavefront: TypeAlias = Sequence[Instruction]
Kernel: TypeAlias = Sequence[Wavefront]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """How fast the parts of a machine are.

    Args:
        parts: By name, bytes per ns and latency in ns; 0 bytes per ns means that messages do not queue.
        resident: Wavefronts that a CU runs at a time.
        lines_in_flight: Lines of a wavefront that may be in flight (relaxed consistency); 0 waits for each
            instruction before the next one (sequential consistency).
    """

    parts: Mapping[str, tuple[float, float]]
    resident: int
    lines_in_flight: int


@dataclass(slots=True)
class Outcome:
    """The cost of a run.

    Args:
        ns: Time.
        traffic: Messages by part and kind.
        nbytes: Bytes of them.
        statistics: As of CoherenceProtocol.
    """

    ns: float = 0.0
    traffic: dict[tuple[str, Kind], int] = field(default_factory=dict)
    nbytes: dict[tuple[str, Kind], int] = field(default_factory=dict)
    statistics: dict[str, int] = field(default_factory=dict)


class _Running:
    """A wavefront in progress."""

    __slots__ = ("cu", "in_flight", "instructions", "is_waiting", "place", "reads_in_flight")

    def __init__(self, cu: int, instructions: Wavefront) -> None:
        self.cu, self.instructions = cu, instructions
        self.place = self.in_flight = self.reads_in_flight = 0
        self.is_waiting = False


class KernelRun:
    """One run.

    Args:
        protocol: Caches and memory.
        speeds: How fast its parts are.
    """

    def __init__(self, protocol: CoherenceProtocol, speeds: Speeds) -> None:
        self._protocol, self._speeds = protocol, speeds
        self._events: list[tuple[float, int, _Running | Operation]] = []
        self._number = 0
        self._now = 0.0
        self._owner: dict[Operation, tuple[_Running | None, bool]] = {}
        self._cu_free = [0.0] * protocol.shape.num_cus
        self._queues: list[deque[Wavefront]] = []
        self._part_free: dict[tuple[str, int], float] = {}
        self._plans: dict[Hop, tuple[tuple[str, int], float, float]] = {}
        self._counts: dict[Hop, int] = {}

    def run(self, kernels: Sequence[Kernel], *, keeps_caches: bool = False) -> Outcome:
        """Runs kernels one after the other; wavefronts go round the GPUs, then round their CUs.

        Args:
            kernels: Each begins when the one before has ended.
            keeps_caches: Whether they are phases of one kernel, between which uncoherent caches keep their lines.

        Raises:
            RuntimeError: If operations wait for each other for ever.
        """
        for kernel in kernels:
            self._launch(kernel)
            self._drain()
            if not keeps_caches:
                for operation in self._protocol.end_kernel():
                    self._owner[operation] = None, True
                    self._at(self._now, operation)
                self._drain()
        outcome = Outcome(ns=self._now, statistics=self._protocol.statistics())
        for hop, count in self._counts.items():
            key = hop.part[0], hop.kind
            outcome.traffic[key] = outcome.traffic.get(key, 0) + count
            outcome.nbytes[key] = outcome.nbytes.get(key, 0) + count * hop.nbytes
        return outcome

    def _launch(self, kernel: Kernel) -> None:
        shape, num_cus = self._protocol.shape, self._protocol.shape.num_cus
        turn = [
            gpu * shape.cus_per_gpu + cu for cu in range(shape.cus_per_gpu) for gpu in range(shape.num_gpus)
        ]
        self._queues = [deque() for _ in range(num_cus)]
        for number, wavefront in enumerate(kernel):
            self._queues[turn[number % num_cus]].append(wavefront)
        for cu in range(num_cus):
            for _ in range(self._speeds.resident):
                self._begin_next(cu)

    def _begin_next(self, cu: int) -> None:
        if self._queues[cu]:
            self._schedule(_Running(cu, self._queues[cu].popleft()))

    def _drain(self) -> None:
        events, protocol = self._events, self._protocol
        while events:
            self._now, _, item = heapq.heappop(events)
            if isinstance(item, _Running):
                self._issue(item)
            else:
                self._step(item)
            while protocol.released:
                for waiting in protocol.released.pop(0):
                    self._at(self._now, waiting)
        if self._owner:
            raise RuntimeError(f"deadlock: {len(self._owner)} operations wait for each other")

    def _schedule(self, wavefront: _Running) -> None:
        """Issues the wavefront's next instruction as soon as its CU has computed so far, unless it must wait."""
        wavefront.is_waiting = False
        if wavefront.place == len(wavefront.instructions):
            if wavefront.in_flight:
                wavefront.is_waiting = True
            else:
                self._begin_next(wavefront.cu)
            return
        instruction = wavefront.instructions[wavefront.place]
        if not self._may_issue(wavefront, instruction):
            wavefront.is_waiting = True
            return
        begin = max(self._now, self._cu_free[wavefront.cu])
        self._cu_free[wavefront.cu] = end = begin + instruction.cycles + len(instruction.lines)
        self._at(end, wavefront)

    def _may_issue(self, wavefront: _Running, instruction: Instruction) -> bool:
        if instruction.is_fenced and wavefront.in_flight:
            return False
        if instruction.waits and wavefront.reads_in_flight:
            return False
        return wavefront.in_flight <= max(self._speeds.lines_in_flight - len(instruction.lines), 0)

    def _issue(self, wavefront: _Running) -> None:
        instruction = wavefront.instructions[wavefront.place]
        wavefront.place += 1
        wavefront.in_flight += len(instruction.lines)
        wavefront.reads_in_flight += 0 if instruction.is_write else len(instruction.lines)
        protocol, cu = self._protocol, wavefront.cu
        for line in instruction.lines:
            operation = protocol.write(cu, line, 0) if instruction.is_write else protocol.read(cu, line)
            self._owner[operation] = wavefront, instruction.is_write
            self._step(operation)
        self._schedule(wavefront)

    def _step(self, operation: Operation) -> None:
        try:
            step = next(operation)
        except StopIteration:
            self._finish(operation)
            return
        if isinstance(step, Hop):
            self._at(self._cross(step), operation)
        else:
            step.append(operation)

    def _cross(self, hop: Hop) -> float:
        """When a message arrives that begins to queue now."""
        plan = self._plans.get(hop)
        if plan is None:
            rate, latency = self._speeds.parts[hop.part[0]]
            plan = self._plans[hop] = hop.part, hop.nbytes / rate if rate else 0.0, latency
            self._counts[hop] = 0
        part, busy, latency = plan
        self._counts[hop] += 1
        if not busy:
            return self._now + latency
        end = max(self._now, self._part_free.get(part, 0.0)) + busy
        self._part_free[part] = end
        return end + latency

    def _finish(self, operation: Operation) -> None:
        wavefront, is_write = self._owner.pop(operation)
        if wavefront is not None:
            wavefront.in_flight -= 1
            wavefront.reads_in_flight -= not is_write
            if wavefront.is_waiting:
                self._schedule(wavefront)

    def _at(self, ns: float, item: _Running | Operation) -> None:
        self._number += 1
        heapq.heappush(self._events, (ns, self._number, item))
