"""Registrations: a device reads exactly what a worker sends, and reports the first difference between two workers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coarse.client.update_settings import SETTINGS_DTYPE
from coarse.errors import ProtocolError, SchemaMismatchError
from coarse.profiler.routing import RoutingTable
from coarse.schema import ITEM_BYTES, OPS, TensorSpec
from coarse.wire.registration import GroupSchema, check_agreement


def spec(name, num_elements=10, dtype="float32", op="mean"):
    return TensorSpec(name=name, dtype=dtype, num_elements=num_elements, op=op)


def schema(*specs, **changes):
    usual = GroupSchema(
        name="model", specs=specs, shard_bytes=1 << 18, gather_bytes=1 << 16, algorithm="auto"
    )
    return replace(usual, **changes)


names = st.text(min_size=1, max_size=20)
lengths = st.integers(1, 1 << 40)
specs = st.builds(
    spec, names, lengths, st.sampled_from(["float32", "bfloat16"]), st.sampled_from(OPS)
) | st.builds(spec, names, lengths, st.sampled_from(["int32", "int64", "uint8"]), st.just("sum"))
routing_tables = st.builds(
    RoutingTable,
    lat_proxy=st.integers(0, 9),
    bw_proxy=st.integers(0, 9),
    threshold_bytes=st.integers(0, 1 << 40),
)
schemas = st.builds(
    GroupSchema,
    name=st.text(),
    specs=st.lists(specs, min_size=1, max_size=5).map(tuple),
    shard_bytes=st.integers(1, 1 << 40),
    gather_bytes=st.integers(0, 1 << 40),
    algorithm=st.sampled_from(["auto", "gather", "direct", "ring"]),
    large_algorithm=st.sampled_from(["direct", "nccl"]),
    is_staging=st.booleans(),
    state_names=st.none() | st.lists(st.text(), max_size=2).map(tuple),
    routes=st.lists(routing_tables, max_size=3).map(tuple),
)


@given(schemas)
def test_a_registration_arrives_as_it_was_sent(sent):
    assert GroupSchema.from_message(json.loads(json.dumps(sent.to_message(3)))) == sent


@given(schemas)
def test_equal_registrations_agree(one):
    check_agreement(0, one, 1, GroupSchema.from_message(one.to_message(0)))


@given(schemas, schemas)
def test_any_difference_is_a_mismatch_that_names_both_workers(one, other):
    if one == other:
        check_agreement(3, one, 5, other)
        return
    with pytest.raises(SchemaMismatchError, match="workers 3 and 5 differ: ") as caught:
        check_agreement(3, one, 5, other)
    assert str(caught.value).endswith("Build the same model on every worker.")


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        (
            schema(spec("a"), spec("b"), spec("c")),
            schema(spec("a"), spec("x"), spec("y")),
            "tensor 1 is 'b' of 10 x float32 (mean) on worker 0, 'x' of 10 x float32 (mean) on worker 2",
        ),
        (
            schema(spec("a", 10)),
            schema(spec("a", 11)),
            "tensor 0 is 'a' of 10 x float32 (mean) on worker 0, 'a' of 11 x float32 (mean) on worker 2",
        ),
        (
            schema(spec("a")),
            schema(spec("a", dtype="float64")),
            "tensor 0 is 'a' of 10 x float32 (mean) on worker 0, 'a' of 10 x float64 (mean) on worker 2",
        ),
        (
            schema(spec("a")),
            schema(spec("a", op="max")),
            "tensor 0 is 'a' of 10 x float32 (mean) on worker 0, 'a' of 10 x float32 (max) on worker 2",
        ),
        (
            schema(spec("a"), spec("b")),
            schema(spec("a")),
            "worker 0 has 2 tensors, the other 1; the first extra one is 'b' of 10 x float32 (mean)",
        ),
        (
            schema(spec("a")),
            schema(spec("a"), spec("b")),
            "worker 2 has 2 tensors, the other 1; the first extra one is 'b' of 10 x float32 (mean)",
        ),
        (
            schema(spec("a")),
            schema(spec("a"), shard_bytes=64),
            "shard_bytes=262144, gather_bytes=65536, algorithm=auto on worker 0, "
            "'model' with shard_bytes=64, gather_bytes=65536, algorithm=auto on worker 2",
        ),
        (schema(spec("a")), schema(spec("a"), name="other"), "'other' with shard_bytes"),
        (schema(spec("a")), schema(spec("a"), algorithm="ring"), "algorithm=ring on worker 2"),
        (schema(spec("a")), schema(spec("a"), gather_bytes=0), "gather_bytes=0"),
        (schema(spec("a")), schema(spec("a"), state_names=("m",)), "optimizer state (m) on worker 2"),
    ],
)
def test_the_first_difference_is_named(one, other, difference):
    with pytest.raises(SchemaMismatchError) as caught:
        check_agreement(0, one, 2, other)
    assert difference in str(caught.value)


def message(**changes):
    return {**schema(spec("a")).to_message(0), **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"specs": None},
        {"specs": []},
        {"specs": {"a": 1}},
        {"specs": ["abcd", 1]},
        {"specs": [["a", "float32", 1]]},
        {"specs": [["a", "float32", 1, "max", 1]]},
        {"specs": [["", "float32", 1, "sum"]]},
        {"specs": [["a", "float8", 1, "sum"]]},
        {"specs": [["a", "float32", 0, "sum"]]},
        {"specs": [["a", "float32", float("inf"), "sum"]]},
        {"specs": [["a", "float32", float("nan"), "sum"]]},
        {"specs": [["a", "float32", None, "sum"]]},
        {"specs": [["a", "float32", "many", "sum"]]},
        {"specs": [["a", "float32", 1, "xor"]]},
        {"specs": [["a", "int32", 1, "mean"]]},
        {"shard_bytes": 0},
        {"shard_bytes": 1.5},
        {"gather_bytes": -1},
        {"gather_bytes": None},
        {"state_names": "exp_avg"},
        {"state_names": 2},
    ],
)
def test_what_cannot_be_read_is_a_protocol_error(changes):
    with pytest.raises(ProtocolError):
        GroupSchema.from_message(message(**changes))


@pytest.mark.parametrize("field", ["name", "specs", "shard_bytes", "gather_bytes", "algorithm"])
def test_a_field_that_is_missing_is_a_protocol_error(field):
    incomplete = message()
    del incomplete[field]
    with pytest.raises(ProtocolError):
        GroupSchema.from_message(incomplete)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=10,
)
fields = st.sampled_from(sorted(message()))


@given(st.dictionaries(fields, json_values, max_size=3))
def test_no_message_does_any_harm(changes):
    try:
        read = GroupSchema.from_message(message(**changes))
    except ProtocolError:
        return
    assert all(tensor.dtype in ITEM_BYTES and tensor.num_elements >= 1 for tensor in read.specs)


def test_an_optimizer_lays_out_what_is_kept_beside_the_slots():
    plain = schema(spec("a", 100), spec("b", 3))
    plan = replace(plain, state_names=("exp_avg", "exp_avg_sq")).native_plan(1, 2)
    slot_bytes = plain.partition().slot_bytes
    assert plan.slot_bytes == slot_bytes
    assert plan.settings_bytes == 2 * SETTINGS_DTYPE.itemsize
    assert plan.kept_bytes == 2 * slot_bytes
    assert plain.native_plan(1, 2).settings_bytes == 0


@given(st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.integers(1, 5000)), min_size=1, max_size=5))
def test_the_data_path_accepts_every_partition(tensors):
    tensor_specs = [spec(str(i), length, dtype, "sum") for i, (dtype, length) in enumerate(tensors)]
    registered = schema(*tensor_specs, shard_bytes=64, gather_bytes=0)
    plan, partition = registered.native_plan(7, 2), registered.partition()
    assert (plan.id, plan.num_clients) == (7, 2)
    assert plan.slot_bytes == partition.slot_bytes
    assert plan.num_shards == len(partition.shards)
