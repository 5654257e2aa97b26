"""benchmarks/simulator_validation.py: profiled files give the closed form of reductions in place, and of a cable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
validation = pytest.importorskip("simulator_validation")

NBYTES = 64 << 20
RATE = 8e9  # bytes that the kernel reads and writes in a second


def simulated_s(num_workers, nbytes, latency_us=10.0):
    kernel_s = [2 * num_workers * nbytes / RATE]
    text = validation._host_memory_file(num_workers, nbytes, kernel_s, latency_us)
    with validation._machine_file(text) as machine:
        return validation._simulated_step_s(machine, num_workers, validation._one_tensor(nbytes))


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_host_memory_reads_and_writes_each_workers_array_once(num_workers):
    assert simulated_s(num_workers, NBYTES) == pytest.approx(2 * num_workers * NBYTES / RATE, rel=0.02)


def test_the_fitted_row_is_the_latency_each_way():
    assert simulated_s(2, 4096) == pytest.approx(20e-6, rel=0.2)


def test_a_cable_carries_the_tensor_once_each_way():
    assert validation._simulated_over_cable_s(0.1, NBYTES) == pytest.approx(NBYTES / 0.1e9, rel=0.1)


def test_residuals_are_relative_to_the_runtime():
    row = validation.Row(
        part="measured", what="", basis=validation.FITTED, kind="measured", real_s=2.0, simulated_s=1.9
    )
    assert row.residual == pytest.approx(-0.05)
