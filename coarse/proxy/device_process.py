"""The process of a memory device: its memory, and one MemoryDevice for each attempt of the job."""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import replace
from pathlib import Path

from coarse.env import Attempt
from coarse.process.scratch import hold
from coarse.proxy.device import REASONS, MemoryDevice
from coarse.proxy.device_status import DeviceStatus
from coarse.proxy.memory import DeviceMemories, DeviceMemory, HostMemory, open_memories
from coarse.proxy.nodes.other_nodes import Reconnect
from coarse.proxy.recovery.persistent_groups import DeviceContents
from coarse.timeline import recorder
from coarse.timeline.part_files import MEMORY_DEVICE, Process
from coarse.wire.device_job import DeviceJob


def run_device(job_fd: int, reconnect: Reconnect) -> None:
    """Entry point of a memory device process that a session started.

    Args:
        job_fd: An inherited descriptor from which the DeviceJob is read.
        reconnect: Makes what replaces broken connections to other nodes.
    """
    job = DeviceJob.read(job_fd)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.suppress(FileNotFoundError):  # its creator has ended and removed it
        hold(Path(job.directory))  # until this process ends
    status = DeviceStatus(job)
    status.respond()
    try:
        _record_timeline(job)
        opened = open_memories(job.memories, job.device, replicas=job.replicas)
    except REASONS as error:
        nothing = DeviceMemories(own=HostMemory(), common=HostMemory())
        first = job.with_own_sockets() if job.keep_s else job
        return MemoryDevice(first, nothing, DeviceContents(), status, reconnect).refuse(error)
    with contextlib.closing(opened) as memories:
        _move_near(memories.own)
        contents = DeviceContents()
        if not job.keep_s:
            MemoryDevice(job, memories, contents, status, reconnect).run()
            return
        attempt = job
        while (
            device := MemoryDevice(attempt.with_own_sockets(), memories, contents, status, reconnect)
        ).run():
            # The first worker to connect now starts the attempt.
            job = job.with_peers(device.lost, device.replaced)
            attempt = replace(job, leader_pid=0)
        contents.close()


def _record_timeline(job: DeviceJob) -> None:
    process = Process(
        role=MEMORY_DEVICE,
        number=job.device,
        node=job.node,
        attempt=Attempt.from_environment().number,
        num_clients=job.num_clients,
    )
    recorder.start(job.timeline, process, num_events=job.timeline_events)


def _move_near(memory: DeviceMemory) -> None:
    """Binds this process, and thus its sync cores, to the processors nearest to its memory."""
    if cores := set(memory.cores()) & os.sched_getaffinity(0):
        os.sched_setaffinity(0, cores)
