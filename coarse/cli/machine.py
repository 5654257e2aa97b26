"""`coarse machine`: shows the machines that COARSE can emulate, and this machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coarse.cli.display.tables import TABLE_WIDTH
from coarse.machine.catalogue import load_machine, machine_names
from coarse.machine.description import GPUS, KINDS, Figure, Machine
from coarse.machine.partition_table import PartitionTable, partition_table_names

if TYPE_CHECKING:  # slow to import; `coarse --help` must not load these
    from coarse.machine.host import Host

_EXIT_WRONG_FILE, _EXIT_USAGE = 1, 2
_GIB = 1 << 30
_STYLES = {"measured": "green", "announced": "cyan", "recalled": "yellow", "assumed": "red"}

Row = tuple[str, ...]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `machine` to the `coarse` command."""
    parser = subparsers.add_parser(
        "machine", help="show machines to emulate, and this machine", description=__doc__
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="list the machines included in COARSE")
    listing.set_defaults(handler=run_list)
    show = actions.add_parser("show", help="show every figure of a machine, with its source and kind")
    which = show.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "name", nargs="?", metavar="NAME", help="a name from `coarse machine list`, or a path to a TOML file"
    )
    which.add_argument("--here", action="store_true", help="show this machine: cores, memory, devices")
    show.set_defaults(handler=run_show)
    check = actions.add_parser("check", help="check whether a file describes a machine or a partition table")
    check.add_argument("file", type=Path, metavar="FILE")
    check.set_defaults(handler=run_check)
    for action in (listing, show, check):
        action.add_argument("--json", action="store_true", help="print JSON")


def run_list(arguments: argparse.Namespace) -> int:
    """Prints all machines; returns 0."""
    machines = [load_machine(name) for name in machine_names()]
    if arguments.json:
        print(json.dumps([machine_summary(machine) for machine in machines], indent=2))
        return 0
    rows = [(machine.name, _devices(machine), _kinds(machine), machine.description) for machine in machines]
    _print_table("Machines", ("name", "devices", "figures", "description"), rows)
    print(f"Partition tables: {', '.join(partition_table_names())}")
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    """Prints one machine, or this machine; returns 2 if the name is unknown."""
    if arguments.here:
        from rich.markup import escape

        from coarse.machine.host import read_host

        host = read_host()
        if arguments.json:
            print(json.dumps({"kind": "measured", "host": asdict(host)}, indent=2))
        else:
            rows = [(what, escape(value)) for what, value in host_rows(host)]
            _print_table("This machine", ("what", "value"), rows)
        return 0
    try:
        machine = load_machine(arguments.name)
    except ValueError as error:
        return _fail(error, _EXIT_USAGE)
    if arguments.json:
        print(json.dumps(asdict(machine), indent=2))
    else:
        _print_machine(machine)
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    """Checks a file; if it is wrong, prints the place and returns 1."""
    try:
        found = check_file(arguments.file)
    except ValueError as error:
        if arguments.json:
            print(json.dumps({"file": str(arguments.file), "ok": False, "error": str(error)}, indent=2))
        else:
            _fail(error, _EXIT_WRONG_FILE)
        return _EXIT_WRONG_FILE
    if arguments.json:
        print(json.dumps({"file": str(arguments.file), "ok": True, "found": found}, indent=2))
    else:
        print(f"{arguments.file}: {found}")
    return 0


def check_file(path: Path) -> str:
    """A description of a file's content.

    Raises:
        ValueError: If the file describes neither a machine nor a partition table; the message names file and line.
    """
    from coarse.machine.machine_file import read_machine
    from coarse.machine.toml_lines import read_toml

    if "memory_device" in read_toml(path).values:
        table = PartitionTable.load(path)
        return f"a partition table of {table.num_workers} workers and {table.num_devices} memory devices"
    machine = read_machine(path)
    return f"a machine of {_devices(machine)}; figures: {_kinds(machine)}"


def machine_summary(machine: Machine) -> dict[str, Any]:
    """Name, description, devices and the number of figures of each kind."""
    return {
        "name": machine.name,
        "description": machine.description,
        "devices": _devices(machine),
        "figures": _count_kinds(machine),
    }


