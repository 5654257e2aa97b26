"""`coarse bench`: compares COARSE with other systems in the same run, and on emulated links of other machines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from coarse.cli.arguments import file_to_write, folder_to_write, num_workers, seconds
from coarse.settings import ALGORITHM_CHOICES, Settings, parse_bytes

if TYPE_CHECKING:  # these import an extra and are slow; `coarse --help` must not load them
    from rich.console import Console

    from coarse.bench.tables import TextTable

_SYNC_PEERS = ("gloo", "mpich", "openmpi", "impi", "ucc", "horovod")
_TRAIN_PEERS = ("ddp", "ddp-tuned", "ddp-default", "none")
_SAVE_PEERS = ("coarse-workers", "torch", "dcp")
_MEMORY_PEERS = ("ddp", "ddp-default", "zero", "fsdp", "coarse-overlap")
_REPLAY_SCHEMES = (
    *("coarse", "offload", "spread", "local", "ring", "direct", "fifo"),
    *("workers", "allreduce", "two-way-ring", "tree"),
)
_ONE_NODE_SCHEMES = ("ring",)
_DENSE_SCHEMES = ("dense", "dense-least")  # a hundred times slower, so only if they are named
_TRACES = (
    *("bert-large", "bert-base", "bert-small", "gpt2-medium"),
    *("alexnet", "vgg16", "resnet50", "resnet152"),
)
_MODELS = (
    *("bert-large", "bert-base", "bert-small", "bert-tiny", "gpt2-medium", "gpt2-large"),
    *("alexnet", "vgg16", "resnet50", "resnet152", "digits"),
)
_MODELS_OF_SIZE = ("bert-large", "bert-base", "bert-small", "gpt2-medium", "gpt2-large", "resnet50")
_DEFAULT_SIZES = "4KiB,64KiB,1MiB,25MiB,100MiB,400MiB"
_EXIT_USAGE = 2
_TABLE_WIDTH = 160

Result = TypeVar("Result")


def add_parser(subparsers: Any) -> None:
    """Adds the `bench` sub-command; its handlers return an exit code."""
    bench = subparsers.add_parser("bench", help="compare COARSE with other systems", description=__doc__)
    benches = bench.add_subparsers(dest="bench", metavar="BENCH", required=True)
    _add_sync_parser(benches)
    _add_train_step_parser(benches)
    _add_replay_parser(benches)
    _add_checkpoint_parser(benches)
    _add_memory_parser(benches)


def _add_sync_parser(benches: Any) -> None:
    parser = benches.add_parser(
        "sync",
        help="all-reduce of one tensor",
        description="Measures the all-reduce of one tensor by size: COARSE with registered and unregistered buffers, "
        "other systems, and the limit: an in-place reduction over shared memory by the same kernels without queues.",
    )
    parser.set_defaults(handler=run_sync_command)
    parser.add_argument("--sizes", type=_sizes, default=_DEFAULT_SIZES, help="default: %(default)s")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64", "int32", "int64"))
    parser.add_argument(
        "--algorithm",
        default="",
        choices=ALGORITHM_CHOICES,
        help="COARSE's algorithm; default: $COARSE_ALGORITHM, or auto",
    )
    parser.add_argument(
        "--memory-devices",
        default="",
        metavar="K",
        help="number of COARSE's memory devices, or the memory of each: host,numa:2; default: "
        "$COARSE_MEMORY_DEVICES",
    )
    parser.add_argument(
        "--budget",
        type=seconds,
        default=2.0,
        metavar="S",
        help="seconds per system and size; default: %(default)s",
    )
    _add_common_arguments(parser, peers=_SYNC_PEERS, default=",".join(_SYNC_PEERS), rounds=3)


def _add_train_step_parser(benches: Any) -> None:
    parser = benches.add_parser(
        "train-step",
        help="a real training step",
        description="Measures a real model's training step under COARSE, torch DDP, and without communication. DDP "
        "is measured with gradients as bucket views (ddp), in addition with one bucket, a static graph and no "
        "broadcast of buffers (ddp-tuned), and with its default settings (ddp-default); ratios are to the fastest "
        "of these.",
    )
    parser.set_defaults(handler=run_train_step_command)
    _add_model(parser, _MODELS, default="bert-base")
    parser.add_argument("--batch", type=int, default=1, help="samples per worker; default: %(default)s")
    parser.add_argument("--seq", type=int, default=32, help="tokens per sample; default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="threads per worker; default: %(default)s")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "sgd"))
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="DEVICE",
        help="device of the models: cpu; cuda: each worker uses the GPU of its rank; cuda:N: all use this GPU",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=0,
        metavar="N",
        help="steps per round; default: as many as fit the budget",
    )
    parser.add_argument(
        "--budget", type=seconds, default=20.0, metavar="S", help="seconds per system; default: %(default)s"
    )
    parser.add_argument(
        "--offload-optimizer",
        action="store_true",
        help="also measure COARSE with the optimizer in the memory devices: coarse-offload updates in "
        "optimizer.step(), coarse-overlap during backward",
    )
    parser.add_argument("--single", action="store_true", help="one worker: measures the overhead of wrapping")
    _add_common_arguments(parser, peers=_TRAIN_PEERS, default="ddp,ddp-tuned,none", rounds=4)


def _add_replay_parser(benches: Any) -> None:
    parser = benches.add_parser(
        "replay",
        help="a training step on another machine's emulated links, with recorded computation times",
        description="Replays a training step on the emulated links of another machine. Workers, memory devices and "
        "all transferred bytes are real; only the computation between pushes is replaced by its recorded time.",
    )
    parser.set_defaults(handler=run_replay_command)
    parser.add_argument(
        "--machine", required=True, metavar="NAME", help="machine to emulate: a name or a TOML file"
    )
    _add_model(parser, _TRACES, default="bert-large")
    parser.add_argument(
        "--schemes",
        type=_names_among((*_REPLAY_SCHEMES, *_DENSE_SCHEMES)),
        metavar="NAMES",
        help=f"default: {','.join(_REPLAY_SCHEMES)}; with --nodes without {','.join(_ONE_NODE_SCHEMES)}",
    )
    parser.add_argument(
        "--time-dilation",
        type=float,
        default=10.0,
        metavar="X",
        help="up to 8 times as much if this machine cannot emulate the links in time; default: %(default)s",
    )
    parser.add_argument(
        "--tflops",
        type=float,
        metavar="T",
        help="1e12 operations/s of a worker; default: half its GPU's peak",
    )
    parser.add_argument(
        "--no-compute", action="store_true", help="make all gradients ready at once: measures bandwidth"
    )
    parser.add_argument("--workers", type=num_workers, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--nodes",
        type=int,
        default=1,
        metavar="N",
        help="emulated nodes, among which the workers are divided; default: %(default)s",
    )
    parser.add_argument(
        "--memory-devices", type=int, default=0, metavar="K", help="of each node; default: one per worker"
    )
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="per round; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="append one record a line to FILE")


def _add_checkpoint_parser(benches: Any) -> None:
    parser = benches.add_parser(
        "checkpoint",
        help="the cost of checkpoints for running training",
        description="Measures saves of a real training loop, including the first save and the steps after the last "
        "one: the time that each save adds to all steps, the longest step, the time until the checkpoint is on the "
        "disk, and the additional memory that the kernel allocates (on the whole machine, so nothing else should "
        "run). Compares COARSE with the optimizer in its memory devices (coarse) and on the workers "
        "(coarse-workers), torch.save, and async_save of torch.distributed.checkpoint (dcp).",
    )
    parser.set_defaults(handler=run_checkpoint_command)
    _add_model(parser, _MODELS, default="bert-base")
    parser.add_argument("--batch", type=int, default=1, help="samples per worker; default: %(default)s")
    parser.add_argument("--seq", type=int, default=32, help="tokens per sample; default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="threads per worker; default: %(default)s")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "sgd"))
    parser.add_argument("--saves", type=int, default=4, metavar="N", help="per round; default: %(default)s")
    parser.add_argument(
        "--every",
        type=int,
        default=40,
        metavar="N",
        help="steps between two saves, and after the last one; default: %(default)s",
    )
    parser.add_argument(
        "--folder",
        type=folder_to_write,
        metavar="PATH",
        help="where to save; default: the temporary folder",
    )
    _add_common_arguments(parser, peers=_SAVE_PEERS, default="coarse-workers,torch,dcp", rounds=1)


def _add_memory_parser(benches: Any) -> None:
    parser = benches.add_parser(
        "memory",
        help="peak memory of a whole training job, and the smallest limit in which it trains",
        description="Measures the peak of a memory control group with a whole training job, including its start, "
        "and the smallest limit in which it trains. Compares COARSE with the optimizer on the workers (coarse) and "
        "in its memory devices (coarse-offload, coarse-overlap), torch DDP with gradients as bucket views (ddp) and "
        "with its default settings (ddp-default), ddp with ZeroRedundancyOptimizer (zero), and FSDP2 by blocks "
        "(fsdp). Must be allowed to create control groups, as root is.",
    )
    parser.set_defaults(handler=run_memory_command)
    _add_model(parser, _MODELS_OF_SIZE, default="bert-base")
    parser.add_argument("--batch", type=int, default=1, help="samples per worker; default: %(default)s")
    parser.add_argument("--seq", type=int, default=32, help="tokens per sample; default: %(default)s")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "sgd"))
    parser.add_argument(
        "--limits",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also search the smallest limit in which each system trains; default: yes, some minutes each",
    )
    default = ",".join(peer for peer in _MEMORY_PEERS if peer != "ddp-default")
    _add_common_arguments(parser, peers=_MEMORY_PEERS, default=default, rounds=None)


def _add_model(parser: argparse.ArgumentParser, models: tuple[str, ...], default: str) -> None:
    parser.add_argument(
        "--model",
        default=default,
        choices=models,
        metavar="MODEL",
        help=f"{', '.join(models)}; default: %(default)s",
    )


def _add_common_arguments(
    parser: argparse.ArgumentParser, *, peers: tuple[str, ...], default: str, rounds: int | None
) -> None:
    """Adds common options; `rounds` is the default of --rounds, None if systems take no turns."""
    parser.add_argument(
        "--against",
        type=_names_among(peers),
        default=default,
        metavar="PEERS",
        help=f'some of {", ".join(peers)}, separated by commas, or ""; default: %(default)s',
    )
    parser.add_argument("--workers", type=num_workers, default=2, metavar="N", help="default: %(default)s")
    if rounds is not None:
        parser.add_argument(
            "--rounds", type=int, default=rounds, help="turns of each system; default: %(default)s"
        )
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="append one record a line to FILE")
    parser.set_defaults(extra="bench")


def run_sync_command(arguments: argparse.Namespace) -> int:
    """Runs `coarse bench sync`; returns its exit code.

    Raises:
        CoarseError: If a system fails; nothing is left behind.
    """
    if complaint := _emulation():
        return _usage_error(complaint)
    from coarse.bench import tables
    from coarse.bench.sync.driver import COARSE_SYSTEMS, SyncPlan, num_progress_steps, run_sync
    from coarse.bench.sync.systems import LIMIT

    limit = (LIMIT,) if arguments.dtype == "float32" else ()
    systems = _installed((*arguments.against, *limit, *COARSE_SYSTEMS))
    try:
        plan = SyncPlan(
            systems=systems,
            num_workers=arguments.workers,
            sizes=arguments.sizes,
            dtype=arguments.dtype,
            algorithm=arguments.algorithm,
            memory_devices=arguments.memory_devices,
            budget_s=arguments.budget,
            rounds=arguments.rounds,
        )
    except ValueError as error:
        return _usage_error(str(error))
    records = _with_progress(lambda progress: run_sync(plan, progress), num_progress_steps(plan))
    what = f"{plan.num_workers} workers, {plan.dtype}, {plan.rounds} rounds, every result verified"
    _publish(
        what,
        [tables.bandwidth_table(records), tables.latency_table(records)],
        (record.as_json() for record in records),
        arguments.json,
    )
    return 0


def run_train_step_command(arguments: argparse.Namespace) -> int:
    """Runs `coarse bench train-step`; returns its exit code.

    Raises:
        CoarseError: If a system fails; nothing is left behind.
    """
    if complaint := _emulation():
        return _usage_error(complaint)
    from coarse.bench import tables
    from coarse.bench.train_step.driver import TrainPlan, num_progress_steps, run_train
    from coarse.bench.train_step.systems import missing_gpu

    peers = arguments.against
    if arguments.offload_optimizer:
        if arguments.single:
            return _usage_error("--offload-optimizer needs memory devices, and --single starts none")
        peers = ("coarse-offload", "coarse-overlap", *peers)
    if arguments.single:
        peers = tuple(dict.fromkeys((*peers, "none")))
    try:
        plan = TrainPlan(
            systems=_installed(("coarse", *peers)),
            model=arguments.model,
            batch=arguments.batch,
            sequence=arguments.seq,
            num_workers=1 if arguments.single else arguments.workers,
            threads=arguments.threads,
            optimizer=arguments.optimizer,
            steps=arguments.steps,
            budget_s=arguments.budget,
            rounds=arguments.rounds,
            device=arguments.device,
        )
    except ValueError as error:
        return _usage_error(str(error))
    if complaint := missing_gpu(plan.device):
        return _usage_error(complaint)
    comparison = _with_progress(lambda progress: run_train(plan, progress), num_progress_steps(plan))
    turns = "all systems up, in turns" if comparison.side_by_side else "started anew for each turn"
    table = tables.single_table(comparison) if arguments.single else tables.train_table(comparison)
    gpu = comparison.results[0].first_step.gpu
    _publish(
        f"{plan.rounds} rounds, {turns}, parameters verified" + (f", on {gpu}" if gpu else ""),
        [table],
        (comparison.as_json(result) for result in comparison.results),
        arguments.json,
    )
    return 0


def run_replay_command(arguments: argparse.Namespace) -> int:
    """Runs `coarse bench replay`; returns its exit code.

    Raises:
        CoarseError: If a worker fails, a result is wrong, or this machine cannot emulate the links in time; nothing
            is left behind.
    """
    from coarse.bench import tables
    from coarse.bench.provenance import EMULATED
    from coarse.bench.replay.driver import ReplayPlan, check_replay, num_progress_steps, run_replay
    from coarse.bench.replay.trace import load_trace, place_trace
    from coarse.machine.catalogue import load_machine

    try:
        gpu = load_machine(arguments.machine).topology.gpu
        plan = ReplayPlan(
            schemes=arguments.schemes or _schemes_over(arguments.nodes),
            trace=place_trace(load_trace(arguments.model), gpu=gpu, tflops=arguments.tflops),
            machine=arguments.machine,
            num_workers=arguments.workers,
            num_nodes=arguments.nodes,
            has_compute=not arguments.no_compute,
            time_dilation=arguments.time_dilation,
            memory_devices=arguments.memory_devices,
            steps=arguments.steps,
            rounds=arguments.rounds,
        )
        check_replay(plan)
    except ValueError as error:
        return _usage_error(str(error))
    results = _with_progress(lambda progress: run_replay(plan, progress), num_progress_steps(plan))
    _publish(
        f"links of {plan.machine}, every result verified",
        [tables.replay_table(results)],
        (result.as_json() for result in results),
        arguments.json,
        kind=EMULATED,
    )
    for result in results:
        if result.ways:
            print(f"{result.scheme}: {result.ways}")
    return 0


def _schemes_over(num_nodes: int) -> tuple[str, ...]:
    return tuple(each for each in _REPLAY_SCHEMES if num_nodes == 1 or each not in _ONE_NODE_SCHEMES)


def run_checkpoint_command(arguments: argparse.Namespace) -> int:
    """Runs `coarse bench checkpoint`; returns its exit code.

    Raises:
        CoarseError: If a system fails; nothing is left behind.
    """
    if complaint := _emulation():
        return _usage_error(complaint)
    from coarse.bench import tables
    from coarse.bench.checkpoint.driver import SavePlan, num_progress_steps, run_checkpoint

    try:
        plan = SavePlan(
            systems=_installed(("coarse", *arguments.against)),
            model=arguments.model,
            batch=arguments.batch,
            sequence=arguments.seq,
            num_workers=arguments.workers,
            threads=arguments.threads,
            optimizer=arguments.optimizer,
            folder=str(arguments.folder or ""),
            saves=arguments.saves,
            every=arguments.every,
            rounds=arguments.rounds,
        )
    except ValueError as error:
        return _usage_error(str(error))
    results = _with_progress(lambda progress: run_checkpoint(plan, progress), num_progress_steps(plan))
    _publish(
        f"{plan.rounds} rounds of {plan.saves} saves, each behind {plan.every} steps; every system alone, what was "
        "saved compared",
        [tables.checkpoint_table(results)],
        (result.as_json() for result in results),
        arguments.json,
    )
    return 0


def run_memory_command(arguments: argparse.Namespace) -> int:
    """Runs `coarse bench memory`; returns its exit code.

    Raises:
        CoarseError: If a system fails; nothing is left behind.
    """
    if complaint := _emulation():
        return _usage_error(complaint)
    from coarse.bench import tables
    from coarse.bench.memory import num_progress_steps, run_state_memory
    from coarse.bench.train_step.driver import TrainPlan

    try:
        plan = TrainPlan(
            systems=_installed((*arguments.against, "coarse", "coarse-offload")),
            model=arguments.model,
            batch=arguments.batch,
            sequence=arguments.seq,
            num_workers=arguments.workers,
            threads=1,
            optimizer=arguments.optimizer,
        )
    except ValueError as error:
        return _usage_error(str(error))
    limits = arguments.limits
    results = _with_progress(
        lambda progress: run_state_memory(plan, progress, finds_limits=limits),
        num_progress_steps(plan, finds_limits=limits),
    )
    _publish(
        "every system alone; page cache of files that were read before is left out",
        [tables.memory_table(results)],
        (result.as_json() for result in results),
        arguments.json,
    )
    return 0


def _installed(systems: Iterable[str]) -> tuple[str, ...]:
    """The systems that can run on this machine; reports how to install the others."""
    from coarse.bench.harness.launchers import missing

    present = []
    for system in systems:
        reason = missing(system)
        if reason is None:
            present.append(system)
        else:
            print(reason, file=sys.stderr)
    return tuple(present)


def _with_progress(work: Callable[[Callable[[str], None]], Result], num_steps: int) -> Result:
    """Runs `work` under a progress bar on standard error; its argument takes a description of each step."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    # Four refreshes a second have no measurable cost; more would affect the workers' times.
    bar = Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4)
    with bar:
        task = bar.add_task("starting", total=num_steps)
        begun = 0

        def progress(description: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=description)
            begun += 1

        return work(progress)


