"""Checkpoints of a training loop: saved in the background, restored on any number of workers.

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
from coarse.torch.checkpoint.agreement import SaveSignal, Workers
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
from coarse.torch.checkpoint.worker_state import OwnTensors, RandomState, WorkerState, checked, load_resharded
from coarse.torch.optimizer.distributed_optimizer import DistributedOptimizer, stand_in_of
from coarse.torch.optimizer.trainers import bare_optimizer
from coarse.torch.weak_calls import weakly

__all__ = ["Checkpointer", "DataPosition", "RandomState", "WorkerState", "load_state_dicts"]

logger = logging.getLogger(__name__)

_NO_CHECKPOINT, _UNREADABLE = -1, -2


class Checkpointer:
    """Saves and restores a training job: model, optimizer, and what else the user hands over.

    A save copies the state (worker 0 does) while the next gradients are computed, and writes it in the background.
    One is under way at most: a save that is due meanwhile waits for its turn, and then saves the step that training
    has reached. If the next one is due before that, it takes the place of the one that waits, and a warning tells
    which `every` would have fitted. close() writes the one that still waits. Training goes on if the disk fails;
    after `most_failures` failures in a row step() raises. SIGUSR1, sent to any worker, saves at one of the next
    steps, or behind the save that is under way. Steps after the last save that was due are not saved: call save()
    where they have to be on the disk.

    Every worker constructs it alike and makes the same calls; step(), save(), restore() and close() are collective
    where there is more than one worker, through a process group of their own.

    Args:
        folder: Of all checkpoints of this job; made if need be. On several nodes all must share it.
        model: Wrapped or not. Parameters and buffers are saved under the bare module's names.
        optimizer: One of torch's, a DistributedOptimizer, or what a trainer has made of either; None to save the
            model alone.
        every: How many steps lie between two saves; 0 saves only on demand.
        keep: How many of the newest checkpoints stay. Pinned ones stay as well.
        state: What else belongs to each worker, by names: RandomState(), DataPosition(), a scheduler, a
            loader with a state_dict().
        most_failures: So many failed saves in a row are an error.
        options: How files are written.
        on_signal: Whether SIGUSR1 saves; needs the main thread.
        first_step: How many steps the training has taken before, if it is not restored from here.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If something of `state` has no state_dict() or load_state_dict().
        OSError: If the folder cannot be made.
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
        self._workers = Workers()
        self._state = {**checked(state), **OwnTensors.of(model, self._workers.world_size)}
        self._copies, self._step_hook = _copies_beside(optimizer)
        parent = Folder.open(folder, create=True)
        self._parent = parent
        self._claim = Claim(parent)
        self._has_folder = False
        if self._workers.rank == 0:
            self._tidy_up()
        newest_step = self._find_newest_step()  # others go on when worker 0 has tidied up
        # Steps that were taken before are of the training that these checkpoints are of.
        self._newest_left = _NO_CHECKPOINT if first_step else newest_step
        self._options = options or WriteOptions()
        self._snapshots: SnapshotSaves | None = None
        self._parameter_names: list[str] = []
        self._follow_optimizer()
        self._saver = Saver(parent, keep=keep, most_failures=most_failures)
        self._signal = SaveSignal(on_signal)

    @property
    def num_steps(self) -> int:
        """How many steps the training has taken, before and after a restore."""
        return self._num_steps

    @property
    def counts(self) -> SaveCounts:
        """What became of the saves; of worker 0 they are those of checkpoints."""
        return self._saver.counts

    @property
    def is_saving(self) -> bool:
        """Whether this worker has something to write for a save that is under way."""
        return self._saver.is_busy

    def step(self) -> bool:
        """Counts a step of the training, and saves if it is time. Call it once after each optimizer.step().

        Returns:
            Whether a save began.

        Raises:
            CheckpointError: If too many saves have failed in a row, or the folder has newer checkpoints of a training
                that this one did not go on from.
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
        start = self._take_state() if began else None
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
            CheckpointError: If `wait`, and it could not be saved; on all workers.
        """
        self._saver.wait()
        failed_before = self.counts.num_failed
        self._workers.agreed()  # whatever was asked for is saved now
        start = self._take_state()
        self._propose(is_busy=True)  # what was proposed before did not know of this save
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
        """Loads the newest checkpoint of which every byte is right, or that of a step.

        Loading is strict: tensors that are missing, too many or of another shape are listed, and nothing is changed.
        After an older one than the newest, nothing is saved beside those that are newer: a folder holds one training.

        Returns:
            How many steps the training had taken; 0 if the folder never had a checkpoint.

        Raises:
            CheckpointError: If there are checkpoints but none is whole, or the one does not fit.
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
                    self._workers.barrier()  # parameters are loaded for all, of whom some may still use them
                load_training_state(checkpoint, self._model, self._optimizer, progress)
                for name, target in self._state.items():
                    if (
                        not states or name not in states[0]
                    ):  # tensors that workers had in common when it was saved
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
                "%s has newer checkpoints than that of step %d, up to step %d; to save what comes now, remove them, "
                "or choose another folder",
                self._parent.path,
                self._num_steps,
                self._newest_left,
            )
        self._workers.barrier()
        return self._num_steps

    def wait(self) -> None:
        """Returns when no save is under way."""
        self._saver.wait()

    def close(self) -> None:
        """Waits for the save that is under way, saves if one is still due, and hands SIGUSR1 back. Idempotent.

        A `with` block that ends by an exception saves nothing more: other workers may not be there.
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
            start = self._take_state()
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

    def _take_state(self) -> Callable[[], object]:
        """Holds the state of now still; returns what begins to write it, after which threads compete for Python."""
        if self._newest_left >= self._num_steps:
            raise CheckpointError(
                f"{self._parent.path} has a checkpoint of step {self._newest_left}, and this is step "
                f"{self._num_steps} of a training that did not go on from it. Call restore() first, remove what is "
                "newer, or choose another folder."
            )
        if isinstance(self._optimizer, DistributedOptimizer) and self._optimizer.offloaded is not None:
            self._optimizer.offloaded.take_assigned()
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
        """Why this job does not have the folder for itself; None from when it has. Collective until then.

        Before that no worker may write there: it would be into what another job saves.
        """
        if self._has_folder:
            return None
        refusal: Exception | None = FolderClaimedError(
            f"another job saves to {self._parent.path}; end it, or have this one save to another folder"
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
        """Removes what killed saves have left, unless somebody saves there, or it cannot be removed."""
        with contextlib.suppress(OSError, CheckpointError):
            if self._claim.take():
                remove_unfinished(self._parent)
        self._claim.release()  # who only restores leaves it to who saves

    def _start(self, writing: Writing, own_state: OwnState | None) -> None:
        if self._snapshots is None:
            self._copies.begin()
        self._saver.start(writing, own_state)

    def _follow_optimizer(self) -> None:
        """Saves from where the optimizer's parameters are now: they move when others come to them."""
        optimizer = self._optimizer
        offloaded = optimizer.offloaded if isinstance(optimizer, DistributedOptimizer) else None
        if optimizer is None or offloaded is None:
            self._snapshots = None
        elif self._snapshots is None or not self._snapshots.are_of(offloaded):
            self._snapshots = SnapshotSaves(offloaded, self._model, self._parent.path, self._options)
            self._parameter_names = names_of_parameters(self._model, optimizer)
            offloaded.before_leaving(weakly(self._finish_save))
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
        """Of all checkpoints in the folder, as worker 0 sees it. Collective."""
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
                f"{error}; worker 0 has it" if error else f"{num_without} worker(s) cannot open step {chosen}"
            )
            raise CheckpointError(
                f"{who}. {self._parent.path} must be on a file system that all nodes share, or be copied to each"
            ) from error
        return checkpoint

    def _choose(self, step: int | None, progress: SaveProgress) -> Checkpoint | None:
        if step is None:
            return find_newest(self._parent, progress)
        attempts = [name for name in names_of(self._parent) if name.step == step]
        return open_verified(self._parent, attempts[-1] if attempts else CheckpointName(step), progress)

    def _worker_states(self, checkpoint: Checkpoint) -> list[dict[str, Any]]:
        """The state of each worker that there was.

        Raises:
            CheckpointError: If it is not that of the same things.
        """
        states = [from_json(state, translate=from_small_tensor) for state in checkpoint.worker_states()]
        known, wanted = (set(each) - {OwnTensors.NAME} for each in (states[0] if states else (), self._state))
        if known != wanted:
            raise CheckpointError(
                f"{checkpoint.path} has the workers' state of {sorted(known)}, wanted is that of {sorted(wanted)}"
            )
        return states


def _copies_beside(optimizer: torch.optim.Optimizer | None) -> tuple[HostCopies, Any]:
    """Where states are copied to, and the hook that has the optimizer wait for it; None where nothing has to."""
    in_devices = isinstance(optimizer, DistributedOptimizer) and optimizer.runs_in_memory_devices
    if optimizer is None or in_devices:
        return HostCopies(waits_for_step=False), None
    copies = HostCopies(waits_for_step=True)
    return copies, optimizer.register_step_pre_hook(lambda *_: copies.finish())
