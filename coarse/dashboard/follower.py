"""Samples a job in a thread, for the history that the page shows and for the recording."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from coarse.dashboard.history import History, Recorder, as_values
from coarse.dashboard.sample_validation import check_sample
from coarse.dashboard.samples import RUNS, Sample

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0


class Follower:
    """Samples a job once a second until close().

    Args:
        take_sample: Returns the job's state now.
        history: Where samples go.
        recorder: Where they go too; None for no recording. A disk that is full ends the recording alone.
    """

    def __init__(
        self, take_sample: Callable[[], Sample], history: History, recorder: Recorder | None = None
    ) -> None:
        self._take_sample = take_sample
        self._history = history
        self._recorder = recorder
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="coarse-dashboard", daemon=True)
        self._has_run = True
        self._thread.start()

    def close(self) -> None:
        """Takes a last sample. Idempotent."""
        self._is_closed.set()
        self._thread.join()
        if self._recorder is not None:
            self._recorder.close()

    def _follow(self) -> None:
        self._take()
        while not self._is_closed.wait(INTERVAL_S):
            self._take()
        self._take()

    def _take(self) -> None:
        """Takes a sample; without processes and events, it would repeat the one before."""
        try:
            sample = self._take_sample()
            values = as_values(sample)
            check_sample(values)
        except (
            Exception
        ) as error:  # processes of another version may answer anything; the next sample may succeed
            logger.warning("no sample could be taken: %s", error)
            return
        is_running = sample.phase == RUNS
        if is_running or self._has_run or sample.events:
            self._history.add(values)
            self._record(values)
        self._has_run = is_running

    def _record(self, values: dict[str, object]) -> None:
        if self._recorder is None:
            return
        try:
            self._recorder.add(values)
        except OSError as error:
            logger.warning("the recording ends here, and the dashboard goes on: %s", error)
            self._recorder = None
