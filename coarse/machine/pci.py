"""PCI devices by their sysfs names, and their nearest NUMA nodes."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/")


def normal_bus_id(bus_id: str | bytes) -> str:
    """A PCI bus id in the form of sysfs; NVML writes eight-digit domains in upper case, some versions as bytes.

    Raises:
        ValueError: If it is not a bus id.
    """
    text = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
    domain, _, rest = text.lower().partition(":")
    if not rest:
        raise ValueError(f"{bus_id!r} is not a PCI bus id such as 0000:17:00.0")
    return f"{int(domain, 16):04x}:{rest}"


def read_pci_node(bus_id: str, root: Path = _ROOT) -> int | None:
    """The nearest NUMA node of a device, by its bus id in the form of sysfs; None if unknown."""
    try:
        node = int((root / "sys/bus/pci/devices" / bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
