"""Finds the tensors in a module's output."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch


def find_tensors(structure: object) -> Iterator[torch.Tensor]:
    """All tensors in nested lists, tuples, dicts and dataclasses, as torch's DDP searches outputs."""
    if isinstance(structure, torch.Tensor):
        yield structure
    elif isinstance(structure, (list, tuple)):
        for item in structure:
            yield from find_tensors(item)
    elif isinstance(structure, dict):
        for item in structure.values():
            yield from find_tensors(item)
    elif dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        for field in dataclasses.fields(structure):
            yield from find_tensors(getattr(structure, field.name))
