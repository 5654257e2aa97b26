"""A job whose workers are killed resumes from the memory devices, bitwise equal, under `coarse run` and torchrun. A
job that loses memory devices resumes from their neighbours' replicas.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import COARSE_RUN, TORCHRUN, WORKERS
from launching import launch as launch_script

SCRIPT = Path(__file__).parent / "recovery_script.py"
STEPS = 15


def launch(
    launcher: tuple[str, ...], folder: Path, *options: str, arguments: tuple[str, ...] = (), **variables: str
) -> str:
    """Runs the script to its end; returns what was printed."""
    return launch_script(launcher, SCRIPT, (str(folder), *arguments), *options, **variables)


def losses(folder: Path) -> list[list[str]]:
    """The loss of each step on each worker: of steps that were taken twice, the later one."""
    found = []
    for rank in range(WORKERS):
        lines = (folder / f"losses-{rank}").read_text().splitlines()
        by_step = dict(line.split() for line in lines)
        assert list(by_step) == [str(step) for step in range(1, STEPS + 1)]
        found.append(list(by_step.values()))
    return found


def ends(folder: Path) -> tuple[list[str], set[str], set[str]]:
    """Digests by rank, attempts, and the steps they went on from."""
    digests, attempts, steps = zip(
        *((folder / f"end-{rank}").read_text().split() for rank in range(WORKERS)), strict=True
    )
    return list(digests), set(attempts), set(steps)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    launch(COARSE_RUN, folder)
    return folder


CRASHES = (
    # In mid-backward, between the updates of a step, after the last one; epochs have 5 steps.
    ("backward.push:kill@rank=1,step=4,count=2", {3}),
    ("step.push:kill@rank=1,step=6,count=3", {5, 6}),
    ("step.prepare:kill@rank=0,step=8", {7}),
    ("step.done:kill@rank=0,step=10", {10}),
    ("step.pull:kill@rank=1,step=12", {11, 12}),
)


# torchrun's restarts differ in how workers come back, not in where they crashed.
CRASHES_UNDER_TORCHRUN = CRASHES[:2]

CRASHES_IN_BACKWARD = (
    # Updates of a step are undone unless all are made: in mid-backward, before the last push, and after it.
    ("backward.push:kill@rank=1,step=4,count=3", {3}),
    ("backward.push:kill@rank=0,step=6,count=5", {5}),
    ("step.pull:kill@rank=1,step=8", {7, 8}),
)

Crashes = tuple[tuple[str, set[int]], ...]


def failpoints(crashes: Crashes) -> str:
    """One of the crashes in each attempt."""
    return ";".join(f"{crash},attempt={attempt}" for attempt, (crash, _) in enumerate(crashes))


def check_went_on(folder: Path, undisturbed: Path, printed: str, crashes: Crashes) -> None:
    digests, attempts, _ = ends(folder)
    assert attempts == {str(len(crashes))}, printed
    for rank in range(WORKERS):
        # For each attempt except the last: how many steps it has repeated, if any.
        went_on = [
            int(line.split()[-1]) for line in printed.splitlines() if f"worker {rank}: from step" in line
        ]
        assert len(went_on) == len(crashes), printed
        assert all(step in steps for step, (_, steps) in zip(went_on, crashes, strict=True)), went_on
    assert losses(folder) == losses(undisturbed)
    assert digests == ends(undisturbed)[0]


@pytest.mark.parametrize(
    "crashes",
    [CRASHES[:2], pytest.param(CRASHES, marks=pytest.mark.slow)],
    ids=["in a backward and in a step", "anywhere"],
)
def test_coarse_run_goes_on_where_memory_is(undisturbed: Path, tmp_path: Path, crashes: Crashes) -> None:
    restarts = str(len(crashes))
    options = ("--max-restarts", restarts, "--keep-devices", "60", "--failpoints", failpoints(crashes))
    printed = launch(COARSE_RUN, tmp_path, *options)
    assert f"was killed by SIGKILL; restart {restarts} of {restarts}" in printed
    check_went_on(tmp_path, undisturbed, printed, crashes)


def test_memory_devices_outlive_a_worker_that_has_to_be_killed(undisturbed: Path, tmp_path: Path) -> None:
    """One that is stopped does not heed SIGTERM. Takes the seconds that workers get before SIGKILL."""
    crash, steps = CRASHES[1]
    stop = crash.replace("kill@rank=1", "stop@rank=0")
    options = (
        "--max-restarts",
        "1",
        "--keep-devices",
        "60",
        "--failpoints",
        f"{crash},attempt=0;{stop},attempt=0",
    )
    printed = launch(COARSE_RUN, tmp_path, *options)
    check_went_on(tmp_path, undisturbed, printed, ((crash, steps),))


@pytest.mark.slow
def test_torchrun_goes_on_where_memory_is(undisturbed: Path, tmp_path: Path) -> None:
    printed = launch(
        TORCHRUN,
        tmp_path,
        "--max-restarts",
        str(len(CRASHES_UNDER_TORCHRUN)),
        COARSE_KEEP_DEVICES="60",
        COARSE_FAILPOINTS=failpoints(CRASHES_UNDER_TORCHRUN),
    )
    check_went_on(tmp_path, undisturbed, printed, CRASHES_UNDER_TORCHRUN)


@pytest.mark.slow
def test_updates_in_backward_are_whole_steps_too(tmp_path: Path) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    for folder in (undisturbed, disturbed):
        folder.mkdir()
    launch(COARSE_RUN, undisturbed, arguments=("overlap",))
    restarts = ("--max-restarts", str(len(CRASHES_IN_BACKWARD)), "--keep-devices", "60")
    crashes = ("--failpoints", failpoints(CRASHES_IN_BACKWARD))
    printed = launch(COARSE_RUN, disturbed, *restarts, *crashes, arguments=("overlap",))
    check_went_on(disturbed, undisturbed, printed, CRASHES_IN_BACKWARD)


@pytest.mark.slow
@pytest.mark.parametrize("way", [(), ("overlap",)], ids=["in step", "in backward"])
@pytest.mark.parametrize(
    "devices",
    ["cuda:0,cuda:0", "cuda:0,cuda:1", "2"],
    ids=["its memory", "that of two GPUs", "the host's memory"],
)
def test_a_worker_on_a_gpu_that_is_stood_in_for_goes_on_where_memory_is(
    devices: str, way: tuple[str, ...], tmp_path: Path, cuda_stand_ins: Path
) -> None:
    crashes = CRASHES_IN_BACKWARD if way else CRASHES[:3]
    on_gpu = {"COARSE_MEMORY_DEVICES": devices, "STAND_IN_GPUS": "2", "STAND_IN_PAGE_BYTES": "4096"}
    on_gpu |= {name: str(cuda_stand_ins) for name in ("LD_LIBRARY_PATH", "XDG_CACHE_HOME")}
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    for folder in (undisturbed, disturbed):
        folder.mkdir()
    launch(COARSE_RUN, undisturbed, arguments=way)
    options = ("--max-restarts", str(len(crashes)), "--keep-devices", "60")
    options += ("--failpoints", failpoints(crashes))
    printed = launch(COARSE_RUN, disturbed, *options, arguments=("stand-in-gpu", *way), **on_gpu)
    check_went_on(disturbed, undisturbed, printed, crashes)


@pytest.mark.slow
def test_without_keeping_a_restart_begins_from_scratch(undisturbed: Path, tmp_path: Path) -> None:
    crash = "step.prepare:kill@rank=0,step=8,attempt=0"
    launch(COARSE_RUN, tmp_path, "--max-restarts", "3", "--failpoints", crash)
    digests, attempts, went_on_from = ends(tmp_path)
    assert (attempts, went_on_from) == ({"1"}, {"0"})
    assert digests == ends(undisturbed)[0]


DEVICE_LOSSES = (  # and the steps from which the next attempt may go on
    ("step.push:kill-md0@rank=1,step=4,count=2", {"3", "4"}),
    ("step.pull:kill-md1@rank=0,step=6", {"5", "6"}),
    ("step.push:kill@rank=1,step=10,count=3", {"9", "10"}),
)


def said_by(launcher: tuple[str, ...], settings: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Settings as flags of `coarse run`, or as variables."""
    if launcher is COARSE_RUN:
        return [part for name, value in settings.items() for part in (f"--{name}", value)], {}
    return [], {f"COARSE_{name.upper().replace('-', '_')}": value for name, value in settings.items()}


