"""A job that loses a memory device is started again, and goes on from its newest checkpoint, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_loss_script import EVERY, KILLED_IN
from launching import COARSE_RUN, WORKERS, launch

SCRIPT = Path(__file__).parent / "device_loss_script.py"


def ends(folder: Path) -> list[list[str]]:
    """Digest, attempt and the step it went on from, by rank."""
    return [(folder / f"end-{rank}").read_text().split() for rank in range(WORKERS)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    launch(COARSE_RUN, SCRIPT, (str(folder), "-1"))
    return folder


KEPT = ("--keep-devices", "60")


@pytest.mark.parametrize(
    ("device", "options", "how"),
    [(0, (), ()), (1, KEPT, ()), (1, (), ("overlap",)), (0, KEPT, ("overlap",))],
    ids=["0", "1 kept", "1 overlap", "0 kept overlap"],
)
def test_what_it_held_comes_back_from_the_newest_checkpoint(
    undisturbed: Path, tmp_path: Path, device: int, options: tuple[str, ...], how: tuple[str, ...]
) -> None:
    printed = launch(COARSE_RUN, SCRIPT, (str(tmp_path), str(device), *how), "--max-restarts", "1", *options)
    assert f"memory device md{device}" in printed
    for (digest, attempt, went_on_from), (expected, *_) in zip(
        ends(tmp_path), ends(undisturbed), strict=True
    ):
        assert (digest, attempt) == (expected, "1"), printed
        # The second one is skipped if the first is still being written.
        assert int(went_on_from) in range(EVERY, KILLED_IN, EVERY)
