"""If any processes of a job are killed or stopped at any time, its results equal an undisturbed job's bitwise."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest
from launching import COARSE_RUN, TORCHRUN, launch
from test_torch_recovery import SCRIPT, STEPS, ends, losses
from tiers import IS_THOROUGH

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

POLL_S = 0.001


@dataclasses.dataclass(frozen=True)
class Strike:
    """A signal to one process of a job."""

    whom: str
    """Text in the command line of the targets: workers or memory devices."""
    number: signal.Signals
    stopped_s: float
    """Seconds from SIGSTOP until SIGCONT."""
    step: int
    """The strike follows after worker 0 has begun this step."""
    later_s: float

    def __call__(self, job: subprocess.Popen[bytes], losses_file: Path, draw: random.Random) -> None:
        while job.poll() is None and num_lines(losses_file) < self.step:
            time.sleep(POLL_S)
        time.sleep(self.later_s)
        struck = [each for each in processes_below(job) if self.whom in command_of(each)]
        if struck:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = draw.choice(struck)
                process.send_signal(self.number)
                if self.number == signal.SIGSTOP:
                    time.sleep(self.stopped_s)
                    process.resume()


def num_lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def processes_below(job: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """All descendants, except the launcher's own processes."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(job.pid).children(recursive=True)
        return [
            each
            for each in found
            if not any(part in command_of(each) for part in ("coarse run", "distributed.run"))
        ]
    return []


def command_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@dataclasses.dataclass(frozen=True)
class DisturbedJob:
    launcher: tuple[str, ...]
    arguments: tuple[str, ...]
    variables: Mapping[str, str]
    strikes: tuple[Strike, ...]


def disturbed_job(draw: random.Random) -> DisturbedJob:
    arguments = draw.choice([(), ("bfloat16",), ("overlap",)])
    if arguments != ("overlap",) and draw.random() < 0.5:
        variables = {"COARSE_REPLICAS": "1", "COARSE_MEMORY_DEVICES": draw.choice("23")}
    else:
        variables = {"COARSE_MEMORY_DEVICES": draw.choice("12")}
    strikes = [
        Strike(
            whom=draw.choice([SCRIPT.name, "coarse device"]),
            number=draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]),
            stopped_s=draw.choice([0.3, 3.0]),
            step=draw.randrange(STEPS + 1),
            later_s=draw.choice([0.0, 0.002, 0.01, 0.03]) * draw.random(),
        )
        for _ in range(draw.randint(1, 3))
    ]
    return DisturbedJob(
        launcher=draw.choice([COARSE_RUN, TORCHRUN]),
        arguments=arguments,
        variables={"COARSE_KEEP_DEVICES": "60", **variables},
        strikes=tuple(sorted(strikes, key=lambda each: each.step)),
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Path]:
    """Returns the reports of an undisturbed job, by its arguments."""

    @functools.cache
    def reports(arguments: tuple[str, ...]) -> Path:
        folder = tmp_path_factory.mktemp("undisturbed")
        launch(COARSE_RUN, SCRIPT, (str(folder), *arguments))
        return folder

    return reports


@pytest.mark.parametrize("seed", range(40 if IS_THOROUGH else 3))
def test_a_job_ends_with_the_bits_of_one_that_is_left_alone(
    seed: int, undisturbed: Callable[[tuple[str, ...]], Path], tmp_path: Path
) -> None:
    draw = random.Random(seed)
    disturbed = disturbed_job(draw)

    def strike(job: subprocess.Popen[bytes]) -> None:
        for each in disturbed.strikes:
            each(job, tmp_path / "losses-0", draw)

    printed = launch(
        disturbed.launcher,
        SCRIPT,
        (str(tmp_path), *disturbed.arguments),
        "--max-restarts",
        str(len(disturbed.strikes)),
        meanwhile=strike,
        **disturbed.variables,
    )
    expected = undisturbed(disturbed.arguments)
    assert (ends(tmp_path)[0], losses(tmp_path)) == (ends(expected)[0], losses(expected)), (
        disturbed,
        printed,
    )
