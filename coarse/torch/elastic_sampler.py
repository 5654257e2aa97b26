"""ElasticSampler: divides a dataset among the workers of a job in which workers are lost and new ones come."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch

from coarse.client.members import WorldChange
from coarse.env import invitation
from coarse.errors import SyncTimeoutError
from coarse.session import Session
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
    from the next one, which then lacks them.

    Every worker constructs it alike, before the first step and before join_training(), and loads its batches alike:
    with as many processes (`num_workers`) that load as many batches in advance. Each forward of the model in training
    mode with gradients uses one batch.

    It is also a WorkerState, for Checkpointer and Recovery: workers that restart, also in another number, go on with
    the samples that no step has used.

    Example:
        >>> sampler = coarse.torch.ElasticSampler(dataset, model, batch_size=64)
        >>> loader = DataLoader(dataset, batch_sampler=sampler)
        >>> for epoch in sampler.epochs(num_epochs):
        ...     for batch in loader:
        ...         train(batch)

    Args:
        dataset: Its length is the number of samples.
        model: The wrapped model that trains on them, or what a trainer has made of it.
        batch_size: Samples of one worker in a step.
        shuffle: Whether each epoch has an order of its own, instead of that of the dataset.
        seed: Of these orders; the same on all workers.
        name: Distinguishes the samplers of a job.

    Raises:
        TypeError: If the model is not wrapped.
        ValueError: If `batch_size` is not positive, the dataset has fewer samples than the job has workers, or this
            is a new worker that takes part in the training already.
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
    ) -> None:
        wrapped = wrapped_in(model, "ElasticSampler")
        session = wrapped.session
        members = (0,) if session is None else session.members
        self._num_samples = len(dataset)
        if batch_size < 1 or self._num_samples < len(members):
            raise ValueError(
                f"batch_size={batch_size} of {self._num_samples} samples: {len(members)} worker(s) need a sample each"
            )
        self._session, self._shuffle, self._seed = session, shuffle, seed
        self._key = f"coarse/sampler {name}"
        self._rank = 0 if session is None else session.identity.rank
        self._division = SampleDivision(self._num_samples, batch_size, members)
        self._num_taken = 0  # rounds of the division whose samples the loader has
        self._is_entering = False  # until this newcomer has used the first of the rounds that it was told
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
        if session.is_newcomer:
            session.on_entry(weakly(self._take_over))

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._division.epoch

    def epochs(self, count: int) -> Iterator[int]:
        """Iterates over the unfinished epochs of `count` epochs; in a new worker, from that of the others on."""
        self._join()
        while self._division.epoch < count:
            epoch = self._division.epoch
            yield epoch
            self._num_taken = 0
            self._division.begin_epoch(epoch + 1)

    def __iter__(self) -> Iterator[list[int]]:
        """Iterates over this worker's batches of the epoch that no step has used."""
        self._join()
        if self._num_taken:  # an iterator before had taken them
            self._division.put_back()
            self._num_taken = 0
        return _Batches(self)

    def __len__(self) -> int:
        """Batches that are left in the epoch if the members stay the same."""
        return len(self._division.rounds) - self._num_taken + self._division.num_rounds_left

    def _next_batch(self) -> list[int]:
        """The samples of this worker's next batch; empty if the epoch has no more."""
        rounds = self._division.rounds
        if self._num_taken == len(rounds) and (self._is_entering or not self._division.divide()):
            return []
        spans = rounds[self._num_taken][self._rank]
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
        self._num_taken = 0

    def load_state_dicts(self, states: list[Mapping[str, Any]]) -> None:
        """load_state_dict() of what all workers have saved alike."""
        self.load_state_dict(states[0])

    # ---- what a step shows ----

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_forward(self, module: torch.nn.Module, *_: Any) -> None:
        if self._num_taken and module.training and torch.is_grad_enabled():
            self._division.use()
            self._num_taken -= 1
            self._is_entering = False

    def _note_members(self, change: WorldChange) -> None:
        """Divides what lost workers had not used among the others."""
        if not self._is_awaiting:
            self._division.lose({*self._division.members} - {*change.new})

    def _welcome(self, newcomers: frozenset[int]) -> None:
        """Gives newcomers samples for this step and tells them where all are."""
        self._division.lose(newcomers & {*self._division.members})  # lost and replaced within a step
        self._division.welcome(newcomers)
        session = self._linked()
        state = {"begun": session.join_training(), **self._division.state()}
        session.store(self._key, np.frombuffer(json.dumps(state).encode(), dtype=np.uint8))

    # ---- newcomers ----

    @property
    def _is_awaiting(self) -> bool:
        """Whether this is a newcomer that does not take part yet."""
        return self._session is not None and self._session.is_newcomer

    def _join(self) -> None:
        if self._is_awaiting:
            self._linked().join_training()

    def _linked(self) -> Session:
        assert self._session is not None, "a job of one worker has no newcomers"
        return self._session

    def _take_over(self, *_: Any) -> None:
        """Waits until a member has told where all are; each does so in this newcomer's first step."""
        session = self._linked()
        begun, until_s = session.join_training(), time.monotonic() + session.settings.timeout_s
        while not (state := self._told()) or state["begun"] != begun:
            session.check_others()
            if time.monotonic() > until_s:
                raise SyncTimeoutError(
                    f"worker {self._rank}: no other worker has told its samples within "
                    f"{session.settings.timeout_s:g} s; every worker has to construct the same ElasticSampler"
                )
            time.sleep(_LOOK_INTERVAL_S)
        self._division.load(state)
        self._is_entering = True

    def _told(self) -> dict[str, Any]:
        stored = self._linked().load(self._key)
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
