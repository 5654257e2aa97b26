"""Devices on PCI as sysfs names them, and the NUMA nodes that they are near to."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/")


def normal_bus_id(bus_id: str | bytes) -> str:
    """A PCI bus id as sysfs writes it: NVML's domain has eight digits, upper case, in bytes by some versions.

    Raises:
        ValueError: If it is none.
    """
    text = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
    domain, _, rest = text.lower().partition(":")
    if not rest:
        raise ValueError(f"{bus_id!r} is no PCI bus id, such as 0000:17:00.0")
    return f"{int(domain, 16):04x}:{rest}"


def read_pci_node(bus_id: str, root: Path = _ROOT) -> int | None:
    """The NUMA node that a device is near to, by its bus id as sysfs writes it; None where that is not told."""
    try:
        node = int((root / "sys/bus/pci/devices" / bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
