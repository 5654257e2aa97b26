"""How the workers of a system meet: in a session of COARSE, or in a process group of torch."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coarse.bench.harness.commands import WorkerJob
from coarse.env import WorkerIdentity, forget_settings
from coarse.machine.memory_name import parse_memory_devices
from coarse.settings import Settings
from coarse.store import DirectoryStore

if TYPE_CHECKING:
    from coarse.session import Session


def join_session(job: WorkerJob, defaults: Settings) -> Session:
    """Joins the session of a job's workers, through the job's directory; the job's options override `defaults`."""
    from coarse.session import Session  # imported by workers of COARSE alone

    identity = WorkerIdentity(
        rank=job.rank, world_size=job.num_workers, local_rank=job.rank, local_world_size=job.num_workers
    )
    chosen = dict(job.options)
    if isinstance(chosen.get("memory_devices"), str):
        chosen["memory_devices"] = parse_memory_devices(chosen["memory_devices"])
    return Session.join(
        identity=identity, store=DirectoryStore(job.directory), settings=replace(defaults, **chosen)
    )


def join_process_group(job: WorkerJob, backend: str = "gloo") -> Any:
    """Makes one of torch's backends the default process group, through the job's directory; returns torch."""
    torch = importlib.import_module("torch")
    torch.distributed.init_process_group(
        backend,
        init_method=f"file://{job.directory}/process-group",
        rank=job.rank,
        world_size=job.num_workers,
    )
    return torch


class SessionCommands:
    """Base of an experiment's commands: a session with the job's options as settings, by default without a profile.

    Settings of the environment do not count.
    """

    def __init__(self, job: WorkerJob) -> None:
        forget_settings()
        self.rank, self.num_workers = job.rank, job.num_workers
        self._job = job
        self._session: Session | None = None

    @property
    def session(self) -> Session:
        """The session, after setup()."""
        assert self._session is not None
        return self._session

    def setup(self) -> int:
        """Joins the session."""
        self._session = join_session(self._job, Settings(profile="off"))
        return self.rank

    def close(self) -> None:
        """Leaves the session."""
        if self._session is not None:
            self._session.close()
