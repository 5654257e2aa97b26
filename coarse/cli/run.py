"""`coarse run`: starts the workers of a job, or of one of its nodes; its flags have torchrun's meanings."""

from __future__ import annotations

import argparse
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from coarse.cli.arguments import file_to_write, num_workers, port_number, seconds, whole_number
from coarse.cli.workers.dashboard_process import DashboardOptions, dashboard, missing_package
from coarse.cli.workers.master_port import MasterPort
from coarse.env import job_secret, process_environment
from coarse.errors import CoarseError
from coarse.machine.catalogue import load_machine
from coarse.machine.host import read_cpu
from coarse.profiler.start import AUTO, CACHED, OFF, REFRESH
from coarse.security.node_ports import NodePorts
from coarse.settings import Declaration, Settings, declarations
from coarse.startup.node_address import gloo_variables
from coarse.status.address import job_id
from coarse.timeline.part_files import parts_folder

if TYPE_CHECKING:  # slow to import
    from coarse.cli.workers.supervisor import JobPlan

_DESCRIPTION = """\
Starts N workers on this node with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT set,
and marks each line of their output. As soon as one worker fails, all workers are ended and this command returns the
failed worker's exit code, or it starts them again, at most --max-restarts times. With --min-workers the others go on
while that many are left, SIGTERM to a worker lets it leave after its step, and --join adds workers. Ctrl-Z stops the
job, and fg continues it. For a job over several nodes, run one such command on each, with the same --nnodes,
--master-addr and --master-port and a different --node-rank."""

_SHUTDOWN_TIMEOUT_S = 30.0

_REDIRECTED_STREAMS: Mapping[str, frozenset[str]] = {
    "0": frozenset(),
    "1": frozenset({"stdout"}),
    "2": frozenset({"stderr"}),
    "3": frozenset({"stdout", "stderr"}),
}
_STREAMS = _REDIRECTED_STREAMS["3"]


_DEVICE_VARIABLES = ("COARSE_MEMORY_DEVICES", "COARSE_PARTITION_TABLE")


class UsageError(CoarseError):
    """The command line describes a job that cannot be started."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `run` to the `coarse` command."""
    parser = subparsers.add_parser(
        "run", help="start the workers of a job on this node", description=_DESCRIPTION, allow_abbrev=False
    )
    _add_launch_options(parser)
    _add_output_options(parser)
    _add_dashboard_options(parser)
    _add_session_options(parser)
    script = parser.add_argument("script", metavar="SCRIPT", help="script, module or program of each worker")
    rest = parser.add_argument("script_args", metavar="...", nargs=argparse.REMAINDER, help="its arguments")
    script.required = rest.required = (
        False  # otherwise argparse reports the second as missing; --join has none
    )
    parser.set_defaults(handler=run, usage_error=parser.error)


def _add_launch_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("launch")
    group.add_argument(
        "-n",
        "--nproc-per-node",
        "--nproc_per_node",
        dest="num_workers",
        metavar="N",
        type=_num_workers,
        default=1,
        help="workers to start, or `cpu` for one per core (default: 1)",
    )
    group.add_argument(
        "--nnodes", default=1, type=_num_nodes, metavar="N", help="number of nodes (default: 1)"
    )
    group.add_argument(
        "--node-rank",
        "--node_rank",
        default=0,
        type=_node_rank,
        metavar="R",
        help="number of this node, from 0 (default: 0)",
    )
    group.add_argument(
        "--master-addr", "--master_addr", metavar="ADDR", help="address of node 0 (default: loopback)"
    )
    group.add_argument(
        "--master-port",
        "--master_port",
        type=port_number,
        metavar="PORT",
        help="MASTER_PORT (default: a free one)",
    )
    group.add_argument(
        "--max-restarts",
        "--max_restarts",
        default=0,
        type=_num_restarts,
        metavar="N",
        help="number of times that all workers are restarted after one has failed, or with --on-loss replace one of "
        "them (default: 0)",
    )
    group.add_argument(
        "--shutdown-timeout",
        "--shutdown_timeout",
        default=_SHUTDOWN_TIMEOUT_S,
        type=seconds,
        metavar="SECONDS",
        help="seconds that workers have to end, for example for a last checkpoint, after this command receives "
        "SIGINT, SIGTERM or SIGHUP; a second signal kills them at once (default: %(default)g)",
    )
    group.add_argument("--standalone", action="store_true", help="accepted; one node is always standalone")
    group.add_argument(
        "--join",
        nargs="?",
        const="",
        metavar="JOB",
        help="instead of starting a job, let N workers join a running one of yours, in its vacant places; JOB is its "
        "id or the beginning of it, as `coarse status` lists it (default: the only one). They run the job's script",
    )
    kind = group.add_mutually_exclusive_group()
    kind.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    kind.add_argument(
        "--no-python", "--no_python", action="store_true", help="SCRIPT is a program, started without python"
    )


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        help="print neither the decisions at the start nor a summary at the end; errors are shown",
    )
    group.add_argument(
        "--no-prefix", action="store_true", help="let worker 0 write directly to the terminal, without marks"
    )
    group.add_argument(
        "--log-dir",
        "--log_dir",
        type=Path,
        metavar="DIR",
        help="also write DIR/worker-RANK.log",
    )
    group.add_argument(
        "--redirects",
        choices=tuple(_REDIRECTED_STREAMS),
        default="0",
        help="streams that go only to the log: 0 none, 1 stdout, 2 stderr, 3 both",
    )