def figure_rows(machine: Machine) -> Iterator[tuple[str, str, Figure]]:
    """All figures of a machine: owner, text with unit, and the figure."""
    for link in machine.links:
        where = f"link {link.name} ({link.scope})"
        yield from _bandwidth_rows(where, link.gbytes_per_s, link.duplex_gbytes_per_s, link.read_gbytes_per_s)
    for name, path in machine.paths.items():
        where = f"path {name}" + (f" (over {', '.join(path.over)})" if path.over else "")
        yield where, "latency, us", path.latency_us
        yield from _bandwidth_rows(where, path.gbytes_per_s, path.duplex_gbytes_per_s)
    for direct in machine.direct_links:
        where = f"direct link {direct.between[0]} - {direct.between[1]}"
        yield where, "latency, us", direct.path.latency_us
        yield from _bandwidth_rows(where, direct.path.gbytes_per_s, direct.path.duplex_gbytes_per_s)
    if (network := machine.network) is not None:
        where = "network" + (f" (over {', '.join(network.over)})" if network.over else "")
        yield where, "latency, us", network.latency_us
        yield from _bandwidth_rows(where, network.gbytes_per_s, None)
    if (power := machine.power) is not None:
        yield "power of a worker", "W", power.worker_watt
        yield "power of a memory device", "W", power.device_watt


def _bandwidth_rows(
    where: str, one_way: Figure | None, duplex: Figure | None, read: Figure | None = None
) -> Iterator[tuple[str, str, Figure]]:
    if one_way is not None:
        yield where, "one direction, GB/s" if read is None else "write, GB/s", one_way
    if read is not None:
        yield where, "read, GB/s", read
    if duplex is not None:
        yield where, "both together, GB/s", duplex


def host_rows(host: Host) -> Iterator[Row]:
    """The rows of `coarse machine show --here`: cores, memory, NUMA nodes, DAX devices, GPUs."""
    cpu, memory = host.cpu, host.memory
    yield "processor", cpu.model or "unknown"
    yield "cores", f"{cpu.num_cores}, of which {cpu.num_cores_granted} for this process"
    yield (
        "memory",
        f"{memory.total_bytes / _GIB:.1f} GiB, of which {memory.available_bytes / _GIB:.1f} available",
    )
    for node in host.numa_nodes:
        place = "no cores: CXL memory" if node in host.cxl_nodes else f"{len(node.cores)} cores"
        yield f"NUMA node {node.node}", f"{node.memory_bytes / _GIB:.1f} GiB, {place}"
    yield "CXL memory nodes", ", ".join(str(node.node) for node in host.cxl_nodes) or "none"
    for device in host.dax_devices:
        node_text = "" if device.node is None else f", NUMA node {device.node}"
        yield f"DAX {device.name}", f"{device.memory_bytes / _GIB:.1f} GiB{node_text}"
    if not host.dax_devices:
        yield "DAX devices", "none"
    for index, gpu in enumerate(host.gpus):
        yield f"GPU {index}", f"{gpu.name}, {gpu.memory_bytes / _GIB:.1f} GiB, driver {gpu.driver}"
    if not host.gpus:
        yield "GPUs", host.gpus_note or "none"


def _devices(machine: Machine) -> str:
    topology = machine.topology
    return f"{topology.num_gpus} {topology.gpu}" if topology.kind == GPUS else "any number of expanders"


def _count_kinds(machine: Machine) -> dict[str, int]:
    kinds = [figure.kind for _, _, figure in figure_rows(machine)]
    return {kind: kinds.count(kind) for kind in KINDS if kind in kinds}


def _kinds(machine: Machine) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in _count_kinds(machine).items())


def _print_machine(machine: Machine) -> None:
    print(f"{machine.name}: {machine.description}")
    print("What runs on it is emulated: the real runtime, paced to these figures. G is 1e9, B is a byte.")
    topology = machine.topology
    for number, switches in enumerate(topology.sockets):
        under = "; ".join(
            f"switch {switch}: GPUs {_listed(topology.switches[switch])}" for switch in switches
        )
        print(f"  socket {number}: {under}")
    from rich.markup import escape

    rows = [
        (where, what, f"{figure.value:g}", f"[{_STYLES[figure.kind]}]{figure.kind}[/]", escape(figure.source))
        for where, what, figure in figure_rows(machine)
    ]
    _print_table("", ("where", "what", "value", "kind", "source"), rows)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)


def _print_table(title: str, columns: Row, rows: Sequence[Row]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:  # avoids truncated tables in files
        console.width = TABLE_WIDTH
    drawn = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        drawn.add_column(
            column, justify="right" if column in ("value",) and len(columns) > 2 else "left", overflow="fold"
        )
    for row in rows:
        drawn.add_row(*row)
    console.print(drawn)


def _fail(error: ValueError, code: int) -> int:
    print(f"coarse machine: {error}", file=sys.stderr)
    return code
