"""Reasons for a session's early end, as memory devices send them to each other and to their workers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from coarse.errors import CoarseError
from coarse.wire.device_job import DeviceJob
from coarse.wire.messages import Message, int_field

_NOT_AS_EXPECTED = (ValueError, TypeError, KeyError, OverflowError, RecursionError)  # of JSON from elsewhere
_MOST_CHARACTERS_BETWEEN_NODES = 4000  # frames between nodes are limited

LEFT = "left"
"""WorkerLoss.fate of a worker that has left as planned."""

_AFTER_A_LOSS = (
    "Parameters are those of the last step that every worker finished. Start the job again from these or from your "
    "last checkpoint."
)


def after_a_failure(replicas: int) -> str:
    """The consequence of the loss of a memory device, with advice.

    Args:
        replicas: Extra copies of each memory device's contents.
    """
    if replicas:
        return (
            "Its neighbour has a copy of its contents (COARSE_REPLICAS): workers that are started again "
            "(--max-restarts) continue from the last complete step."
        )
    return (
        "Gradients of this step are lost; parameters are those of the step before. Start the job again from your "
        "last checkpoint."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The failure that every worker receives once.

    Args:
        error: Name of the error that workers raise.
        text: Its message.
        is_final: Whether the text is complete. Otherwise workers check which memory device has ended, and how.
        silent_device: The memory device of this node that no longer works, although its process exists; -1 if that is
            not the reason.
        is_unready: Whether the session cannot begin. Otherwise it has begun, or workers have left before.
        is_of_node: Whether only this node ends: where nodes may be lost, the others go on without it.
    """

    error: str
    text: str
    is_final: bool = False
    silent_device: int = -1
    is_unready: bool = False
    is_of_node: bool = False

    def to_message(self, kind: str) -> Message:
        """The control message of this type."""
        return {
            "type": kind,
            "error": self.error,
            "text": self.text,
            "is_final": self.is_final,
            "silent_device": self.silent_device,
            "is_unready": self.is_unready,
            "is_of_node": self.is_of_node,
        }

    @classmethod
    def from_message(cls, message: Message) -> Failure:
        """Reads a failure that another memory device has reported."""
        return cls(
            error=str(message["error"]),
            text=str(message["text"]),
            is_final=message["is_final"] is True,
            silent_device=int_field(message, "silent_device", low=-1),
            is_unready=message["is_unready"] is True,
            is_of_node=message["is_of_node"] is True,
        )

    def to_node(self) -> str:
        """The text form for other nodes."""
        return json.dumps({"error": self.error, "text": self.text[:_MOST_CHARACTERS_BETWEEN_NODES]})

    def to_reason(self) -> str:
        """Why this node ends, for other nodes: without advice."""
        return self.text.partition(". ")[0][:_MOST_CHARACTERS_BETWEEN_NODES]

    @classmethod
    def from_node(cls, text: str) -> Failure:
        """Reads a failure that another node has reported."""
        try:
            told = json.loads(text)
            return cls(error=str(told["error"]), text=str(told["text"]), is_final=True)
        except _NOT_AS_EXPECTED:
            return cls(error="WorkerLostError", text=f"another node ended the session: {text}", is_final=True)


def device_died(job: DeviceJob, device: int) -> Failure:
    """Another memory device of this node has closed its connection."""
    return Failure(
        error="MemoryDeviceLostError",
        text=f"{_name(job, device)} died. {after_a_failure(job.replicas)}",
        is_of_node=True,
    )


def device_failed(job: DeviceJob, reason: str) -> Failure:
    """This memory device can no longer work, and ends."""
    return Failure(
        error="MemoryDeviceLostError",
        text=f"{_name(job, job.device)} (pid {os.getpid()}, {job.memory}) failed: {reason}. "
        f"{after_a_failure(job.replicas)}",
        is_final=True,
        is_of_node=True,
    )


def device_unready(job: DeviceJob, reason: Exception) -> Failure:
    """This memory device cannot serve workers."""
    return Failure(
        error=type(reason).__name__ if isinstance(reason, CoarseError) else "MemoryDeviceLostError",
        text=f"{_name(job, job.device)} ({job.memory}) could not start: {reason}",
        is_final=True,
        is_unready=True,
    )


