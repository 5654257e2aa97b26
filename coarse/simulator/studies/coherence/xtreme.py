"""The Xtreme benchmarks (section 4.3.3): C = A + B again and again, on slices that CUs share or do not share.

A lane adds one element, so a wavefront has four lines of each vector. In Xtreme2 and Xtreme3 a step begins when the
wavefront's step before has ended in memory: relaxed consistency needs that synchronisation for a correct result where
CUs share data (section 4.4.2). Xtreme1 shares nothing. Its accesses to one line keep their order, all others are free
(section 3.2.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from coarse.simulator.studies.coherence.kernels import LANES, LINE_ELEMENTS
from coarse.simulator.studies.coherence.machines import SHAPE, SHARE
from coarse.simulator.studies.coherence.operations import LINE_BYTES
from coarse.simulator.studies.coherence.timing import Instruction, Kernel, Wavefront

SCALE = SHARE
"""The document's vectors, and caches of a GPU, over ours: as CUs and bandwidths, so that a CU has its own of each."""

XTREME_SHAPE = replace(SHAPE, l1_sets=64, l2_sets=64)
"""Caches as Table 3.1: an L1 of 16 KB for each CU, L2 for each GPU divided by SCALE."""

RESIDENT = 40
"""Wavefronts of a CU at a time: GCN's, which the document's simulator models (recalled)."""

_VECTORS = 3
_LINES_OF_LANES = LANES // LINE_ELEMENTS
_LEAST_KBYTES = SCALE * _VECTORS * SHAPE.cus_per_gpu * _LINES_OF_LANES * LINE_BYTES // 1024


@dataclass(frozen=True, slots=True)
class Place:
    """A wavefront, and the CU whose slice it works on."""

    cu: int
    wavefront: int


class Vectors:
    """A, B and C, a slice of each for every CU.

    Args:
        kbytes: Each GPU's part of all three together, in the document: 768 KB fit into its L1 caches.

    Raises:
        ValueError: If a CU's slice is not a whole number of wavefronts.
    """

    def __init__(self, kbytes: int) -> None:
        lines = kbytes * 1024 // SCALE // LINE_BYTES
        self.slice_lines, rest = divmod(lines, _VECTORS * SHAPE.cus_per_gpu)
        if rest or self.slice_lines % _LINES_OF_LANES:
            raise ValueError(
                f"{kbytes} KB are no whole number of wavefronts for each CU; use a multiple of {_LEAST_KBYTES}"
            )
        self.a, self.b, self.c = (number * self.slice_lines * SHAPE.num_cus for number in range(_VECTORS))

    def places(self) -> list[Place]:
        """All wavefronts, in the order in which CUs get them."""
        return [
            Place(gpu * SHAPE.cus_per_gpu + cu, wavefront)
            for wavefront in range(self.slice_lines // _LINES_OF_LANES)
            for cu in range(SHAPE.cus_per_gpu)
            for gpu in range(SHAPE.num_gpus)
        ]

    def sums(self, target: int, source: int, place: Place, times: int, *, is_shared: bool) -> Wavefront:
        """target = source + B on a wavefront's lines, several times; `is_shared` if other CUs access them."""
        return tuple(
            instruction for _ in range(times) for instruction in self._sum(target, source, place, is_shared)
        )

    def read_all(self, place: Place) -> Wavefront:
        return tuple(Instruction(self._lines(base, place)) for base in (self.a, self.b, self.c))

    def _sum(self, target: int, source: int, place: Place, is_shared: bool) -> Iterator[Instruction]:
        yield Instruction(self._lines(source, place), cycles=2, is_fenced=is_shared)
        yield Instruction(self._lines(self.b, place), cycles=2)
        yield Instruction(self._lines(target, place), is_write=True, cycles=2, waits=True)

    def _lines(self, base: int, place: Place) -> tuple[int, ...]:
        first = base + place.cu * self.slice_lines + place.wavefront * _LINES_OF_LANES
        return tuple(range(first, first + _LINES_OF_LANES))


def xtreme1(kbytes: int, repeats: int = 10) -> list[Kernel]:
    """Each CU writes its own slices again and again."""
    vectors = Vectors(kbytes)
    kernel = [
        (
            *vectors.read_all(place),
            *vectors.sums(vectors.c, vectors.a, place, 1 + repeats, is_shared=False),
            *vectors.sums(vectors.a, vectors.c, place, 1 + repeats, is_shared=False),
        )
        for place in vectors.places()
    ]
    return [kernel]


def xtreme2(kbytes: int, repeats: int = 10) -> list[Kernel]:
    """CUs with even numbers write the slice that the next CU of their GPU has read."""
    return _shared(kbytes, repeats, distance=1)


def xtreme3(kbytes: int, repeats: int = 10) -> list[Kernel]:
    """CUs with even numbers write a slice that a CU of the next GPU has read."""
    return _shared(kbytes, repeats, distance=SHAPE.cus_per_gpu + 1)


def _shared(kbytes: int, repeats: int, distance: int) -> list[Kernel]:
    vectors = Vectors(kbytes)
    places = vectors.places()
    own = [
        (*vectors.read_all(place), *vectors.sums(vectors.c, vectors.a, place, 1, is_shared=True))
        for place in places
    ]
    others = [
        vectors.sums(
            vectors.a,
            vectors.c,
            replace(place, cu=(place.cu + distance) % SHAPE.num_cus),
            1 + repeats,
            is_shared=True,
        )
        if place.cu % 2 == 0
        else ()
        for place in places
    ]
    again = [vectors.sums(vectors.c, vectors.a, place, 1, is_shared=True) for place in places]
    return [own, others, again]


BENCHMARKS = {"Xtreme1": xtreme1, "Xtreme2": xtreme2, "Xtreme3": xtreme3}