def _add_dashboard_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("dashboard")
    group.add_argument(
        "--dashboard", action="store_true", help="serve a page that shows this node's part of the job"
    )
    group.add_argument(
        "--dashboard-port", type=port_number, metavar="PORT", help="the same, at this port of loopback"
    )
    group.add_argument(
        "--dashboard-record",
        type=file_to_write,
        metavar="FILE",
        help="the same, and write its samples to FILE, for `coarse dashboard --open FILE`",
    )


def _add_session_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("session", "each sets the variable that it names, for all workers")
    parser.add_argument(
        "--help-all",
        action=_HelpAll,
        nargs=0,
        help="show this help including advanced settings, for research and tests",
    )
    for each in declarations():
        text = argparse.SUPPRESS if each.is_advanced else _help_of(each)
        group.add_argument(each.flag, dest=each.variable, metavar=each.name.upper(), help=text)


def _help_of(setting: Declaration) -> str:
    default = f"default: {setting.default_text}; " if setting.default_text else ""
    return f"{setting.summary} ({default}{setting.variable})".replace("%", "%%")


class _HelpAll(argparse.Action):
    """Shows the help of all settings, advanced ones included, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        texts = {each.variable: _help_of(each) for each in declarations()}
        for action in parser._actions:
            action.help = texts.get(action.dest, action.help)
        parser.exit(message=parser.format_help())


def run(arguments: argparse.Namespace) -> int:
    """Runs the job that the command line describes; returns the exit code of the first failure, or 0."""
    if arguments.join is not None:
        return _join(arguments)
    if arguments.script is None:
        arguments.usage_error("the following arguments are required: SCRIPT")
    with MasterPort(arguments.master_port, is_here=arguments.node_rank == 0) as master_port:
        return _run(arguments, master_port)


def _run(arguments: argparse.Namespace, master_port: MasterPort) -> int:
    from coarse.cli.workers.supervisor import JobPlan

    fail: Callable[[str], NoReturn] = arguments.usage_error
    try:
        command = command_of(arguments)
        environments = environments_of(arguments, process_environment(), master_port.number)
        settings = Settings.from_environment(environments[0])
        _require_restarts(settings, arguments.max_restarts)
        _require_python(settings, arguments)
        plan = JobPlan(
            command=command,
            environments=environments,
            min_workers=settings.least_workers,
            has_other_nodes=arguments.nnodes > 1,
            replaces_workers=settings.on_loss == "replace",
            takes_workers=settings.replaces_workers,
            num_vacant=len(environments) - arguments.num_workers,
            first_rank=_first_rank(arguments),
            plain_first=arguments.no_prefix,
            log_dir=_prepare_log_dir(arguments),
            console_streams=_STREAMS - _REDIRECTED_STREAMS[arguments.redirects],
            max_restarts=arguments.max_restarts,
            preload=settings.preloaded_modules,
            shutdown_timeout_s=arguments.shutdown_timeout,
            is_quiet=arguments.quiet,
            restart_variables=lambda attempt: restart_variables(master_port, attempt),
        )
        options = _dashboard_options(arguments)
    except UsageError as error:
        fail(str(error))
    if not arguments.quiet:
        _announce_threads(plan.environments[0], plan.num_workers)
        _announce_machine(plan.environments[0])
    _prepare_timeline(Settings.from_environment(plan.environments[0]).timeline, arguments.nnodes)
    if options is None:
        return _run_job(plan, arguments.nnodes)
    with dashboard(job_id(plan.job), options) as tell:
        return _run_job(replace(plan, tell=tell), arguments.nnodes)


def _run_job(plan: JobPlan, num_nodes: int) -> int:
    from coarse.cli.workers.processes import run_guarded
    from coarse.cli.workers.supervisor import Supervisor
    from coarse.wire.persistent_sessions import forget_job

    try:
        return run_guarded(lambda: Supervisor(plan).run(), shutdown_timeout_s=plan.shutdown_timeout_s)
    finally:
        forget_job(plan.job)  # needed if the supervisor was killed
        _finish_timeline(Settings.from_environment(plan.environments[0]).timeline, num_nodes)


def _join(arguments: argparse.Namespace) -> int:
    """Lets workers join a running job; returns 0 if all of them take part."""
    from coarse.cli.workers.joining import join

    if arguments.script is not None:
        arguments.usage_error("--join takes no SCRIPT: the workers run that of the job")
    if given := _session_variables(arguments):
        arguments.usage_error(
            f"--join takes no settings, but {', '.join(given)}: the workers have those of the job"
        )
    return join(arguments.join, arguments.num_workers)


def _dashboard_options(arguments: argparse.Namespace) -> DashboardOptions | None:
    """The dashboard's options on the command line; None without a dashboard.

    Raises:
        UsageError: If a package is missing.
    """
    port, record = arguments.dashboard_port, arguments.dashboard_record
    if not arguments.dashboard and port is None and record is None:
        return None
    if missing := missing_package():
        raise UsageError(
            f"--dashboard needs {missing}, which is not installed: pip install 'coarse-train[dashboard]'"
        )
    return DashboardOptions(port=port or 0, record=record)


def command_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Returns the command line of each worker.

    Raises:
        UsageError: If the script or program does not exist.
    """
    if arguments.no_python:
        program = shutil.which(arguments.script)
        if program is None:
            raise UsageError(f"{arguments.script}: no such program on PATH")
        return (program, *arguments.script_args)
    if not arguments.module and not Path(arguments.script).exists():
        is_interpreter = Path(arguments.script).name.startswith("python")
        advice = "; name the script itself, or give --no-python" if is_interpreter else ""
        raise UsageError(f"{arguments.script}: no such file{advice}")
    option = ("-m",) if arguments.module else ()
    return (sys.executable, "-u", *option, arguments.script, *arguments.script_args)


