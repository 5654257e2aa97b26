"""With the partition tables of the paper's machines, training gives the same results as with devices on the host.

GPUs are stand-ins that can access each other's memory as on the real machine. Results are compared bit by bit.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from launching import launch

SCRIPT = Path(__file__).with_name("gpu_training_script.py")
TABLES = Path(__file__).parents[2] / "experiments" / "aws" / "tables"
NUM_WORKERS, NUM_GPUS = 4, 8
WORKERS_GPUS = "0,2,4,6"

# NVLinks of a p3.16xlarge, without which its GPUs do not reach each other's memory: two squares with their diagonals,
# and the corners of one with those of the other.
SQUARES = ((0, 1, 2, 3), (4, 5, 6, 7))
NVLINKS = {
    *zip(*SQUARES, strict=True),
    *(link for square in SQUARES for link in itertools.combinations(square, 2)),
}
PAIRS = itertools.combinations(range(NUM_GPUS), 2)
APART = {
    "p3": ",".join(f"{one}:{other}" for one, other in PAIRS if (one, other) not in NVLINKS),
    "g4dn": "all",  # what goes from one to another goes through the host
}


def train(
    folder: Path, table: Path, *gpus: str, algorithm: str, **variables: str
) -> tuple[list[list[str]], str]:
    """Hash of the parameters and way of the gradients by rank, and what was printed."""
    launcher = ("coarse", "run", "-n", str(NUM_WORKERS))
    options = ("--partition-table", str(table))
    variables["COARSE_ALGORITHM"] = algorithm
    printed = launch(launcher, SCRIPT, (str(folder), *gpus), *options, **variables)
    return [(folder / f"end-{rank}").read_text().split() for rank in range(NUM_WORKERS)], printed


def moved_to_the_host(table: Path, folder: Path) -> Path:
    """The same table, with memory devices that serve the same workers from the host's memory."""
    moved = folder / table.name
    lines = table.read_text().splitlines()
    moved.write_text("\n".join(line for line in lines if not line.startswith(("kind", "device"))))
    return moved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("p3-1to1", "ring"),  # for which its memory devices are in the order of their links
        *((path.stem, "exchange") for path in sorted(TABLES.glob("*.toml"))),
    ],
)
def test_a_table_trains_what_memory_devices_on_the_host_do(
    name: str, algorithm: str, cuda_stand_ins: Path, tmp_path: Path
) -> None:
    stand_ins = {"LD_LIBRARY_PATH": str(cuda_stand_ins), "XDG_CACHE_HOME": str(cuda_stand_ins)}
    gpus = {"STAND_IN_GPUS": str(NUM_GPUS), "STAND_IN_GPUS_ARE_APART": APART[name.partition("-")[0]]}
    table = TABLES / f"{name}.toml"
    expected, _ = train(tmp_path, moved_to_the_host(table, tmp_path), algorithm=algorithm)
    found, printed = train(tmp_path, table, WORKERS_GPUS, algorithm=algorithm, **stand_ins, **gpus)
    assert [digest for digest, _ in found] == [digest for digest, _ in expected], printed
    assert len({digest for digest, _ in found}) == 1, printed
    assert {way for _, way in found} == {"GpuGradients"}, printed
    # Every worker is next to its memory device, except where GPUs cannot reach each other.
    assert ("so tensors go through the host" in printed) == name.startswith("g4dn"), printed
