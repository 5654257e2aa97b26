"""`coarse plan`: plans routes, shard size and dual synchronisation from a profile, with reasons."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coarse.cli.arguments import file_to_write
from coarse.cli.display.tables import format_size, print_table
from coarse.machine.wiring import link_table
from coarse.settings import Settings

if TYPE_CHECKING:  # slow to import; `coarse --help` must not load these
    from coarse.bench.replay.trace import ComputeTrace
    from coarse.cli.simulated.what_if import Here
    from coarse.machine.description import Machine
    from coarse.machine.partition_table import PartitionTable
    from coarse.profiler.curve import Curve
    from coarse.profiler.direct_allreduce import Collectives
    from coarse.profiler.dual_sync import DualSyncPlan, SyncCosts
    from coarse.profiler.partition import ShardRange
    from coarse.profiler.profile import Profile
    from coarse.profiler.routing import RoutingTable
    from coarse.profiler.shard_size import ShardSize

_EXIT_FAILED, _EXIT_USAGE = 1, 2
_CACHED = "cached"
_MODELS = (
    *("bert-large", "bert-base", "bert-small", "gpt2-medium"),
    *("alexnet", "vgg16", "resnet50", "resnet152"),
)
_DEFAULT_ENDPOINTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """The input of planning.

    Args:
        profile: The machine's profile.
        origin: The source of the profile, in words.
        tables: The routing table of each worker.
        size: The shard size.
        costs: Costs of synchronising a byte.
        collectives: The workers' own all-reduce, if all links are known; None for a measured profile.
    """

    profile: Profile
    origin: str
    tables: tuple[RoutingTable, ...]
    size: ShardSize
    costs: SyncCosts
    collectives: Collectives | None = None


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `plan` to the `coarse` command."""
    parser = subparsers.add_parser(
        "plan",
        help="routes, shard size and dual synchronisation, with reasons",
        description="Plans from a measured profile, or from the links of a machine (simulated).",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--profile",
        default=_CACHED,
        metavar="FILE",
        help='a file written by `coarse profile --json`, or "cached" (default): the last profile of this machine',
    )
    source.add_argument(
        "--machine", metavar="NAME", help="a name from `coarse machine list`, or a path to a TOML file"
    )
    parser.add_argument(
        "--partition-table",
        default="",
        metavar="NAME",
        help="roles of the devices of --machine; default: the paper's, or half of the devices",
    )
    parser.add_argument(
        "--model",
        choices=_MODELS,
        metavar="MODEL",
        help=f"plan dual synchronisation for this model: {', '.join(_MODELS)}",
    )
    parser.add_argument(
        "--tflops",
        type=float,
        metavar="X",
        help="speed of a worker, in 1e12 operations a second (with --what-if: of a worker there); default: half of "
        "the peak of the machine's GPU, or the recorded times of the model",
    )
    parser.add_argument(
        "--dual-sync", default="auto", metavar="MODE", help='"off", "auto" or a size such as 64MiB'
    )
    parser.add_argument(
        "--show-routing", action="store_true", help="also show the times behind each worker's table"
    )
    parser.add_argument(
        "--what-if",
        metavar="MACHINE",
        help="instead of a plan: a step of --model on MACHINE (as for `coarse simulate`), simulated, with its "
        "uncertainty, compared with this machine",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="workers on MACHINE of --what-if; default: as many as here"
    )
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write the plan to FILE")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs `coarse plan`; returns its exit code.

    Raises:
        ProfileError: If there is no profile, or it cannot be used.
    """
    from coarse.profiler.dual_sync import parse_mode

    try:
        mode = parse_mode(arguments.dual_sync)
        if arguments.what_if is not None:
            return _run_what_if(arguments, mode)
        if arguments.workers is not None:
            raise ValueError("--workers needs --what-if")
        basis = plan_machine(arguments.machine, arguments.partition_table) if arguments.machine else None
        if basis is None and arguments.partition_table:
            raise ValueError("--partition-table needs --machine: a profile has its own")
        basis = basis or plan_profile(arguments.profile)
        trace = _trace(arguments.model, arguments.tflops, arguments.machine)
        split = plan_model(basis, trace, mode) if trace is not None else None
    except ValueError as error:
        print(f"coarse plan: {error}", file=sys.stderr)
        return _EXIT_USAGE
    _print_plan(basis, trace, split, show_times=arguments.show_routing)
    return _write_json(arguments.json, plan_as_json(basis, trace, split))


def _write_json(path: Path | None, document: Mapping[str, Any]) -> int:
    """Writes a document, if there is a path; returns the exit code."""
    if path is None:
        return 0
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"coarse plan: --json {path}: {error.strerror}", file=sys.stderr)
        return _EXIT_FAILED
    return 0


def _run_what_if(arguments: argparse.Namespace, mode: str | int) -> int:
    """Answers --what-if.

    Raises:
        ProfileError: If the named profile cannot be used.
        ValueError: If the question is incomplete or impossible.
    """
    from coarse.cli.simulated.what_if import answer, answer_as_json, print_answer

    if arguments.model is None:
        raise ValueError(f"--what-if needs --model: {', '.join(_MODELS)}")
    here = _here(arguments, mode)
    num_workers = here.num_workers if here is not None and arguments.workers is None else arguments.workers
    if num_workers is None:
        raise ValueError("no profile of this machine is cached, so --what-if needs --workers")
    found = answer(arguments.what_if, num_workers, arguments.model, arguments.tflops, here)
    print_answer(found)
    return _write_json(arguments.json, answer_as_json(found))


def _here(arguments: argparse.Namespace, mode: str | int) -> Here | None:
    """The user's machine, from a profile or --machine; None if no profile is cached."""
    from coarse.cli.simulated.what_if import Here
    from coarse.errors import ProfileError

    try:
        basis = (
            plan_machine(arguments.machine, arguments.partition_table)
            if arguments.machine
            else plan_profile(arguments.profile)
        )
    except ProfileError:
        if arguments.profile != _CACHED:
            raise
        return None
    trace = _trace(arguments.model, None, arguments.machine)
    assert trace is not None
    key = basis.profile.key
    return Here(
        machine=key.machine,
        num_workers=key.num_workers,
        kind=basis.profile.kind,
        step_s=plan_model(basis, trace, mode).predicted_s,
        trace=trace,
    )