@pytest.mark.parametrize(
    ("launcher", "arguments", "num_devices", "lost"),
    [
        (COARSE_RUN, (), 2, DEVICE_LOSSES[:1]),
        pytest.param(COARSE_RUN, (), 2, DEVICE_LOSSES, marks=pytest.mark.slow),
        pytest.param(TORCHRUN, ("bfloat16",), 3, DEVICE_LOSSES[:1], marks=pytest.mark.slow),
    ],
    ids=["coarse run, AdamW", "coarse run, AdamW, three times", "torchrun, momentum, bfloat16"],
)
def test_a_job_goes_on_from_the_neighbours_copy(
    tmp_path: Path,
    undisturbed: Path,
    launcher: tuple[str, ...],
    arguments: tuple[str, ...],
    num_devices: int,
    lost: tuple[tuple[str, set[str]], ...],
) -> None:
    disturbed = tmp_path / "disturbed"
    disturbed.mkdir()
    if arguments:
        undisturbed = tmp_path / "undisturbed"
        undisturbed.mkdir()
        launch(COARSE_RUN, undisturbed, arguments=arguments)
    failpoints = ";".join(f"{place},attempt={attempt}" for attempt, (place, _) in enumerate(lost))
    settings = {
        "keep-devices": "60",
        "replicas": "1",
        "memory-devices": str(num_devices),
        "failpoints": failpoints,
    }
    options, variables = said_by(launcher, settings)
    restarts = ("--max-restarts", str(len(lost)))
    printed = launch(launcher, disturbed, *restarts, *options, arguments=arguments, **variables)
    digests, attempts, went_on_from = ends(disturbed)
    assert attempts == {str(len(lost))}, printed
    assert went_on_from <= lost[-1][1], printed
    assert digests == ends(undisturbed)[0]
    assert losses(disturbed) == losses(undisturbed)
    assert "Its neighbour has a copy of its contents (COARSE_REPLICAS)" in printed
