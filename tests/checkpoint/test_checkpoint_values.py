"""Plain values in checkpoints are restored unchanged; other values are rejected."""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coarse.checkpoint.values import SmallTensor, from_json, to_json
from coarse.checkpoint.writer import read_worker_state
from coarse.errors import CheckpointError

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=40)
)
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


def there_and_back(value):
    return from_json(json.loads(json.dumps(to_json(value))))


def types_of(value):
    if isinstance(value, (list, tuple)):
        return type(value), [types_of(part) for part in value]
    if isinstance(value, dict):
        return dict, [(types_of(key), types_of(part)) for key, part in value.items()]
    return type(value)


@given(values)
def test_values_come_back_with_their_types(value):
    back = there_and_back(value)
    assert back == value
    assert types_of(back) == types_of(value)


@given(
    st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)
)
def test_foreign_json_is_read_or_refused(value):
    try:
        text = json.dumps(value)
    except TypeError:  # JSON has no bytes
        return
    with contextlib.suppress(CheckpointError):
        from_json(json.loads(text))


@pytest.mark.parametrize(
    "kind", ["$float", "$tuple", "$dict", "$bytes", "$array", "$tensor", "$counter", "$else"]
)
@given(
    contents=scalars.filter(lambda value: not isinstance(value, bytes))
    | st.lists(st.integers() | st.text())
    | st.tuples(
        st.sampled_from(["F32", "<f4", "|b1"]) | st.text(),
        st.lists(st.integers() | st.floats()) | scalars,
        st.just("") | st.text(),
    ).map(list)
)
def test_wrong_contents_of_a_kind_are_refused(kind, contents):
    with contextlib.suppress(CheckpointError):
        from_json({kind: contents})


@pytest.mark.parametrize(
    "text",
    [
        '{"$tensor": ["F32", [Infinity], ""]}',
        '{"$tensor": ["F32", [1e400], ""]}',
        '{"$tensor": ["F32", [NaN], ""]}',
        '{"$tensor": ["F32", [0.5], ""]}',
        '{"$tensor": ["F32", [1e30, 1e30], ""]}',
        '{"$tensor": ["F32", [1180591620717411303424, 0], ""]}',
        '{"$tensor": ["F32", "0", ""]}',
        '{"$array": ["<f4", [Infinity], ""]}',
        '{"$array": ["<f4", [1e400], ""]}',
        '{"$array": ["<f4", [1180591620717411303424, 0], ""]}',
        '{"$array": ["<f4,(", [0], ""]}',
        '{"$array": ["<f4", 0, ""]}',
        '{"$array": [[], [0], ""]}',
    ],
)
def test_absurd_shapes_are_refused(text):
    with pytest.raises(CheckpointError, match="a value of the checkpoint cannot be read"):
        from_json(json.loads(text))


def test_worker_states_of_an_absurd_save_are_refused():
    with pytest.raises(CheckpointError, match="the state of a worker cannot be read"):
        read_worker_state(b'{"save_number": Infinity, "state": {}}')


def test_numbers_that_are_not_finite_come_back():
    back = there_and_back([math.inf, -math.inf, math.nan])
    assert back[:2] == [math.inf, -math.inf]
    assert math.isnan(back[2])


@pytest.mark.parametrize(
    "array", [np.arange(6, dtype=np.int16).reshape(2, 3), np.zeros((0, 2)), np.float32(0.1)]
)
def test_arrays_come_back(array):
    back = there_and_back(array)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_tensors_come_back():
    tensor = SmallTensor(dtype="BF16", shape=(2, 1), data=b"abcd")
    assert there_and_back({"lr": tensor}) == {"lr": tensor}


def test_counters_come_back():
    back = there_and_back({"milestones": Counter({30: 1, 60: 2})})["milestones"]
    assert type(back) is Counter
    assert sorted(back.elements()) == [30, 60, 60]


def test_arrays_of_records_are_refused():
    with pytest.raises(CheckpointError, match=r"state is a numpy\.ndarray"):
        to_json(np.zeros(2, dtype=[("index", "<i4"), ("weight", "<f8")]))


def test_pythons_generator_comes_back():
    state = random.getstate()
    assert there_and_back(state) == state


def test_a_value_that_cannot_be_held_is_named():
    with pytest.raises(CheckpointError, match=r"state/loader/1 is a builtins\.object"):
        to_json({"loader": [0, object()]})


def test_values_without_end_are_refused():
    endless: list = []
    endless.append(endless)
    with pytest.raises(CheckpointError, match="more than 64 levels"):
        to_json(endless)
