"""How other processes read about a worker while its session lives: its status, and metrics without memory devices."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from coarse.client.client import Client
from coarse.client.worker_status import AnsweringWorker, answer_as_worker
from coarse.env import Attempt, WorkerIdentity
from coarse.metrics.values import Metrics
from coarse.settings import Settings
from coarse.status.responder import Report

if TYPE_CHECKING:  # slow to import
    from coarse.metrics.endpoint import MetricsEndpoint


class WorkerServices:
    """Answers `coarse status` from now on.

    Args:
        identity: Rank and node of the worker.
        attempt: The job's attempt.
    """

    def __init__(self, identity: WorkerIdentity, attempt: Attempt) -> None:
        self._rank = identity.rank
        self._pid = os.getpid()
        self._answering: AnsweringWorker = answer_as_worker(attempt.job, identity.rank)
        self._endpoint: MetricsEndpoint | None = None

    def follow(self, client: Client, describe_plan: Callable[[], Report]) -> None:
        """Reports about a client and its session's plan from now on, but keeps neither alive.

        Args:
            client: The session's client.
            describe_plan: A bound method.
        """
        self._answering.follow(client, weakref.WeakMethod(describe_plan))

    def serve_metrics(self, read: Callable[[], Metrics], settings: Settings) -> None:
        """Serves the metrics of a job without memory devices, if the settings say so."""
        if settings.metrics_port:
            from coarse.metrics.endpoint import try_endpoint  # slow to import

            address, port = settings.metrics_address, settings.metrics_port
            self._endpoint = try_endpoint(read, address, port, f"w{self._rank}")

    def close_with(self, session: object) -> None:
        """Also stops answering when the session is collected without close()."""
        weakref.finalize(session, self._answering.close)

    def close(self) -> None:
        """Stops answering. Idempotent; a fork leaves the metrics to its parent."""
        if self._endpoint is not None and os.getpid() == self._pid:
            self._endpoint.close()
        self._answering.close()