def device_silent(job: DeviceJob, device: int) -> Failure:
    """A memory device of this node exists but does not work."""
    return Failure(
        error="MemoryDeviceLostError",
        text=f"{_name(job, device)} {silence(job.heartbeat_s)}. {after_a_failure(job.replicas)}",
        silent_device=device,
        is_of_node=True,
    )


def silence(heartbeat_s: float) -> str:
    """The state of a device that makes no progress, in words."""
    return (
        f"has given no sign of life for more than {heartbeat_s:g} s (COARSE_HEARTBEAT_S); it may be stopped"
    )


def _name(job: DeviceJob, device: int) -> str:
    return f"memory device md{device}{f' of node {job.node}' if job.num_nodes > 1 else ''}"


def name_of_node(job: DeviceJob, node: int) -> str:
    """A node in words, with its workers."""
    return f"node {node} (worker(s) {', '.join(map(str, job.nodes[node]))})"


def node_lost(job: DeviceJob, node: int, reason: str) -> Failure:
    """The connection to another node, or a memory device there, is gone."""
    return Failure(
        error="MemoryDeviceLostError",
        text=f"a memory device of {name_of_node(job, node)}, or the connection to it, is lost: {reason}. "
        f"{after_a_failure(0)}",
        is_final=True,
    )


def few_nodes_left(job: DeviceJob, node: int, reason: str, num_left: int, num_before: int) -> Failure:
    """A node is out of reach, and may live: it could go on as well as this side.

    Args:
        job: The device's place in the session.
        node, reason: The node, and how it was lost.
        num_left, num_before: Nodes that are left, and that there were before.
    """
    return Failure(
        error="MemoryDeviceLostError",
        text=f"{name_of_node(job, node)} is out of reach: {reason}. It may live, and only more than half of the "
        f"{num_before} nodes go on without such a node; here {num_left} would be left. {after_a_failure(0)}",
        is_final=True,
    )


def nodes_lost_together(job: DeviceJob, first: int, second: int, reason: str) -> Failure:
    """A node is lost while the others agree on the loss of another one.

    Args:
        job: The device's place in the session.
        first: The node on whose loss they agree.
        second, reason: The other one, and how it was lost.
    """
    return Failure(
        error="MemoryDeviceLostError",
        text=f"{name_of_node(job, second)} is lost ({reason}) before all had agreed on the loss of "
        f"{name_of_node(job, first)}. {after_a_failure(0)}",
        is_final=True,
    )


def node_excluded(job: DeviceJob, node: int, reason: str) -> Failure:
    """The others go on without a node, which is told so if it lives."""
    return Failure(
        error="MemoryDeviceLostError",
        text=f"node {job.node} goes on without {name_of_node(job, node)}: {reason}. {after_a_failure(0)}",
        is_final=True,
    )


def node_of_worker_lost(node: int, rank: int, reason: str, lost_at: str) -> WorkerLoss:
    """A worker is lost with its node."""
    return WorkerLoss(
        rank=rank, pid=0, fate=f"was lost with node {node} ({reason})", last_step=0, lost_at=lost_at
    )


