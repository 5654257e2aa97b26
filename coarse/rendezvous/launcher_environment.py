"""Reads this worker's rank, job size and store address from the variables of torchrun, MPI, Slurm or TF_CONFIG."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from coarse.env import WorkerIdentity, is_of_tensorflow, process_environment
from coarse.errors import RendezvousError
from coarse.rendezvous.socket_store import Address, LocalAddress, TcpAddress
from coarse.security.listening import host_and_port

_MPI = {  # rank and number of workers, in the job and on this node
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH, Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_PORTS = range(20_000, 30_000)  # below the ephemeral ports of most systems
_PORTS_BETWEEN_STEPS = 997


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherEnvironment:
    """The contents of the launcher's variables.

    Args:
        identity: This process's identity. The workers meet before they find out which of them share a node.
        address: Where worker 0 serves the store; None for a job of one worker.
    """

    identity: WorkerIdentity
    address: Address | None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> LauncherEnvironment:
        """Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or else TF_CONFIG, or the variables of mpirun or srun.

        Without any of them the job has one worker.

        Raises:
            RendezvousError: If the variables contradict each other, or TF_CONFIG has tasks other than workers.
        """
        environ = dict(process_environment() if environ is None else environ)
        if is_of_tensorflow(environ):
            return _from_tf_config(environ["TF_CONFIG"])
        adopt_launcher(environ)
        identity = WorkerIdentity.from_environment(environ)
        return cls(
            identity=identity, address=None if identity.world_size == 1 else _address(identity, environ)
        )


def rendezvous_address(identity: WorkerIdentity, environ: Mapping[str, str]) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT of a job of several workers.

    Raises:
        RendezvousError: If they are missing or are not a valid address.
    """
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT", "")
    if not host or not port.isdigit() or int(port) > 65535:
        raise RendezvousError(
            f"worker {identity.rank} of {identity.world_size}: MASTER_ADDR={host!r}, MASTER_PORT={port!r} is "
            "not an address. Start the script with `coarse run -n N script.py`, torchrun, or a TF_CONFIG; "
            "under mpirun on several nodes name the first one (mpirun -x MASTER_ADDR=host -x "
            "MASTER_PORT=29500)."
        )
    return host, int(port)


def why_unresolved(host: str) -> str:
    """Why a host name cannot be resolved; "" if it can."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        return f"the name {host!r} has no address: {getattr(error, 'strerror', None) or error}"
    return ""


def unserved(host: str, port: int, reason: str) -> RendezvousError:
    """Explains why worker 0 cannot serve the job's store at this address, and how to fix it.

    Args:
        host, port: The address of the store.
        reason: The system's error text.
    """
    if unresolved := why_unresolved(host):
        cause, advice = unresolved, "Set MASTER_ADDR to a name or address of worker 0's machine."
    elif "in use" in reason:
        cause = f"the port is taken ({reason})"
        advice = "Choose a free MASTER_PORT; if another process has RANK=0, give each worker its own rank."
    elif "timed out" in reason:
        cause = f"its own connection to it is not answered ({reason})"
        advice = "Check for a firewall, and that MASTER_ADDR is an address of worker 0's machine."
    else:
        cause, advice = reason, "Check that MASTER_ADDR is an address of worker 0's machine."
    return RendezvousError(f"worker 0 cannot serve {host_and_port(host, port)}: {cause}. {advice}")


def _address(identity: WorkerIdentity, environ: Mapping[str, str]) -> Address:
    host, port = rendezvous_address(identity, environ)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return TcpAddress(host, port)
    # torchrun's agent uses the port for a store that only PyTorch can access.
    if identity.local_world_size == identity.world_size:
        job = f"{host}:{port}/{environ.get('TORCHELASTIC_RUN_ID', '')}"
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return LocalAddress(hashlib.sha256(f"{job}/{attempt}".encode()).hexdigest()[:32])
    return TcpAddress(host, port + 1)


def _from_tf_config(text: str) -> LauncherEnvironment:
    try:
        config = json.loads(text)
        cluster, task = config.get("cluster", {}), config.get("task", {})
        workers = [*cluster.get("chief", []), *cluster.get("worker", [])]
        rank = _rank_of_task(cluster, task)
    except (ValueError, AttributeError, TypeError) as error:
        raise RendezvousError(f"TF_CONFIG={text!r} cannot be read: {error}") from error
    world_size = max(1, len(workers))
    identity = WorkerIdentity(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    if world_size == 1:
        return LauncherEnvironment(identity=identity, address=None)
    host, _, port = str(workers[0]).rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise RendezvousError(f"TF_CONFIG: the first worker's address {workers[0]!r} is not host:port")
    return LauncherEnvironment(identity=identity, address=TcpAddress(host.strip("[]"), int(port)))


def _rank_of_task(cluster: Mapping[str, Any], task: Mapping[str, Any]) -> int:
    kind, index = task.get("type", "worker"), int(task.get("index", 0))
    if kind == "chief":
        return index
    if kind == "worker":
        return len(cluster.get("chief", [])) + index
    raise ValueError(
        f"task type {kind!r} is not supported; coarse.tensorflow has only chief and worker, no parameter "
        "servers or evaluators"
    )


def adopt_launcher(environ: MutableMapping[str, str] | None = None, *, parent_pid: int | None = None) -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE for a worker started by mpirun or srun.

    Does nothing if RANK or WORLD_SIZE is set, or if no variable of such a launcher is set. Also sets MASTER_ADDR and
    MASTER_PORT, unless the user has set them. Under Slurm, they are the step's first node and a port derived from the
    job and step numbers. Under MPI with all workers on this node, they are this node and a port derived from the
    launcher's process id. Under mpirun on several nodes, the user must set them (`mpirun -x MASTER_ADDR=host`).
    """
    environ = process_environment() if environ is None else environ
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
    # A batch script also has ranks but is only one process; only a step has a step number.
    if "SLURM_STEP_ID" not in environ or not all(name in environ for name in _SLURM):
        return {}
    rank, size, local_rank, per_node = (environ[name] for name in _SLURM)
    counts = list(_tasks_of_nodes(per_node))
    found = _ranks(rank, size, local_rank, str(counts[int(environ.get("SLURM_NODEID", "0"))]))
    nodes = environ.get("SLURM_STEP_NODELIST", "") if len(counts) > 1 else "127.0.0.1"
    # Steps of a job may run at the same time, and job numbers are consecutive: keep their ports far apart.
    number = int(environ.get("SLURM_JOB_ID", "0")) + _PORTS_BETWEEN_STEPS * int(environ["SLURM_STEP_ID"])
    return found | ({"MASTER_ADDR": _first_host(nodes), "MASTER_PORT": _port(number)} if nodes else {})


def _ranks(rank: str, size: str, local_rank: str, local_size: str) -> dict[str, str]:
    return {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}


def _port(number: int) -> str:
    return str(_PORTS[number % len(_PORTS)])


def _tasks_of_nodes(text: str) -> Iterator[int]:
    """Expands Slurm's `2(x3),1` to 2, 2, 2, 1."""
    for tasks, _, nodes in re.findall(r"(\d+)(\(x(\d+)\))?", text):
        yield from [int(tasks)] * int(nodes or 1)


def _first_host(nodes: str) -> str:
    """The first host of a Slurm list: rack2gpu03-ib for `rack[2-3]gpu[03-05,9]-ib,login`."""
    with_first_numbers = re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes)
    return with_first_numbers.split(",")[0]
