"""Runs the jobs whose workers are killed, and reads what the workers have written."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.elastic import JOIN_TIMEOUT_MS, SYSTEMS, failure, start
from experiments.common import FOLDER
from experiments.elastic.goodput import Absence, JobLog, Step, rate_per_worker

WARM_UP_STEPS = 50
"""Steps of every worker before its steps count for anything."""

FEWEST_STEPS_TO_THE_END, SECONDS_TO_THE_END = 20, 2.0
"""From the moment at which the last step is chosen: more than any worker makes until it knows."""

LIMIT_S = 120.0
"""Longest time to the first steps, to a worker that can be killed, and from the last step to the end."""

END_GRACE_S = 15.0
"""Time for the other replicas of torchft to end; one that has started too late does not."""

MIN_WORKERS = 1
TEST_FRACTION, SPLIT_SEED = 0.2, 1797
_POLL_S = 0.02
_LONGEST_LINE = 200
_WITHOUT_END = 100_000  # restarts


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What happens in every system.

    Args:
        systems: Names of those to run, of benchmarks.elastic.SYSTEMS.
        workers: Number of workers.
        batch: Samples of a step of one worker.
        calm_s: Seconds of training without kills, before the others.
        seconds: Seconds of training with kills; more if the last one that was killed is not replaced yet.
        kill_every_s: Seconds in each of which one worker is killed.
        seed: Of the kills and of the batches.
        preload: Modules that `coarse run` imports once for all workers; "" lets each worker import them.
    """

    systems: tuple[str, ...] = tuple(SYSTEMS)
    workers: int = 3
    batch: int = 16
    calm_s: float = 20.0
    seconds: float = 300.0
    kill_every_s: float = 15.0
    seed: int = 0
    preload: str = ""

    def __post_init__(self) -> None:
        if self.workers < 2 or min(self.batch, self.calm_s, self.seconds, self.kill_every_s) <= 0:
            raise ValueError(f"a job without survivors, steps or seconds: {self}")

    def kills(self) -> list[Kill]:
        """One in each whole interval, at a random moment of its middle half: so two are half an interval apart."""
        chance = random.Random(self.seed)
        return [
            Kill(
                after_s=(number + chance.uniform(0.25, 0.75)) * self.kill_every_s,
                places=tuple(chance.sample(range(self.workers), self.workers)),
            )
            for number in range(int(self.seconds / self.kill_every_s))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """SIGKILL for a worker.

    Args:
        after_s: Seconds after the time without kills.
        places: The first of these whose worker trains is killed.
    """

    after_s: float
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A process that had a place, and when it had its model."""

    ready_s: float
    pid: int

    @classmethod
    def of_line(cls, line: str) -> WorkerProcess:
        """Reads what the worker has written."""
        ready_s, pid = line.split()
        return cls(float(ready_s), int(pid))


class Processes:
    """The processes of a job that are started here: a launcher, or each replica of torchft.

    Args:
        commands: One for each.
        folder: Gets their output.
        environment: Further variables.
        are_replaced: Whether one that has ended is started again.
    """

    def __init__(
        self,
        commands: Sequence[list[str]],
        folder: Path,
        environment: dict[str, str] | None = None,
        *,
        are_replaced: bool = False,
    ) -> None:
        paths = os.pathsep.join(filter(None, (str(FOLDER.parent), os.environ.get("PYTHONPATH"))))
        self._environment = {"PYTHONPATH": paths, **(environment or {})}
        self._commands, self._folder, self._are_replaced = commands, folder, are_replaced
        self._running = [self._start(command) for command in commands]

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        return start(command, self._folder, self._environment)

    def sleep_until(self, moment_s: float) -> None:
        """Returns at a moment of the monotonic clock; meanwhile replaces what has ended.

        Raises:
            JobFailedError: If a launcher ends.
        """
        while (left_s := moment_s - time.monotonic()) > 0:
            self._replace_ended()
            time.sleep(min(left_s, _POLL_S))

    def _replace_ended(self) -> None:
        for number, process in enumerate(self._running):
            if process.poll() is None:
                continue
            if not self._are_replaced:
                raise failure(self._folder, f"the job has ended with exit code {process.returncode}")
            self._running[number] = self._start(self._commands[number])

    def wait(self) -> None:
        """Waits until the job ends; kills replicas that do not end soon after another one.

        Raises:
            JobFailedError: If nothing ends in time, or the launcher fails.
        """
        until_s = time.monotonic() + LIMIT_S
        while all(process.poll() is None for process in self._running):
            if time.monotonic() > until_s:
                raise failure(self._folder, f"the job did not end within {LIMIT_S:g} s of its last step")
            time.sleep(_POLL_S)
        until_s = time.monotonic() + END_GRACE_S
        while any(process.poll() is None for process in self._running) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        if not self._are_replaced and self._running[0].returncode:
            raise failure(self._folder, f"the job has failed with exit code {self._running[0].returncode}")

    def kill(self) -> None:
        """Ends all of them; launchers get the time to end their workers."""
        for process in self._running:
            process.terminate()
        for process in self._running:
            try:
                process.wait(END_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Job:
    """A job that trains, seen through the files of its workers.

    Args:
        folder: Of these files.
        workers: Number of places.
        processes: What was started.
    """

    def __init__(self, folder: Path, workers: int, processes: Processes) -> None:
        self._folder, self._places, self._processes = folder, range(workers), processes
        self._began_s = time.monotonic()

    def wait_for_warm_up(self) -> None:
        """Returns when each worker has made WARM_UP_STEPS."""
        self._wait_until(lambda: all(self._num_lines(place) >= WARM_UP_STEPS for place in self._places))

    def wait_for_all(self) -> None:
        """Returns when each place has a worker that trains."""
        self._wait_until(lambda: all(map(self._trains, self._places)))

    def _num_lines(self, place: int) -> int:
        path = self._folder / f"steps-{place}.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def _wait_until(self, is_true: Callable[[], bool]) -> None:
        until_s = time.monotonic() + LIMIT_S
        while not is_true():
            if time.monotonic() > until_s:
                raise failure(self._folder, f"not all workers train after {LIMIT_S:g} s")
            self._processes.sleep_until(time.monotonic() + _POLL_S)

    def kill(self, places: Sequence[int]) -> tuple[int, float]:
        """Kills the first worker of these places that trains; returns its place and when.

        Waits for one if none does, as while all are restarted.
        """
        self._wait_until(lambda: any(map(self._trains, places)))
        place = next(filter(self._trains, places))
        killed_s = time.monotonic()
        os.kill(self._processes_of(place)[-1].pid, signal.SIGKILL)
        return place, killed_s

    def _trains(self, place: int) -> bool:
        """Whether this place's present process lives and has finished a step."""
        step, processes = self._last_step(place), self._processes_of(place)
        return step is not None and step.ended_s > processes[-1].ready_s and _is_alive(processes[-1].pid)

    def _last_step(self, place: int) -> Step | None:
        path = self._folder / f"steps-{place}.jsonl"
        if not path.exists():
            return None
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LONGEST_LINE))
            whole = file.read().splitlines(keepends=True)[1:]
        return next((Step(*json.loads(line)) for line in reversed(whole) if line.endswith(b"\n")), None)

    def _processes_of(self, place: int) -> list[WorkerProcess]:
        path = self._folder / f"ready-{place}"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [WorkerProcess.of_line(line) for line in lines if line.endswith("\n")]

    def end(self) -> float:
        """Tells the workers their last step, and waits until they have ended; returns when they were told."""
        newest = max(step.number for place in self._places if (step := self._last_step(place)) is not None)
        steps_per_s = newest / (time.monotonic() - self._began_s)
        last = newest + FEWEST_STEPS_TO_THE_END + int(SECONDS_TO_THE_END * steps_per_s)
        new = self._folder / "stop.new"
        new.write_text(str(last))
        new.rename(self._folder / "stop")
        ended_s = time.monotonic()
        self._processes.wait()
        return ended_s

    def read(self, kills: Sequence[tuple[int, float]], batch: int, began_s: float, ended_s: float) -> JobLog:
        """The log of the whole job, when it has ended."""
        return JobLog(
            steps=[self._steps(place) for place in self._places],
            absences=[self._absence(place, killed_s, ended_s) for place, killed_s in kills],
            batch=batch,
            began_s=began_s,
            ended_s=ended_s,
            accuracy=self._accuracy(),
        )

    def _steps(self, place: int) -> list[Step]:
        lines = (self._folder / f"steps-{place}.jsonl").read_text().splitlines(keepends=True)
        return [Step(*json.loads(line)) for line in lines if line.endswith("\n")]

    def _absence(self, place: int, killed_s: float, ended_s: float) -> Absence:
        ready = [each.ready_s for each in self._processes_of(place) if each.ready_s > killed_s]
        return Absence(place=place, killed_s=killed_s, ready_s=min([*ready, ended_s]))

    def _accuracy(self) -> float:
        """The lowest of all workers that have come to the end."""
        found = [float(path.read_text()) for path in self._folder.glob("end-*")]
        if not found:
            raise failure(self._folder, "no worker came to the end")
        return min(found)


