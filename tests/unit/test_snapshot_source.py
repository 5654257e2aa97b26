"""A worker's snapshot requests: read as sent, or refused; results are row-major for any memory order."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coarse.checkpoint.source import DTYPE_BYTES, SavedTensor
from coarse.errors import ProtocolError
from coarse.wire.snapshots import KeptTensor, SentTensor, SnapshotContents

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
saved = st.builds(
    SavedTensor, name=st.text(min_size=1), dtype=st.sampled_from(list(DTYPE_BYTES)), shape=shapes
)
numbers = st.integers(0, 1 << 40)
kept = saved.flatmap(
    lambda tensor: st.builds(
        KeptTensor,
        saved=st.just(tensor),
        tensor=numbers,
        array=numbers,
        order=st.permutations(range(len(tensor.shape))).map(tuple),
    )
)
contents = st.builds(
    SnapshotContents,
    step=numbers,
    kept=st.lists(kept, max_size=4).map(tuple),
    sent=st.lists(st.builds(SentTensor, saved=saved, offset=numbers), max_size=4).map(tuple),
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


@given(contents)
def test_a_request_arrives_as_it_was_sent(sent):
    assert SnapshotContents.from_message(json.loads(json.dumps(sent.to_message()))) == sent


@given(st.fixed_dictionaries({}, optional={"step": anything, "kept": anything, "sent": anything}))
def test_anything_else_is_refused_and_nothing_worse(message):
    with contextlib.suppress(ProtocolError):
        SnapshotContents.from_message(message)


@pytest.mark.parametrize(
    "row",
    [
        ["name", "F32", [2], 0, 0, [1]],
        ["name", "F32", [2], 0, 0],
        ["name", "F31", [2], 0, 0, [0]],
        ["name", "F32", [-2], 0, 0, [0]],
        ["name", "F32", [1] * 65, 0, 0, list(range(65))],
        ["", "F32", [2], 0, 0, [0]],
    ],
)
def test_a_tensor_that_cannot_be_is_refused(row):
    with pytest.raises(ProtocolError, match="cannot be read"):
        SnapshotContents.from_message({"step": 1, "kept": [row], "sent": []})


@given(st.permutations(range(4)), st.sampled_from(["F32", "BF16"]))
def test_bytes_come_out_row_major(order, dtype):
    shape = (2, 3, 4, 5)
    numbers = np.arange(np.prod(shape), dtype=f"u{DTYPE_BYTES[dtype]}").reshape(shape)
    tensor = KeptTensor(
        saved=SavedTensor(name="x", dtype=dtype, shape=shape), tensor=0, array=0, order=tuple(order)
    )
    as_it_lies = np.ascontiguousarray(numbers.transpose(order)).tobytes()
    assert bytes(tensor.to_row_major(as_it_lies)) == numbers.tobytes()
    assert tensor.is_row_major == (list(order) == [0, 1, 2, 3])
