"""The Xtreme benchmarks (section 4.3.3): C = A + B again and again, on slices that CUs share or do not share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from coarse.simulator.studies.coherence.machines import SHAPE
from coarse.simulator.studies.coherence.timing import Instruction, Kernel, Wavefront

SCALE = 64
"""The document's vectors, which all GPUs hold together, over ours."""

_LINES_AT_ONCE = 4
_WAVEFRONTS = 2  # of a CU; they take its lines in turn


@dataclass(frozen=True, slots=True)
class Place:
    """A wavefront of the CU whose slice it works on."""

    cu: int
    wavefront: int


class Vectors:
    """A, B and C, a slice of each for every CU.

    Args:
        kbytes: Size of one vector in the document.
    """

    def __init__(self, kbytes: int) -> None:
        self.slice_lines = kbytes * 1024 // SCALE // 64 // SHAPE.num_cus
        lines = self.slice_lines * SHAPE.num_cus
        self.a, self.b, self.c = 0, lines, 2 * lines

    def sums(self, target: int, source: int, place: Place, times: int) -> Wavefront:
        """target = source + B on a wavefront's part of one CU's slice, several times."""
        return tuple(instruction for _ in range(times) for instruction in self._sum(target, source, place))

    def read_all(self, place: Place) -> Wavefront:
        return tuple(
            Instruction(lines) for base in (self.a, self.b, self.c) for lines in self._pieces(base, place)
        )

    def _sum(self, target: int, source: int, place: Place) -> Iterator[Instruction]:
        pieces = (self._pieces(base, place) for base in (source, self.b, target))
        for one, other, result in zip(*pieces, strict=True):
            yield Instruction(one, cycles=2)
            yield Instruction(other, cycles=2)
            yield Instruction(result, is_write=True, cycles=2, waits=True)

    def _pieces(self, base: int, place: Place) -> Iterator[tuple[int, ...]]:
        first = base + place.cu * self.slice_lines
        own, step = first + place.wavefront * _LINES_AT_ONCE, _WAVEFRONTS * _LINES_AT_ONCE
        for begin in range(own, first + self.slice_lines, step):
            yield tuple(range(begin, min(begin + _LINES_AT_ONCE, first + self.slice_lines)))


def xtreme1(kbytes: int, repeats: int = 10) -> list[Kernel]:
    """Each CU writes its own slices again and again."""
    vectors = Vectors(kbytes)
    kernel = [
        (
            *vectors.read_all(place),
            *vectors.sums(vectors.c, vectors.a, place, 1 + repeats),
            *vectors.sums(vectors.a, vectors.c, place, 1 + repeats),
        )
        for place in _in_turn()
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
    own = [(*vectors.read_all(place), *vectors.sums(vectors.c, vectors.a, place, 1)) for place in _in_turn()]
    others = [
        vectors.sums(
            vectors.a, vectors.c, replace(place, cu=(place.cu + distance) % SHAPE.num_cus), 1 + repeats
        )
        if place.cu % 2 == 0
        else ()
        for place in _in_turn()
    ]
    again = [vectors.sums(vectors.c, vectors.a, place, 1) for place in _in_turn()]
    return [own, others, again]


def _in_turn() -> Iterator[Place]:
    """CUs in the order in which wavefronts are given to them."""
    for wavefront in range(_WAVEFRONTS):
        for cu in range(SHAPE.cus_per_gpu):
            for gpu in range(SHAPE.num_gpus):
                yield Place(gpu * SHAPE.cus_per_gpu + cu, wavefront)


BENCHMARKS = {"Xtreme1": xtreme1, "Xtreme2": xtreme2, "Xtreme3": xtreme3}