def plan_profile(name: str) -> Basis:
    """Plans from a profile.

    Args:
        name: Name of its file, or "cached".

    Raises:
        ProfileError: If there is no such profile, or it cannot be used.
    """
    from coarse.errors import ProfileError
    from coarse.machine.host import read_host
    from coarse.profiler.profile import Profile, current_versions, host_key, newest_cached

    path = newest_cached(host_key(read_host()), current_versions()) if name == _CACHED else Path(name)
    if path is None:
        raise ProfileError(
            "no profile of this machine is cached. Measure one with `coarse profile`, name a file with --profile, "
            "or plan for another machine with --machine."
        )
    return basis_of(Profile.load(path), str(path))


def basis_of(profile: Profile, origin: str) -> Basis:
    """Plans from a profile; `origin` names its source."""
    from coarse.profiler.dual_sync import SyncCosts
    from coarse.profiler.routing import plan_routing
    from coarse.profiler.shard_size import plan_shard_size

    tables = plan_routing(profile)
    size = plan_shard_size(profile, tables)
    return Basis(
        profile=profile,
        origin=origin,
        tables=tables,
        size=size,
        costs=SyncCosts.of_profile(profile, tables, shard_bytes=size.nbytes),
    )


def plan_machine(name: str, partition_table: str = "") -> Basis:
    """Plans from the links of a machine.

    Args:
        name: Name of the machine, or a path to its file.
        partition_table: Name or path; "" for the paper's if it has one, otherwise half of the devices.

    Raises:
        ValueError: If the machine or table does not exist, or they do not fit together.
    """
    from coarse.machine.catalogue import load_machine
    from coarse.profiler.linked import collectives_from_links, profile_from_links, sync_costs_from_links
    from coarse.profiler.routing import plan_routing
    from coarse.profiler.shard_size import plan_shard_size

    machine = load_machine(name)
    table = _partition_table(machine, partition_table)
    links = link_table(machine, table)
    profile = profile_from_links(links, [table.local_device(worker) for worker in range(table.num_workers)])
    tables = plan_routing(profile)
    return Basis(
        profile=profile,
        origin=f"links of {machine.name}",
        tables=tables,
        size=plan_shard_size(profile, tables),
        costs=sync_costs_from_links(links, tables),
        collectives=collectives_from_links(links),
    )


def plan_model(basis: Basis, trace: ComputeTrace, mode: str | int) -> DualSyncPlan:
    """Splits a model's gradients between memory devices and workers."""
    from coarse.profiler.dual_sync import DualSyncInputs, plan_dual_sync

    shards = _shards(basis, trace)
    inputs = DualSyncInputs(
        tensor_bytes=tuple(4 * shard.num_elements for shard in shards),
        forward_s=trace.forward_s,
        backward_s=trace.backward_s,
        costs=basis.costs,
        ready_s=tuple(trace.events[shard.tensor].ready * trace.backward_s for shard in shards),
    )
    return plan_dual_sync(inputs, mode=mode)


