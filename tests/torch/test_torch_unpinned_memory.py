"""Workers on a GPU whose slots CUDA cannot pin: one warning with the reason, and training with CPU copies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import COARSE_RUN, WORKERS, launch

from coarse.machine.host import read_numa_nodes

SCRIPT = Path(__file__).with_name("gpu_training_script.py")
NODE = next((node.node for node in read_numa_nodes() if node.memory_bytes), None)
needs_nodes = pytest.mark.skipif(NODE is None, reason="this kernel knows no NUMA nodes")
DEVICE_BYTES = 64 << 20
SLOTS = 2  # which of its ranges a worker pins second; the first one is the words that streams wait for
NOT_PERMITTED, NOT_SUPPORTED = 800, 801
REASONS = {
    NOT_PERMITTED: "look at the memory limit of the container or cgroup, and at ulimit -l",
    NOT_SUPPORTED: "memory of this kind cannot be pinned on this system",
}


def train(folder: Path, memory_devices: str, *gpus: str, **variables: str) -> tuple[list[list[str]], str]:
    """Hash of the parameters and way of the gradients by rank, and what was printed."""
    options = ("--memory-devices", memory_devices)
    printed = launch(COARSE_RUN, SCRIPT, (str(folder), *gpus), *options, **variables)
    return [(folder / f"end-{rank}").read_text().split() for rank in range(WORKERS)], printed


@pytest.fixture(scope="module")
def on_the_processor(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What workers without a GPU come to."""
    return train(tmp_path_factory.mktemp("processor"), "2")[0]


@pytest.fixture
def dax(tmp_path: Path) -> str:
    """Two DAX devices, for which files stand."""
    paths = [tmp_path / f"dax{number}" for number in range(2)]
    for path in paths:
        path.write_bytes(b"\xff" * DEVICE_BYTES)
    return ",".join(f"dax:{path}" for path in paths)


@pytest.mark.parametrize(
    ("memory", "result"),
    [
        ("host", NOT_PERMITTED),
        pytest.param("host", NOT_SUPPORTED, marks=pytest.mark.slow),
        pytest.param("numa", NOT_PERMITTED, marks=[pytest.mark.slow, needs_nodes]),
        pytest.param("numa", NOT_SUPPORTED, marks=[pytest.mark.slow, needs_nodes]),
        pytest.param("dax", NOT_PERMITTED, marks=pytest.mark.slow),
        ("dax", NOT_SUPPORTED),
    ],
)
def test_the_processor_copies_what_cannot_be_pinned(
    memory: str,
    result: int,
    dax: str,
    on_the_processor: list[list[str]],
    cuda_stand_ins: Path,
    tmp_path: Path,
) -> None:
    memory_devices = {"host": "2", "numa": f"numa:{NODE},numa:{NODE}", "dax": dax}[memory]
    refuses = {
        "LD_LIBRARY_PATH": str(cuda_stand_ins),
        "STAND_IN_REFUSES": f"cuMemHostRegister_v2:{SLOTS}:{result}",
    }
    ends, printed = train(tmp_path, memory_devices, "0,0", **refuses)
    assert ends == on_the_processor, printed
    slower = [line for line in printed.splitlines() if "which is slower: cuMemHostRegister: " in line]
    warnings = [line for line in slower if "model0/buffers" not in line]
    assert len(warnings) == WORKERS, printed
    for warning in warnings:
        assert "gradients of model0/gradients are copied synchronously" in warning
        assert re.search(rf"pinning [1-9]\d* [KM]iB of host memory; {REASONS[result]}", warning)
