"""Names of checkpoints in their folder: `step-N`, unfinished ones, pins, and the hint to the latest."""

from __future__ import annotations

import re
from dataclasses import dataclass

LATEST_NAME = "latest"
TEMPORARY_SUFFIX = ".tmp"
PIN_SUFFIX = ".pinned"
STATE_FILE_PREFIX = "worker-"
_NAME = re.compile(r"step-(0|[1-9]\d{0,18})(?:\.([1-9]\d{0,8}))?")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    """Name of a checkpoint's folder.

    Args:
        step: Number of updates that its state includes.
        attempt: 0, or a number that distinguishes it from earlier checkpoints of the same step, which are never
            replaced.
    """

    step: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"step-{self.step}.{self.attempt}" if self.attempt else f"step-{self.step}"

    @property
    def temporary(self) -> str:
        """Name of the folder while it is written."""
        return f"step-{self.step}{TEMPORARY_SUFFIX}"

    @property
    def pin(self) -> str:
        """Name of the file that pins the checkpoint."""
        return f"{self}{PIN_SUFFIX}"

    @classmethod
    def parse(cls, text: str) -> CheckpointName | None:
        """Reads a folder's name; None if it is not the name of a finished checkpoint."""
        match = _NAME.fullmatch(text)
        return cls(int(match[1]), int(match[2] or 0)) if match else None


def state_file_name(rank: int) -> str:
    """Name of the file with a worker's own state."""
    return f"{STATE_FILE_PREFIX}{rank}.json"
