"""Memory in several pieces: its division, and its transfer between processes."""

from __future__ import annotations

import os
from itertools import accumulate, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coarse.errors import ProtocolError
from coarse.proxy.memory import HostMemory
from coarse.proxy.memory.spread_cuda import piece_lengths, reachable_from
from coarse.wire.segments import Extent, Segment, pack, unpack

PAGE = 2 << 20


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def on_gpu(gpu, num_bytes):
    """What a segment of a GPU's memory looks like to who cannot use that."""
    return Segment(os.memfd_create("test"), num_bytes, Extent(0, num_bytes, gpu))


@pytest.fixture
def segments():
    joined = Segment.joined([on_gpu("GPU-a", PAGE), on_gpu("GPU-b", 2 * PAGE)])
    made = [HostMemory().allocate("test", 100), joined, on_gpu("GPU-b", PAGE)]
    yield made
    for segment in made:
        segment.close()


def test_only_the_last_piece_may_end_within_a_page():
    whole, part = on_gpu("GPU-a", PAGE), Segment(os.memfd_create("test"), 100, Extent(0, PAGE, "GPU-b"))
    sealed = HostMemory().allocate("test", 100)
    for pieces in ([part, whole], [sealed, whole]):
        with pytest.raises(ValueError, match="a piece of 100 bytes is not a whole number of pages"):
            Segment.joined(pieces)
    assert Segment.joined([whole, part]).num_bytes == PAGE + 100
    for segment in (whole, part, sealed):
        segment.close()


@given(st.integers(1, 100 * PAGE), st.integers(1, 16))
def test_pieces_end_with_pages_and_are_about_as_long(num_bytes, count):
    lengths = piece_lengths(num_bytes, count, PAGE)
    assert sum(lengths) == num_bytes
    assert len(lengths) == count
    ends = [*accumulate(lengths)]
    assert all(end % PAGE == 0 or end == num_bytes for end in ends)
    assert max(lengths) - min(lengths) <= 2 * PAGE
    assert lengths[0] > 0


@given(st.integers(1, 1000), st.integers(1, 8), st.integers(1, 3))
def test_states_are_cut_at_the_same_parts_as_parameters(num_pages, count, num_states):
    parameters = piece_lengths(num_pages * PAGE, count, PAGE)
    states = piece_lengths(num_states * num_pages * PAGE, count, PAGE)
    for cut in range(count):
        assert abs(sum(states[:cut]) - num_states * sum(parameters[:cut])) <= num_states * PAGE


@pytest.mark.parametrize(
    ("home", "others", "expected"),
    [(1, [3, 5, 7], [3]), (1, [5, 3, 7], [5]), (0, [1, 2, 3], [1, 2, 3]), (1, [7], []), (1, [], [])],
)
def test_memory_is_on_gpus_that_reach_each_other(monkeypatch, home, others, expected):
    """As those of a p3.16xlarge: four at each socket, and one across from each."""
    reach = {
        (one, other)
        for one, other in permutations(range(8), 2)
        if one // 4 == other // 4 or one % 4 == other % 4
    }
    monkeypatch.setattr("coarse.kernels._native.cuda_reaches_peer", lambda *pair: pair in reach)
    assert reachable_from(home, others) == expected


def test_segments_come_to_another_process_as_they_were(segments):
    extents, fds = pack(segments)
    found = unpack([None if each is None else [*each] for each in _as_json(extents)], [*map(os.dup, fds)])
    assert [each.num_bytes for each in found] == [100, 3 * PAGE, PAGE]
    assert [each.gpus for each in found] == [(), ("GPU-a", "GPU-b"), ("GPU-b",)]
    assert [each.gpu for each in found] == ["", "GPU-a", "GPU-b"]
    assert [os.fstat(fd).st_ino for each in found for fd, _ in each.pieces] == [
        os.fstat(fd).st_ino for fd in fds
    ]
    for each in found:
        each.close()


def _as_json(extents):
    def listed(value):
        return [listed(each) for each in value] if isinstance(value, list | tuple) else value

    return listed(extents)


def test_a_duplicate_is_closed_by_itself(segments):
    before = open_descriptors()
    copy = segments[1].duplicate()
    assert open_descriptors() == before + 2
    assert copy.gpus == segments[1].gpus
    copy.close()
    copy.close()
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("extents", "text"),
    [
        ([[[0, PAGE, "GPU-a"], [0, PAGE]]], "does not say where memory lies"),
        ([[[0, PAGE, "GPU-a"]]], "in 1 pieces came with 2 descriptors"),
        ([None, None, None], "in 3 pieces came with 2 descriptors"),
        ([[0, PAGE, "GPU-a"], {}], "does not say where memory lies"),
    ],
)
def test_what_is_no_memory_is_refused_and_closed(extents, text):
    before = open_descriptors()
    with pytest.raises(ProtocolError, match=text):
        unpack(extents, [os.memfd_create("test"), os.memfd_create("test")])
    assert open_descriptors() == before


def test_the_host_maps_no_pieces(segments):
    with pytest.raises(ValueError, match="the host maps no memory in pieces"):
        segments[1].map()