def run_job(
    system: str, plan: Plan, *, workers: int, kills: Sequence[Kill], seconds: float
) -> tuple[JobLog, float]:
    """Trains with a system, at first without kills.

    Returns:
        What the workers did after the time without kills, and their rate in that time: samples per second and worker.

    Raises:
        JobFailedError: If the job does not come to its end.
    """
    with tempfile.TemporaryDirectory(prefix="coarse-elastic-") as name:
        folder = Path(name)
        save_digits(folder / "digits.npz")
        with launched(system, plan, folder, workers=workers, are_lost=bool(kills)) as processes:
            job = Job(folder, workers, processes)
            job.wait_for_warm_up()
            calm_s = time.monotonic()
            began_s = calm_s + plan.calm_s
            killed = []
            for kill in kills:
                processes.sleep_until(began_s + kill.after_s)
                killed.append(job.kill(kill.places))
            processes.sleep_until(began_s + seconds)
            job.wait_for_all()
            ended_s = job.end()
        log = job.read(killed, plan.batch, began_s, ended_s)
        return log, rate_per_worker(log, calm_s, began_s)


@contextmanager
def launched(system: str, plan: Plan, folder: Path, *, workers: int, are_lost: bool) -> Iterator[Processes]:
    """Starts a job, and ends what is left of it."""
    preload = [f"--preload={plan.preload}"] if system == "coarse" and plan.preload else []
    worker = [*preload, "-m", "experiments.elastic.worker", system, f"--folder={folder}"]
    worker += [f"--batch={plan.batch}", f"--seed={plan.seed}"]
    with _LAUNCHERS[system](worker, folder, workers, are_lost) as processes:
        try:
            yield processes
        finally:
            processes.kill()