def _shards(basis: Basis, trace: ComputeTrace) -> tuple[ShardRange, ...]:
    """The shards of a model's float32 gradients, in the order of their readiness."""
    from coarse.profiler.partition import plan_partition

    return plan_partition(
        trace.specs(),
        shard_bytes=basis.size.nbytes,
        gather_bytes=Settings().gather_bytes,
        algorithm="auto" if basis.collectives is None else "exchange",  # as on emulated links
    ).shards


def all_to_all_from_bytes(basis: Basis) -> float | None:
    """Tensor size from which the workers' own all-reduce is predicted to be faster as all-to-all.

    Below this size, all-gather is faster. None if it always is: with one worker or two. The prediction uses all links
    at once if they are known; otherwise pairs of workers, which were measured alone and do not show shared links.
    """
    from coarse.profiler.direct_allreduce import ALL_GATHER, ALL_TO_ALL
    from coarse.profiler.profile import WORKERS
    from coarse.profiler.switchover import predict_all_to_all_crossing, predict_crossing, slowest_path

    if basis.collectives is not None:
        return predict_crossing(basis.collectives[ALL_GATHER], basis.collectives[ALL_TO_ALL])
    profile = basis.profile
    fits = [curve.fit() for path, curve in profile.curves.items() if path.kind == WORKERS]
    return predict_all_to_all_crossing(slowest_path(fits), profile.key.num_workers) if fits else None


def plan_as_json(basis: Basis, trace: ComputeTrace | None, split: DualSyncPlan | None) -> dict[str, Any]:
    """The whole plan as JSON values."""
    document: dict[str, Any] = {
        "kind": basis.profile.kind,
        "machine": basis.profile.key.machine,
        "origin": basis.origin,
        "routing": [
            {"worker": worker, "local_device": local, **asdict(table)}
            for worker, (local, table) in enumerate(
                zip(basis.profile.key.local_devices, basis.tables, strict=True)
            )
        ],
        "shard_size": asdict(basis.size),
        "sync_costs": asdict(basis.costs),
        "workers_all_to_all_from_bytes": all_to_all_from_bytes(basis),
    }
    if basis.profile.is_of_this_machine:
        document["session"] = session_decisions(basis)
    if trace is not None and split is not None:
        document["dual_sync"] = {
            "model": trace.model,
            "forward_s": trace.forward_s,
            "backward_s": trace.backward_s,
            "times": trace.source,
            "num_tensors": len(trace.events),
            "num_shards": len(_shards(basis, trace)),
            "total_bytes": trace.nbytes,
            **asdict(split),
            "num_offloaded": split.num_offloaded,
            "offloaded": _offloaded_bytes(basis, trace, split),
        }
    return document


def _offloaded_bytes(basis: Basis, trace: ComputeTrace, split: DualSyncPlan) -> dict[str, int]:
    """Number of bytes of each tensor that go to the memory devices."""
    shards, offloaded = _shards(basis, trace), dict[str, int]()
    for position in sorted(split.offloaded):
        name = trace.events[shards[position].tensor].name
        offloaded[name] = offloaded.get(name, 0) + 4 * shards[position].num_elements
    return offloaded


def _partition_table(machine: Machine, name: str) -> PartitionTable:
    from coarse.machine.partition_table import PartitionTable, partition_table_names

    if not name and machine.name in partition_table_names():
        name = machine.name
    if name:
        return PartitionTable.load(name)
    half = machine.topology.num_gpus // 2 or _DEFAULT_ENDPOINTS
    return PartitionTable.even(num_workers=half, num_devices=half)


def _trace(model: str | None, tflops: float | None, machine: str | None) -> ComputeTrace | None:
    """The model's times on the requested processor."""
    from coarse.bench.replay.trace import check_tflops, load_trace, place_trace
    from coarse.machine.catalogue import load_machine

    if tflops is not None:
        check_tflops(tflops)
    if model is None:
        return None
    gpu = load_machine(machine).topology.gpu if machine else ""
    return place_trace(load_trace(model), gpu=gpu, tflops=tflops)


# ---- tables ----