def environments_of(
    arguments: argparse.Namespace, inherited: Mapping[str, str], master_port: int
) -> tuple[dict[str, str], ...]:
    """Returns the environment of each worker: inherited variables, its identity, and the given flags.

    With --max-workers, those of workers that may join later follow.

    Args:
        arguments: The parsed command line.
        inherited: The launcher's own environment.
        master_port: MASTER_PORT.

    Raises:
        UsageError: If the options for nodes are inconsistent, or a COARSE_* value is invalid.
    """
    _require_sound_nodes(arguments)
    num_workers: int = arguments.num_workers
    common = {**inherited, **_session_variables(arguments)}
    for flag, other in (_DEVICE_VARIABLES, _DEVICE_VARIABLES[::-1]):
        if vars(arguments)[flag] is not None and vars(arguments)[other] is None:
            common.pop(other, None)  # the inherited variable has the same meaning
    _require_sound_settings(common, num_workers, arguments.nnodes)
    if common.get("COARSE_TIMELINE"):
        common["COARSE_TIMELINE"] = str(
            Path(common["COARSE_TIMELINE"]).absolute()
        )  # workers may change folders
    common.pop(
        "TORCHELASTIC_USE_AGENT_STORE", None
    )  # set by an outer torchrun; no process would serve our store
    common.setdefault("OMP_NUM_THREADS", str(threads_per_worker(read_cpu().num_cores_granted, num_workers)))
    common["MASTER_ADDR"] = arguments.master_addr or "127.0.0.1"
    common["MASTER_PORT"] = str(master_port)
    if arguments.nnodes == 1:  # launchers of several nodes share only what the user passes to each
        common.setdefault("COARSE_JOB_SECRET", secrets.token_hex(32))
    else:
        common.update(gloo_variables(Settings.from_environment(common), common))
    common["TORCHELASTIC_RUN_ID"] = secrets.token_hex(8)
    common["TORCHELASTIC_RESTART_COUNT"] = "0"
    common["TORCHELASTIC_MAX_RESTARTS"] = str(arguments.max_restarts)
    common["WORLD_SIZE"] = str(arguments.nnodes * num_workers)
    common["LOCAL_WORLD_SIZE"] = str(num_workers)
    first_rank = _first_rank(arguments)
    num_places = max(num_workers, Settings.from_environment(common).max_workers)
    of_all = {"WORLD_SIZE": str(num_places), "LOCAL_WORLD_SIZE": str(num_places)}
    return tuple(
        {
            **_quieter(first_rank + local_rank),
            **common,
            **({} if local_rank < num_workers else of_all),
            "RANK": str(first_rank + local_rank),
            "LOCAL_RANK": str(local_rank),
        }
        for local_rank in range(num_places)
    )


