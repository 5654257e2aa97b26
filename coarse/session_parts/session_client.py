"""The client of a session until the session closes, shared by the session's parts."""

from __future__ import annotations

from typing import TypeAlias

from coarse.client.client import Client
from coarse.client.single_worker import SingleWorkerClient, SingleWorkerTensorGroup
from coarse.client.tensor_group import TensorGroup
from coarse.errors import SessionClosedError
from coarse.kernels import _native
from coarse.metrics.writer import MetricsWriter

AnyClient: TypeAlias = Client | SingleWorkerClient
"""The client of a job of several workers or of one."""

AnyTensorGroup: TypeAlias = TensorGroup | SingleWorkerTensorGroup
"""The tensors of one registration, in a job of one or several workers."""


class SessionClient:
    """Refuses to lend its client after close().

    Args:
        rank: Rank of the worker, for errors.
        client: Its session's client.
    """

    def __init__(self, rank: int, client: AnyClient) -> None:
        self._rank = rank
        self._client: AnyClient | None = client
        self.metrics: MetricsWriter = client.metrics
        """Counts events of this worker; counts nothing after close()."""

    def any(self) -> AnyClient:
        """The client of a job of any size.

        Raises:
            SessionClosedError: After close().
        """
        if self._client is None:
            raise self._closed()
        return self._client

    def of_several(self) -> Client | None:
        """The client of a job of several workers; None in a job of one.

        Raises:
            SessionClosedError: After close().
        """
        if self._client is None:
            raise self._closed()
        return self._client if isinstance(self._client, Client) else None

    def linked(self) -> Client:
        """The client of a job of several workers.

        Raises:
            SessionClosedError: After close().
            ValueError: In a job of one worker.
        """
        client = self.of_several()
        if client is None:
            raise ValueError("a job of one worker has no memory devices, and no links to them")
        return client

    @property
    def if_open(self) -> Client | None:
        """The client of a job of several workers; None in a job of one, and after close()."""
        return self._client if isinstance(self._client, Client) else None

    @property
    def is_closed(self) -> bool:
        """Whether close() was called."""
        return self._client is None

    def close(self, *, is_finished: bool, leaves_early: bool) -> None:
        """Closes the client, as Client.close(). Idempotent."""
        client, self._client = self._client, None
        self.metrics = MetricsWriter()
        if client is not None:
            client.close(is_finished=is_finished, leaves_early=leaves_early)
            _native.cuda_unmap_unused()

    def _closed(self) -> SessionClosedError:
        return SessionClosedError(f"worker {self._rank}: the session is closed")
