"""ElasticSampler: divides a dataset among the workers of a job in which workers are lost and new ones come."""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch

from coarse.env import invitation
from coarse.errors import SyncTimeoutError
from coarse.session import Session, WorldChange
from coarse.torch.ddp.wrapped import wrapped_in
from coarse.torch.sample_division import SampleDivision
from coarse.torch.weak_calls import weakly

_LOOK_INTERVAL_S = 0.001


class ElasticSampler(torch.utils.data.Sampler):  # type: ignore[misc]
    """Batches of this worker's samples, for DataLoader(batch_sampler=...); others' follow from the members alone.

    In an epoch each sample is given to one worker at most. What a lost worker had not trained on is given to the
    others, and a new worker goes on where they are (docs/guides/elastic.md). Not given are: the batch of the step
    in which a worker is lost, and fewer samples than there are workers at the end of an epoch. Before that, the last
    batches of an epoch may be smaller. A new worker that comes in the last steps of an epoch takes its first batches
    from the next one, which then lacks them. A worker that leaves as planned takes nothing along.

    Every worker constructs it alike, before the first step and before join_training(), and loads its batches alike:
    with as many processes (`num_workers`) that load as many batches in advance. Each forward of the model in training
    mode with gradients uses one batch.

    With `global_batch_size` a step has that many samples, however many workers there are: each accumulates the
    gradients of one or several batches, none of which exceeds `batch_size`. The loop then needs accumulate(),
    weighted() and `completes_step`.

    It is also a WorkerState, for Checkpointer and Recovery: workers that restart, also in another number, go on with
    the samples that no step has used.

    Example:
        >>> sampler = coarse.torch.ElasticSampler(dataset, model, batch_size=64)
        >>> loader = DataLoader(dataset, batch_sampler=sampler)
        >>> for epoch in sampler.epochs(num_epochs):
        ...     for batch in loader:
        ...         train(batch)

        With a global batch:

        >>> sampler = coarse.torch.ElasticSampler(dataset, model, batch_size=64, global_batch_size=512)
        >>> for batch in loader:
        ...     with sampler.accumulate():
        ...         sampler.weighted(mean_loss_of(model(batch))).backward()
        ...     if sampler.completes_step:
        ...         optimizer.step()
        ...         optimizer.zero_grad()

    Args:
        dataset: Its length is the number of samples.
        model: The wrapped model that trains on them, or what a trainer has made of it.
        batch_size: Samples of one worker in a step; with a global batch, the most in a batch.
        shuffle: Whether each epoch has an order of its own, instead of that of the dataset.
        seed: Of these orders; the same on all workers.
        name: Distinguishes the samplers of a job.
        global_batch_size: Samples of all workers in a step; None for `batch_size` of each.

    Raises:
        TypeError: If the model is not wrapped.
        ValueError: If `batch_size` is not positive, the dataset or the global batch has fewer samples than the job
            has workers, or this is a new worker that takes part in the training already.
    """

    def __init__(
        self,
        dataset: Sized,
        model: torch.nn.Module,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        name: str = "train",
        global_batch_size: int | None = None,
    ) -> None:
        wrapped = wrapped_in(model, "ElasticSampler")
        session = wrapped.session
        members = (0,) if session is None else session.members
        self._num_samples = len(dataset)
        if batch_size < 1 or self._num_samples < len(members):
            raise ValueError(
                f"batch_size={batch_size} of {self._num_samples} samples: {len(members)} worker(s) need a sample each"
            )
        num_places = 1 if session is None else session.num_places
        if global_batch_size is not None and global_batch_size < num_places:
            raise ValueError(
                f"global_batch_size={global_batch_size}: each of up to {num_places} worker(s) needs a sample"
            )
        self._session, self._shuffle, self._seed = session, shuffle, seed
        self._model = weakref.ref(wrapped)
        self._key = f"coarse/sampler {name}"
        self._rank = 0 if session is None else session.identity.rank
        self._accumulates = global_batch_size is not None
        self._division = SampleDivision(self._num_samples, batch_size, members, global_batch_size or 0)
        self._num_taken = 0  # batches that the loader has, and no forward has used
        self._num_used = 0  # batches of the oldest round
        self._weight = 1.0
        self._asked = {"weighted()", "completes_step"}  # parts of a loop, since the last forward
        self._is_entering = False  # until this newcomer has used the first of the batches that it was told
        self._orders: dict[int, torch.Tensor] = {}
        wrapped.module.register_forward_pre_hook(weakly(self._note_forward))
        if session is not None:
            self._follow(session)

    def _follow(self, session: Session) -> None:
        if invitation() and not session.is_newcomer:
            raise ValueError(
                "this new worker takes part in the training already, so the others have divided the samples without "
                "this sampler; construct ElasticSampler before join_training() and the first forward"
            )
        session.on_change(weakly(self._note_members))
        session.on_newcomers(weakly(self._welcome))
        session.on_leave(weakly(self._tell_used))
        if session.is_newcomer:
            session.on_entry(weakly(self._take_over))

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._division.epoch

    def epochs(self, count: int) -> Iterator[int]:
        """Iterates over the unfinished epochs of `count` epochs; in a new worker, from that of the others on.

        An epoch comes again, with the rest of its samples, if a worker leaves in its last step when loaders have no
        batch of it left.
        """
        self._join()
        while self._division.epoch < count:
            epoch = self._division.epoch
            yield epoch
            self._num_taken = self._num_used = 0
            if not self._division.reopens():
                self._division.begin_epoch(epoch + 1)

    def __iter__(self) -> Iterator[list[int]]:
        """Iterates over this worker's batches of the epoch that no step has used."""
        self._join()
        self._num_taken = 0  # batches that an iterator before had taken are given again
        return _Batches(self)

    def __len__(self) -> int:
        """Batches that are left in the epoch if the members stay the same."""
        divided = self._division.num_batches - self._num_used - self._num_taken
        return divided + self._division.num_batches_left

    # ---- a step of several batches ----

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        """The context of a batch's forward and backward: no_sync() of the model, but for the last batch of a step."""
        self._asked.add("accumulate()")
        if self._is_last:
            return contextlib.nullcontext()
        model = self._model()
        assert model is not None, "the sampler's model was deleted"
        context: contextlib.AbstractContextManager[None] = model.no_sync()
        return context

    def weighted(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean loss of the last forward's batch, multiplied so that gradients become the mean over all samples.

        That is, over those of all workers in a step, also if workers have unequally many. The factor is 1 if they
        have equally many, in a batch each.
        """
        self._asked.add("weighted()")
        return loss * self._weight

    @property
    def completes_step(self) -> bool:
        """Whether the last forward used the last batch of a step, so that the optimizer is to update."""
        self._asked.add("completes_step")
        return self._num_used == 0

    @property
    def _is_last(self) -> bool:
        """Whether the next forward uses the last batch of a step."""
        rounds = self._division.rounds
        return not rounds or self._num_used + 1 == rounds[0].num_batches

    def _check_loop(self) -> None:
        """Raises RuntimeError if the loop updates by other gradients than the mean, or would do so after a loss."""
        if missing := {"accumulate()", "weighted()", "completes_step"} - self._asked:
            raise RuntimeError(
                f"worker {self._rank}: with global_batch_size, the loop has to use accumulate(), weighted() and "
                f"completes_step of the sampler for each batch, and it lacks {', '.join(sorted(missing))}; see the "
                "example of ElasticSampler"
            )
        self._asked.clear()

    # ---- batches ----

    def _next_batch(self) -> list[int]:
        """The samples of this worker's next batch; empty if the epoch has no more."""
        number = self._num_used + self._num_taken
        spans = self._division.batch(self._rank, number)
        if spans is None and not self._is_entering and self._division.divide():
            spans = self._division.batch(self._rank, number)
        if spans is None:
            return []
        self._num_taken += 1
        if not spans:
            raise RuntimeError(
                f"worker {self._rank}: no sample is left for this new worker in epoch {self.epoch} or the next one; "
                f"{self._num_samples} samples are too few for so many workers that come"
            )
        return [index for first, end in spans for index in self._indices(first, end)]

    def _indices(self, first: int, end: int) -> list[int]:
        later, place = divmod(first, self._num_samples)
        indices: list[int] = self._order(self.epoch + later)[place : place + end - first].tolist()
        return indices

    def _order(self, epoch: int) -> torch.Tensor:
        if epoch not in self._orders:
            self._orders = {each: order for each, order in self._orders.items() if each >= self.epoch}
            chance = torch.Generator().manual_seed(self._seed + epoch)
            self._orders[epoch] = (
                torch.randperm(self._num_samples, generator=chance)
                if self._shuffle
                else torch.arange(self._num_samples)
            )
        return self._orders[epoch]

    def state_dict(self) -> dict[str, Any]:
        """The samples that no step has used, equal on all workers."""
        return self._division.progress()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with the samples of state_dict(), from any number of workers."""
        self._division.load_progress(state)
        self._num_taken = self._num_used = 0

    def load_state_dicts(self, states: list[Mapping[str, Any]]) -> None:
        """load_state_dict() with the state that all workers have saved."""
        self.load_state_dict(states[0])

    # ---- what a step shows ----

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_forward(self, module: torch.nn.Module, *_: Any) -> None:
        if not (self._num_taken and module.training and torch.is_grad_enabled()):
            return
        if self._accumulates:
            self._check_loop()
        self._weight = self._division.rounds[0].weight(self._rank, self._num_used)
        is_last = self._is_last
        self._num_taken -= 1
        self._num_used += 1
        self._is_entering = False
        if is_last:
            self._division.use()
            self._num_used = 0

    def _note_members(self, change: WorldChange) -> None:
        """Divides what workers that have left had not used among the others."""
        if not self._is_awaiting:
            self._lose(frozenset(self._division.members) - frozenset(change.new))

    def _lose(self, ranks: frozenset[int]) -> None:
        self._division.lose(ranks, self._rounds_used_by(ranks))

    def _welcome(self, newcomers: frozenset[int]) -> None:
        """Gives newcomers samples for this step and tells them where all are."""
        self._lose(newcomers & frozenset(self._division.members))  # lost and replaced within a step
        self._division.welcome(newcomers)
        self._tell(self._key, {"begun": self._linked().join_training(), **self._division.state()})

    # ---- workers that leave as planned ----

    def _tell_used(self) -> None:
        """Tells the others which rounds this worker has used, for it leaves before they begin the next step."""
        if not self._is_awaiting:
            note = {"since": self._division.since[self._rank], "used": self._division.num_used}
            self._tell(self._key_of_leaver(self._rank), note)

    def _rounds_used_by(self, ranks: Iterable[int]) -> dict[int, int]:
        """How many rounds those have used that have left as planned; nobody knows it of lost workers."""
        notes = {rank: self._told(self._key_of_leaver(rank)) for rank in ranks}
        since = self._division.since
        # Another worker of that rank may have left before.
        return {rank: note["used"] for rank, note in notes.items() if note and note["since"] == since[rank]}

    def _key_of_leaver(self, rank: int) -> str:
        return f"{self._key}/left {rank}"

    # ---- newcomers ----

    @property
    def _is_awaiting(self) -> bool:
        """Whether this is a newcomer that does not take part yet."""
        return self._session is not None and self._session.is_newcomer

    def _join(self) -> None:
        if self._is_awaiting:
            self._linked().join_training()

    def _linked(self) -> Session:
        assert self._session is not None, "a job of one worker has no other members"
        return self._session

    def _take_over(self, *_: Any) -> None:
        """Waits until a member has told where all are; each does so in this newcomer's first step."""
        session = self._linked()
        begun, until_s = session.join_training(), time.monotonic() + session.settings.timeout_s
        while not (state := self._told(self._key)) or state["begun"] != begun:
            session.check_others()
            if time.monotonic() > until_s:
                raise SyncTimeoutError(
                    f"worker {self._rank}: no other worker has told its samples within "
                    f"{session.settings.timeout_s:g} s; every worker has to construct the same ElasticSampler"
                )
            time.sleep(_LOOK_INTERVAL_S)
        self._division.load(state)
        self._is_entering = True

    def _tell(self, key: str, told: Mapping[str, Any]) -> None:
        self._linked().store(key, np.frombuffer(json.dumps(told).encode(), dtype=np.uint8))

    def _told(self, key: str) -> dict[str, Any]:
        stored = self._linked().load(key)
        told: dict[str, Any] = json.loads(bytes(stored.value)) if stored.version else {}
        return told


class _Batches(Iterator[list[int]]):
    """Goes on after its end, if a lost worker has left samples."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler

    def __next__(self) -> list[int]:
        if batch := self._sampler._next_batch():
            return batch
        raise StopIteration
