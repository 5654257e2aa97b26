"""A job that loses memory devices goes on from their neighbours' copies, under both launchers, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import COARSE_RUN, TORCHRUN, launch
from test_torch_recovery import ends, losses

SCRIPT = Path(__file__).parent / "recovery_script.py"
LOSSES = (  # and the steps from which the next attempt may go on
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
        (COARSE_RUN, (), 2, LOSSES[:1]),
        pytest.param(COARSE_RUN, (), 2, LOSSES, marks=pytest.mark.slow),
        pytest.param(TORCHRUN, ("bfloat16",), 3, LOSSES[:1], marks=pytest.mark.slow),
    ],
    ids=["coarse run, AdamW", "coarse run, AdamW, three times", "torchrun, momentum, bfloat16"],
)
def test_a_job_goes_on_from_the_neighbours_copy(
    tmp_path: Path,
    launcher: tuple[str, ...],
    arguments: tuple[str, ...],
    num_devices: int,
    lost: tuple[tuple[str, set[str]], ...],
) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    for folder in (undisturbed, disturbed):
        folder.mkdir()
    launch(COARSE_RUN, SCRIPT, (str(undisturbed), *arguments))
    failpoints = ";".join(f"{place},attempt={attempt}" for attempt, (place, _) in enumerate(lost))
    settings = {
        "keep-devices": "60",
        "replicas": "1",
        "memory-devices": str(num_devices),
        "failpoints": failpoints,
    }
    options, variables = said_by(launcher, settings)
    restarts = ("--max-restarts", str(len(lost)))
    printed = launch(launcher, SCRIPT, (str(disturbed), *arguments), *restarts, *options, **variables)
    digests, attempts, went_on_from = ends(disturbed)
    assert attempts == {str(len(lost))}, printed
    assert went_on_from <= lost[-1][1], printed
    assert digests == ends(undisturbed)[0]
    assert losses(disturbed) == losses(undisturbed)
    assert "its neighbour too (COARSE_REPLICAS)" in printed