def _print_plan(
    basis: Basis, trace: ComputeTrace | None, split: DualSyncPlan | None, *, show_times: bool
) -> None:
    key = basis.profile.key
    print(
        f"{key.machine}: {key.num_workers} workers, {key.num_devices} memory devices; "
        f"{basis.profile.kind}, from {basis.origin}"
    )
    print_routing(basis)
    if show_times:
        for worker in range(key.num_workers):
            _print_times(basis, worker)
    print_shard_size(basis.size)
    _print_worker_path(basis)
    if basis.profile.is_of_this_machine:
        _print_session(basis)
    if trace is not None and split is not None:
        _print_split(trace, split, len(_shards(basis, trace)))


def print_routing(basis: Basis) -> None:
    """Prints each worker's routing table with its reasons."""
    key = basis.profile.key
    rows = [
        (f"w{worker}", f"md{local}", f"md{table.lat_proxy}", f"md{table.bw_proxy}", _threshold(table), why)
        for worker, (local, table) in enumerate(zip(key.local_devices, basis.tables, strict=True))
        for why in ["\n".join(table.reasons)]
    ]
    print_table("Routing", ("worker", "local", "LatProxy", "BwProxy", "from bytes", "reasons"), rows)


def print_shard_size(size: ShardSize) -> None:
    """Prints S' and its reason."""
    print_table("Shards", ("at least", "why"), [(format_size(size.nbytes), size.reason)])


def _print_worker_path(basis: Basis) -> None:
    crossing = all_to_all_from_bytes(basis)
    if crossing is not None:
        why = "alpha beta N / ((N-1)(N-2)) of the slowest path between workers, measured in pairs; predicted"
        if basis.collectives is not None:
            why = "where both take equally long over all links at once, predicted"
        row = (format_size(round(crossing)), why)
        print_table("Workers' own all-reduce: all-gather, and all-to-all", ("from", "why"), [row])


def _print_session(basis: Basis) -> None:
    """Prints the decisions of sessions for a profile of host memory, where no link transfers shards."""
    title = f"A session goes by (COARSE_ROUTING={Settings.from_environment().routing})"
    print_table(title, ("decision",), [(line,) for line in session_decisions(basis)])


def session_decisions(basis: Basis) -> tuple[str, ...]:
    """Decisions of a session with this environment's settings and the same profile, with reasons, one per line."""
    from coarse.profiler.link_plan import plan_links

    profile, settings = basis.profile, Settings.from_environment()
    plan = plan_links(profile, basis.origin, local_devices=profile.key.local_devices, settings=settings)
    return plan.decisions[1:]


def _print_times(basis: Basis, worker: int) -> None:
    """Prints a worker's time by size and proxy, both directions at once, with the spread of its repeats."""
    curves = basis.profile.both_at_once(worker)
    table = basis.tables[worker]
    sizes = sorted({point.nbytes for curve in curves.values() for point in curve.points})
    rows = [
        (
            format_size(nbytes),
            *(_time_and_spread(curve, nbytes) for curve in curves.values()),
            f"md{table.route(nbytes)}",
        )
        for nbytes in sizes
    ]
    columns = ("bytes each way", *(f"md{device}, us (spread)" for device in curves), "route")
    print_table(f"Worker {worker}: push and pull at once", columns, rows)


def _time_and_spread(curve: Curve, nbytes: int) -> str:
    """The time in us, and its spread if repeats differed."""
    spread_us = next((point.spread_us for point in curve.points if point.nbytes == nbytes), 0.0)
    return f"{curve.time_us(nbytes):.1f}" + (f" ({spread_us:.1f})" if spread_us else "")


def _print_split(trace: ComputeTrace, split: DualSyncPlan, num_shards: int) -> None:
    rows = [
        (
            "forward, backward",
            f"{trace.forward_s * 1e3:.1f} ms, {trace.backward_s * 1e3:.1f} ms",
            trace.source,
        ),
        (
            "memory devices",
            f"{split.num_offloaded} of {num_shards} shards, {format_size(split.m_bytes)} of "
            f"{format_size(trace.nbytes)}",
            f"the formula's m is {format_size(round(split.optimum_bytes))}",
        ),
        ("step, this plan", f"{split.predicted_s * 1e3:.1f} ms", split.reason),
        ("step, memory devices alone", f"{split.devices_only_s * 1e3:.1f} ms", "m = n"),
        (
            "step, workers alone",
            f"{split.workers_only_s * 1e3:.1f} ms",
            "all-reduce that overlaps with backward at its best",
        ),
    ]
    print_table(f"Dual synchronisation of {trace.model}", ("what", "value", "why"), rows)


def _threshold(table: RoutingTable) -> str:
    return str(table.threshold_bytes) if table.lat_proxy != table.bw_proxy else "all"
