"""A progress bar on a terminal, for operations that take longer than a second."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # slow to import
    from rich.progress import Progress, TaskID

_PATIENCE_S = 1.0


class SaveProgress:
    """Shows the progress of a save or another pass over a checkpoint: a bar on a terminal, nothing elsewhere.

    Call it with the completed and the total number of bytes; use it in a `with` block.

    Args:
        title: Name of the operation.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._began_s = time.monotonic()
        self._shown: tuple[Progress, TaskID] | None = None

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if self._shown is None:
            if time.monotonic() - self._began_s < _PATIENCE_S or not sys.stderr.isatty():
                return
            self._shown = self._show(total_bytes)
        bar, task = self._shown
        bar.update(task, completed=done_bytes)

    def __enter__(self) -> SaveProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown is not None:
            self._shown[0].stop()
            self._shown = None

    def _show(self, total_bytes: int) -> tuple[Progress, TaskID]:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (
            TextColumn("checkpoint {task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
        )
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        bar.start()
        return bar, bar.add_task(self._title, total=total_bytes)
