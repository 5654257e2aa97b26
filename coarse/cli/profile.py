"""`coarse profile`: measures the links between workers and memory devices, and shows, draws and keeps the results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from coarse.cli.arguments import file_of_new_folder, folder_to_write, num_workers

if TYPE_CHECKING:  # slow to import; `coarse --help` must not load these
    from coarse.cli.plan import Basis
    from coarse.emulation.machine import Emulation
    from coarse.machine.memory_name import MemoryName
    from coarse.machine.partition_table import PartitionTable
    from coarse.profiler.curve import Curve
    from coarse.profiler.profile import Profile, ProfileKey

_DEFAULT_WORKERS = 2
_DEFAULT_BUDGET_S = 2.5
_DEFAULT_DILATION = 20.0
_EXIT_FAILED, _EXIT_USAGE = 1, 2
_NOT_OF_GPUS = (
    "workers",
    "memory_devices",
    "partition_table",
    "machine",
    "time_dilation",
    "refresh",
    "figures",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The session to measure.

    Args:
        table: The workers that each memory device serves.
        emulation: Emulation of another machine's links; None for this machine's links.
        flags: Flags of `coarse run` for such a session.
    """

    table: PartitionTable
    emulation: Emulation | None
    flags: tuple[str, ...]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `profile` to the `coarse` command."""
    parser = subparsers.add_parser(
        "profile",
        help="measure the links between workers and memory devices",
        description="Measures latency and bandwidth of every path between workers and memory devices by size, and "
        "plans from them. The result is kept, and sessions with the same numbers of workers and memory devices use "
        "it.",
    )
    parser.add_argument(
        "--workers", type=num_workers, metavar="N", help="default: the partition table's, or 2"
    )
    parser.add_argument(
        "--memory-devices",
        metavar="K",
        help="number of memory devices, or the memory of each; default: $COARSE_MEMORY_DEVICES, or one per worker",
    )
    parser.add_argument(
        "--partition-table",
        metavar="NAME",
        help="assigns workers to memory devices; default: $COARSE_PARTITION_TABLE, the paper's for --machine, or an "
        "even one",
    )
    parser.add_argument(
        "--machine",
        metavar="NAME",
        help="emulate the links of this machine: a name from `coarse machine list` or a TOML file; default: "
        "$COARSE_MACHINE",
    )
    parser.add_argument(
        "--time-dilation",
        type=float,
        metavar="X",
        help="factor by which emulated links are slower than the machine's; a session uses profiles with the same "
        f"factor; default: $COARSE_TIME_DILATION, or {_DEFAULT_DILATION:g}",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=_DEFAULT_BUDGET_S,
        metavar="S",
        help="time limit for measuring in seconds; each path is measured at least once; default: %(default)s",
    )
    parser.add_argument(
        "--gpus",
        action="store_true",
        help="measure the links of this machine's GPUs instead, and show their topology; combines only with --json",
    )
    parser.add_argument("--refresh", action="store_true", help="measure even if a kept result exists")
    parser.add_argument(
        "--json",
        type=file_of_new_folder,
        metavar="FILE",
        help="write the profile, for `coarse plan`; with --gpus, write the figures of all copies",
    )
    parser.add_argument(
        "--figures", type=folder_to_write, metavar="DIR", help="draw figures into DIR, as PNG and SVG"
    )
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs `coarse profile`; returns its exit code.

    Raises:
        CoarseError: If measuring fails; nothing is left behind.
    """
    from coarse.cli.measurement.link_measurement import RefusedError
    from coarse.cli.plan import basis_of

    if arguments.gpus:
        return _profile_gpus(arguments)
    if arguments.figures is not None and find_spec("matplotlib") is None:
        print("coarse profile: --figures needs matplotlib: pip install 'coarse-train[plot]'", file=sys.stderr)
        return _EXIT_USAGE
    try:
        scope = _scope(arguments)
        if not 0 <= arguments.budget < float("inf"):
            raise ValueError(f"--budget {arguments.budget} must be at least 0")
    except (OSError, ValueError) as error:
        print(f"coarse profile: {error}", file=sys.stderr)
        return _EXIT_USAGE
    try:
        profile, origin = _obtain(arguments, scope)
    except RefusedError as error:
        print(f"coarse profile: {error}", file=sys.stderr)
        return _EXIT_USAGE
    basis = basis_of(profile, origin)
    print_profile(basis)
    print_memory_only_nodes()
    place = arguments.json  # a failed write does not name its file
    try:
        if arguments.json is not None:
            profile.save(arguments.json)
        place = arguments.figures
        if arguments.figures is not None:
            for file in draw_figures(basis, arguments.figures):
                print(file)
    except OSError as error:
        print(f"coarse profile: {error.filename or place}: {error.strerror}", file=sys.stderr)
        return _EXIT_FAILED
    return 0