def _emulation() -> str:
    """A warning against comparing figures of emulated links; "" if links are not emulated."""
    machine = Settings.from_environment().machine
    return machine and (
        f"COARSE_MACHINE={machine}: figures of emulated links do not compare with peers on this machine's; unset it"
    )


def _publish(
    what: str,
    tables: Iterable[TextTable],
    records: Iterable[Mapping[str, Any]],
    json_path: Path | None,
    *,
    kind: str = "measured",
) -> None:
    """Appends the records to `json_path` if there is one, and prints the tables."""
    from rich.console import Console

    from coarse.bench.provenance import Provenance, append_records
    from coarse.bench.tables import heading

    provenance = Provenance.here()
    if json_path is not None:  # first, because the reader of the tables may close the pipe
        append_records(json_path, records, provenance, kind=kind)
    # Lines longer than the terminal wrap, because a truncated table would be useless as a record.
    console = Console(width=_TABLE_WIDTH)
    print(heading(provenance.machine, what, kind=kind))
    print(f"commit {provenance.commit}")
    for table in tables:
        _print_table(console, table)


def _print_table(console: Console, table: TextTable) -> None:
    from rich import box
    from rich.table import Table

    drawn = Table(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(table.columns):
        drawn.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*row)
    console.print(drawn)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(parse_bytes(part, what="--sizes") for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _names_among(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        chosen = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return chosen

    return names


def _usage_error(message: str) -> int:
    print(f"coarse bench: {message}", file=sys.stderr)
    return _EXIT_USAGE
