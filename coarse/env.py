"""The environment of a process: launchers' variables, and those of other programs. No other module reads it.

Nothing is read at import.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from coarse.errors import RendezvousError
from coarse.security.job_secret import JobSecret

_LEAST_SECRET_BYTES = 16

MOST_WORKERS_OF_A_NODE = 256
"""The most workers that a memory device serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Which worker of which job this process is.

    Args:
        rank: 0 <= rank < world_size.
        world_size: Number of workers of the job.
        local_rank: Position among the workers of this node.
        local_world_size: Number of workers on this node.

    Raises:
        RendezvousError: If the numbers contradict each other.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise RendezvousError(
                f"RANK={self.rank} does not fit WORLD_SIZE={self.world_size}: ranks run from 0 to "
                f"{self.world_size - 1}. Check the launcher's variables."
            )
        if not 0 <= self.local_rank < self.local_world_size <= self.world_size:
            raise RendezvousError(
                f"worker {self.rank}: LOCAL_RANK={self.local_rank} does not fit LOCAL_WORLD_SIZE="
                f"{self.local_world_size} of WORLD_SIZE={self.world_size}. Check the launcher's variables."
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> WorkerIdentity:
        """Reads RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; a process without them is worker 0 of 1.

        Raises:
            RendezvousError: If only some of RANK and WORLD_SIZE are set, or one is no number.
        """
        environ = os.environ if environ is None else environ
        if "RANK" not in environ and "WORLD_SIZE" not in environ:
            return cls(rank=0, world_size=1, local_rank=0, local_world_size=1)
        rank = _required_int(environ, "RANK")
        world_size = _required_int(environ, "WORLD_SIZE")
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=_required_int(environ, "LOCAL_RANK", default=rank),
            local_world_size=_required_int(environ, "LOCAL_WORLD_SIZE", default=world_size),
        )


def _required_int(environ: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is not None:
            return default
        raise RendezvousError(
            f"{name} is not set, although other launcher variables are. Start the script with `coarse run -n N "
            "script.py` or `torchrun --nproc-per-node N script.py`."
        )
    try:
        return int(text)
    except ValueError:
        raise RendezvousError(f"{name}={text!r} is not a whole number") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Which start of a job this is: launchers that restart workers count.

    Args:
        job: The same for all attempts of a job, and for no other one that this user runs here at the same time.
        number: 0 for the first attempt.
    """

    job: str
    number: int = 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Attempt:
        """Reads TORCHELASTIC_RUN_ID (or else MASTER_ADDR and MASTER_PORT) and TORCHELASTIC_RESTART_COUNT.

        torchrun sets them, and so does `coarse run`.

        Raises:
            RendezvousError: If the count is no number.
        """
        environ = os.environ if environ is None else environ
        run_id = environ.get("TORCHELASTIC_RUN_ID", "")
        if run_id in ("", "none"):  # the latter is torchrun's default, for every job
            run_id = f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"
        return cls(job=run_id, number=_required_int(environ, "TORCHELASTIC_RESTART_COUNT", default=0))


def master_address() -> str:
    """MASTER_ADDR, where the launcher says that worker 0 can be reached; "" if it says nothing."""
    return os.environ.get("MASTER_ADDR", "")


def job_secret(environ: Mapping[str, str] | None = None) -> JobSecret:
    """COARSE_JOB_SECRET, which the launcher gives all workers of a job; one without value if it gives none.

    Raises:
        RendezvousError: If it is too short for a secret.
    """
    environ = os.environ if environ is None else environ
    value = environ.get("COARSE_JOB_SECRET", "").encode()
    if value and len(value) < _LEAST_SECRET_BYTES:
        raise RendezvousError(
            f"COARSE_JOB_SECRET has {len(value)} characters, too few to be safe; give all workers of the job "
            f"the same {_LEAST_SECRET_BYTES} random ones or more, such as `openssl rand -hex 32` prints"
        )
    return JobSecret(value)


def notes_pipe() -> str:
    """COARSE_NOTES_PIPE, by which `coarse run` gives workers a pipe for notes; "" under other launchers."""
    return os.environ.get("COARSE_NOTES_PIPE", "")


def invitation() -> str:
    """COARSE_INVITATION, by which `coarse run` tells a worker that joins a running job how; "" for all others."""
    return os.environ.get("COARSE_INVITATION", "")


def process_environment() -> MutableMapping[str, str]:
    """The environment of this process itself, for code that passes it on or reads the variables of launchers."""
    return os.environ


def compiler_command() -> tuple[str, ...]:
    """CXX, the command of the C++ compiler with its options; empty if it is not set."""
    return tuple(os.environ.get("CXX", "").split())


def may_share_gpus_over_nccl() -> bool:
    """NCCL_MULTI_RANK_GPU_ENABLE, by which NCCL 2.30 and later admit several ranks on a GPU."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def is_of_torchrun() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_USE_AGENT_STORE" in os.environ


def is_of_tensorflow(environ: Mapping[str, str]) -> bool:
    """Whether TF_CONFIG describes the job, because no launcher does."""
    return bool(environ.get("TF_CONFIG")) and "RANK" not in environ and "WORLD_SIZE" not in environ


def forget_settings() -> None:
    """Removes all variables of COARSE from the environment of this process."""
    for name in [name for name in os.environ if name.startswith("COARSE_")]:
        del os.environ[name]


def own_process_environment() -> dict[str, str]:
    """The environment for a Python process that runs COARSE's own code alone.

    It imports nothing from the current folder, where users' files have any name (from Python 3.11 on), unless COARSE
    itself lies there.
    """
    is_in_current_folder = Path(__file__).parents[1].samefile(".")
    return {**os.environ, **({} if is_in_current_folder else {"PYTHONSAFEPATH": "1"})}