def _profile_gpus(arguments: argparse.Namespace) -> int:
    from coarse.cli.measurement import gpu_profile

    given = [f"--{name.replace('_', '-')}" for name in _NOT_OF_GPUS if getattr(arguments, name)]
    if given:
        print(
            "coarse profile: --gpus measures all GPUs of this machine, and cannot be combined with "
            f"{', '.join(given)}",
            file=sys.stderr,
        )
        return _EXIT_USAGE
    return gpu_profile.run(arguments.json)


def print_profile(basis: Basis) -> None:
    """Prints all figures of a profile, and the resulting plan."""
    from coarse.bench.provenance import BenchMachine
    from coarse.cli.display.tables import print_table
    from coarse.cli.plan import print_routing, print_shard_size
    from coarse.profiler.profile import BOTH

    profile, key = basis.profile, basis.profile.key
    print(
        f"{key.machine}: {key.num_workers} workers, {key.num_devices} memory devices; {profile.kind} on "
        f"{BenchMachine.here()}; {basis.origin}"
    )
    columns = ("", *(f"md{device}" for device in range(key.num_devices)))
    print_table(
        "Highest bandwidth, GB/s: push / pull / both at once, together",
        columns,
        _matrix(profile, lambda kind, curve: curve.peak_gbytes_per_s * (2 if kind == BOTH else 1)),
    )
    smallest = next(iter(profile.curves.values())).points[0].nbytes
    print_table(
        f"Time of {smallest} bytes, us: push / pull / both at once",
        columns,
        _matrix(profile, lambda kind, curve: curve.latency_us),
    )
    print_table(
        "Fit: time = alpha + bytes / beta",
        ("path", "alpha, us", "beta, GB/s", "error", "highest, GB/s", "repeats"),
        _fits(profile),
    )
    print_routing(basis)
    print_shard_size(basis.size)


def print_memory_only_nodes() -> None:
    """Prints NUMA nodes with memory and no cores, which memory devices could own."""
    from coarse.cli.doctor import numa_findings
    from coarse.machine.host import read_numa_nodes

    nodes = [node for node in read_numa_nodes() if node.is_memory_only]
    for finding in numa_findings(nodes) if nodes else ():
        print(f"NUMA {finding.name}: {finding.value}")


def draw_figures(basis: Basis, folder: Path) -> list[Path]:
    """Draws the paper's Figures 8, 14 and 15 of a profile; returns the files.

    Raises:
        OSError: If they cannot be written.
    """
    from coarse.profiler.figures import draw_bandwidth_matrix, draw_by_size, draw_normalised, save_figure

    profile = basis.profile
    figures = {"bandwidth-matrix": draw_bandwidth_matrix(profile)}
    for worker, table in enumerate(basis.tables):
        figures[f"by-size-w{worker}"] = draw_by_size(
            profile, worker=worker, table=table, shard_bytes=basis.size.nbytes
        )
        if profile.key.num_devices > 1:
            figures[f"remote-to-local-w{worker}"] = draw_normalised([profile], [table], worker=worker)
    return [file for name, figure in figures.items() for file in save_figure(figure, folder / name)]


