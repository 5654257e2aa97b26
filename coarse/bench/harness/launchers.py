"""Starts the processes of each system, and reports missing requirements."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from coarse.bench.harness.commands import MakeCommands, WorkerJob, name_of
from coarse.env import process_environment

RANK_FROM_LAUNCHER = -1

_MISSING_HINTS: Mapping[str, str] = {
    "limit": "build the native module first: pip install -e .",
    "coarse": "build the native module first: pip install -e .",
    "gloo": "pip install torch",
    "mpich": "pip install mpi4py mpich",
    "openmpi": "pip install mpi4py; apt-get install openmpi-bin",
    "impi": "pip install mpi4py; then, as its files have the names of MPICH's, into an environment of its own: "
    "python -m venv ~/impi && ~/impi/bin/pip install impi-rt; export I_MPI_ROOT=~/impi",
    "ucc": "benchmarks/build_ucc.sh says what it needs and builds it",
    "horovod": "benchmarks/build_horovod.sh builds it",
    "ddp": "pip install torch transformers",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Commands that start the processes of one system, and their additional environment variables."""

    commands: tuple[tuple[str, ...], ...]
    environment: Mapping[str, str]


def missing(system: str) -> str | None:
    """The reason why `system` cannot run on this machine, and how to install it, in one line; None if it can run."""
    present = {
        "limit": lambda: _importable("coarse.kernels._native"),
        "coarse": lambda: _importable("coarse.kernels._native"),
        "coarse-unregistered": lambda: _importable("coarse.kernels._native"),
        "mpich": lambda: _importable("mpi4py") and _mpich_launcher() is not None,
        "openmpi": lambda: _importable("mpi4py") and _openmpi_launcher() is not None,
        "impi": lambda: _importable("mpi4py") and intel_mpi_root() is not None,
        "ucc": lambda: ucc_library() is not None,
        "horovod": lambda: _importable("horovod.torch") and find_program("horovodrun") is not None,
    }.get(system, lambda: _importable("torch"))()
    if present:
        return None
    hint = _MISSING_HINTS.get(system, _MISSING_HINTS["coarse" if system.startswith("coarse") else "ddp"])
    return f"{system}: not installed, skipped. To get it: {hint}"


def launch(job: WorkerJob, make_commands: MakeCommands, socket_path: str) -> Launch:
    """Returns the commands that start the workers of `job.system`, and sets their ranks.

    Raises:
        FileNotFoundError: If its launcher is missing; call missing() first.
    """
    module = ("-m", "coarse.bench.harness.worker_process", "--commands", name_of(make_commands))
    command = (sys.executable, *module, "--socket", socket_path, "--job")
    if job.system in _LAUNCHERS:
        return _LAUNCHERS[job.system](job, (*command, job.to_json()))
    ranks = range(job.num_workers)
    return Launch(
        commands=tuple((*command, replace(job, rank=rank).to_json()) for rank in ranks),
        environment={"GLOO_SOCKET_IFNAME": process_environment().get("GLOO_SOCKET_IFNAME", "lo")},
    )


def _launch_mpich(job: WorkerJob, worker: tuple[str, ...]) -> Launch:
    prefix = (_required(_mpich_launcher(), "mpiexec.hydra"), "-n", str(job.num_workers))
    return Launch(
        commands=((*prefix, *worker),),
        environment={"MPI4PY_LIBMPI": _mpich_library()},
    )


def _launch_openmpi(job: WorkerJob, worker: tuple[str, ...]) -> Launch:
    # Containers often run as root with more workers than cores; the options do not affect two workers on two cores.
    prefix = (
        _required(_openmpi_launcher(), "mpirun.openmpi"),
        *("--allow-run-as-root", "--oversubscribe", "-n", str(job.num_workers)),
    )
    return Launch(
        commands=((*prefix, *worker),),
        environment={"MPI4PY_LIBMPI": "libmpi.so.40", "TMPDIR": os.fspath(job.directory)},
    )


def _launch_impi(job: WorkerJob, worker: tuple[str, ...]) -> Launch:
    root = intel_mpi_root()
    launcher = _required(None if root is None else os.fspath(root / "bin" / "mpiexec.hydra"), "mpiexec.hydra")
    library = os.fspath(Path(launcher).parents[1] / "lib" / "libmpi.so.12")
    return Launch(
        commands=((launcher, "-n", str(job.num_workers), *worker),),
        # Only shared memory is its fastest path within a node. `fork` makes it ignore Slurm or ssh around this job.
        environment={"MPI4PY_LIBMPI": library, "I_MPI_FABRICS": "shm", "I_MPI_HYDRA_BOOTSTRAP": "fork"},
    )


def _launch_horovod(job: WorkerJob, worker: tuple[str, ...]) -> Launch:
    prefix = (
        _required(find_program("horovodrun"), "horovodrun"),
        *("--gloo", "--network-interfaces", "lo", "-np", str(job.num_workers)),
        *("-H", f"localhost:{job.num_workers}"),
    )
    return Launch(
        commands=((*prefix, *worker),),
        environment={},
    )


_LAUNCHERS = {
    "mpich": _launch_mpich,
    "openmpi": _launch_openmpi,
    "impi": _launch_impi,
    "horovod": _launch_horovod,
}


def find_program(name: str) -> str | None:
    """Path of a program in this Python environment, otherwise in PATH; None if it is in neither."""
    beside = Path(sys.executable).parent / name
    return os.fspath(beside) if beside.exists() else shutil.which(name)


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _mpich_launcher() -> str | None:
    return find_program("mpiexec.hydra") or shutil.which("mpiexec.mpich")


def _mpich_library() -> str:
    """The wheel's library in this Python environment, otherwise Debian's; mpi4py's wheels load the named library."""
    beside = Path(sys.prefix) / "lib" / "libmpi.so.12"
    return os.fspath(beside) if beside.exists() else "libmpich.so.12"


def _openmpi_launcher() -> str | None:
    return shutil.which("mpirun.openmpi")


def intel_mpi_root() -> Path | None:
    """Folder of Intel MPI: I_MPI_ROOT, set by Intel's own setup, otherwise this environment; None if in neither."""
    for root in (process_environment().get("I_MPI_ROOT"), sys.prefix):
        if root and (Path(root) / "lib" / "libmpi.so.12").exists() and _is_intel(Path(root)):
            return Path(root)
    return None


def _is_intel(root: Path) -> bool:
    """Whether `root` has Intel MPI; MPICH's launcher and library have the same names."""
    return (root / "bin" / "mpiexec.hydra").exists() and (root / "bin" / "impi_info").exists()


def ucc_library() -> Path | None:
    """The library from benchmarks/build_ucc.sh in this environment; None if it was not built."""
    path = Path(sys.prefix) / "lib" / "libcoarse_bench_ucc.so"
    return path if path.exists() else None


def _required(path: str | None, program: str) -> str:
    if path is None:
        raise FileNotFoundError(f"{program} was not found; install it or leave its system out of --against")
    return path
