"""Why a session ends before its time, as memory devices tell each other and their workers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coarse.errors import CoarseError
from coarse.wire.device_job import DeviceJob
from coarse.wire.messages import Message, int_field

_MOST_CHARACTERS_BETWEEN_NODES = 4000  # a frame between nodes has its limit


def after_a_failure(replicas: int) -> str:
    """What the loss of a memory device means, and what to do.

    Args:
        replicas: How many others have what it kept.
    """
    if replicas:
        return (
            "What it kept is with its neighbour too (COARSE_REPLICAS): workers that are started again, as "
            "--max-restarts does, go on from the last whole step."
        )
    return (
        "Gradients of this step are lost; parameters are those of the step before. Start the job again from your "
        "last checkpoint."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What every worker is told once.

    Args:
        error: Name of the error that workers raise.
        text: Its message.
        is_final: Whether the text says all. Else workers look which memory device has gone, and how.
        silent_device: The memory device of this node that does not work any more, though its process is there;
            -1 if that is not the reason.
        is_unready: Whether the session cannot begin; else it has begun, or workers have gone before.
    """

    error: str
    text: str
    is_final: bool = False
    silent_device: int = -1
    is_unready: bool = False

    def to_message(self, kind: str) -> Message:
        """The control message of that type."""
        return {
            "type": kind,
            "error": self.error,
            "text": self.text,
            "is_final": self.is_final,
            "silent_device": self.silent_device,
            "is_unready": self.is_unready,
        }

    @classmethod
    def from_message(cls, message: Message) -> Failure:
        """Reads what another memory device has noticed."""
        return cls(
            error=str(message["error"]),
            text=str(message["text"]),
            is_final=message["is_final"] is True,
            silent_device=int_field(message, "silent_device", low=-1),
            is_unready=message["is_unready"] is True,
        )

    def to_node(self) -> str:
        """The form in which other nodes are told."""
        return json.dumps({"error": self.error, "text": self.text[:_MOST_CHARACTERS_BETWEEN_NODES]})

    @classmethod
    def from_node(cls, text: str) -> Failure:
        """Reads what another node has told."""
        try:
            told = json.loads(text)
            return cls(error=str(told["error"]), text=str(told["text"]), is_final=True)
        except (ValueError, TypeError, KeyError):
            return cls(error="WorkerLostError", text=f"another node ended the session: {text}", is_final=True)


def device_died(job: DeviceJob, device: int) -> Failure:
    """Another memory device of this node has closed its connection."""
    return Failure(
        error="MemoryDeviceLostError", text=f"{_name(job, device)} died. {after_a_failure(job.replicas)}"
    )


def device_failed(job: DeviceJob, reason: str) -> Failure:
    """This memory device cannot work any more, and ends."""
    return Failure(
        error="MemoryDeviceLostError",
        text=f"{_name(job, job.device)} (pid {os.getpid()}, {job.memory}) failed: {reason}. "
        f"{after_a_failure(job.replicas)}",
        is_final=True,
    )


def device_unready(job: DeviceJob, reason: Exception) -> Failure:
    """This memory device cannot serve anybody."""
    return Failure(
        error=type(reason).__name__ if isinstance(reason, CoarseError) else "MemoryDeviceLostError",
        text=f"{_name(job, job.device)} ({job.memory}) could not start: {reason}",
        is_final=True,
        is_unready=True,
    )


def device_silent(job: DeviceJob, device: int) -> Failure:
    """A memory device of this node is there and does not work."""
    return Failure(
        error="MemoryDeviceLostError",
        text=f"{_name(job, device)} {silence(job.heartbeat_s)}. {after_a_failure(job.replicas)}",
        silent_device=device,
    )


def silence(heartbeat_s: float) -> str:
    """What a device that has stood still does, in words."""
    return f"has given no sign of life for more than {heartbeat_s:g} s (COARSE_HEARTBEAT_S), as if stopped"


def _name(job: DeviceJob, device: int) -> str:
    return f"memory device md{device}{f' of node {job.node}' if job.num_nodes > 1 else ''}"


def node_lost(job: DeviceJob, node: int, reason: str) -> Failure:
    """The connection to another node, or a memory device there, is gone."""
    ranks = ", ".join(map(str, job.nodes[node]))
    return Failure(
        error="MemoryDeviceLostError",
        text=f"a memory device of node {node} (worker(s) {ranks}), or the connection to it, is lost: {reason}. "
        f"{after_a_failure(0)}",
        is_final=True,
    )


def worker_died(rank: int, pid: int, last_step: int, evidence: str = "") -> Failure:
    """A worker has ended without a goodbye.

    Args:
        rank, pid: Which.
        last_step: The last that it has contributed to.
        evidence: What speaks for a reason; "" if nothing does.
    """
    return Failure(
        error="WorkerLostError",
        text=f"worker {rank} (pid {pid}) died; {f'{evidence}; ' if evidence else ''}its last contribution was step "
        f"{last_step}. "
        "Parameters are those of the last step that every worker finished. Start the job again from these, or from "
        "your last checkpoint.",
    )


def worker_evicted(rank: int, pid: int, reason: str) -> Failure:
    """A worker has sent what cannot be."""
    return Failure(
        error="WorkerLostError",
        text=f"worker {rank} (pid {pid}) was evicted because it {reason}. "
        "Start the job again from your last checkpoint.",
    )


def workers_departed(ranks: Mapping[int, int], failed: Iterable[int]) -> Failure:
    """Workers have said goodbye, and others still synchronise.

    Args:
        ranks: Of those that have left, each with the last step that it has contributed to; 0 where nobody knows.
        failed: Of those of them that an error of their own has ended.
    """
    if failing := sorted(failed):
        text = (
            f"worker(s) {', '.join(map(str, failing))} left with an error of their own while others still "
            "synchronise: look at their output. Start the job again from your last checkpoint."
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
    """What is said of a counter of snapshots that says what cannot be.

    Args:
        name: Of the tensor group.
        begun: What the counter says.
        ranks: The workers that share it.
    """
    return (
        f"{name}: the counter by which workers begin snapshots says {begun}, which cannot be: worker "
        f"{' or '.join(map(str, ranks))} has overwritten it. Snapshots that were begun before stay right, training "
        "goes on, and no other snapshot begins. Look for a stray write in what these workers run, and start the job "
        "again."
    )