def _scope(arguments: argparse.Namespace) -> Scope:
    """The scope from the command line and the environment.

    Raises:
        ValueError: If they are inconsistent.
    """
    from coarse.emulation.machine import choose_emulation
    from coarse.machine.partition_table import PartitionTable, choose_partition_table
    from coarse.settings import Settings

    settings = Settings.from_environment()
    machine = settings.machine if arguments.machine is None else arguments.machine
    dilation = arguments.time_dilation
    if dilation is None:
        dilation = settings.time_dilation if settings.machine else _DEFAULT_DILATION
    elif not machine:
        raise ValueError("--time-dilation needs --machine: only emulated time dilates")
    if arguments.partition_table and arguments.memory_devices:
        raise ValueError(
            "--memory-devices cannot be combined with --partition-table, which already defines the memory devices"
        )
    is_open = arguments.workers is None and arguments.memory_devices is None
    name = arguments.partition_table or ("" if arguments.memory_devices else settings.partition_table)
    if not name and machine and is_open:
        name = _table_of_machine(machine)
    num_workers = arguments.workers
    if num_workers is None:
        num_workers = PartitionTable.load(name).num_workers if name else _DEFAULT_WORKERS
    devices = settings.memory_devices
    if arguments.memory_devices is not None:
        devices = _memory_devices(arguments.memory_devices)
    if num_workers < 2:
        raise ValueError(
            f"--workers {num_workers}: links are between workers and memory devices of 2 workers or more"
        )
    table = choose_partition_table(name, num_workers=num_workers, devices=devices)
    if table.is_on_gpus and not machine:
        raise ValueError("links to the memory of GPUs are measured by `coarse profile --gpus`")
    if not name and not machine:
        from coarse.startup.nearest_gpus import pair_with_nearest

        table = pair_with_nearest(table)  # as sessions do
    flags = ["--partition-table", name] if name else ["--memory-devices", ",".join(table.memories)]
    if machine:
        flags += ["--machine", machine, "--time-dilation", repr(dilation)]
    emulation = choose_emulation(machine, table, time_dilation=dilation)
    return Scope(table=table, emulation=emulation, flags=tuple(flags))


def _memory_devices(text: str) -> int | tuple[MemoryName, ...]:
    from coarse.machine.memory_name import parse_memory_devices

    devices = parse_memory_devices(text)
    num_devices = devices if isinstance(devices, int) else len(devices)
    if not 0 <= num_devices <= 64:
        raise ValueError(f"--memory-devices {text} is out of range: it must be between 0 and 64")
    return devices


def _table_of_machine(machine: str) -> str:
    from coarse.machine.partition_table import partition_table_names

    return machine if machine in partition_table_names() else ""


def _obtain(arguments: argparse.Namespace, scope: Scope) -> tuple[Profile, str]:
    """Returns a profile and its source: the kept one, or a new one if it is missing, damaged or must be refreshed."""
    from coarse.machine.host import read_host
    from coarse.profiler.profile import cache_path, host_key, profile_key

    key = profile_key(scope.table, host_key(read_host()), scope.emulation)
    if not arguments.refresh:
        kept = _kept(key)
        if kept is not None:
            return kept, f"kept in {cache_path(key)}; --refresh measures anew"
    profile = _measure(scope, arguments.budget)
    path = cache_path(profile.key)
    try:
        profile.save(path)
    except OSError as error:
        print(f"coarse profile: cannot keep the result in {path}: {error.strerror}", file=sys.stderr)
        return profile, "just now"
    return profile, f"just now, kept in {path}"


def _kept(key: ProfileKey) -> Profile | None:
    from coarse.errors import ProfileError
    from coarse.profiler.profile import load_cached

    try:
        return load_cached(key)
    except ProfileError as error:
        print(f"coarse profile: measuring anew: {error}", file=sys.stderr)
        return None


def _measure(scope: Scope, budget_s: float) -> Profile:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from coarse.cli.measurement.link_measurement import MeasurementJob

    job = MeasurementJob(num_workers=scope.table.num_workers, flags=scope.flags, budget_s=budget_s)
    columns = (TextColumn("measuring links"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as bar:
        task = bar.add_task("", total=1.0)
        return job.run(lambda done: bar.update(task, completed=done))


def _matrix(profile: Profile, value: Callable[[str, Curve], float]) -> Iterator[tuple[str, ...]]:
    """A row for each worker, with a cell of three figures for each memory device."""
    from coarse.profiler.profile import BOTH, PULL, PUSH

    key = profile.key
    for worker in range(key.num_workers):
        cells = [
            " / ".join(
                f"{value(kind, profile.curve(kind, worker, device)):.3g}" for kind in (PUSH, PULL, BOTH)
            )
            + (" (local)" if device == key.local_devices[worker] else "")
            for device in range(key.num_devices)
        ]
        yield (f"w{worker}", *cells)


def _fits(profile: Profile) -> Iterator[tuple[str, ...]]:
    for path, curve in profile.curves.items():
        fit = curve.fit()
        yield (
            str(path),
            f"{fit.alpha_us:.1f}",
            f"{fit.beta_gbytes_per_s:.3g}",
            f"{fit.relative_error:.0%}",
            f"{curve.peak_gbytes_per_s:.3g}",
            _repeats(curve),
        )


def _repeats(curve: Curve) -> str:
    counts = [point.num_repeats for point in curve.points]
    return f"{min(counts)} to {max(counts)}"
