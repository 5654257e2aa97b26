"""Profile: all paths or none, no contradictions, unchanged after writing and reading a file."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import curves, key_of, line, profile_of

from coarse.errors import ProfileError
from coarse.machine.host import read_host
from coarse.profiler.profile import (
    PathId,
    Profile,
    as_json,
    cache_path,
    current_versions,
    from_json,
    host_key,
    load_cached,
    newest_cached,
)

ONE = key_of(local_devices=(0,), num_devices=1)
REFRESH = "coarse profile --refresh"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def document():
    return json.loads(json.dumps(as_json(profile_of())))


def write(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


# ---- values ----


def test_a_profile_has_every_path():
    profile = profile_of(key_of(local_devices=(0, 0, 1), num_devices=2))
    kinds = [path.kind for path in profile.curves]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "both": 6,
        "pull": 6,
        "push": 6,
        "devices": 2,
        "workers": 6,
    }
    assert set(profile.both_at_once(2)) == {0, 1}


def test_one_worker_and_one_device_have_nobody_else_to_talk_to():
    assert {path.kind for path in profile_of(ONE).curves} == {"push", "pull", "both"}


def test_paths_name_both_ends():
    assert str(PathId(kind="pull", source=1, target=0)) == "pull w1-md0"
    assert str(PathId(kind="devices", source=1, target=0)) == "devices md1-md0"
    assert str(PathId(kind="workers", source=1, target=0)) == "workers w1-w0"


def test_a_missing_path_is_named():
    curves = dict(profile_of().curves)
    del curves[PathId(kind="pull", source=1, target=0)]
    with pytest.raises(ValueError, match="pull w1-md0: the profile has no curve"):
        profile_of(curves=curves)


def test_an_unknown_path_is_named():
    curves = {**profile_of().curves, PathId(kind="push", source=2, target=0): line(1, 1)}
    with pytest.raises(ValueError, match="push w2-md0: no such path exists between 2 workers and 2 memory"):
        profile_of(curves=curves)


def test_both_directions_at_once_cannot_be_faster_than_each_alone():
    curves = {**profile_of().curves, PathId(kind="both", source=0, target=1): line(8, 20)}
    with pytest.raises(ValueError, match=r"both w0-md1: .* GB/s at once contradict"):
        profile_of(curves=curves)


def test_both_directions_at_once_may_be_as_fast_as_each_alone():
    curves = {path: line(8, 8) for path in profile_of().curves}
    assert profile_of(curves=curves).curve("both", 0, 1) == line(8, 8)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "guessed"}, "kind 'guessed' must be one of measured, emulated, simulated"),
        ({"time_budget_s": -1.0}, "time_budget_s=-1.0"),
        ({"time_budget_s": float("nan")}, "time_budget_s=nan"),
    ],
)
def test_fields_out_of_range_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        profile_of(**wrong)


def test_keys_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="at least one worker"):
        key_of(local_devices=())
    with pytest.raises(ValueError, match="worker 1 is local to md2 of 2 memory devices"):
        key_of(local_devices=(0, 2))
    with pytest.raises(ValueError, match="'sideways' must be one of push"):
        PathId(kind="sideways", source=0, target=0)


def test_the_order_of_versions_does_not_matter():
    one = key_of(versions={"coarse": "1", "kernel": "2"})
    other = key_of(versions={"kernel": "2", "coarse": "1"})
    assert one == other
    assert one.digest() == other.digest()


@pytest.mark.parametrize(
    "change",
    [
        {"machine": "aws-p3"},
        {"host": "elsewhere"},
        {"local_devices": (1, 0)},
        {"num_devices": 3},
        {"versions": {"coarse": "0.2.0", "kernel": "6.18"}},
    ],
)
def test_every_part_of_a_key_counts(change):
    assert key_of(**change) != key_of()
    assert key_of(**change).digest() != key_of().digest()


# ---- files ----


@given(st.data())
def test_a_file_holds_the_very_same_profile(tmp_path_factory, data):
    one = data.draw(curves)
    profile = profile_of(curves=dict.fromkeys(profile_of().curves, one))
    path = tmp_path_factory.mktemp("profiles") / "profile.json"
    profile.save(path)
    assert Profile.load(path, expected=profile.key) == profile


def test_a_profile_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "profile.json"
    profile_of().save(path)
    before = path.read_bytes()

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        profile_of(local=(1, 1)).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["profile.json"]


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ProfileError, match=rf"none.json: No such file or directory. .*`{REFRESH}`"):
        Profile.load(tmp_path / "none.json")


@given(st.floats(0, 1, exclude_max=True))
@settings(max_examples=50)
def test_a_truncated_file_is_refused(tmp_path_factory, fraction):
    text = json.dumps(as_json(profile_of()))
    path = write(tmp_path_factory.mktemp("profiles") / "cut.json", text[: int(fraction * len(text))])
    with pytest.raises(ProfileError, match=rf"cut.json: cut off or not JSON: .*`{REFRESH}`"):
        Profile.load(path)


def change(*steps, value):
    """A change of one value, deep in the document."""

    def apply(document):
        for step in steps[:-1]:
            document = document[step]
        document[steps[-1]] = value

    return apply


POINT = ("curves", 0, "points", 0)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (change("format", value="something"), "this is not a profile"),
        (change("format_version", value=2), "its format version is 2, but this COARSE reads 1"),
        (change("kind", value=None), "kind is None, not str"),
        (change("kind", value="guessed"), "'guessed' must be one of"),
        (change("paths_share_links", value=1), "paths_share_links is 1, not bool"),
        (change("time_budget_s", value="4"), "time_budget_s is '4', not a number"),
        (change("curves", value=[]), "it has no curves"),
        (change("curves", value={}), r"curves is \{\}, not list"),
        (change("curves", 0, value=None), r"curves\[0\] is NoneType, not an object"),
        (change("curves", 0, "kind", value="up"), "'up' must be one of push"),
        (change("curves", 0, "source", value=True), "source is True, not int"),
        (change("curves", 0, "source", value=-1), "both w0-md0: the profile has no curve"),
        (change("curves", 0, "points", value=[]), "both w0-md0: a curve needs at least one point"),
        (change(*POINT, value=[1, 2]), r"both w0-md0: \[1, 2\] is not \[bytes"),
        (change(*POINT, 0, value=-4096), "between one byte and 1 PiB"),
        (change(*POINT, 0, value=10**400), "between one byte and 1 PiB"),
        (change(*POINT, 1, value=1e-320), "a time must be above 0"),
        (change(*POINT, 1, value=1e300), "less than eleven days"),
        (
            change("key", "num_devices", value=10**9),
            "2 workers and 1000000000 memory devices: a node has at most",
        ),
        (change(*POINT, 0, value=4096.5), "bytes is 4096.5, not a whole number"),
        (change(*POINT, 0, value=8192), "two points at 8192 bytes"),
        (change(*POINT, 1, value=-3.0), "both w0-md0: a time must be above 0"),
        (change(*POINT, 1, value=0), "a time must be above 0"),
        (change(*POINT, 1, value=float("nan")), "NaN is not a measurement"),
        (change(*POINT, 1, value=float("inf")), "Infinity is not a measurement"),
        (change(*POINT, 1, value=10**400), "time_us is too large"),
        (change(*POINT, 2, value=-1), "its spread at least 0"),
        (change(*POINT, 3, value=0), "at least one repeat"),
        (change("key", "local_devices", value=[]), "at least one worker"),
        (change("key", "local_devices", value=[0, "1"]), "key.local_devices is '1'"),
        (change("key", "num_devices", value=1), "worker 1 is local to md1 of 1"),
        (change("key", "versions", "coarse", value=1), "key.versions.coarse is 1, not text"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(tmp_path, damage, reason):
    damaged = document()
    damage(damaged)
    path = write(tmp_path / "damaged.json", damaged)
    with pytest.raises(ProfileError, match=rf"damaged.json: .*{reason}.*`{REFRESH}`"):
        Profile.load(path)


def test_a_path_that_is_there_twice_is_refused(tmp_path):
    damaged = document()
    damaged["curves"].append(copy.deepcopy(damaged["curves"][0]))
    with pytest.raises(ProfileError, match="both w0-md0: the profile has two curves of this path"):
        Profile.load(write(tmp_path / "twice.json", damaged))


@pytest.mark.parametrize("text", ["", "[]", "null", "3", '"text"', "[" * 100_000, "\x00", '{"format": 1}'])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    with pytest.raises(ProfileError, match=REFRESH):
        Profile.load(write(tmp_path / "other.json", text))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(st.data(), json_values)
def test_whatever_stands_in_a_document_is_a_profile_or_a_value_error(data, value):
    damaged = target = document()
    while isinstance(target, dict | list) and target:
        steps = sorted(target) if isinstance(target, dict) else range(len(target))
        step = data.draw(st.sampled_from(list(steps)))
        parent, target = target, target[step]
        if data.draw(st.booleans()):
            break
    parent[step] = value
    with contextlib.suppress(ValueError):
        assert from_json(damaged).curves


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"machine": "aws-p3"}, "it was made for machine 'host', but this job has 'aws-p3'"),
        ({"host": "elsewhere"}, "it was made for host '0123456789abcdef', but this job has 'elsewhere'"),
        ({"versions": {"coarse": "9", "kernel": "6.18"}}, "it was made for versions .*'coarse': '9'"),
        ({"local_devices": (1, 0)}, r"it was made for local_devices \[0, 1\], but this job has \[1, 0\]"),
    ],
)
def test_a_profile_of_something_else_is_refused(tmp_path, other, difference):
    path = tmp_path / "profile.json"
    profile_of().save(path)
    with pytest.raises(ProfileError, match=rf"{difference}.*`{REFRESH}`"):
        Profile.load(path, expected=key_of(**other))


# ---- the cache ----


def test_the_cache_gives_back_what_was_put_into_it(cache):
    profile = profile_of()
    assert load_cached(profile.key) is None
    profile.save(cache_path(profile.key))
    assert load_cached(profile.key) == profile
    assert cache_path(profile.key).is_relative_to(cache / "coarse")


def test_each_key_has_its_own_place(cache):
    assert cache_path(key_of()) != cache_path(key_of(host="elsewhere"))


def test_a_damaged_cache_is_told_not_measured_over(cache):
    path = cache_path(key_of())
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(ProfileError, match=REFRESH):
        load_cached(key_of())


def test_the_newest_profile_of_this_host_is_found(cache):
    assert newest_cached("0123456789abcdef", {"coarse": "0.1.0"}) is None
    ours, larger = key_of(), key_of(local_devices=(0, 1, 1))
    for age, key in enumerate([larger, ours, key_of(host="elsewhere"), key_of(versions={"coarse": "9"})]):
        profile_of(key).save(cache_path(key))
        os.utime(cache_path(key), (1000 - age, 1000 - age))
    (cache_path(ours).parent / "aaa.json").write_text("damaged")
    assert newest_cached(ours.host, ours.versions) == cache_path(larger)


def test_the_key_of_a_host_depends_on_its_facts_and_on_nothing_that_passes():
    host = read_host()
    busy = replace(host, memory=replace(host.memory, available_bytes=1, cgroup_used_bytes=2), limits=())
    other = replace(host, memory=replace(host.memory, total_bytes=1))
    assert host_key(host) == host_key(busy) == host_key(read_host())
    assert host_key(host) != host_key(other)
    assert set(current_versions()) == {"coarse", "kernel"}
