"""The document's twenty workloads: footprints of its Table II, and access patterns that we assume.

Every pattern sweeps its own part of the data, in contiguous batches of thread blocks, and reads some data of others.
Each array begins on a page of its own, as allocations of GPU memory do.
What a workload shares, and in which pages, decides which mechanism helps it:

- streams: nothing is shared;
- records: a page has lines that are written beside lines that are only read, and kernels sweep it in several orders;
- meshes: arrays are as small as pages, so that a page belongs to all GPUs and most of its lines to one;
- lookups: all GPUs read one table at random places, some of them often;
- layers: all GPUs read the weights, each its own activations.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from coarse.simulator.studies.remote_data_cache.accesses.streams import Kernel, Lines
from coarse.simulator.studies.remote_data_cache.parameters import GIB, MIB, Machine, scaled_lines
from coarse.simulator.studies.study import StateTable

Pattern = Callable[[int, np.random.Generator], Sequence[Kernel]]
"""From the lines of the footprint and random numbers to kernels."""

STREAMING, GATHERING, DENSE = 4.0, 50.0, 400.0
"""Warp instructions per access that leaves the L1 caches: streams, irregular codes, and those bound by computing."""

OTHER_PARAMETERS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "footprints": ("24 MB to 15 GB", "document", "Table II"),
        "instructions per access, streams": (f"{STREAMING:g}", "assumed", "bound by DRAM"),
        "instructions per access, irregular codes": (f"{GATHERING:g}", "fitted", "NUMA-GPU of Table V"),
        "instructions per access, dense codes": (f"{DENSE:g}", "assumed", "bound by computing"),
        "outstanding lines per SM, RandAccess": ("2", "fitted", "RandAccess of Fig 9: latency limits it"),
        "access patterns": (
            "in the table of workloads",
            "assumed",
            "from what the programs do; which are private, shared to read or shared to write, so that as many are of "
            "each kind as the document's introduction says",
        ),
    }
)
"""Value, kind and source of parameters that are not the machine's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A program of the document.

    Args:
        name: As in Table II.
        footprint_bytes: Its memory, of Table II.
        pattern: Its accesses.
        instructions: Warp instructions per access that leaves the L1 caches.
        outstanding_lines: Lines that an SM waits for at once, if fewer than the machine allows; else 0.
        warm_kernels: First kernels, which are simulated and not counted.
    """

    name: str
    footprint_bytes: float
    pattern: Pattern
    instructions: float
    outstanding_lines: int = 0
    warm_kernels: int = 4

    def kernels(self) -> Sequence[Kernel]:
        """The same kernels at every call."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        return self.pattern(scaled_lines(self.footprint_bytes), rng)


