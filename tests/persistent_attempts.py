"""Runs tests/gpu/replica_script.py in attempts. All attempts except the last one lose a memory device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent / "gpu" / "replica_script.py"
WORKERS = 2
LIMIT_S = 300


def train_in_attempts(
    folder: Path, memory_devices: str, place: str, deaths: Sequence[str], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the result of the last attempt's workers, which must be equal.

    Args:
        folder: Folder for the job's files.
        memory_devices: As in COARSE_MEMORY_DEVICES.
        place: Place of the workers' tensors: the number of a GPU, or "host".
        deaths: The death that ends each attempt except the last one, as the script's arguments.
        environment: Further variables of the workers.
    """
    for attempt, death in enumerate((*deaths, "")):
        arguments = [str(folder), str(attempt), place, *death.split(maxsplit=3)]
        told, errors = _run_workers(folder, memory_devices, arguments, environment)
        assert all(told), errors
        if death:
            assert [each.get("error") for each in told] == ["MemoryDeviceLostError"] * WORKERS, (told, errors)
    assert told[0] == told[1]
    return told[0]


def _run_workers(
    folder: Path, memory_devices: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[Any], str]:
    """The output of each worker, and the errors of all."""
    variables = {
        "WORLD_SIZE": str(WORKERS),
        "LOCAL_WORLD_SIZE": str(WORKERS),
        "COARSE_MEMORY_DEVICES": memory_devices,
        "TMPDIR": str(folder),
    }
    # Output goes to files, because persistent memory devices keep the workers' pipes open.
    printed = [folder / f"worker{rank}.out" for rank in range(WORKERS)]
    errors = [folder / f"worker{rank}.err" for rank in range(WORKERS)]
    workers = []
    for rank in range(WORKERS):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with printed[rank].open("w") as out, errors[rank].open("w") as err:
            workers.append(
                subprocess.Popen(
                    [sys.executable, str(SCRIPT), *arguments],
                    env=os.environ | variables | environment | own,
                    stdout=out,
                    stderr=err,
                )
            )
    try:
        for worker in workers:
            worker.wait(timeout=LIMIT_S)
    finally:
        for worker in workers:
            worker.kill()
    told = [json.loads(each.read_text() or "null") for each in printed]
    return told, "".join(each.read_text() for each in errors)
