"""What a model cannot have if new workers take the places of lost ones (docs/guides/elastic.md)."""

from __future__ import annotations

from coarse.settings import Settings
from coarse.torch.gradients.gradient_parts import GradientParts


def check_replaceable(settings: Settings, *, num_models: int, has_tables: bool) -> None:
    """Raises ValueError for a model with whose training a newcomer could not go on, if the settings ask for that.

    Args:
        settings: The session's settings.
        num_models: Models that were wrapped so far, with this one.
        has_tables: Whether it has sparse gradients.
    """
    if not settings.replaces_workers:
        return
    if num_models > 1:
        raise _refusal("a second model was wrapped, and a newcomer joins the steps of one", "Wrap one model")
    if has_tables:
        raise _refusal("the model has sparse gradients", "Build its embeddings with sparse=False")


def check_all_updates(gradients: GradientParts) -> None:
    """Raises ValueError unless one optimizer in the memory devices has all parameters, so that a newcomer finds them.

    Args:
        gradients: The model's gradients.
    """
    if gradients.rest is not None or len(gradients.offloaded) != 1:
        raise _refusal(
            "a newcomer finds parameters and optimizer states in the memory devices, but workers hold some of them",
            "Give all trainable parameters to one DistributedOptimizer that runs in the memory devices",
        )
    if gradients.offloaded[0].cached is not None:
        raise _refusal("workers have copies of the parameters", "Pass staleness=0")


def _refusal(reason: str, advice: str) -> ValueError:
    return ValueError(
        f"COARSE_ON_LOSS=replace: new workers cannot take the places of lost ones: {reason}. {advice}, or set "
        "COARSE_ON_LOSS=continue"
    )
