"""Machine files: every number has a source and a kind; errors contain file and line."""

from __future__ import annotations

import pytest

from coarse.machine.catalogue import load_machine, machine_names
from coarse.machine.description import KINDS, Figure
from coarse.machine.fields import FieldError
from coarse.machine.machine_file import read_machine
from coarse.machine.toml_lines import parse_toml

GOOD = """\
description = "two GPUs"

[topology]
kind = "gpus"
gpu = "G"
switches = [[0, 1], [2]]
sockets = [[0, 1]]

[link.lane]
scope = "endpoint"
gbytes_per_s = { value = 10, source = "s", kind = "measured" }

[path.local]
latency_us = { value = 1, source = "s", kind = "assumed" }
gbytes_per_s = { value = 4, source = "s", kind = "announced" }
duplex_gbytes_per_s = { value = 6, source = "s", kind = "recalled" }
over = ["lane"]

[path.remote]
latency_us = { value = 2, source = "s", kind = "assumed" }
over = ["lane"]

[[direct_link]]
between = [0, 2]
latency_us = { value = 1, source = "s", kind = "assumed" }
gbytes_per_s = { value = 25, source = "s", kind = "assumed" }
"""

NETWORK = """\

[network]
latency_us = { value = 5, source = "s", kind = "assumed" }
gbytes_per_s = { value = 12.5, source = "s", kind = "announced" }
over = ["lane"]
"""
NETWORK_LINE = GOOD.count("\n") + 2


def write(folder, text):
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_a_file_becomes_a_machine(tmp_path):
    machine = read_machine(write(tmp_path, GOOD))
    assert (machine.name, machine.topology.num_gpus, machine.topology.gpu) == ("mine", 3, "G")
    assert machine.paths["local"].duplex_gbytes_per_s == Figure(value=6, source="s", kind="recalled")
    assert machine.paths["remote"].over == ("lane",)
    assert machine.direct_links[0].between == (0, 2)
    assert load_machine(tmp_path / "mine.toml") == machine


LANE = 'gbytes_per_s = { value = 10, source = "s", kind = "measured" }'
LOCAL = 'gbytes_per_s = { value = 4, source = "s", kind = "announced" }'
DUPLEX = 'duplex_gbytes_per_s = { value = 6, source = "s", kind = "recalled" }'
READ = 'read_gbytes_per_s = { value = 5, source = "s", kind = "measured" }'
SECOND_DIRECT_LINK = "\n".join(GOOD.splitlines()[22:]).replace("[0, 2]", "[2, 0]") + "\n"


