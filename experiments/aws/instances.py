"""The supported instances, with their numbers of workers and memory devices (paper, Table I and V-A)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

TABLES = Path(__file__).with_name("tables")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One type of instance.

    Args:
        num_workers: Training processes.
        gpus: The workers' GPUs, by local rank; () without GPUs.
        devices: Number of memory devices, by the ratio of workers to memory devices.
        tables: Partition tables with GPUs as memory devices, by the same ratios; empty without GPUs.
        batches: Samples per worker, by model.
        note: A description of the instance.
    """

    num_workers: int
    gpus: tuple[int, ...]
    devices: Mapping[str, int]
    tables: Mapping[str, Path]
    batches: Mapping[str, int]
    note: str


_PAPER_BATCHES = MappingProxyType({"resnet50": 64, "bert-large": 2})  # V-D

INSTANCES: Mapping[str, Instance] = MappingProxyType(
    {
        "p3.16xlarge": Instance(
            num_workers=4,
            gpus=(0, 2, 4, 6),
            devices={"1:1": 4, "2:1": 2},
            tables={"1:1": TABLES / "p3-1to1.toml", "2:1": TABLES / "p3-2to1.toml"},
            batches=_PAPER_BATCHES,
            note="8 V100 with NVLink; half of them are memory devices",
        ),
        "g4dn.metal": Instance(
            num_workers=4,
            gpus=(0, 2, 4, 6),
            devices={"1:1": 4, "2:1": 2},
            tables={"1:1": TABLES / "g4dn-1to1.toml", "2:1": TABLES / "g4dn-2to1.toml"},
            batches=_PAPER_BATCHES,
            note="8 T4 on PCIe; half of them are memory devices",
        ),
        "cpu": Instance(
            num_workers=2,
            gpus=(),
            devices={"1:1": 2, "2:1": 1},
            tables={},
            batches={"bert-tiny": 2, "digits": 64},
            note="any machine: small models, memory devices in the host's memory; shows that the scripts work",
        ),
    }
)
"""By AWS's names; "cpu" is any machine without GPUs."""
