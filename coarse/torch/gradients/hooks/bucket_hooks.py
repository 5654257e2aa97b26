"""Gradients that a user's communication hook averages, in buckets as in torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from coarse.client.tensor_group import UpdateKind
from coarse.session import Session
from coarse.torch.gradients.paths.gradient_path import GradientLayout
from coarse.torch.optimizer.mirrored_parameters import MirroredParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketHook:
    """A user's hook that averages gradients in place of the memory devices.

    Args:
        call: Receives `state` and a bucket; returns a torch.futures.Future of the bucket's averages.
        state: The user's state for `call`.
        bucket_bytes: Size of a bucket. As in torch, the first bucket is smaller; a larger tensor is a bucket of its
            own.
    """

    call: Callable[[Any, Any], Any]
    state: Any
    bucket_bytes: int


class GradientBucket:
    """A bucket with the methods of torch.distributed.GradBucket.

    Args:
        index: Number of the bucket; buckets of the last parameters come first.
        num_buckets: Number of buckets.
        parameters: The bucket's parameters, all of one type and device.
        layout: Layout of the gradients of all parameters.
        members: The numbers of `parameters` in `layout`.
    """

    def __init__(
        self,
        index: int,
        num_buckets: int,
        parameters: Sequence[torch.nn.Parameter],
        layout: GradientLayout,
        members: Sequence[int],
    ) -> None:
        self._index = index
        self._is_last = index == num_buckets - 1
        self._parameters = list(parameters)
        self._layout = layout
        self.members = members
        self._flat = torch.zeros(
            sum(parameter.numel() for parameter in parameters),
            dtype=parameters[0].dtype,
            device=parameters[0].device,
        )
        self._buffer = self._flat
        self.slots = self.views(self._flat)
        """Views into which gradients are copied."""
        self.num_missing = len(members)
        """Number of gradients that have not arrived in this iteration."""

    def index(self) -> int:
        """Number of the bucket, the same in every iteration."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients, one after the other."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views of buffer() with the shapes of the parameters."""
        return self.views(self._buffer)

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of gradients()."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether this is the last bucket of an iteration."""
        return self._is_last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces the tensor of buffer() and gradients() by one with the same number of elements."""
        self._buffer = buffer

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of the gradients in a flat tensor."""
        found, offset = [], flat.storage_offset()
        for parameter, member in zip(self._parameters, self.members, strict=True):
            found.append(flat.as_strided(parameter.shape, self._layout.strides(member), offset))
            offset += parameter.numel()
        return found

    def begin(self) -> None:
        """Begins another iteration."""
        self.num_missing = len(self.members)
        self._buffer = self._flat


class BucketHookGradients:
    """A GradientPath to a hook, which is called for each bucket when it is full, in a fixed order.

    Args:
        session: The session in which workers exchange which parameters they have used.
        names: Names of the parameters.
        parameters: The model's parameters.
        hook: The hook that averages.
    """

    def __init__(
        self,
        session: Session,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        hook: BucketHook,
    ) -> None:
        self._session = session
        self._parameters = parameters
        self._hook = hook
        self._layout = GradientLayout(names, parameters)
        limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, hook.bucket_bytes]
        assigned, _ = dist._compute_bucket_assignment_by_size(list(parameters), limits)
        self._buckets = [
            GradientBucket(index, len(assigned), [parameters[i] for i in members], self._layout, members)
            for index, members in enumerate(reversed(assigned))
        ]
        self._place_of = {
            member: (bucket, position)
            for bucket in self._buckets
            for position, member in enumerate(bucket.members)
        }
        self._is_used = np.zeros(len(parameters), dtype=np.int32)
        self._futures: list[Any] = []
        self._averages: dict[int, torch.Tensor] = {}

    def can_write_in_place(self, index: int) -> bool:
        return False

    def slot(self, index: int) -> torch.Tensor:
        bucket, position = self._place_of[index]
        return bucket.slots[position]

    def send(self, index: int, kind: UpdateKind) -> None:
        gradient = self._parameters[index].grad
        if gradient is None:
            return self.contribute(index, kind, present=False)
        self._layout.check(index, gradient)
        self.slot(index).copy_(gradient.detach())
        self._fill(index, is_used=True)

    def contribute(self, index: int, kind: UpdateKind, *, present: bool) -> None:
        self.slot(index).zero_()
        self._fill(index, is_used=present)

    def _fill(self, index: int, *, is_used: bool) -> None:
        self._is_used[index] = is_used
        self._place_of[index][0].num_missing -= 1
        while len(self._futures) < len(self._buckets) and not self._buckets[len(self._futures)].num_missing:
            self._futures.append(self._hook.call(self._hook.state, self._buckets[len(self._futures)]))

    def flush(self) -> None:
        pass  # the hook was already called for all complete buckets

    def is_late(self, index: int) -> bool:
        raise NotImplementedError("no gradients take turns with a hook")

    def stage(self, index: int, gradient: torch.Tensor) -> None:
        raise NotImplementedError("no optimizer is in the memory devices with a hook")

    def finish_staging(self) -> None:
        raise NotImplementedError("no optimizer is in the memory devices with a hook")

    def mirror(self, parameters: MirroredParameters) -> bool:
        return False

    def collect(self, *, counts: bool) -> Sequence[int]:
        for bucket, future in zip(self._buckets, self._futures, strict=True):
            value = future.wait()
            flat = value[0] if isinstance(value, (list, tuple)) else value
            self._averages.update(zip(bucket.members, bucket.views(flat.detach().view(-1)), strict=True))
            bucket.begin()
        self._futures.clear()
        contributors = self._is_used.copy()
        self._session.all_reduce(contributors)
        found: list[int] = contributors.tolist()
        return found

    def deliver(self, absent: Collection[int], contributors: Sequence[int]) -> None:
        averages, self._averages = self._averages, {}
        for index, parameter in enumerate(self._parameters):
            if index in absent:
                if not contributors[index]:
                    continue
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.detach().copy_(averages[index])

    def synchronize(self) -> None:
        pass  # collect() has waited

    def check(self) -> None:
        pass  # every call reports errors at once

    def confirm(self) -> None:
        pass  # collect() has waited
