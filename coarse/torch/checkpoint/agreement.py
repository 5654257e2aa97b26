"""Agreement between the workers of a job on when to save and whether saves succeeded."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
import weakref
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from coarse.errors import WorkerLostError
from coarse.settings import Settings
from coarse.torch.checkpoint.worker_state import rank_here
from coarse.torch.deadlines import within
from coarse.torch.failing import is_failing
from coarse.torch.group_teardown import hold_process_group
from coarse.torch.process_group import host_backend

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0
_LEAVING_S = 5.0


class SaveAgreement:
    """Lets the workers of the job agree on saves.

    Proposals after one step are reduced while the next step runs, and the result is available after that step. So all
    workers act on it at the same step, and none waits.
    """

    def __init__(self) -> None:
        self.rank = rank_here()
        self.world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self._group: Any = None
        if self.world_size > 1:
            settings = Settings.from_environment()
            if settings.least_workers:
                raise ValueError(
                    "a Checkpointer lets the workers agree through torch's own process group, which fails when one "
                    "is lost, but COARSE_MIN_WORKERS lets the job go on then. Save model.state_dict() on worker "
                    "min(model.session.members), or unset COARSE_MIN_WORKERS"
                )
            timeout_s = settings.timeout_s
            timeout = timedelta(seconds=timeout_s)
            self._group = within(
                timeout_s + _PATIENCE_S,  # torch's own error, if raised in time, has more details
                lambda: dist.new_group(backend=host_backend(settings), timeout=timeout),
                "a worker that takes part in checkpoints, or the process group's store,",
            )
            atexit.register(_finish, weakref.ref(self), os.getpid())
        self._flags = torch.zeros(3, dtype=torch.int32, device="cpu")
        self._reducing: Any = None

    def propose(self, *, asks: bool, is_busy: bool, has_failed: bool) -> None:
        """Proposes whether this worker asks for a save, has a running save, or had too many failures."""
        self._flags = torch.tensor([asks, is_busy, has_failed], dtype=torch.int32, device="cpu")
        if self._group is not None:
            self._reducing = dist.all_reduce(
                self._flags, op=dist.ReduceOp.MAX, group=self._group, async_op=True
            )

    def agreed(self) -> tuple[bool, bool, bool]:
        """Returns, once, whether any worker's last proposal asked for a save, was busy, or had failed.

        Raises:
            WorkerLostError: If another worker is gone.
        """
        reducing, self._reducing = self._reducing, None
        if reducing is not None:
            try:
                reducing.wait()
            except RuntimeError as error:
                raise WorkerLostError(
                    f"worker {self.rank}: another worker was lost before all could agree on saving: {error}"
                ) from error
        asked, busy, failed = self._flags.tolist()
        self._flags = torch.zeros(3, dtype=torch.int32, device="cpu")
        return bool(asked), bool(busy), bool(failed)

    def flush(self, limit_s: float) -> None:
        """Waits until other workers have received the last proposal, at most `limit_s` seconds."""
        if self._reducing is not None and self._group is not None:
            with contextlib.suppress(RuntimeError):
                self._reducing.wait(timedelta(seconds=limit_s))

    def told_by_first(self, *numbers: int) -> list[int]:
        """Returns the numbers of worker 0. Collective."""
        told = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        if self._group is not None:
            dist.broadcast(told, src=0, group=self._group)
        return [int(number) for number in told.tolist()]

    def how_many(self, of_this: bool) -> int:
        """Returns the number of workers that passed True. Collective."""
        count = torch.full((), int(of_this), dtype=torch.int64, device="cpu")
        if self._group is not None:
            dist.all_reduce(count, group=self._group)
        return int(count)

    def barrier(self) -> None:
        """Waits until all workers have called it."""
        self.how_many(False)

    def close(self, *, alone: bool) -> None:
        """Releases the process group. Idempotent.

        Args:
            alone: Whether other workers may be gone or hang; if so, close() does not wait.
        """
        if self._group is not None and dist.is_initialized():
            if alone:
                hold_process_group(self._group)
            else:
                self.agreed()
                dist.destroy_process_group(self._group)
        self._group = None


def _finish(workers: weakref.ref[SaveAgreement], owner_pid: int) -> None:
    """Runs at exit, because without close() other workers may still wait for this worker's last proposal."""
    if (left := workers()) is not None and os.getpid() == owner_pid and not is_failing():
        left.flush(_LEAVING_S)


class SaveSignal:
    """Detects SIGUSR1. The previous handler is called as well, and is restored by close()."""

    def __init__(self, is_wanted: bool) -> None:
        self._arrived = False
        self._previous: Any = None
        self._is_installed = is_wanted and threading.current_thread() is threading.main_thread()
        if self._is_installed:
            self._previous = signal.signal(signal.SIGUSR1, self._note)
        elif is_wanted:
            logger.warning("SIGUSR1 does not save: the Checkpointer was not created in the main thread")

    def take(self) -> bool:
        """Whether the signal arrived since the last call."""
        arrived, self._arrived = self._arrived, False
        return arrived

    def close(self) -> None:
        """Restores the previous handler. Idempotent."""
        if self._is_installed:
            self._is_installed = False
            signal.signal(signal.SIGUSR1, self._previous or signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived = True
        if callable(self._previous):
            self._previous(number, frame)
