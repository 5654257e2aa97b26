"""Settings of a session. The only module that reads environment variables.

Explicit arguments beat the environment, the environment beats the defaults. Nothing is read at import.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from coarse.errors import RendezvousError

_SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str, *, what: str = "size") -> int:
    """Reads a size such as "4MB", "256KiB" or "65536" as a number of bytes.

    Raises:
        ValueError: If `text` is anything else.
    """
    match = re.fullmatch(r"\s*(\d+)\s*([A-Za-z]*)\s*", text)
    unit = match.group(2).upper() if match else ""
    if match is None or unit not in _SIZE_UNITS:
        raise ValueError(f"{what}: {text!r} is no size; write a number with B, KB, MB, GB, KiB, MiB or GiB")
    return int(match.group(1)) * _SIZE_UNITS[unit]


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
            f"{name} is not set although other launcher variables are. Start the script with "
            "`coarse run -n N script.py` or `torchrun --nproc-per-node N script.py`."
        )
    try:
        return int(text)
    except ValueError:
        raise RendezvousError(f"{name}={text!r} is no whole number") from None
