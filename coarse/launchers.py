"""Ranks as MPI's and Slurm's launchers tell them, in the variables that torchrun sets and all else here reads."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, MutableMapping

_MPI = {  # rank, number of workers, and both on this node
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH, Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_PORTS = range(20_000, 30_000)  # below those that systems give to whoever asks for any


def adopt_launcher(environ: MutableMapping[str, str] | None = None, *, parent_pid: int | None = None) -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE for a worker that mpirun or srun has started.

    Does nothing where RANK or WORLD_SIZE is set, or nothing of such a launcher is. MASTER_ADDR and MASTER_PORT are
    set too, unless the user has: to the first node of a Slurm step and a port by the number of its job, or, if all of
    MPI's workers are on this node, to it and a port by the launcher's process. Workers on several nodes under mpirun
    have to be told (`mpirun -x MASTER_ADDR=host`).
    """
    environ = os.environ if environ is None else environ
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return
    found = _slurm(environ) or _mpi(environ, os.getppid() if parent_pid is None else parent_pid)
    for name, value in found.items():
        environ.setdefault(name, value)


def _mpi(environ: MutableMapping[str, str], parent_pid: int) -> dict[str, str]:
    for names in _MPI.values():
        if all(name in environ for name in names):
            found = _ranks(*(environ[name] for name in names))
            if found["WORLD_SIZE"] == found["LOCAL_WORLD_SIZE"]:
                found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _port(parent_pid)}
            return found
    return {}


def _slurm(environ: MutableMapping[str, str]) -> dict[str, str]:
    # A batch script has ranks too, but is one process: only a step has a number.
    if "SLURM_STEP_ID" not in environ or not all(name in environ for name in _SLURM):
        return {}
    rank, size, local_rank, per_node = (environ[name] for name in _SLURM)
    counts = list(_tasks_of_nodes(per_node))
    found = _ranks(rank, size, local_rank, str(counts[int(environ.get("SLURM_NODEID", "0"))]))
    host = _first_host(environ.get("SLURM_STEP_NODELIST", "127.0.0.1"))
    return found | {"MASTER_ADDR": host, "MASTER_PORT": _port(int(environ.get("SLURM_JOB_ID", "0")))}


def _ranks(rank: str, size: str, local_rank: str, local_size: str) -> dict[str, str]:
    return {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}


def _port(number: int) -> str:
    return str(_PORTS[number % len(_PORTS)])


def _tasks_of_nodes(text: str) -> Iterator[int]:
    """Of Slurm's `2(x3),1`: 2, 2, 2, 1."""
    for tasks, _, nodes in re.findall(r"(\d+)(\(x(\d+)\))?", text):
        yield from [int(tasks)] * int(nodes or 1)


def _first_host(nodes: str) -> str:
    """Of Slurm's `gpu[03-05,9],login`: gpu03."""
    return re.sub(r"\[(\w+)[^\]]*\].*", r"\1", nodes) if "[" in nodes.split(",")[0] else nodes.split(",")[0]
