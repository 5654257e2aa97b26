"""Simulated steps agree with steps of the real runtime on emulated links."""

from __future__ import annotations

import pytest

from coarse.bench.replay.driver import ReplayPlan, run_replay
from coarse.bench.replay.trace import ComputeTrace, GradientEvent
from coarse.simulator.setup import Setup
from coarse.simulator.training_step import simulate_step

MIB = 1 << 20
TRACE = ComputeTrace(
    model="four layers",
    batch=1,
    sequence=0,
    forward_s=1e-3,
    backward_s=4e-3,
    flops=1e9,
    events=tuple(
        GradientEvent(name=f"layer{4 - i}", num_elements=2 * MIB, dtype="float32", ready=i / 4)
        for i in range(1, 5)
    ),
    source="made up",
)


def emulated_s(scheme, machine):
    """The fastest step: the host's delays only add to what links take."""
    plan = ReplayPlan(
        schemes=(scheme,), trace=TRACE, machine=machine, num_workers=2, time_dilation=20.0, steps=5
    )
    return run_replay(plan)[0].step.min_us * 1e-6


@pytest.mark.parametrize(
    ("scheme", "machine"),
    [
        ("offload", "aws-p3"),
        pytest.param("offload", "sdsc-p100", marks=pytest.mark.slow),
        pytest.param("workers", "aws-p3", marks=pytest.mark.slow),
        pytest.param("dense", "sdsc-p100", marks=pytest.mark.slow),
    ],
)
def test_a_simulated_step_takes_as_long_as_an_emulated_one(scheme, machine):
    simulated = simulate_step(Setup(machine=machine, trace=TRACE, num_workers=2), scheme)
    assert simulated.blocked_s > 0
    assert simulated.step_s == pytest.approx(emulated_s(scheme, machine), rel=0.1)
