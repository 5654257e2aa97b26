"""`coarse machine`: lists, shows and checks machines; one-line errors."""

from __future__ import annotations

import json

import pytest

from coarse.cli.machine import figure_rows, host_rows
from coarse.cli.main import main
from coarse.machine.catalogue import load_machine, machine_names
from coarse.machine.host import DaxDevice, Gpu, NumaNode, read_host


def run(capsys, *arguments):
    code = main(["machine", *arguments])
    return code, capsys.readouterr()


def test_list_names_every_machine(capsys):
    code, text = run(capsys, "list")
    assert code == 0
    for name in machine_names():
        assert name in text.out
    assert "aws-p3-2to1" in text.out


def test_list_as_json_counts_figures_by_kind(capsys):
    code, text = run(capsys, "list", "--json")
    assert code == 0
    (p100,) = (machine for machine in json.loads(text.out) if machine["name"] == "sdsc-p100")
    assert p100["devices"] == "4 P100"
    assert p100["figures"]["measured"] == 4


@pytest.mark.parametrize("name", machine_names())
def test_show_gives_every_figure_with_source_and_kind(name, capsys):
    code, text = run(capsys, "show", name)
    assert code == 0
    assert "emulated" in text.out
    flat = "".join(text.out.split())
    for _, _, figure in figure_rows(load_machine(name)):
        assert figure.kind in flat
        assert figure.source.split()[0] in flat


def test_show_as_json_has_what_the_file_has(capsys):
    code, text = run(capsys, "show", "aws-p3", "--json")
    assert code == 0
    duplex = json.loads(text.out)["paths"]["remote"]["duplex_gbytes_per_s"]
    assert duplex == {"value": 16, "source": "COARSE Fig 8a, remote", "kind": "measured"}


def test_an_unknown_name_is_one_line_and_exit_code_2(capsys):
    code, text = run(capsys, "show", "aws-p4")
    assert code == 2
    assert text.err == "coarse machine: no machine is named 'aws-p4'; did you mean aws-p3 or aws-g4dn?\n"


def test_show_here_is_this_machine(capsys):
    code, text = run(capsys, "show", "--here")
    assert code == 0
    assert "cores" in text.out
    code, text = run(capsys, "show", "--here", "--json")
    assert json.loads(text.out)["host"]["cpu"]["num_cores"] == read_host().cpu.num_cores


def test_memory_devices_of_this_machine_are_named(tmp_path):
    from dataclasses import replace

    host = replace(
        read_host(tmp_path),
        numa_nodes=(
            NumaNode(node=0, cores=(0, 1), memory_bytes=8 << 30),
            NumaNode(node=1, cores=(), memory_bytes=64 << 30),
        ),
        dax_devices=(DaxDevice(name="dax0.0", memory_bytes=32 << 30, node=2),),
        gpus=(Gpu(name="NVIDIA H200", memory_bytes=139 << 30, driver="570.1"),),
        gpus_note="",
    )
    rows = dict(host_rows(host))
    assert rows["NUMA node 1"] == "64.0 GiB, no cores: CXL memory"
    assert rows["CXL memory nodes"] == "1"
    assert rows["DAX dax0.0"] == "32.0 GiB, NUMA node 2"
    assert rows["GPU 0"] == "NVIDIA H200, 139.0 GiB, driver 570.1"
    assert "GPUs" not in rows


def test_check_says_what_a_file_is(tmp_path, capsys):
    table = tmp_path / "table.toml"
    table.write_text("[[memory_device]]\nworkers = [0, 1]\n")
    code, text = run(capsys, "check", str(table))
    assert (code, text.out) == (0, f"{table}: a partition table of 2 workers and 1 memory devices\n")


def test_check_names_file_and_line(tmp_path, capsys):
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('description = "x"\n[topology]\nkind = "cpus"\n')
    code, text = run(capsys, "check", str(wrong))
    assert (code, text.out) == (1, "")
    assert text.err == f"coarse machine: {wrong}:3: kind 'cpus' must be one of gpus, expanders\n"
    code, text = run(capsys, "check", str(wrong), "--json")
    assert code == 1
    assert json.loads(text.out)["error"].startswith(f"{wrong}:3:")
