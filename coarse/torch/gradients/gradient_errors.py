"""Errors for mistakes of a training loop between forward and step, each with its remedy."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_NAMES = 20


def unfinished(rank: int, missing: Sequence[str], *, num_parameters: int) -> RuntimeError:
    """The parameters `missing` received no gradient in the last backward."""
    shown = ", ".join(missing[:_MOST_NAMES])
    if len(missing) > _MOST_NAMES:
        shown += f" and {len(missing) - _MOST_NAMES} more"
    return RuntimeError(
        f"worker {rank}: the last backward is unfinished: {len(missing)} of {num_parameters} "
        f"parameters got no gradient, so their averages are still pending: {shown}. Each "
        "parameter must take part in the loss. If your model does not use all of them in each "
        "iteration, pass find_unused_parameters=True to DistributedDataParallel; also check that the "
        "loss uses all outputs of forward(), and that the previous backward did not fail."
    )


def came_twice(rank: int, name: str) -> RuntimeError:
    """The gradient of the parameter `name` was complete, and arrived again."""
    return RuntimeError(
        f"worker {rank}: parameter {name!r} got a gradient twice in one backward. "
        "It is used by several checkpointed segments or re-entrant backward passes, or outside of "
        "forward(). If the graph is the same in each iteration, pass static_graph=True to "
        "DistributedDataParallel; otherwise use torch.utils.checkpoint with use_reentrant=False, or "
        "make several backward passes under no_sync()."
    )


def taken_away(rank: int, name: str) -> RuntimeError:
    """Another hook removed the gradient of the parameter `name`."""
    return RuntimeError(
        f"worker {rank}: a hook of parameter {name!r} has set its .grad to None before it was averaged. "
        "Remove the hook; put code that must run after averaging between backward() and step()."
    )


def averaged_elsewhere(rank: int, name: str) -> RuntimeError:
    """The gradient of the parameter `name` is being averaged for another model."""
    return RuntimeError(
        f"worker {rank}: another DistributedDataParallel also contains parameter {name!r}, and averages its "
        "gradient in this same backward. Wrap one module that contains all parts, with no wrapped module "
        "inside; or call forward and backward for one wrapped model after the other."
    )


def step_is_due(rank: int) -> RuntimeError:
    """A backward would update parameters, but step() was not called after the last one."""
    return RuntimeError(
        f"worker {rank}: overlap=True updates parameters in each backward() that averages gradients, and no "
        "step() followed the last one. Call step() after each. Accumulate gradients of several backward passes "
        "under no_sync(), except for the last one; compute gradients that only another model needs through "
        "model.module; or pass overlap=False."
    )


def updated_in_backward(rank: int) -> RuntimeError:
    """average_gradients() was called for gradients that backward uses up."""
    return RuntimeError(
        f"worker {rank}: average_gradients() cannot be used with overlap=True: backward updates the parameters "
        "and keeps no gradients. Create the DistributedOptimizer with overlap=False."
    )
