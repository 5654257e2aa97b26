"""The document's benchmarks (Table 3.2) as address streams of small kernels.

One wavefront has 64 lanes, an element has 4 bytes, a line 16 elements. Arrays are smaller than the document's by one
factor for all; caches are too (see `machines`), so that each array is to a cache as it was.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from coarse.simulator.studies.coherence.timing import Instruction, Kernel, Wavefront

LANES, LINE_ELEMENTS = 64, 16
_LINES_OF_LANES = LANES // LINE_ELEMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A benchmark.

    Args:
        kernels: One after the other; their wavefronts have no order.
        input_lines, output_lines: Lines that a processor copies to the GPUs before, and back after.
        scale: The document's elements over these.
        work_scale: The document's accesses of kernels over these; 0 if as `scale`.
    """

    kernels: tuple[Kernel, ...]
    input_lines: int
    output_lines: int
    scale: float
    work_scale: float = 0.0


class _Arrays:
    """Gives arrays their addresses, from a page on."""

    def __init__(self) -> None:
        self._next = 0

    def array(self, elements: int) -> int:
        first = self._next
        self._next += -(-elements // LINE_ELEMENTS // 16) * 16
        return first


def _lines(base: int, first: int, number: int = LANES) -> tuple[int, ...]:
    """Lines of neighbouring elements."""
    return tuple(range(base + first // LINE_ELEMENTS, base + (first + number - 1) // LINE_ELEMENTS + 1))


def _read(lines: Iterable[int], cycles: int = 0) -> Instruction:
    return Instruction(tuple(lines), cycles=cycles)


def _write(lines: Iterable[int], cycles: int = 0) -> Instruction:
    return Instruction(tuple(lines), is_write=True, cycles=cycles, waits=True)


def relu(elements: int = 1 << 16) -> Workload:
    arrays = _Arrays()
    source, target = arrays.array(elements), arrays.array(elements)
    kernel = [
        (_read(_lines(source, first), 8), _write(_lines(target, first), 4))
        for first in range(0, elements, LANES)
    ]
    lines = elements // LINE_ELEMENTS
    return Workload(kernels=(kernel,), input_lines=lines, output_lines=lines, scale=(1 << 23) / elements)


def mt(size: int = 256) -> Workload:
    """A tile of 64 x 64 goes through the CU's local memory."""
    arrays = _Arrays()
    source, target = arrays.array(size * size), arrays.array(size * size)

    def wavefront(row: int, column: int) -> Wavefront:
        reads = [_read(_lines(source, (row + r) * size + column), 4) for r in range(LANES)]
        writes = [_write(_lines(target, (column + c) * size + row), 4) for c in range(LANES)]
        return (*reads, *writes)

    kernel = [wavefront(row, column) for row in range(0, size, LANES) for column in range(0, size, LANES)]
    lines = size * size // LINE_ELEMENTS
    return Workload(kernels=(kernel,), input_lines=lines, output_lines=lines, scale=(4096 / size) ** 2)


def fir(elements: int = 1 << 16, taps: int = 16) -> Workload:
    arrays = _Arrays()
    coefficients, source, target = arrays.array(LANES), arrays.array(elements), arrays.array(elements)

    def wavefront(first: int) -> Iterator[Instruction]:
        yield _read((coefficients,))
        for tap in range(taps):
            yield _read(_lines(source, max(first - tap, 0)), 6)
        yield _write(_lines(target, first), 4)

    kernel = [tuple(wavefront(first)) for first in range(0, elements, LANES)]
    lines = elements // LINE_ELEMENTS
    return Workload(kernels=(kernel,), input_lines=lines, output_lines=lines, scale=(1 << 23) / elements)


def conv(size: int = 256, mask: int = 3) -> Workload:
    arrays = _Arrays()
    weights, source = arrays.array(LANES), arrays.array((size + mask) * size)
    target = arrays.array(size * size)

    def wavefront(first: int) -> Iterator[Instruction]:
        yield _read((weights,))
        for row in range(mask):
            for column in range(mask):
                yield _read(_lines(source, first + row * size + column), 8)
        yield _write(_lines(target, first), 4)

    kernel = [tuple(wavefront(first)) for first in range(0, size * size, LANES)]
    lines = size * size // LINE_ELEMENTS
    return Workload(kernels=(kernel,), input_lines=lines, output_lines=lines, scale=(4258 / size) ** 2)


def mm(size: int = 256, tile: int = 32) -> Workload:
    """A wavefront computes a tile of C, by tiles of A and B in the CU's local memory."""
    arrays = _Arrays()
    a, b, c = (arrays.array(size * size) for _ in range(3))
    cycles = tile * tile * tile // LANES // 8

    def rows(base: int, row: int, column: int) -> Iterator[tuple[int, ...]]:
        for first in range(0, tile, 2):
            yield (
                *_lines(base, (row + first) * size + column, tile),
                *_lines(base, (row + first + 1) * size + column, tile),
            )

    def wavefront(row: int, column: int) -> Iterator[Instruction]:
        for k in range(0, size, tile):
            for lines in (*rows(a, row, k), *rows(b, k, column)):
                yield _read(lines, cycles // 4)
        for lines in rows(c, row, column):
            yield _write(lines, 2)

    kernel = [
        tuple(wavefront(row, column)) for row in range(0, size, tile) for column in range(0, size, tile)
    ]
    lines = size * size // LINE_ELEMENTS
    return Workload(
        kernels=(kernel,),
        input_lines=2 * lines,
        output_lines=lines,
        scale=(4096 / size) ** 2,
        work_scale=(4096 / size) ** 3,
    )


def _matrix_products(
    rows: int = 256, columns: int = 128, pitch: int = 512
) -> tuple[Kernel, Kernel, int, int]:
    """A x, a row for each lane, and the transpose of A times that, a column for each lane; lines of A and a vector.

    Sums lie in memory, as in PolyBench. The pitch gives rows the same cache sets, as 4096 columns do.
    """
    arrays = _Arrays()
    matrix, x, product, result = arrays.array(rows * pitch), *(arrays.array(rows) for _ in range(3))

    def by_rows(first: int) -> Iterator[Instruction]:
        for column in range(columns):
            yield _read(_lines(x, column, 1))
            yield _read(((matrix + ((first + r) * pitch + column) // LINE_ELEMENTS) for r in range(LANES)), 8)
            yield _write(_lines(product, first))

    def by_columns(first: int) -> Iterator[Instruction]:
        for row in range(rows):
            yield _read(_lines(product, row, 1))
            yield _read(_lines(matrix, row * pitch + first), 8)
            yield _write(_lines(result, first))

    return (
        [tuple(by_rows(first)) for first in range(0, rows, LANES)],
        [tuple(by_columns(first)) for first in range(0, columns, LANES)],
        rows * columns // LINE_ELEMENTS,
        rows // LINE_ELEMENTS,
    )


def atax() -> Workload:
    by_rows, by_columns, matrix, vector = _matrix_products()
    return Workload(
        kernels=(by_rows, by_columns),
        input_lines=matrix,
        output_lines=vector,
        scale=4096 * 4096 / matrix / 16,
    )


def bicg() -> Workload:
    """As atax, but the two products do not depend on each other; the one by columns comes first."""
    by_rows, by_columns, matrix, vector = _matrix_products()
    return Workload(
        kernels=(by_columns, by_rows),
        input_lines=matrix,
        output_lines=2 * vector,
        scale=4096 * 4096 / matrix / 16,
    )


def bfs(nodes: int = 1 << 12, degree: int = 4, seed: int = 1) -> Workload:
    """Levels of a random graph; a lane looks at a node, and at its neighbours if the node is new."""
    chance = random.Random(seed)
    neighbours = [[chance.randrange(nodes) for _ in range(degree)] for _ in range(nodes)]
    arrays = _Arrays()
    levels, edges = arrays.array(nodes), arrays.array(nodes * degree)
    kernels, frontier, seen = [], {0}, {0}
    while frontier:
        new = {other for node in frontier for other in neighbours[node]} - seen
        level = _Level(frontier, new, neighbours, levels, edges)
        kernels.append([tuple(level.expand(first)) for first in range(0, nodes, LANES)])
        frontier = new
        seen |= new
    lines = nodes * (degree + 1) // LINE_ELEMENTS
    return Workload(
        kernels=tuple(kernels),
        input_lines=lines,
        output_lines=nodes // LINE_ELEMENTS,
        scale=(1 << 24) / nodes,
    )


@dataclass(frozen=True, slots=True)
class _Level:
    """One level of a breadth-first search: the nodes it comes from, and those it reaches first."""

    frontier: set[int]
    new: set[int]
    neighbours: list[list[int]]
    levels: int
    edges: int

    def expand(self, first: int) -> Iterator[Instruction]:
        """One wavefront."""
        yield _read(_lines(self.levels, first), 8)
        active = [node for node in range(first, first + LANES) if node in self.frontier]
        degree = len(self.neighbours[0])
        for edge in range(degree if active else 0):
            yield _read(sorted({self.edges + (n * degree + edge) // LINE_ELEMENTS for n in active}), 4)
            reached = [self.neighbours[node][edge] for node in active]
            yield _read(self._lines_of(reached), 4)
            written = self._lines_of([node for node in reached if node in self.new])
            if written:
                yield _write(written, 4)

    def _lines_of(self, nodes: list[int]) -> list[int]:
        return sorted({self.levels + node // LINE_ELEMENTS for node in nodes})


WORKLOADS: Mapping[str, Callable[[], Workload]] = {
    "atax": atax,
    "bfs": bfs,
    "bicg": bicg,
    "conv": conv,
    "fir": fir,
    "mm": mm,
    "mt": mt,
    "relu": relu,
}


@cache
def workload(name: str) -> Workload:
    """A benchmark of WORKLOADS; made once."""
    return WORKLOADS[name]()