@pytest.mark.parametrize(
    ("before", "after", "line", "message"),
    [
        (LANE, LANE.replace("10", "-10"), 11, "value -10 is negative"),
        (LANE, LANE.replace("10", "0"), 11, "a bandwidth must be above 0 GB/s"),
        (LANE, LANE.replace("10", "nan"), 11, "value nan is not a finite number"),
        (LANE, LANE.replace("10", '"10"'), 11, "value '10' is not a finite number"),
        (LANE, LANE.replace("10", "true"), 11, "value True is not a finite number"),
        (LANE, LANE.replace('"s"', '" "'), 11, "source is empty"),
        (LANE, LANE.replace("measured", "guessed"), 11, "'guessed' must be one of measured, announced"),
        (LANE, "gbytes_per_s = 10", 11, "link.lane.gbytes_per_s must be a table, not 10"),
        (LANE, "gbytes_per_s = { value = 10 }", 11, "link.lane.gbytes_per_s.source is missing"),
        (LANE, LANE.replace(" }", ", unit = 1 }"), 11, "unknown key 'unit'"),
        (LANE, "", 9, "link.lane.gbytes_per_s is missing"),
        (LANE, f"{LANE}\n{READ.replace('5', '0')}", 12, "a bandwidth must be above 0 GB/s"),
        (LANE, LANE.replace("10", "3"), 15, "4 GB/s exceed the 3 GB/s of its link 'lane'"),
        (LANE, f"{LANE}\n{READ}\n{DUPLEX.replace('6', '16')}", 13, r"\(10\) and at most both \(15\)"),
        (
            f'scope = "endpoint"\n{LANE}',
            f'scope = "switch"\n{LANE}\n{READ}',
            12,
            "scope 'endpoint' can have separate values for reads and writes",
        ),
        (
            DUPLEX,
            DUPLEX.replace("6", "3"),
            16,
            r"together \(3 GB/s\) must reach at least the faster single direction \(4\)",
        ),
        (DUPLEX, DUPLEX.replace("6", "9"), 16, "at most twice that"),
        (LOCAL, "", 16, "duplex_gbytes_per_s needs gbytes_per_s too"),
        (
            'over = ["lane"]\n\n[path.remote]',
            'over = ["lan"]\n\n[path.remote]',
            17,
            "unknown link 'lan'; known: lane",
        ),
        ('over = ["lane"]\n\n[path.r', 'over = ["lane", "lane"]\n\n[path.r', 17, "link lane appears twice"),
        ('over = ["lane"]\n\n[path.r', "over = 3\n\n[path.r", 17, "over must be a list of strings"),
        ('over = ["lane"]\n\n[[', "\n[[", 19, "a path needs gbytes_per_s, or the links"),
        ("[path.remote]", "[path.nowhere]", 13, "path.remote is missing"),
        ("[[direct_link]]", "[path.nowhere]", 24, "unknown key 'between'"),
        ('scope = "endpoint"', 'scope = "host"', 10, "scope 'host' must be one of endpoint, switch"),
        ('kind = "gpus"', 'kind = "cpus"', 4, "kind 'cpus' must be one of gpus, expanders"),
        ('kind = "gpus"', 'kind = "expanders"', 5, "gpu has no meaning for expanders"),
        ("[[0, 1], [2]]", "[[0, 1], [1]]", 6, "GPU 1 appears twice"),
        ("[[0, 1], [2]]", "[[0, 1], [3]]", 6, "GPU 2 is missing"),
        ("[[0, 1], [2]]", "[[0, 1], [-2]]", 6, "-2 is not a whole number"),
        ("[[0, 1], [2]]", "[]", 6, "switches is empty"),
        ("[[0, 1], [2]]", "[0, 1]", 6, "switches must be a list of lists"),
        ("[[0, 1]]", "[[0]]", 7, "sockets name 1 switches, but the machine has 2"),
        ("[0, 2]", "[0, 3]", 24, "GPU 3 is not one of the 3 GPUs"),
        ("[0, 2]", "[0, 0]", 24, "does not name two GPUs"),
        (GOOD, GOOD + "\n" + SECOND_DIRECT_LINK, 29, "a second direct link between GPUs 2 and 0"),
        ('"two GPUs"', '""', 1, "description must be a string that is not empty"),
        ("[link.lane]", "[[link.lane]]", 9, "link.lane must be a table"),
        ("[path.remote]", "[path.local]", 19, "twice"),
        ("kind = ", "kind ", 4, "Expected '='"),
        (GOOD, "", 1, "topology is missing"),
        (GOOD, "# nothing\n", 1, "topology is missing"),
        (GOOD, GOOD + "[links]\n", 27, "unknown key 'links'"),
    ],
)
def test_what_is_wrong_is_reported_with_file_and_line(tmp_path, before, after, line, message):
    assert before in GOOD
    path = write(tmp_path, GOOD.replace(before, after, 1))
    with pytest.raises(ValueError, match=message) as error:
        read_machine(path)
    assert str(error.value).startswith(f"{path}:{line}: ")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.toml: No such file"):
        read_machine(tmp_path / "nowhere.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"binary\.toml: not UTF-8"):
        read_machine(binary)


@pytest.mark.parametrize(
    ("name", "nearest"), [("aws_p3", "aws-p3"), ("P100", "sdsc-p100"), ("cxl2-8x", "cxl2-x8")]
)
def test_unknown_names_suggest_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=f"no machine is named '{name}'; did you mean .*{nearest}"):
        load_machine(name)


def test_names_like_no_other_get_the_whole_list():
    with pytest.raises(ValueError, match=r"known: aws-g4dn, aws-p3, .*, or a path to a TOML file"):
        load_machine("zzzz")


def test_all_machines_of_the_papers_and_of_cxl_are_there():
    assert machine_names() == [
        *("aws-g4dn", "aws-p3", "cxl2-switch", "cxl2-x8", "cxl3-x8"),
        *("dgx1-volta", "pcie4", "pcie5", "sdsc-p100"),
    ]


def test_nvlinks_of_a_dgx1_are_those_of_its_source():
    links = {link.between: link.path.gbytes_per_s.value for link in load_machine("dgx1-volta").direct_links}
    assert {pair: links[pair] for pair in links if pair[0] == 0} == {
        (0, 1): 50,
        (0, 2): 50,
        (0, 3): 25,
        (0, 6): 25,
    }
    assert links[2, 3] == 25
    assert (3, 4) not in links
    for gpu in range(8):  # six links to a V100
        assert sum(speed for pair, speed in links.items() if gpu in pair) == 6 * 25
    neighbours = {gpu: {other for pair in links if gpu in pair for other in pair} for gpu in range(8)}
    assert all(neighbours[one] & neighbours[other] for one in range(8) for other in range(8))


@pytest.mark.parametrize("kind", KINDS)
def test_figures_are_of_four_kinds(kind):
    assert Figure(value=1.5, source="a page", kind=kind).kind == kind


def test_a_wrong_figure_says_which_field():
    with pytest.raises(FieldError) as error:
        Figure(value=1, source="", kind="measured")
    assert error.value.field == "source"


LINES = """\
# comment
name = "x"   # and more

numbers = [
  [1],
  [2],
]
inline = { one = 1, two = { three = 3 } }
text = \"\"\"
line = 1
\"\"\"
dotted.one = 1

[a.b]
one = 1
[c]
[a.d]

two = 2
[[list]]
one = 1
# between

[[list]]
one = 2
[list.below]
three = 3
'quoted key' = 4
"""


