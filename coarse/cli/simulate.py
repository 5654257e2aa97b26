"""`coarse simulate`: one training step on a machine, or a study of a document; every figure is simulated."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from coarse.cli.arguments import file_to_write
from coarse.cli.display.tables import format_size, print_table
from coarse.cli.simulated import disturbances

if TYPE_CHECKING:  # slow to import; `coarse --help` must not load these
    from rich.progress import Progress, TaskID

    from coarse.simulator.events.engine import Outcome
    from coarse.simulator.events.timeline import Timeline
    from coarse.simulator.faults.disturbances import Jitter
    from coarse.simulator.faults.jittered import StepTimes
    from coarse.simulator.schemes.step import Step
    from coarse.simulator.setup import Setup
    from coarse.simulator.training_step import StepResult

    _Answer = tuple[StepResult, StepTimes | None, disturbances.Goodputs]

_EXIT_FAILED, _EXIT_USAGE = 1, 2
_SHOWN_LINKS = 3
_UPDATE_EVERY_S = 0.25


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `simulate` to the `coarse` command."""
    parser = subparsers.add_parser(
        "simulate",
        help="one training step on a machine of any size, or a study of a document, simulated",
        description="Simulates one training step under several schemes: its time, the bytes of links, the memory of "
        "workers and memory devices. With NAME: the system of another document, with the document's figures. "
        "Every figure is simulated; docs/simulator.md has the model and its limits.",
    )
    _add_studies(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_step(parser.add_argument_group("a training step"))
    disturbances.add_options(parser)
    parser.set_defaults(handler=run, extra="plot")


def _add_studies(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", nargs="?", metavar="NAME", help="a study; --list names them")
    group = parser.add_argument_group("studies")
    group.add_argument("--list", action="store_true", help="list the studies and their traces")
    group.add_argument("--trace", metavar="TRACE", help="print this trace of study NAME, step by step")
    group.add_argument("--all", action="store_true", help="run all studies, and rewrite their pages")
    group.add_argument(
        "--from",
        dest="begin",
        metavar="PART",
        help="of --all: begin with this part, where an interrupted run has stopped",
    )
    group.add_argument(
        "--docs", type=Path, default=Path("docs"), metavar="FOLDER", help="of --all; default: %(default)s"
    )


def _add_step(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--machine",
        metavar="NAME",
        help="a name from `coarse machine list`, a TOML file, or a generated machine: cxl-switch, cxl-pool, fat-tree",
    )
    parser.add_argument("--model", default="bert-large", metavar="M", help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--scheme",
        default="coarse,offload,allreduce",
        metavar="S[,S]",
        help='schemes, or "all"; default: %(default)s',
    )
    parser.add_argument(
        "--workers-per-device",
        type=int,
        default=1,
        metavar="R",
        help="workers of each memory device; default: 1",
    )
    parser.add_argument(
        "--workers-per-switch", type=int, default=8, metavar="K", help="of a generated machine; default: 8"
    )
    parser.add_argument(
        "--oversubscription",
        type=float,
        default=1.0,
        metavar="X",
        help="bandwidth of a generated switch's workers over that of its uplink; default: 1",
    )
    parser.add_argument(
        "--tflops",
        type=float,
        metavar="T",
        help="1e12 operations/s of a worker; default: half of the peak of the machine's GPU, or the model's "
        "recorded times",
    )
    parser.add_argument(
        "--sync-cores",
        type=int,
        default=0,
        metavar="N",
        help="sync cores of each memory device, at assumed rates; default: 0, reductions take no time",
    )
    parser.add_argument(
        "--timeline",
        type=file_to_write,
        metavar="FILE",
        help="write links and sync cores over time as trace events, for ui.perfetto.dev",
    )
    parser.add_argument(
        "--host-overhead-us",
        type=float,
        default=0.0,
        metavar="US",
        help="the host's time for each message; default: 0",
    )
    parser.add_argument(
        "--service",
        default="fair",
        metavar="S",
        help="how links serve transfers: fair, all at once, or first-come, one after the other as the emulator's; "
        "default: %(default)s",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs `coarse simulate`; returns its exit code."""
    from coarse.cli.simulated.studies import list_studies, show_study, write_all

    fault = _fault(arguments)
    if fault:
        print(f"coarse simulate: {fault}", file=sys.stderr)
        return _EXIT_USAGE
    if arguments.list:
        return list_studies(as_json=arguments.json)
    if arguments.all:
        return write_all(arguments.docs, arguments.begin)
    if arguments.study is not None:
        return show_study(arguments.study, arguments.trace, as_json=arguments.json)
    return _run_step(arguments)


def _fault(arguments: argparse.Namespace) -> str:
    """Why the question has no answer; "" if it has one."""
    asked = {
        "NAME": arguments.study is not None,
        "--machine": arguments.machine is not None,
        "--list": arguments.list,
        "--all": arguments.all,
    }
    given = [name for name, is_given in asked.items() if is_given]
    if len(given) != 1:
        return f"give one of {', '.join(asked)}" + (f", not {' and '.join(given)}" if given else "")
    if arguments.trace is not None and arguments.study is None:
        return "--trace needs the NAME of a study"
    if arguments.begin is not None and not arguments.all:
        return "--from needs --all"
    return ""


def _run_step(arguments: argparse.Namespace) -> int:
    """Simulates a step; Ctrl-C prints the results so far."""
    from coarse.simulator.schemes.catalogue import SCHEMES
    from coarse.simulator.validated import outside_validated_range

    answers: list[_Answer] = []
    timelines: list[Timeline] | None = None if arguments.timeline is None else []
    try:
        takes_all = arguments.scheme == "all"
        schemes = tuple(SCHEMES) if takes_all else tuple(arguments.scheme.split(","))
        setup, jitter = _setup(arguments), disturbances.jitter(arguments)
        for warning in outside_validated_range(setup, schemes):
            print(f"outside of the validated range: {warning}", file=sys.stderr)
        for result, times in _simulate(setup, schemes, jitter, timelines, may_leave_out=takes_all):
            answers.append((result, times, disturbances.goodput_by_recovery(arguments, result)))
    except ValueError as error:
        print(f"coarse simulate: {error}", file=sys.stderr)
        return _EXIT_USAGE
    except KeyboardInterrupt:
        _publish(arguments, setup, answers)
        raise
    _publish(arguments, setup, answers)
    return 0 if timelines is None else _write_timelines(arguments.timeline, timelines)


def _setup(arguments: argparse.Namespace) -> Setup:
    from coarse.bench.replay.trace import load_trace, place_trace
    from coarse.machine.catalogue import load_machine
    from coarse.simulator.job import DEFAULT_RATES, SyncCores
    from coarse.simulator.machines.generated import KINDS
    from coarse.simulator.setup import Setup

    is_generated = arguments.machine in KINDS
    gpu = "" if is_generated else load_machine(arguments.machine).topology.gpu
    cores = arguments.sync_cores
    return Setup(
        machine=arguments.machine,
        trace=place_trace(load_trace(arguments.model), gpu=gpu, tflops=arguments.tflops),
        num_workers=arguments.workers,
        workers_per_device=arguments.workers_per_device,
        workers_per_switch=arguments.workers_per_switch,
        oversubscription=arguments.oversubscription,
        sync_cores=SyncCores(num_cores=cores, gbytes_per_s=DEFAULT_RATES) if cores else None,
        host_overhead_us=arguments.host_overhead_us,
        disturbances=disturbances.disturbances(arguments),
        service=arguments.service,
    )


def _simulate(
    setup: Setup,
    schemes: Sequence[str],
    jitter: Jitter | None,
    timelines: list[Timeline] | None,
    *,
    may_leave_out: bool,
) -> Iterator[tuple[StepResult, StepTimes | None]]:
    """Yields the result of each scheme, and its times with jitter; says on an interrupt how far it came.

    Adds the scheme's timeline to `timelines`, if any are asked for.

    Raises:
        ValueError: If a scheme does not fit the machine, unless it may be left out.
    """
    from coarse.simulator.events.timeline import timeline
    from coarse.simulator.faults.jittered import simulate_jittered
    from coarse.simulator.training_step import simulate_step

    def record(result: StepResult, step: Step, outcome: Outcome) -> None:
        if timelines is not None:
            timelines.append(timeline(setup, result, step, outcome))

    with _progress_bar() as bar:
        for number, scheme in enumerate(schemes, 1):
            shown = SchemeProgress(bar, f"{scheme} ({number} of {len(schemes)})")
            try:
                result = simulate_step(setup, scheme, shown.update, record=record)
                times = None if jitter is None else simulate_jittered(setup, scheme, jitter, shown.update)
                yield result, times
            except KeyboardInterrupt:
                bar.stop()
                print(f"coarse simulate: interrupted in {shown}", file=sys.stderr)
                raise
            except ValueError as error:
                if not may_leave_out:
                    raise
                print(f"{scheme} left out: {error}", file=sys.stderr)
            shown.finish()


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as bar:
        yield bar


class SchemeProgress:
    """How far the simulation of one scheme is.

    Args:
        bar: Shows it.
        what: The scheme in words.
    """

    def __init__(self, bar: Progress, what: str, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._bar, self._what, self._now_s = bar, what, now_s
        self._line: TaskID = bar.add_task(f"{what}: plans", total=None)
        self._num_finished = self._num_tasks = 0
        self._next_s = 0.0

    def update(self, num_finished: int, num_tasks: int) -> None:
        """Called by the engine after each event."""
        self._num_finished, self._num_tasks = num_finished, num_tasks
        if self._now_s() >= self._next_s:
            self._next_s = self._now_s() + _UPDATE_EVERY_S
            self._bar.update(self._line, completed=num_finished, total=num_tasks, description=self._what)

    def finish(self) -> None:
        """Removes it from the bar."""
        self._bar.remove_task(self._line)

    def __str__(self) -> str:
        return f"{self._what}, after {self._num_finished} of {self._num_tasks} transfers"


# ---- output ----


def _write_timelines(path: Path, timelines: Sequence[Timeline]) -> int:
    """Writes trace events; returns the exit code."""
    from coarse.simulator.events.timeline import MOST_LINKS, trace_document

    try:
        path.write_text(json.dumps(trace_document(timelines)) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"coarse simulate: --timeline {path}: {error.strerror}", file=sys.stderr)
        return _EXIT_FAILED
    for each in timelines:
        if each.num_links > MOST_LINKS:
            print(
                f"{path} shows the {MOST_LINKS} busiest of {each.num_links} links of {each.result.scheme}",
                file=sys.stderr,
            )
    return 0


def _publish(arguments: argparse.Namespace, setup: Setup, answers: Sequence[_Answer]) -> None:
    if arguments.json:
        records = [
            {**result.as_json(), "compute": setup.trace.source, **disturbances.as_json(times, goodputs)}
            for result, times, goodputs in answers
        ]
        print(json.dumps(records, indent=1))
    elif answers:
        _print_answers(arguments, setup, answers)


def _print_answers(arguments: argparse.Namespace, setup: Setup, answers: Sequence[_Answer]) -> None:
    results = [result for result, _, _ in answers]
    _print_results(setup, results)
    jitter = disturbances.jitter(arguments)
    if jitter is not None:
        disturbances.print_jitter(jitter, [times for _, times, _ in answers if times], results)
    if arguments.failures:
        disturbances.print_goodputs({result.scheme: goodputs for result, _, goodputs in answers})


def _print_results(setup: Setup, results: Sequence[StepResult]) -> None:
    trace = setup.trace
    print(
        f"{setup.machine}, {setup.num_workers} workers, {trace.model}: {format_size(trace.nbytes)} of gradients, "
        f"{results[0].compute_s * 1e3:.1f} ms of computation ({trace.source})"
    )
    print_table(
        "One training step, simulated",
        (
            *(
                "scheme",
                "memory devices",
                "step, ms",
                "blocked, ms",
                "GiB per worker",
                "GiB per memory device",
            ),
            *(["J a step"] if results[0].energy_j is not None else []),
        ),
        [_row(result) for result in results],
    )
    if words := _power_in_words(setup):
        print(words)
    print_table(
        f"The {_SHOWN_LINKS} busiest links of each scheme, simulated",
        ("scheme", "link", "number", "MiB a step", "busy"),
        [row for result in results for row in _link_rows(result)],
    )


def _power_in_words(setup: Setup) -> str:
    """The figures of the energy with their sources; "" if there are none."""
    from coarse.simulator.training_step import power_of

    power = power_of(setup)
    if power is None:
        return ""
    drawn = {"worker": power.worker_watt, "memory device in use": power.device_watt}
    each = [f"{watt.value:g} W of a {what} ({watt.kind}: {watt.source})" for what, watt in drawn.items()]
    return f"J a step: the step times {' and '.join(each)}"


def _row(result: StepResult) -> tuple[str, ...]:
    memory = result.memory
    return (
        result.scheme,
        str(result.num_devices) if memory.device_bytes else "-",
        f"{result.step_s * 1e3:.1f}",
        f"{result.blocked_s * 1e3:.1f}",
        f"{memory.worker_bytes / (1 << 30):.2f}",
        f"{memory.device_bytes / (1 << 30):.2f}" if memory.device_bytes else "-",
        *([] if result.energy_j is None else [f"{result.energy_j:.1f}"]),
    )


def _link_rows(result: StepResult) -> list[tuple[str, ...]]:
    busiest = sorted(result.links, key=lambda name: (-result.links[name].busy, name))[:_SHOWN_LINKS]
    return [
        (result.scheme, name, str(load.copies), f"{load.nbytes / (1 << 20):.1f}", f"{load.busy:.0%}")
        for name in busiest
        for load in [result.links[name]]
    ]