@contextmanager
def _launch_coarse(worker: list[str], folder: Path, workers: int, are_lost: bool) -> Iterator[Processes]:
    """`coarse run` of this checkout."""
    command = [sys.executable, "-m", "coarse", "run", "-n", str(workers)]
    if are_lost:
        command += [
            "--min-workers",
            str(MIN_WORKERS),
            "--on-loss",
            "replace",
            "--max-restarts",
            str(_WITHOUT_END),
        ]
    yield Processes([[*command, *worker]], folder)


@contextmanager
def _launch_torchrun(worker: list[str], folder: Path, workers: int, are_lost: bool) -> Iterator[Processes]:
    """torchrun, which restarts all workers. With a store of its own, see benchmarks/elastic.py."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    command += [f"--max-restarts={_WITHOUT_END if are_lost else 0}", "--monitor-interval=0.1"]
    yield Processes([[*command, *worker]], folder, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


@contextmanager
def _launch_torchft(worker: list[str], folder: Path, workers: int, are_lost: bool) -> Iterator[Processes]:
    """torchft's lighthouse in this process, and a process a replica, which is started again when it has ended."""
    os.environ.setdefault("RUST_LOG", "error")  # without it, the lighthouse writes four lines a step
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=MIN_WORKERS, join_timeout_ms=JOIN_TIMEOUT_MS
    )
    commands = [[sys.executable, *worker, f"--place={place}"] for place in range(workers)]
    environment = {"TORCHFT_LIGHTHOUSE": lighthouse.address()}
    try:
        yield Processes(commands, folder, environment, are_replaced=True)
    finally:
        lighthouse.shutdown()


_LAUNCHERS = {"coarse": _launch_coarse, "torchft": _launch_torchft, "torchrun": _launch_torchrun}


def save_digits(path: Path) -> None:
    """Writes scikit-learn's digits, so that no worker needs to import it: 1x8x8 images in 0..1, and their labels."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    pixels = (digits.images / 16).astype(np.float32)[:, None]
    parts = train_test_split(
        pixels, digits.target, test_size=TEST_FRACTION, random_state=SPLIT_SEED, stratify=digits.target
    )
    np.savez(path, **dict(zip(("pixels", "test_pixels", "labels", "test_labels"), parts, strict=True)))


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