def _quieter(rank: int) -> dict[str, str]:
    """Restricts TensorFlow's notes about the processor to worker 0; the others print only warnings and errors."""
    return {} if rank == 0 else {"TF_CPP_MIN_LOG_LEVEL": "1"}


def restart_variables(master_port: MasterPort, attempt: int) -> dict[str, str]:
    """Returns the variables of every worker that differ in the `attempt`-th restart from the first start."""
    master_port.renew()
    return {"TORCHELASTIC_RESTART_COUNT": str(attempt), "MASTER_PORT": str(master_port.number)}


def threads_per_worker(num_cores: int, num_workers: int) -> int:
    """Returns the number of threads for each worker so that all workers together use all cores; at least 1."""
    return max(1, num_cores // num_workers)


def _first_rank(arguments: argparse.Namespace) -> int:
    """Rank of this node's first worker, numbered as by torchrun: node 0 first, equally many on each node."""
    return int(arguments.node_rank * arguments.num_workers)


def _require_sound_nodes(arguments: argparse.Namespace) -> None:
    if arguments.node_rank >= arguments.nnodes:
        raise UsageError(
            f"--node-rank {arguments.node_rank} of --nnodes {arguments.nnodes}: nodes are numbered from 0"
        )
    if arguments.nnodes == 1:
        return
    if arguments.max_restarts:
        raise UsageError(
            f"--max-restarts is for one node, not for --nnodes {arguments.nnodes}: other nodes would not be started "
            "again; use torchrun"
        )
    if arguments.standalone:
        raise UsageError(f"--standalone is for one node, not for --nnodes {arguments.nnodes}")
    if not arguments.master_addr or not arguments.master_port:
        raise UsageError(
            f"--nnodes {arguments.nnodes}: needs --master-addr and --master-port, the same on every node"
        )


def _require_restarts(settings: Settings, max_restarts: int) -> None:
    if settings.on_loss == "replace" and not max_restarts:
        raise UsageError(
            "--on-loss replace starts at most --max-restarts new workers, and that is 0; give it, or choose another "
            "--on-loss"
        )


def _require_python(settings: Settings, arguments: argparse.Namespace) -> None:
    if settings.preload and arguments.no_python:
        raise UsageError(
            f"--preload {settings.preload} is for Python scripts: the program of --no-python cannot be forked from a "
            "process that has imported modules; leave out one of them"
        )


def _require_sound_settings(environment: Mapping[str, str], num_workers: int, num_nodes: int) -> None:
    """Reports invalid settings once, before every worker would report them."""
    try:
        settings = Settings.from_environment(environment)
        job_secret(environment)
        if settings.machine:
            load_machine(settings.machine)
        if settings.max_workers and num_workers * num_nodes == 1:
            from coarse.session_parts.checks import check_single_worker

            check_single_worker(settings)
        if settings.timeline and not (folder := Path(settings.timeline).absolute().parent).is_dir():
            raise ValueError(f"COARSE_TIMELINE={settings.timeline}: there is no folder {folder}")
        if settings.profile not in (OFF, CACHED, AUTO, REFRESH) and not Path(settings.profile).is_file():
            raise ValueError(
                f"COARSE_PROFILE={settings.profile} is neither off, cached, auto, refresh nor a file"
            )
        if num_nodes > 1:
            from coarse.session_parts.checks import check_nodes

            check_nodes(settings, num_nodes)
            NodePorts.parse(settings.node_ports).check(num_workers)
        if settings.least_workers:
            from coarse.session_parts.checks import check_losses

            num_in_job = num_workers * num_nodes
            check_losses(settings, num_workers=num_in_job, num_nodes=num_nodes, is_of_torchrun=False)
        checked, default = ("memory_devices", "partition_table", "replicas", "algorithm"), Settings()
        if any(
            getattr(settings, name) != getattr(default, name) for name in checked
        ):  # the import takes 0.1 s
            from coarse.startup.device_checks import check_node

            check_node(settings, num_workers=num_workers, num_nodes=num_nodes)
    except (OSError, ValueError, CoarseError) as error:
        raise UsageError(str(error)) from None


def _session_variables(arguments: argparse.Namespace) -> dict[str, str]:
    given = {name: value for name, value in vars(arguments).items() if name.startswith("COARSE_")}
    return {name: str(value) for name, value in given.items() if value is not None}


def _prepare_log_dir(arguments: argparse.Namespace) -> Path | None:
    log_dir: Path | None = arguments.log_dir
    if log_dir is None:
        if arguments.redirects != "0":
            raise UsageError(f"--redirects {arguments.redirects}: needs --log-dir")
        return None
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--log-dir {log_dir}: {error.strerror}") from None
    return log_dir


def _prepare_timeline(timeline: str, num_nodes: int) -> None:
    """Removes parts that an earlier job left; with several nodes they may be those of a node that started before."""
    if timeline and num_nodes == 1:
        from coarse.timeline.merge import remove_parts

        remove_parts(Path(timeline))


def _finish_timeline(timeline: str, num_nodes: int) -> None:
    """Merges the processes' records, however they ended, and prints the file's name."""
    if not timeline:
        return
    if num_nodes > 1:
        said = (
            f"the parts of this node are in {parts_folder(Path(timeline))}; bring those of all nodes together, and "
            f"run `coarse timeline merge {timeline}`"
        )
    else:
        from coarse.timeline.merge import merge

        try:
            said = f"{timeline}: {merge(Path(timeline))}; open it in https://ui.perfetto.dev"
        except (OSError, CoarseError) as error:
            said = str(error)
    print(f"coarse run: timeline: {said}", file=sys.stderr)


def _announce_threads(environment: Mapping[str, str], num_workers: int) -> None:
    if "OMP_NUM_THREADS" in process_environment():
        return
    threads = environment["OMP_NUM_THREADS"]
    print(
        f"coarse run: OMP_NUM_THREADS={threads} for each worker, its share of the cores "
        f"({num_workers} on this node); set it to choose yourself",
        file=sys.stderr,
    )


def _announce_machine(environment: Mapping[str, str]) -> None:
    settings = Settings.from_environment(environment)
    if settings.machine:
        print(
            f"coarse run: emulated: links of {settings.machine}, {settings.time_dilation:g} times slower",
            file=sys.stderr,
        )


def _num_nodes(text: str) -> int:
    """Reads a number of nodes, also torchrun's "2:2"; a job keeps its number of nodes."""
    low, _, high = text.partition(":")
    if high not in ("", low):
        raise argparse.ArgumentTypeError(f"{text!r}: the number of nodes cannot change; write one number")
    return whole_number(low, "a whole number from 1 on", 1, float("inf"))


def _node_rank(text: str) -> int:
    return whole_number(text, "a whole number from 0 on", 0, float("inf"))


def _num_restarts(text: str) -> int:
    return whole_number(text, "a whole number from 0 on", 0, float("inf"))


def _num_workers(text: str) -> int:
    if text == "cpu":
        return read_cpu().num_cores_granted
    return num_workers(text)
