"""TensorSpec: valid registrations; refusals of others suggest an alternative."""

from __future__ import annotations

import pytest

from coarse.schema import ITEM_BYTES, OPS, TensorSpec


@pytest.mark.parametrize(("dtype", "item_bytes"), ITEM_BYTES.items())
def test_length_in_bytes(dtype, item_bytes):
    assert TensorSpec(name="a", dtype=dtype, num_elements=7, op="sum").nbytes == 7 * item_bytes


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("op", OPS)
def test_floats_take_every_op(dtype, op):
    assert TensorSpec(name="a", dtype=dtype, num_elements=1, op=op).op == op


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_integers_have_no_mean(dtype):
    with pytest.raises(ValueError, match=f"tensor 'count': mean of {dtype} is not exact; use op='sum'"):
        TensorSpec(name="count", dtype=dtype, num_elements=1, op="mean")


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"name": ""}, "a tensor needs a name"),
        ({"dtype": "complex64"}, "tensor 'w': dtype 'complex64' .* float32, .*Convert the tensor first"),
        ({"op": "product"}, "tensor 'w': op 'product' must be one of sum, mean, max"),
        ({"num_elements": 0}, "tensor 'w': needs at least one element, has 0"),
        ({"num_elements": -1}, "has -1"),
        (
            {"num_elements": 10, "row_elements": 3},
            "table 'w': 10 elements are not a whole number of rows of 3 each",
        ),
        ({"num_elements": 4, "row_elements": -2}, "rows of -2 each"),
        ({"num_elements": 1 << 32, "row_elements": 1 << 32}, "a row has 4 Gi elements or more"),
    ],
)
def test_what_cannot_be_is_refused_by_name(wrong, match):
    with pytest.raises(ValueError, match=match):
        TensorSpec(**{"name": "w", "dtype": "float32", "num_elements": 1, **wrong})


def test_a_spec_is_a_value():
    spec = TensorSpec(name="w", dtype="float32", num_elements=1)
    assert spec == TensorSpec(name="w", dtype="float32", num_elements=1, op="mean")
    with pytest.raises(AttributeError):
        spec.name = "x"
