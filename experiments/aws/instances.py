"""The supported instances: their GPUs, memory, links and prices, and which GPUs train (paper, Table I and V-A)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

TABLES = Path(__file__).with_name("tables")

SOURCES = MappingProxyType(
    {
        "described": "AWS's DescribeInstanceTypes of 27 October 2026, as moto 5.2.5 keeps it: GPUs, memory, network. "
        "It describes p3dn.24xlarge, and neither p3.8xlarge nor p3.16xlarge",
        "p3": "AWS's announcement of p3, October 2017: GPUs, memory, network, 15.7 TFLOPS",
        "price": "AWS's price list of 9 February 2026, us-east-1, Linux, on demand, as Karpenter's provider keeps it",
        "tflops": "NVIDIA's data sheets, recalled: dense, at boost clock",
        "link": "assumed, nobody measured it: what one GPU moves in one direction",
    }
)
"""Where the figures below come from, by kind of figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One type of GPU.

    Args:
        name: Its name.
        memory_bytes: Memory of one GPU.
        float32_tflops: Peak of float32 without tensor cores, in 1e12 operations per second.
        tf32_tflops: Peak of TF32 on tensor cores; None on GPUs without it.
        link: Interconnect between GPUs of an instance.
        link_gbytes_per_s: Assumed bandwidth of a GPU's link in one direction, 1e9 bytes per second.
    """

    name: str
    memory_bytes: int
    float32_tflops: float
    tf32_tflops: float | None
    link: str
    link_gbytes_per_s: float

    @property
    def has_nvlink(self) -> bool:
        """Whether NVLink connects the GPUs."""
        return self.link.startswith("NVLink")


def _gpu(name: str, mib: int, float32: float, tf32: float | None, link: str, link_gbytes_per_s: float) -> Gpu:
    return Gpu(
        name=name,
        memory_bytes=mib << 20,
        float32_tflops=float32,
        tf32_tflops=tf32,
        link=link,
        link_gbytes_per_s=link_gbytes_per_s,
    )


T4 = _gpu("T4", 16384, 8.1, None, "PCIe 3.0", 5)
V100 = _gpu("V100", 16384, 15.7, None, "NVLink 2", 20)
V100_32 = _gpu("V100 32 GB", 32768, 15.7, None, "NVLink 2", 20)
A10G = _gpu("A10G", 22888, 31.5, 35, "PCIe 4.0", 10)
L4 = _gpu("L4", 22888, 30.3, 60, "PCIe 4.0", 10)
L40S = _gpu("L40S", 45776, 91.6, 183, "PCIe 4.0", 10)
A100 = _gpu("A100", 40960, 19.5, 156, "NVLink 3", 200)
H100 = _gpu("H100", 81920, 67, 494, "NVLink 4", 350)

_PAPER_BATCHES = MappingProxyType(
    {"resnet50": (64, 128), "bert-large": (2, 4, 8)}
)  # V-D, and the next power of two


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One type of instance. Half of its GPUs train, the others are memory devices.

    Args:
        gpu: Type of its GPUs; None without GPUs.
        num_gpus: Number of GPUs.
        memory_gib: Memory of the host; 0 where it is not known.
        network_gbits_per_s: Network bandwidth; 0 where it is not known.
        usd_per_hour: Price of an hour; None without a source.
        is_offered: Whether AWS still describes it.
        batches: Samples per worker, by model.
        num_workers: Training processes.
        tables: Partition tables, by ratio of workers to memory devices, where the order of memory devices matters.
        note: A remark for readers.
    """

    gpu: Gpu | None
    num_gpus: int
    memory_gib: int = 0
    network_gbits_per_s: int = 0
    usd_per_hour: float | None = None
    is_offered: bool = True
    batches: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: _PAPER_BATCHES)
    num_workers: int
    tables: Mapping[str, Path] = field(default_factory=dict)
    note: str = ""

    @property
    def gpus(self) -> tuple[int, ...]:
        """The workers' GPUs, by local rank; () without GPUs. Each has a neighbour for its memory device."""
        if self.gpu is None:
            return ()
        return tuple(range(0, 2 * self.num_workers, 2))

    @property
    def ratios(self) -> tuple[str, ...]:
        """Ratios of workers to memory devices (V-A): 2:1 if the number of workers is even."""
        return ("1:1", "2:1") if self.num_workers % 2 == 0 else ("1:1",)

    def num_devices(self, ratio: str) -> int:
        """Number of memory devices at a ratio."""
        return self.num_workers // int(ratio.partition(":")[0])

    def device_gpus(self, ratio: str) -> tuple[int, ...]:
        """The memory devices' GPUs at a ratio, in the devices' order: each is beside the first of its workers."""
        return tuple(gpu + 1 for gpu in self.gpus[:: int(ratio.partition(":")[0])])


def _paired(gpu: Gpu, num_gpus: int, memory_gib: int, network_gbits_per_s: int, price: float) -> Instance:
    return Instance(
        gpu=gpu,
        num_gpus=num_gpus,
        memory_gib=memory_gib,
        network_gbits_per_s=network_gbits_per_s,
        usd_per_hour=price,
        num_workers=num_gpus // 2,
    )


def _volta(gpu: Gpu, memory_gib: int, network_gbits_per_s: int, **values: object) -> Instance:
    """8 V100. Neighbours in the order of the table have NVLink between them, other pairs have none."""
    return Instance(
        gpu=gpu,
        num_gpus=8,
        memory_gib=memory_gib,
        network_gbits_per_s=network_gbits_per_s,
        num_workers=4,
        tables=MappingProxyType({"1:1": TABLES / "p3-1to1.toml"}),
        **values,  # type: ignore[arg-type]
    )


INSTANCES: Mapping[str, Instance] = MappingProxyType(
    {
        "g4dn.12xlarge": _paired(T4, 4, 192, 50, 3.912),
        "g4dn.metal": _paired(T4, 8, 384, 100, 7.824),
        "g5.12xlarge": _paired(A10G, 4, 192, 40, 5.672),
        "g5.48xlarge": _paired(A10G, 8, 768, 100, 16.288),
        "g6.12xlarge": _paired(L4, 4, 192, 40, 4.6016),
        "g6.48xlarge": _paired(L4, 8, 768, 100, 13.3504),
        "g6e.12xlarge": _paired(L40S, 4, 384, 100, 10.49264),
        "g6e.48xlarge": _paired(L40S, 8, 1536, 400, 30.13118),
        "p4d.24xlarge": _paired(A100, 8, 1152, 400, 21.957642),
        "p5.48xlarge": _paired(H100, 8, 2048, 3200, 55.04),
        "p3dn.24xlarge": _volta(
            V100_32, 768, 100, usd_per_hour=31.212, note="Table I's memory and network; still offered"
        ),
        "p3.16xlarge": _volta(V100, 488, 25, is_offered=False, note="the paper's p3"),
        "p3.8xlarge": Instance(
            gpu=V100, num_gpus=4, memory_gib=244, network_gbits_per_s=10, is_offered=False, num_workers=2
        ),
        "cpu": Instance(
            gpu=None,
            num_gpus=0,
            batches=MappingProxyType({"bert-tiny": (2, 4), "digits": (64,)}),
            num_workers=2,
            note="any machine: small models, memory devices in the host's memory; shows that the scripts work",
        ),
    }
)
"""By AWS's names; "cpu" is any machine without GPUs."""