def worker_died(rank: int, pid: int, last_step: int, evidence: str = "") -> Failure:
    """A worker has ended without leaving the session.

    Args:
        rank, pid: The worker and its process.
        last_step: The last step to which it contributed.
        evidence: Evidence for a cause; "" for none.
    """
    return Failure(
        error="WorkerLostError",
        text=f"worker {rank} (pid {pid}) died; {f'{evidence}; ' if evidence else ''}its last contribution was "
        f"step {last_step}. Parameters are those of the last step that every worker finished. Start the "
        "job again from these or from your last checkpoint.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoss:
    """A worker that is lost, as messages name it.

    Args:
        rank, pid: The worker and its process; pid 0 if it is not known.
        fate: What became of it, in words.
        last_step: The last step to which it contributed.
        lost_at: Time of day.
    """

    rank: int
    pid: int
    fate: str
    last_step: int
    lost_at: str

    def __str__(self) -> str:
        if not self.pid:
            return f"worker {self.rank} {self.fate} at {self.lost_at}"
        return (
            f"worker {self.rank} (pid {self.pid}) {self.fate} at {self.lost_at}; its last contribution was step "
            f"{self.last_step}"
        )

    @property
    def is_departure(self) -> bool:
        """Whether the worker has left as planned."""
        return self.fate == LEFT

    def to_node(self) -> str:
        """The text form for other nodes."""
        return json.dumps(asdict(replace(self, fate=self.fate[:_MOST_CHARACTERS_BETWEEN_NODES])))

    @classmethod
    def from_node(cls, rank: int, text: str) -> WorkerLoss:
        """Reads a loss that another node has reported."""
        try:
            told = json.loads(text)
            pid, last_step = int(told["pid"]), int(told["last_step"])
            return cls(
                rank=rank, pid=pid, fate=str(told["fate"]), last_step=last_step, lost_at=str(told["lost_at"])
            )
        except _NOT_AS_EXPECTED:
            return cls(rank=rank, pid=0, fate=f"was lost: {text}", last_step=0, lost_at="an unknown time")


def _in_words(losses: Sequence[WorkerLoss]) -> str:
    return ". Then ".join(map(str, losses))


def too_few_workers(losses: Sequence[WorkerLoss], num_left: int, min_workers: int) -> Failure:
    """Fewer workers are left than suffice to go on.

    Args:
        losses: All losses.
        num_left: Workers that are not lost.
        min_workers: Workers that suffice.
    """
    return Failure(
        error="WorkerLostError",
        text=f"{_in_words(losses)}. {num_left} worker(s) are left, and COARSE_MIN_WORKERS={min_workers}. "
        f"{_AFTER_A_LOSS}",
    )


def node_without_workers(job: DeviceJob, losses: Sequence[WorkerLoss]) -> Failure:
    """All workers of this node are lost, and its memory devices end with the last one.

    Args:
        job: The device's place in the session.
        losses: All losses.
    """
    return Failure(
        error="WorkerLostError",
        text=f"{_in_words(losses)}. No worker is left on {name_of_node(job, job.node)}, whose memory devices end "
        f"with the last one. {_AFTER_A_LOSS}",
        is_of_node=True,
    )


def training_over() -> Failure:
    """A worker has joined when the others had finished."""
    return Failure(
        error="WorkerLostError",
        text="the other workers have finished before this one could take part; nothing is left to do",
    )


def worker_evicted(rank: int, pid: int, reason: str) -> Failure:
    """A worker has sent invalid data."""
    return Failure(
        error="WorkerLostError",
        text=f"worker {rank} (pid {pid}) was evicted because it {reason}. "
        "Start the job again from your last checkpoint.",
    )


def workers_departed(ranks: Mapping[int, int], failed: Iterable[int]) -> Failure:
    """Workers have left the session while others still synchronise.

    Args:
        ranks: The workers that have left, each with the last step to which it contributed; 0 if unknown.
        failed: Those of them that ended because of their own error.
    """
    if failing := sorted(failed):
        text = (
            f"worker(s) {', '.join(map(str, failing))} left with an error of their own while others were still "
            "synchronising: see their output. Start the job again from your last checkpoint."
        )
    else:
        text = (
            f"worker(s) {', '.join(map(str, sorted(ranks)))} closed the session while others still synchronise"
            f"{_last_steps(ranks)}. Give every worker the same number of steps: datasets of equal length, drop_last "
            "or drop_remainder; or, in PyTorch, train inside `with model.join():`."
        )
    return Failure(error="WorkerLostError", text=text)


def _last_steps(ranks: Mapping[int, int]) -> str:
    known = [f"step {step} of worker {rank}" for rank, step in sorted(ranks.items()) if step]
    return f"; their last contributions were {', '.join(known)}" if known else ""


def overwritten_counter(name: str, begun: int, ranks: Sequence[int]) -> str:
    """The message about a snapshot counter with an impossible value.

    Args:
        name: Name of the tensor group.
        begun: Value of the counter.
        ranks: The workers that share it.
    """
    return (
        f"{name}: the snapshot counter is {begun}, an impossible value: worker {' or '.join(map(str, ranks))} "
        "has overwritten it. Earlier snapshots stay valid and training continues, but no new snapshot can "
        "begin. Look for a stray write in the code of these workers, and start the job again."
    )
