"""The machine of the document, its kind of source for each number, and how sizes are scaled down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from coarse.simulator.studies.study import StateTable

LINE_BYTES = 128
"""A line of every cache, and the bytes of one access."""

SCALE = 256
"""Footprints, pages, caches and memories are the document's divided by this; lines and rates are not."""

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def scaled_lines(num_bytes: float) -> int:
    """Lines of the simulation for so many bytes of the document."""
    return max(1, round(num_bytes / LINE_BYTES / SCALE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Four GPUs with their links, before scaling. SOURCES says where each number is from.

    Args:
        num_gpus, num_sms: GPUs, and streaming multiprocessors of each.
        clock_hz: Cycles per second; an SM issues one warp instruction per cycle.
        page_bytes: Page of the operating system.
        cache_bytes, cache_ways, cache_banks: Last-level cache of one GPU; each bank serves a line per cycle.
        memory_bytes, memory_bytes_per_s: DRAM of one GPU.
        link_bytes_per_s: Into one GPU from all others, and out of it.
        host_bytes_per_s: From the host's memory into one GPU.
        remote_cache_bytes: Part of the DRAM that caches remote lines.
        epoch_bits: Width of the epoch counter.
        header_bytes: Of each message on a link: a request, an invalidation, the head of a line.
        probe_bytes: Smallest access of DRAM: an invalidation's look at a tag.
        cache_cycles, memory_cycles, link_cycles: Latency to the LLC and back, of DRAM, and of a link both ways.
        outstanding_lines: Lines that an SM waits for at once.
        private_probability: With which a local write ends a line's sharing state.
        serial_share: A kernel's launch and tail, relative to its time on one GPU; more GPUs do not divide it.
    """

    num_gpus: int = 4
    num_sms: int = 64
    clock_hz: float = 1e9
    page_bytes: int = 2 * MIB
    cache_bytes: int = 8 * MIB
    cache_ways: int = 16
    cache_banks: int = 16
    memory_bytes: int = 32 * GIB
    memory_bytes_per_s: float = 1e12
    link_bytes_per_s: float = 64e9
    host_bytes_per_s: float = 32e9
    remote_cache_bytes: int = 2 * GIB
    epoch_bits: int = 20
    header_bytes: int = 16
    probe_bytes: int = 32
    cache_cycles: float = 200.0
    memory_cycles: float = 200.0
    link_cycles: float = 400.0
    outstanding_lines: int = 64
    private_probability: float = 0.01
    serial_share: float = 0.027

    @property
    def page_lines(self) -> int:
        """Lines of a scaled page."""
        return scaled_lines(self.page_bytes)

    @property
    def cache_sets(self) -> int:
        """Sets of a scaled last-level cache."""
        return scaled_lines(self.cache_bytes) // self.cache_ways

    @property
    def remote_cache_lines(self) -> int:
        """Lines of a scaled remote data cache."""
        return scaled_lines(self.remote_cache_bytes)


_DOCUMENT, _FITTED, _ASSUMED = "document", "fitted", "assumed"

SOURCES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "num_gpus": (_DOCUMENT, "Table III"),
        "num_sms": (_DOCUMENT, "Table III"),
        "clock_hz": (_DOCUMENT, "Table III; one warp instruction per SM and cycle"),
        "page_bytes": (_DOCUMENT, "Table III"),
        "cache_bytes": (_DOCUMENT, "Table III, a quarter of 32 MB"),
        "cache_ways": (_DOCUMENT, "Table III"),
        "cache_banks": (_DOCUMENT, "Table IV"),
        "memory_bytes": (_DOCUMENT, "Table III, a quarter of 128 GB"),
        "memory_bytes_per_s": (_DOCUMENT, "Table III, a quarter of 4 TB/s"),
        "link_bytes_per_s": (
            _DOCUMENT,
            "Table III; assumed: to all other GPUs together, as Table IV counts",
        ),
        "host_bytes_per_s": (_DOCUMENT, "Table III"),
        "remote_cache_bytes": (_DOCUMENT, "the text on its evaluation; Table V for other sizes"),
        "epoch_bits": (_DOCUMENT, "the text on invalidation"),
        "header_bytes": (_ASSUMED, "one flit of 128 bits"),
        "probe_bytes": (_ASSUMED, "one burst of HBM"),
        "cache_cycles": (_ASSUMED, "usual for GPUs of that time"),
        "memory_cycles": (_ASSUMED, "usual for GPUs of that time"),
        "link_cycles": (_ASSUMED, "both ways, twice the DRAM's"),
        "outstanding_lines": (_ASSUMED, "enough that latency limits no workload but RandAccess"),
        "private_probability": (_DOCUMENT, "the text on hardware coherence, as an example"),
        "serial_share": (_FITTED, "ideal speed-up of Fig 13"),
    }
)
"""Kind of source of each number of Machine, and where it is from."""


def parameter_table(others: Mapping[str, tuple[str, str, str]]) -> StateTable:
    """All parameters with their sources.

    Args:
        others: Value, kind and source of those that are not of Machine.
    """
    machine = Machine()
    rows = [
        (f"`{each.name}`", _format(getattr(machine, each.name)), *SOURCES[each.name])
        for each in fields(Machine)
    ]
    rows += [(name, *cells) for name, cells in others.items()]
    return StateTable(title="Parameters", columns=("parameter", "value", "kind", "source"), rows=rows)


def _format(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
