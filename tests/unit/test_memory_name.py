"""Names of memories: each contains a kind and its place; other texts are refused."""

from __future__ import annotations

import pytest

from coarse.machine.memory_name import DEVICE_KINDS, MemoryName, parse_memory_devices


@pytest.mark.parametrize(
    "text", ["host", "numa:0", "numa:12", "dax:/dev/dax0.0", "dax:/mnt/pmem/a:b", "cuda:4"]
)
def test_a_name_is_read_as_it_is_written(text):
    assert str(MemoryName.parse(text)) == text


def test_names_of_the_same_memory_are_equal(tmp_path):
    (tmp_path / "dax0.0").touch()
    (tmp_path / "link").symlink_to("dax0.0")
    names = [
        MemoryName.parse(f"dax:{path}")
        for path in (tmp_path / "dax0.0", tmp_path / "link", f"/{tmp_path}/dax0.0")
    ]
    assert len(set(names)) == 1
    assert MemoryName.parse("cuda:00") == MemoryName.parse("cuda:0")
    assert str(MemoryName.parse("numa:02")) == "numa:2"


def test_a_place_may_hold_colons():
    assert MemoryName.parse("dax:/mnt/pmem/a:b").place == "/mnt/pmem/a:b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tape", "kind 'tape' must be one of host, numa, dax, cuda"),
        ("", "kind '' must be one of"),
        ("host:1", "memory of kind host takes no place"),
        (
            "numa",
            "node '' is not the number of a NUMA node; write numa:2, for example, or node = 2 in a partition table",
        ),
        ("numa:-1", "node '-1' is not the number"),
        ("numa:two", "node 'two' is not the number"),
        ("dax", "path '' is not an absolute path"),
        (
            "cuda",
            "device '' is not the ordinal of a GPU; write cuda:4, for example, or "
            "device = .cuda:4. in a partition table",
        ),
        ("cuda:all", "device 'all' is not the ordinal"),
        ("dax:dax0.0", "path 'dax0.0' is not an absolute path"),
    ],
)
def test_what_is_no_name_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        MemoryName.parse(text)


def test_every_kind_is_named_in_the_error():
    with pytest.raises(ValueError, match=", ".join(DEVICE_KINDS)):
        MemoryName(kind="drum")


@pytest.mark.parametrize(("text", "number"), [("0", 0), (" 3 ", 3), ("-1", -1)])
def test_a_number_of_devices_stays_one(text, number):
    assert parse_memory_devices(text) == number


def test_a_list_has_a_memory_for_each_device():
    names = parse_memory_devices("host, numa:2,dax:/dev/dax0.0")
    assert isinstance(names, tuple)
    assert [str(name) for name in names] == ["host", "numa:2", "dax:/dev/dax0.0"]


@pytest.mark.parametrize("text", ["", "  ", "host,", "many", "1.5"])
def test_what_is_neither_is_refused(text):
    with pytest.raises(ValueError, match=r"no memory device|must be one of"):
        parse_memory_devices(text)