# ---- patterns ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Grid codes: boxes with all their arrays in one record. Some lines of it are written, the others only read.

    Kernels take the orders in turn: 1 is the order of memory; n deals records out with stride n, as a kernel does
    whose grid has another dimension first. Two halves of the written lines are read and written in turn.

    Args:
        orders: Strides of the kernels' orders, taken in turn.
        lines: Lines of a record.
        written: Lines of a record that are written.
        halo: Lines of each of the two neighbours that are read.
        num_kernels: Kernels in all.
    """

    orders: Sequence[int] = (1,)
    lines: int = 16
    written: int = 4
    halo: int = 1
    num_kernels: int = 12

    def __call__(self, footprint_lines: int, rng: np.random.Generator) -> Sequence[Kernel]:
        num = max(4, footprint_lines // self.lines)
        return [self._kernel(num, turn) for turn in range(self.num_kernels)]

    def _kernel(self, num: int, turn: int) -> Kernel:
        record = _dealt(num, self.orders[turn % len(self.orders)])
        half = self.written // 2
        source, target = (0, half) if turn % 2 == 0 else (half, 0)
        reads = [*range(source, source + half), *range(self.written, self.lines)]
        neighbours = [(record + step) % num * self.lines for step in (-1, 1)]
        columns = [record * self.lines + line for line in reads]
        columns += [start + source + line for start in neighbours for line in range(self.halo)]
        columns += [record * self.lines + target + line for line in range(half)]
        return _rows(columns, num_writes=half)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Unstructured meshes and graphs: arrays over elements, and reads of neighbours' values through an index.

    Args:
        arrays: Arrays over all elements, one after the other in memory.
        read: Arrays that a kernel reads at its elements.
        reach: Neighbours are within so many lines; 0 for anywhere.
        gathers: Neighbours' lines that are read for each line of elements.
        num_kernels: Kernels in all. Each writes one array, the next one in turn.
    """

    arrays: int = 12
    read: int = 6
    reach: int = 3
    gathers: int = 2
    num_kernels: int = 24

    def __call__(self, footprint_lines: int, rng: np.random.Generator) -> Sequence[Kernel]:
        num = max(4, footprint_lines // self.arrays)
        return [self._kernel(num, turn, rng) for turn in range(self.num_kernels)]

    def _kernel(self, num: int, turn: int, rng: np.random.Generator) -> Kernel:
        element = np.arange(num)
        arrays = [(turn + 1 + step) % self.arrays for step in range(self.read)]
        stride = _whole_pages(num)
        columns = [array * stride + element for array in arrays]
        columns += [
            arrays[step % self.read] * stride + self._neighbours(num, rng) for step in range(self.gathers)
        ]
        columns += [turn % self.arrays * stride + element]
        return _rows(columns, num_writes=1)

    def _neighbours(self, num: int, rng: np.random.Generator) -> Lines:
        if not self.reach:
            return rng.integers(0, num, num)
        steps = rng.integers(-self.reach, self.reach + 1, num)
        return np.asarray(np.clip(np.arange(num) + steps, 0, num - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookups:
    """Particles or rays, which are private, and a table that all read.

    Args:
        table_share: Part of the footprint that is the table.
        per_line: Lookups for each line of particles' state.
        run: Neighbouring lines that one lookup reads.
        skew: Places are u**skew of the table, u uniform in 0 to 1: 1 is uniform, 3 has a hot end.
        written_share: Part of the lookups that also write a tally into the table.
        num_kernels: Kernels in all.
    """

    table_share: float
    per_line: int
    run: int = 1
    skew: float = 1.0
    written_share: float = 0.0
    num_kernels: int = 4

    def __call__(self, footprint_lines: int, rng: np.random.Generator) -> Sequence[Kernel]:
        table = int(footprint_lines * self.table_share)
        places = rng.permutation(table // self.run)  # hot places are anywhere in memory
        return [self._kernel(table, footprint_lines - table, places, rng) for _ in range(self.num_kernels)]

    def _kernel(self, table: int, private: int, places: Lines, rng: np.random.Generator) -> Kernel:
        own = _whole_pages(table) + np.arange(private)
        columns = [own]
        is_tally = np.zeros((private, 0), dtype=bool)
        for _ in range(self.per_line):
            start = places[(rng.random(private) ** self.skew * len(places)).astype(np.int64)] * self.run
            columns += [start + step for step in range(self.run)]
        if self.written_share:
            tallied = rng.random((private, self.per_line)) < self.written_share
            columns += [columns[1 + lookup * self.run] for lookup in range(self.per_line)]
            is_tally = tallied
        columns.append(own)
        return _rows_with_tallies(columns, is_tally)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """A layer of a neural network, again and again: all GPUs read its weights, each its own samples.

    Args:
        weight_share: Part of the footprint that all read.
        sweeps: Times that each batch of thread blocks reads the weights in one kernel.
        num_kernels: Kernels in all; activations are read and written in turn.
    """

    weight_share: float
    sweeps: int = 16
    num_kernels: int = 12

    def __call__(self, footprint_lines: int, rng: np.random.Generator) -> Sequence[Kernel]:
        weights = max(1, int(footprint_lines * self.weight_share))
        half = (footprint_lines - weights) // 2
        return [self._kernel(weights, half, turn % 2) for turn in range(self.num_kernels)]

    def _kernel(self, weights: int, half: int, turn: int) -> Kernel:
        sample = np.arange(half)
        per_line = max(1, round(self.sweeps * weights / half))
        first, other = (_whole_pages(weights) + which * _whole_pages(half) for which in (turn, 1 - turn))
        columns = [first + sample]
        columns += [(sample * per_line + step) % weights for step in range(per_line)]
        columns += [other + sample]
        return _rows(columns, num_writes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Triad:
    """a = b + s c, or any other sweep whose parts have nothing in common."""

    reads: int = 2
    num_kernels: int = 3

    def __call__(self, footprint_lines: int, rng: np.random.Generator) -> Sequence[Kernel]:
        num = footprint_lines // (self.reads + 1)
        columns = [array * _whole_pages(num) + np.arange(num) for array in range(self.reads + 1)]
        return [_rows(columns, num_writes=1)] * self.num_kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomUpdates:
    """Reads and writes lines anywhere in one table."""

    share: float = 0.25
    num_kernels: int = 5

    def __call__(self, footprint_lines: int, rng: np.random.Generator) -> Sequence[Kernel]:
        num = int(footprint_lines * self.share)
        return [_rows([at := rng.integers(0, footprint_lines, num), at], 1) for _ in range(self.num_kernels)]


def _whole_pages(lines: int) -> int:
    """Lines of the pages that an array takes; the next array begins behind them."""
    page = Machine().page_lines
    return -(-lines // page) * page


def _dealt(num: int, stride: int) -> Lines:
    """Numbers 0 to num - 1 in an order of `stride` passes."""
    return np.concatenate([np.arange(start, num, stride) for start in range(stride)])


def _rows(columns: Sequence[Lines], num_writes: int) -> Kernel:
    """A kernel whose thread block i accesses entry i of each column in turn; the last columns are writes."""
    line = np.stack(columns, axis=1)
    is_write = np.zeros(line.shape, dtype=bool)
    is_write[:, len(columns) - num_writes :] = True
    return _kernel(line, is_write)


def _rows_with_tallies(columns: Sequence[Lines], is_tally: NDArray[np.bool_]) -> Kernel:
    """The same; the last column is a write, and so are entries of those before it if they tally."""
    line = np.stack(columns, axis=1)
    is_write = np.zeros(line.shape, dtype=bool)
    is_write[:, -1] = True
    is_write[:, -1 - is_tally.shape[1] : -1] = is_tally
    return _kernel(line, is_write)


def _kernel(line: Lines, is_write: NDArray[np.bool_]) -> Kernel:
    num, width = line.shape
    return Kernel(block=np.repeat(np.arange(num) / num, width), line=line.ravel(), is_write=is_write.ravel())


WORKLOADS: Sequence[Workload] = (
    Workload(
        name="AMG",
        footprint_bytes=3.2 * GIB,
        pattern=Records(orders=(1, 1, 1, 10), written=2, num_kernels=8),
        instructions=GATHERING,
    ),
    Workload(
        name="HPGMG",
        footprint_bytes=2.0 * GIB,
        pattern=Records(orders=(1, 66, 18), written=2, num_kernels=9),
        instructions=GATHERING,
        warm_kernels=3,
    ),
    Workload(
        name="HPGMG-amry",
        footprint_bytes=7.7 * GIB,
        pattern=Records(orders=(1, 1, 10), written=2, num_kernels=6),
        instructions=GATHERING,
        warm_kernels=3,
    ),
    Workload(
        name="Lulesh",
        footprint_bytes=24 * MIB,
        pattern=Mesh(),
        instructions=GATHERING,
    ),
    Workload(
        name="Lulesh-s190",
        footprint_bytes=3.7 * GIB,
        pattern=Mesh(num_kernels=4),
        instructions=GATHERING,
        warm_kernels=1,
    ),
    Workload(
        name="CoMD",
        footprint_bytes=910 * MIB,
        pattern=Records(lines=8, written=2, halo=3, num_kernels=4),
        instructions=DENSE,
        warm_kernels=2,
    ),
    Workload(
        name="MCB",
        footprint_bytes=254 * MIB,
        pattern=Lookups(table_share=0.7, per_line=8, written_share=0.05, num_kernels=6),
        instructions=GATHERING,
    ),
    Workload(
        name="MiniAMR",
        footprint_bytes=4.4 * GIB,
        pattern=Records(num_kernels=4),
        instructions=GATHERING,
        warm_kernels=2,
    ),
    Workload(
        name="Nekbone",
        footprint_bytes=1.0 * GIB,
        pattern=Records(lines=32, written=8, num_kernels=4),
        instructions=GATHERING,
        warm_kernels=2,
    ),
    Workload(
        name="XSBench",
        footprint_bytes=4.4 * GIB,
        pattern=Lookups(table_share=0.95, per_line=48, run=2, skew=3.0, num_kernels=2),
        instructions=GATHERING,
        warm_kernels=1,
    ),
    Workload(
        name="Euler",
        footprint_bytes=26 * MIB,
        pattern=Mesh(arrays=14, reach=8, gathers=4),
        instructions=GATHERING,
    ),
    Workload(
        name="SSSP",
        footprint_bytes=42 * MIB,
        pattern=Mesh(arrays=8, read=4, reach=24, gathers=3),
        instructions=GATHERING,
    ),
    Workload(
        name="bfs-road",
        footprint_bytes=590 * MIB,
        pattern=Records(orders=(1, 10, 6), lines=8, written=2, num_kernels=12),
        instructions=GATHERING,
    ),
    Workload(
        name="AlexNet",
        footprint_bytes=96 * MIB,
        pattern=Layers(weight_share=0.02),
        instructions=DENSE,
    ),
    Workload(
        name="GoogLeNet",
        footprint_bytes=1.2 * GIB,
        pattern=Layers(weight_share=0.05, num_kernels=4),
        instructions=GATHERING,
        warm_kernels=2,
    ),
    Workload(
        name="OverFeat",
        footprint_bytes=88 * MIB,
        pattern=Layers(weight_share=0.04),
        instructions=DENSE,
    ),
    Workload(
        name="Bitcoin",
        footprint_bytes=5.6 * GIB,
        pattern=Triad(reads=1),
        instructions=DENSE,
        warm_kernels=1,
    ),
    Workload(
        name="Raytracing",
        footprint_bytes=150 * MIB,
        pattern=Lookups(table_share=0.8, per_line=16, skew=2.0, num_kernels=6),
        instructions=GATHERING,
    ),
    Workload(
        name="stream-triad",
        footprint_bytes=3.0 * GIB,
        pattern=Triad(),
        instructions=STREAMING,
        warm_kernels=1,
    ),
    Workload(
        name="RandAccess",
        footprint_bytes=15.0 * GIB,
        pattern=RandomUpdates(),
        instructions=GATHERING,
        outstanding_lines=2,
    ),
)


def workload_table() -> StateTable:
    """Workloads with their patterns."""
    return StateTable(
        title="Workloads: footprints of Table II, and assumed patterns",
        columns=(
            "workload",
            "footprint, MiB",
            "pattern",
            "instructions per access",
            "kernels before counting",
        ),
        rows=[
            (
                each.name,
                f"{each.footprint_bytes / MIB:,.0f}",
                str(each.pattern),
                f"{each.instructions:g}",
                str(each.warm_kernels),
            )
            for each in WORKLOADS
        ],
    )
