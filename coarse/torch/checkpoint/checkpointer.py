"""Checkpoints of a training loop, saved in the background and restored on any number of workers.

Example:
    >>> position = DataPosition()
    >>> state = {"random": RandomState(), "scheduler": scheduler, "position": position}
    >>> with Checkpointer("checkpoints", model, optimizer, every=50, keep=3, state=state) as checkpointer:
    ...     checkpointer.restore()
    ...     for epoch in position.epochs(num_epochs):
    ...         for batch in position.batches(loader):
    ...             train(batch)
    ...             checkpointer.step()
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch

from coarse.checkpoint.catalogue import find_newest, names_of, open_verified, remove_unfinished
from coarse.checkpoint.claim import Claim
from coarse.checkpoint.due_saves import DueSaves
from coarse.checkpoint.folder import Folder
from coarse.checkpoint.names import CheckpointName
from coarse.checkpoint.progress import SaveProgress
from coarse.checkpoint.reader import Checkpoint, open_checkpoint
from coarse.checkpoint.saver import SaveCounts, Saver, SourceWriting, Writing
from coarse.checkpoint.saver import WorkerState as OwnState
from coarse.checkpoint.values import from_json, to_json
from coarse.checkpoint.writer import SaveDetails, WriteOptions
from coarse.errors import CheckpointError, CoarseError, FolderClaimedError, SnapshotsBusyError, follow_up
from coarse.torch.checkpoint.agreement import SaveAgreement, SaveSignal
from coarse.torch.checkpoint.data_position import DataPosition
from coarse.torch.checkpoint.host_copies import HostCopies
from coarse.torch.checkpoint.plain_checkpoints import load_state_dicts
from coarse.torch.checkpoint.snapshot_saves import SnapshotSaves
from coarse.torch.checkpoint.training_state import (
    as_small_tensor,
    from_small_tensor,
    load_training_state,
    names_of_parameters,
    optimizer_settings,
    training_state,
)
from coarse.torch.checkpoint.worker_state import OwnTensors, RandomState, load_resharded
from coarse.torch.operations import operation
from coarse.torch.optimizer.distributed_optimizer import DistributedOptimizer, stand_in_of
from coarse.torch.optimizer.trainers import bare_optimizer
from coarse.torch.session import metrics_of_default_group
from coarse.torch.weak_calls import weakly
from coarse.worker_state import WorkerState, checked

__all__ = ["Checkpointer", "DataPosition", "RandomState", "WorkerState", "load_state_dicts"]

logger = logging.getLogger(__name__)

_NO_CHECKPOINT, _UNREADABLE = -1, -2


class Checkpointer:
    """Saves and restores a training job: model, optimizer, and further state of each worker.

    For a save, worker 0 copies the state while the next gradients are computed, and writes it in the background. Only
    one save runs at a time. If another save becomes due meanwhile, it waits, and then saves the step that training
    has reached. If yet another becomes due before that, it replaces the waiting one, and a warning suggests a larger
    `every`. close() writes a save that is still waiting. Training continues if the disk fails; after `most_failures`
    failures in a row, step() raises. SIGUSR1, sent to any worker, saves at one of the next steps, or after the save
    that is running. Steps after the last due save are not saved: call save() if they must be on the disk.

    Every worker must construct it with the same arguments and make the same calls. With more than one worker, step(),
    save(), restore() and close() are collective; they use a separate process group.

    Args:
        folder: Folder for all checkpoints of this job; created if necessary. On several nodes all must share it.
        model: Wrapped or not. Parameters and buffers are saved under the bare module's names.
        optimizer: One of torch's optimizers, a DistributedOptimizer, or a trainer's wrapper around either; None to
            save only the model.
        every: Steps between two saves; 0 saves only on demand.
        keep: Number of newest checkpoints to keep. Pinned checkpoints are always kept.
        state: Further state of each worker, by name: RandomState(), DataPosition(), a scheduler, a loader with a
            state_dict().
        most_failures: Number of failed saves in a row after which step() raises.
        options: How files are written.
        on_signal: Whether SIGUSR1 triggers a save; needs the main thread.
        first_step: Number of steps that the training has already taken, if it is not restored from this folder.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If an object in `state` has no state_dict() or load_state_dict().
        OSError: If the folder cannot be created.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        every: int = 0,
        keep: int = 3,
        state: Mapping[str, WorkerState] | None = None,
        most_failures: int = 3,
        options: WriteOptions | None = None,
        on_signal: bool = True,
        first_step: int = 0,
    ) -> None:
        if every < 0:
            raise ValueError(f"every={every} must be 0 or more steps")
        if optimizer is not None:
            optimizer = stand_in_of(bare_optimizer(optimizer))
        self._model = model
        self._optimizer = optimizer
        self._due = DueSaves(every)
        self._num_steps = first_step
        self._num_saves = 0
        self._is_closed = False
        self._workers = SaveAgreement()
        self._state = {**checked(state), **OwnTensors.of(model, self._workers.world_size)}
        self._copies, self._step_hook = _copies_beside(optimizer)
        parent = Folder.open(folder, create=True)
        self._parent = parent
        self._claim = Claim(parent)
        self._has_folder = False
        if self._workers.rank == 0:
            self._tidy_up()
        newest_step = self._find_newest_step()  # also makes other workers wait until worker 0 has tidied up
        # With `first_step`, this training is the one that saved these checkpoints.
        self._newest_left = _NO_CHECKPOINT if first_step else newest_step
        self._options = options or WriteOptions()
        self._snapshots: SnapshotSaves | None = None
        self._parameter_names: list[str] = []
        self._follow_optimizer()
        self._saver = Saver(parent, keep=keep, most_failures=most_failures, metrics=metrics_of_default_group)
        self._signal = SaveSignal(on_signal)

    @property
    def num_steps(self) -> int:
        """Number of steps of the training, before and after a restore."""
        return self._num_steps

    @property
    def counts(self) -> SaveCounts:
        """Counts of completed and failed saves; on worker 0 they count checkpoints."""
        return self._saver.counts

    @property
    def is_saving(self) -> bool:
        """Whether this worker still writes data for a running save."""
        return self._saver.is_busy

    def step(self) -> bool:
        """Counts a step of the training, and saves if a save is due. Call it once after each optimizer.step().

        Returns:
            Whether a save began.

        Raises:
            CheckpointError: If too many saves have failed in a row, or the folder has newer checkpoints from which
                this training did not continue.
        """
        self._num_steps += 1
        if self._workers.world_size == 1:
            self._propose()
        was_asked, was_busy, has_failed = self._workers.agreed()
        if has_failed:
            self._saver.check()
            raise CheckpointError(follow_up("too many saves have failed in a row", "worker 0"))
        self._due.note(self._num_steps, is_asked=was_asked)
        began = self._due.is_waiting and not was_busy
        start = self._frozen_state() if began else None
        if self._workers.world_size > 1:
            self._propose(is_busy=began)
        if start is not None:
            start()
        elif self._workers.rank == 0:
            self._follow_optimizer()
            if self._snapshots is not None:
                self._snapshots.prepare()
        return began

    def save(self, *, wait: bool = True) -> None:
        """Saves now.

        Args:
            wait: Whether to return only when the checkpoint is on the disk.

        Raises:
            CheckpointError: On all workers, if `wait` is True and the save failed.
        """
        self._saver.wait()
        failed_before = self.counts.num_failed
        self._workers.agreed()  # this save also answers all earlier requests
        start = self._frozen_state()
        self._propose(is_busy=True)  # earlier proposals did not include this save
        start()
        if not wait:
            return
        self._saver.wait()
        has_failed = self.counts.num_failed > failed_before
        if self._workers.how_many(has_failed):
            text = f"step {self._num_steps} could not be saved"
            raise CheckpointError(
                f"{text}: {self.counts.last_error}" if has_failed else follow_up(text, "another worker")
            )

    def restore(self, step: int | None = None) -> int:
        """Loads the newest checkpoint whose checksums are all correct, or the checkpoint of `step`.

        Loading is strict: if tensors are missing, unexpected or of another shape, the error lists them and nothing is
        changed. After restoring a checkpoint that is not the newest, saving is refused until the newer ones are
        removed, because a folder holds only one training.

        Returns:
            The number of steps that the training had taken; 0 if the folder has no checkpoint.

        Raises:
            CheckpointError: If no checkpoint is complete although some exist, or the checkpoint does not fit.
        """
        self._saver.wait()
        with SaveProgress("restore") as progress:
            checkpoint = self._open_same(step, progress)
            if checkpoint is None:
                logger.info("no checkpoint in %s: training starts from scratch", self._parent.path)
                return 0
            with checkpoint:
                states = self._worker_states(checkpoint)
                if self._snapshots is not None:
                    self._workers.barrier()  # loading overwrites shared parameters, which some workers may still use
                load_training_state(checkpoint, self._model, self._optimizer, progress)
                for name, target in self._state.items():
                    if (
                        not states or name not in states[0]
                    ):  # tensors that the workers shared when the checkpoint was saved
                        continue
                    load_resharded(
                        name,
                        target,
                        [state[name] for state in states],
                        rank=self._workers.rank,
                        world_size=self._workers.world_size,
                    )
                self._num_steps = checkpoint.step
                self._due.forget()
                logger.info("[step %d] restored %s", checkpoint.step, checkpoint.path.name)
        self._newest_left = _NO_CHECKPOINT if step is None else self._find_newest_step()
        if self._newest_left > self._num_steps:
            logger.warning(
                "%s has checkpoints newer than that of step %d, up to step %d; to save from here on, remove them, "
                "or choose another folder",
                self._parent.path,
                self._num_steps,
                self._newest_left,
            )
        self._workers.barrier()
        return self._num_steps

    def wait(self) -> None:
        """Waits until no save is running."""
        self._saver.wait()

    def close(self) -> None:
        """Waits for the running save, saves if another is due, and restores SIGUSR1's handler. Idempotent.

        A `with` block that ends by an exception does not begin another save, because other workers may be gone.
        """
        self._close(alone=False)

    def _close(self, *, alone: bool) -> None:
        was_closed, self._is_closed = self._is_closed, True
        try:
            if not alone and not was_closed:
                self._save_what_is_due()
        finally:
            self._let_go(alone=alone)

    def _save_what_is_due(self) -> None:
        if self._workers.world_size == 1:
            self._propose()
        was_asked, _, has_failed = self._workers.agreed()
        if has_failed or not (was_asked or self._due.is_waiting):
            return
        self._saver.wait()
        try:
            start = self._frozen_state()
        except (CoarseError, OSError) as error:
            return self._saver.fail(error)
        start()

    def _let_go(self, *, alone: bool) -> None:
        self._signal.close()
        self._saver.close()
        self._claim.release()
        self._copies.close()
        if self._step_hook is not None:
            self._step_hook.remove()
        self._workers.close(alone=alone)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(alone=error is not None)

    def _propose(self, *, is_busy: bool = False) -> None:
        self._workers.propose(
            asks=self._signal.take(),
            is_busy=is_busy or self._saver.is_busy,
            has_failed=self._saver.has_given_up,
        )

    def _frozen_state(self) -> Callable[[], object]:
        with operation("take the checkpoint's state"):
            return self._take_state()

    def _take_state(self) -> Callable[[], object]:
        """Freezes the current state; returns the function that begins to write it.

        Once writing has begun, its threads compete with training for Python.
        """
        if self._newest_left >= self._num_steps:
            raise CheckpointError(
                f"{self._parent.path} has a checkpoint of step {self._newest_left}, but this is step "
                f"{self._num_steps} of a training that did not resume from it. Call restore() first, remove the "
                "newer checkpoints, or choose another folder."
            )
        if (
            isinstance(self._optimizer, DistributedOptimizer)
            and self._optimizer.remote_parameters is not None
        ):
            self._optimizer.remote_parameters.take_assigned()
        self._num_saves += 1
        self._saver.count_skipped(self._due.begin(self._num_steps))
        if (refusal := self._claim_folder()) is not None:
            return functools.partial(self._saver.fail, refusal) if self._workers.rank == 0 else lambda: None
        if self._snapshots is not None:
            self._snapshots.take_over_writes()
        own_state = self._own_state()
        if self._workers.rank == 0:
            try:
                writing = self._writing()
            except (SnapshotsBusyError, OSError) as error:
                return functools.partial(self._saver.fail, error)
            return functools.partial(self._start, writing, own_state)
        if own_state is not None:
            return functools.partial(self._saver.start_worker_state, own_state)
        return lambda: None

    def _claim_folder(self) -> Exception | None:
        """Claims the folder for this job; returns None, or the reason for a refusal. Collective until claimed.

        No worker may write to the folder before that, because another job may be saving there.
        """
        if self._has_folder:
            return None
        refusal: Exception | None = FolderClaimedError(
            f"another job saves to {self._parent.path}; end it, or choose another folder for this job"
        )
        if self._workers.rank == 0:
            try:
                refusal = None if self._claim.take() else refusal
            except OSError as error:
                refusal = error
        (is_refused,) = self._workers.told_by_first(int(refusal is not None))
        self._has_folder = not is_refused
        return refusal if is_refused else None

    def _tidy_up(self) -> None:
        """Removes the files of killed saves, unless another job saves there or they cannot be removed."""
        with contextlib.suppress(OSError, CheckpointError):
            if self._claim.take():
                remove_unfinished(self._parent)
        self._claim.release()  # a job that only restores does not block a job that saves

    def _start(self, writing: Writing, own_state: OwnState | None) -> None:
        if self._snapshots is None:
            self._copies.begin()
        self._saver.start(writing, own_state)

    def _follow_optimizer(self) -> None:
        """Makes saves use the current memory of the optimizer's parameters, which moves when parameters are added."""
        optimizer = self._optimizer
        remote = optimizer.remote_parameters if isinstance(optimizer, DistributedOptimizer) else None
        if optimizer is None or remote is None:
            self._snapshots = None
        elif self._snapshots is None or not self._snapshots.are_of(remote):
            self._snapshots = SnapshotSaves(remote, self._model, self._parent.path, self._options)
            self._parameter_names = names_of_parameters(self._model, optimizer)
            remote.before_leaving(weakly(self._finish_save))
            if self._workers.rank == 0:
                self._snapshots.warm()

    def _finish_save(self) -> None:
        self._saver.wait()

    def _own_state(self) -> OwnState | None:
        if not self._state:
            return None
        state = {name: each.state_dict() for name, each in self._state.items()}
        return OwnState(
            step=self._num_steps,
            save_number=self._num_saves,
            rank=self._workers.rank,
            state=to_json(state, translate=as_small_tensor),
        )

    def _writing(self) -> Writing:
        self._follow_optimizer()
        if self._snapshots is not None:
            assert isinstance(self._optimizer, DistributedOptimizer)
            settings = optimizer_settings(self._optimizer, self._parameter_names)
            return self._snapshots.begin(self._num_steps, self._details(settings))
        taken = training_state(self._model, self._optimizer)
        details = self._details(taken.optimizer)
        source = self._copies.take(
            self._num_steps, taken.tensors, only_optimizer_changes=taken.only_optimizer_changes
        )
        return SourceWriting(self._parent, source, details, self._options)

    def _details(self, settings: Any) -> SaveDetails:
        return SaveDetails(
            world_size=self._workers.world_size,
            optimizer=settings,
            save_number=self._num_saves,
            has_worker_state=bool(self._state),
        )

    def _find_newest_step(self) -> int:
        """The newest step of all checkpoints in the folder, as worker 0 finds them. Collective."""
        names = names_of(self._parent) if self._workers.rank == 0 else []
        newest_step = max((name.step for name in names), default=_NO_CHECKPOINT)
        return self._workers.told_by_first(newest_step)[0]

    def _open_same(self, step: int | None, progress: SaveProgress) -> Checkpoint | None:
        """Opens the checkpoint that worker 0 has chosen and verified."""
        checkpoint, error = None, None
        if self._workers.rank == 0:
            try:
                checkpoint = self._choose(step, progress)
            except (CheckpointError, OSError) as problem:
                error = problem
        chosen = _NO_CHECKPOINT if checkpoint is None else checkpoint.step
        attempt = 0
        if checkpoint is not None:
            name = CheckpointName.parse(checkpoint.path.name)
            attempt = name.attempt if name else 0
        chosen, attempt = self._workers.told_by_first(_UNREADABLE if error else chosen, attempt)
        if error is not None:
            raise error
        if chosen == _UNREADABLE:
            raise CheckpointError(follow_up("no checkpoint could be opened", "worker 0"))
        if chosen == _NO_CHECKPOINT:
            return None
        if self._workers.rank != 0:
            try:
                checkpoint = open_checkpoint(self._parent, CheckpointName(chosen, attempt))
            except (CheckpointError, OSError) as problem:
                error = problem
        if num_without := self._workers.how_many(error is not None):
            if checkpoint is not None:
                checkpoint.close()
            who = (
                f"{error}; worker 0 can open it"
                if error
                else f"{num_without} worker(s) cannot open step {chosen}"
            )
            raise CheckpointError(
                f"{who}. {self._parent.path} must be on a file system that all nodes share, or be copied to each node"
            ) from error
        return checkpoint

    def _choose(self, step: int | None, progress: SaveProgress) -> Checkpoint | None:
        if step is None:
            return find_newest(self._parent, progress)
        attempts = [name for name in names_of(self._parent) if name.step == step]
        return open_verified(self._parent, attempts[-1] if attempts else CheckpointName(step), progress)

    def _worker_states(self, checkpoint: Checkpoint) -> list[dict[str, Any]]:
        """The saved state of each worker of the checkpoint's job.

        Raises:
            CheckpointError: If its names differ from those of this worker's state.
        """
        states = [from_json(state, translate=from_small_tensor) for state in checkpoint.worker_states()]
        known, wanted = (set(each) - {OwnTensors.NAME} for each in (states[0] if states else (), self._state))
        if known != wanted:
            raise CheckpointError(
                f"{checkpoint.path} has the workers' state of {sorted(known)}, but {sorted(wanted)} is requested"
            )
        return states


def _copies_beside(optimizer: torch.optim.Optimizer | None) -> tuple[HostCopies, Any]:
    """The host copies, and the hook by which the optimizer waits for them; None if it need not wait."""
    in_devices = isinstance(optimizer, DistributedOptimizer) and optimizer.runs_in_memory_devices
    if optimizer is None or in_devices:
        return HostCopies(waits_for_step=False), None
    copies = HostCopies(waits_for_step=True)
    return copies, optimizer.register_step_pre_hook(lambda *_: copies.finish())
