"""A worker's copies of parameters from the memory devices, for training with bounded staleness."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable, Sequence

import torch

from coarse.client.memory.parameter_cache import CacheStatistics, ParameterCache
from coarse.errors import CoarseError
from coarse.torch.ddp.module_hooks import OwnHook
from coarse.torch.ddp.watched_tensors import WatchedTensors
from coarse.torch.failing import is_failing
from coarse.torch.gradients.layout import copy_all


class CachedParameters:
    """One worker's copies of a model's parameters, at most `staleness` updates behind those in the memory devices.

    A worker with sufficiently recent copies does not wait for the running update, and thus not for slower workers.
    Writes to copies, or tensors assigned to their `.data`, go to the memory devices before the next update. Every
    worker must write the same values.

    Args:
        parameters: The worker's own parameters; they become copies of `shared` now.
        shared: The same parameters in the memory devices, which update them.
        staleness: Number of recent updates that the copies may lack, at least 1.
        finish_update: Waits until the updates that this worker has pushed are complete; returns their number.
        keep_snapshots: Called before any write to `shared` except an update.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        shared: Sequence[torch.Tensor],
        *,
        staleness: int,
        finish_update: Callable[[], int],
        keep_snapshots: Callable[[], None],
    ) -> None:
        self._parameters = parameters
        self._shared = shared
        self._finish_update = finish_update
        self._keep_snapshots = keep_snapshots
        self._cache = ParameterCache(staleness=staleness, num_bytes=sum(tensor.nbytes for tensor in shared))
        self._watched = WatchedTensors(parameters)
        self.pull()

    def read(self, current: int) -> None:
        """Pulls the parameters if they are too old; called before they are used.

        Args:
            current: Number of updates that this worker has pushed.
        """
        self.publish_changes()
        if not self._cache.is_hit(current):
            self.pull()

    def pull(self) -> None:
        """Waits for the last update and makes the copies exact."""
        self.publish_changes()
        version = self._finish_update()
        with torch.no_grad():
            copy_all(self._parameters, self._shared)
        torch.autograd.graph.increment_version(list(self._parameters))
        self._cache.filled(version)
        self._watched.note_all()

    def publish(self) -> None:
        """Writes this worker's copies to the memory devices, between two steps."""
        version = self._finish_update()
        with torch.no_grad():
            copy_all(self._shared, self._parameters)
        self._cache.filled(version)
        self._watched.note_all()

    def publish_changes(self) -> None:
        """As publish(), only for copies that were written to or whose memory was replaced."""
        changed = self._watched.changed()
        if not changed:
            return
        self._finish_update()
        self._keep_snapshots()
        with torch.no_grad():
            copy_all(
                [self._shared[index] for index in changed], [self._parameters[index] for index in changed]
            )
        self._watched.note(changed)

    def follow(self, module: torch.nn.Module) -> None:
        """Keeps `module` consistent: exact state dicts, loading into the devices, exit after the last update."""
        reference = weakref.ref(self)

        def pull() -> None:
            if (cached := reference()) is not None:
                cached.pull()

        def publish() -> None:
            if (cached := reference()) is not None:
                cached.publish()

        def finish(owner_pid: int) -> None:
            # A worker must not leave before the update is complete: workers that have not pushed yet still need it.
            if (cached := reference()) is not None and os.getpid() == owner_pid and not is_failing():
                with contextlib.suppress(CoarseError):
                    cached._finish_update()

        atexit.register(finish, os.getpid())
        module.register_state_dict_pre_hook(OwnHook(pull))
        module.register_load_state_dict_post_hook(OwnHook(publish))

    def statistics(self) -> CacheStatistics:
        """Statistics of all reads so far."""
        return self._cache.statistics()
