"""What a worker does for the others after its inputs are exhausted (torch.distributed.algorithms.join)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from coarse.torch.distributed import DistributedDataParallel


class UnevenInputsHook(JoinHook):  # type: ignore[misc]
    """Takes part in the exchanges of the workers that still have inputs.

    `main_hook` mirrors one forward and backward of the others, exchange by exchange in the same order:
    buffers, whether gradients are averaged, gradients.

    Args:
        model: The wrapped model.
        divide_by_initial_world_size: Whether averages still count this worker (with zeros) or leave it out.
    """

    def __init__(self, model: DistributedDataParallel, *, divide_by_initial_world_size: bool) -> None:
        super().__init__()
        self._model = model
        self._divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        """Mirrors one iteration of the workers that still have inputs."""
        model = self._model
        if model.will_sync_module_buffers():
            model.broadcast_module_buffers(model.agree_on_rank(candidate=False))
        averages = model.agree_on_averaging(wants=False)
        # An iteration under no_sync is followed by a forward without a broadcast of buffers.
        model.require_forward_param_sync = averages
        if averages:
            model.shadow_averaging(divide_by_initial_world_size=self._divide_by_initial_world_size)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copies the model of one of the workers that had the most inputs to all others."""
        self._model.broadcast_model(self._model.agree_on_rank(candidate=is_last_joiner))


def check_joinable(*, is_offloaded: bool, has_tables: bool) -> None:
    """Refuses join() where a worker without inputs could not take part.

    Args:
        is_offloaded: Whether the optimizer runs in the memory devices.
        has_tables: Whether the model has sparse gradients.

    Raises:
        ValueError: Names the reason and the alternative.
    """
    if is_offloaded:
        raise ValueError(
            "join() does not work with a DistributedOptimizer: a worker without inputs would not take part in "
            "step(). Give all workers equally many batches, or use the optimizer without it."
        )
    if has_tables:
        raise ValueError(
            "join() does not work with layers of sparse=True, whose workers tell each other how many rows they have. "
            "Give all workers equally many batches, or build the layers with sparse=False."
        )
