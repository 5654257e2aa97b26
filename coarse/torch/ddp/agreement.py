"""Checks, before anything is copied, that all workers wrapped the same model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from coarse.errors import SchemaMismatchError
from coarse.session import Session


def describe(name: str, tensor: torch.Tensor) -> str:
    """One line with all properties that must agree between workers, including strides: the order in memory."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    trainable = ", trainable" if tensor.requires_grad else ""
    return f"{name}: {dtype} {list(tensor.shape)}, strides {list(tensor.stride())}{trainable}"


def check_same_tensors(session: Session, lines: Sequence[str]) -> None:
    """Compares the description of this worker's tensors with worker 0's. Collective.

    Raises:
        SchemaMismatchError: On every worker, with the first difference that the highest differing rank found.
    """
    rank = session.identity.rank
    reference = broadcast_text(session, "\n".join(lines), root=0)
    difference = _first_difference(reference.split("\n"), list(lines), rank)
    culprit = np.array([rank if difference else -1], np.int64)
    session.all_reduce(culprit, op="max")
    if culprit[0] >= 0:
        raise SchemaMismatchError(broadcast_text(session, difference, root=int(culprit[0])))


def _first_difference(expected: list[str], actual: list[str], rank: int) -> str:
    """The first difference, or "" if there is none."""
    if expected == actual:
        return ""
    for theirs, ours in zip(expected, actual, strict=False):
        if theirs != ours:
            found = f"worker 0 has {theirs!r}, worker {rank} has {ours!r}"
            break
    else:
        longer, extra = (0, expected) if len(expected) > len(actual) else (rank, actual)
        found = f"only worker {longer} has {extra[min(len(expected), len(actual))]!r}"
    return (
        f"the models of the workers differ: {found} (worker 0 has {len(expected)} parameters and buffers, "
        f"worker {rank} has {len(actual)}). Build the same model on every worker."
    )


def broadcast_text(session: Session, text: str, *, root: int) -> str:
    """Returns the text of worker `root`. Collective."""
    encoded = text.encode()
    length = np.array([len(encoded)], np.int64)
    session.broadcast(length, root=root)
    payload = np.zeros(int(length[0]), np.uint8)
    if session.identity.rank == root or session.is_newcomer:
        payload[:] = np.frombuffer(encoded, np.uint8)
    if payload.size:
        session.broadcast(payload, root=root)
    return payload.tobytes().decode()