@pytest.mark.parametrize(
    ("key", "line"),
    [
        (("name",), 2),
        (("numbers",), 4),
        (("inline",), 8),
        (("inline", "two", "three"), 8),
        (("text",), 9),
        (("dotted", "one"), 12),
        (("a", "b"), 14),
        (("a", "b", "one"), 15),
        (("c",), 16),
        (("a", "d"), 17),
        (("a", "d", "two"), 19),
        (("list", 0), 20),
        (("list", 0, "one"), 21),
        (("list", 1), 24),
        (("list", 1, "one"), 25),
        (("list", 1, "below", "three"), 27),
        (("list", 1, "below", "quoted key"), 28),
        (("list", 1, "below", "missing"), 26),
        (("missing",), 1),
    ],
)
def test_every_key_has_its_line(key, line):
    assert parse_toml(LINES, path="file").line(key) == line


@pytest.mark.parametrize(
    "above",
    [
        "x = [  # ] key = 1\n  \"]\", '[', { y = [[1], 2] },\n]",
        'x = """\\\n  key = \\"""\n"""""',
        "x = '''\nkey = 1 \\'''\n# key = '",
        'x = { y = [1, 2], "z # = }".a = { b = "}" } }  # }',
        "\"key = 1\" = 1.5e3\n'#' = 1979-05-27 07:32:00",
    ],
)
def test_a_key_is_not_found_within_strings_comments_and_arrays(above):
    document = parse_toml(f"{above}\nkey = 1\n", path="file")
    assert document.line(("key",)) == 2 + above.count("\n")
    assert document.lines.keys() == set(keys_of(document.values, ()))


def keys_of(table, above):
    for name, value in table.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from keys_of(value, (*above, name))


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_values_are_plain_and_line_ends_do_not_matter(ending):
    document = parse_toml(LINES.replace("\n", ending), path="file")
    assert document.values["list"] == [{"one": 1}, {"one": 2, "below": {"three": 3, "quoted key": 4}}]
    assert type(document.values["inline"]) is dict
    assert document.line(("list", 1, "one")) == 25


# ---- the network between nodes ----


def test_a_machine_may_have_a_network(tmp_path):
    assert read_machine(write(tmp_path, GOOD)).network is None
    network = read_machine(write(tmp_path, GOOD + NETWORK)).network
    assert network.gbytes_per_s == Figure(value=12.5, source="s", kind="announced")
    assert (network.latency_us.value, network.over) == (5, ("lane",))


QPI = """
[link.qpi]
scope = "between sockets"
gbytes_per_s = { value = 10, source = "s", kind = "measured" }
"""


@pytest.mark.parametrize(
    ("before", "after", "line", "message"),
    [
        ("12.5", "0", 2, "a bandwidth must be above 0 GB/s"),
        ("12.5", "-1", 2, "value -1 is negative"),
        ("announced", "guessed", 2, "'guessed' must be one of"),
        ("latency_us", "latency_ms", 1, "unknown key 'latency_ms'; known: latency_us"),
        (NETWORK.splitlines()[2], "", 0, "network.latency_us is missing"),
        (NETWORK.splitlines()[3], "", 0, "network.gbytes_per_s is missing"),
        ('"lane"', '"lan"', 3, "network over unknown link 'lan'; known: lane"),
        ('["lane"]', '["lane", "lane"]', 3, "link lane appears twice"),
        ('["lane"]', f'["qpi"]\n{QPI}', 3, "link 'qpi', which joins sockets"),
    ],
)
def test_errors_of_a_network_name_the_line(tmp_path, before, after, line, message):
    text = GOOD + NETWORK
    path = write(tmp_path, GOOD + NETWORK.replace(before, after, 1))
    assert before in text
    with pytest.raises(ValueError, match=message) as error:
        read_machine(path)
    assert str(error.value).startswith(f"{path}:{NETWORK_LINE + line}: ")


@pytest.mark.parametrize("name", ["aws-g4dn", "aws-p3", "sdsc-p100"])
def test_the_papers_machines_have_its_network(name):
    network = load_machine(name).network
    assert network.gbytes_per_s.value * 8 == 100
    assert "Table I" in network.gbytes_per_s.source


POWER = """\

[power]
worker_watt = { value = 250, source = "s", kind = "announced" }
device_watt = { value = 20, source = "s", kind = "assumed" }
"""


def test_power_is_optional_and_needs_both_figures(tmp_path):
    assert read_machine(write(tmp_path, GOOD)).power is None
    power = read_machine(write(tmp_path, GOOD + POWER)).power
    assert power.energy_j(num_workers=4, num_devices=2, seconds=0.5) == (4 * 250 + 2 * 20) * 0.5
    lines = POWER.splitlines(keepends=True)
    with pytest.raises(ValueError, match=r"power\.device_watt is missing"):
        read_machine(write(tmp_path, GOOD + "".join(lines[:-1])))
    with pytest.raises(ValueError, match="value -20 is negative"):
        read_machine(write(tmp_path, GOOD + POWER.replace("20", "-20")))
