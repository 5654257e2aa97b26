"""Keeps a worker in the collectives of the others after its inputs are exhausted (torch's algorithms.join)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch
from torch.distributed.algorithms.join import JoinHook


class _JoinedModel(Protocol):
    require_forward_param_sync: bool

    def run_optimizers_on_workers(self) -> None:
        """Moves the updates to the workers."""

    def resume_optimizers(self, root: int) -> None:
        """Moves the updates back to the memory devices, with the state of worker `root`."""

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward broadcasts buffers."""

    def broadcast_module_buffers(self, root: int) -> None:
        """Copies buffers of worker `root` to all."""

    def broadcast_model(self, root: int) -> None:
        """Copies parameters and buffers of worker `root` to all."""

    def agree_on_rank(self, *, candidate: bool) -> int:
        """The highest rank that is a candidate."""

    def agree_on_averaging(self, *, wants: bool) -> bool:
        """Whether any worker averages gradients."""

    def shadow_averaging(self, *, divide_by_initial_world_size: bool) -> None:
        """Participates in an averaging without gradients."""


class UnevenInputsHook(JoinHook):  # type: ignore[misc]
    """Participates in the exchanges of the workers that still have inputs.

    `main_hook` mirrors one forward and backward of the others, with the same exchanges in the same order: buffers,
    whether gradients are averaged, gradients.

    Args:
        model: The wrapped model.
        divide_by_initial_world_size: Whether averages still count this worker, with zeros.
    """

    def __init__(self, model: _JoinedModel, *, divide_by_initial_world_size: bool) -> None:
        super().__init__()
        self._model = model
        self._divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        """Mirrors one iteration of the workers that still have inputs."""
        model = self._model
        model.run_optimizers_on_workers()
        if model.will_sync_module_buffers():
            model.broadcast_module_buffers(model.agree_on_rank(candidate=False))
        averages = model.agree_on_averaging(wants=False)
        # After an iteration under no_sync, the next forward does not broadcast buffers.
        model.require_forward_param_sync = averages
        if averages:
            model.shadow_averaging(divide_by_initial_world_size=self._divide_by_initial_world_size)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copies model and optimizer state of one of the workers that had the most inputs to all others."""
        root = self._model.agree_on_rank(candidate=is_last_joiner)
        self._model.broadcast_model(root)
        self._model.resume_optimizers(root)


def check_joinable(
    *, remote_parameters: Collection[torch.nn.Parameter], has_sparse_gradients: bool, keeps_devices: bool
) -> None:
    """Refuses join() if a worker without inputs could not participate.

    Args:
        remote_parameters: Parameters that memory devices update; within join() the workers update them.
        has_sparse_gradients: Whether the model has sparse gradients.
        keeps_devices: Whether the memory devices outlive crashed workers.

    Raises:
        ValueError: Names the reason and the alternative.
    """
    if remote_parameters and keeps_devices:
        raise ValueError(
            "join() cannot be combined with COARSE_KEEP_DEVICES and a DistributedOptimizer: within join() workers "
            "compute the updates, and a restarted one would resume from an older state. Give all workers the same "
            "number of batches, or unset COARSE_KEEP_DEVICES."
        )
    if narrow := {parameter.dtype for parameter in remote_parameters} - {torch.float32}:
        raise ValueError(
            f"join() cannot be combined with a DistributedOptimizer of parameters of {', '.join(map(str, narrow))}: "
            "within join() workers compute the updates, without the float32 master weights of the memory devices. "
            "Give all workers the same number of batches, or train a float32 model under torch.autocast."
        )
    if has_sparse_gradients:
        raise ValueError(
            "join() cannot be combined with layers of sparse=True, whose workers exchange their numbers of rows. "
            "Give all workers the same number of batches, or build the layers with sparse=False."
        )
