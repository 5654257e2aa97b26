"""Folding equal workers, memory devices and links into one changes no figure."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_jobs import small_setup

from coarse.simulator.job import DEFAULT_RATES, SyncCores
from coarse.simulator.machines.generated import KINDS
from coarse.simulator.schemes.catalogue import SCHEMES
from coarse.simulator.training_step import simulate_step

CORES = SyncCores(num_cores=4, gbytes_per_s=DEFAULT_RATES)


def orbit_of(name):
    """The name of a bucket in the folded network."""
    if " CCI " in name:
        return f"each worker's CCI {name.split()[-1]}"
    part, way = re.fullmatch(r"(worker|md|switch) ?\d+ (up|down)", name).groups()
    return f"each {part} {way}"


def assert_alike(folded, unfolded):
    assert folded.step_s == pytest.approx(unfolded.step_s, rel=1e-9)
    assert folded.memory == unfolded.memory
    for name, load in unfolded.links.items():
        alike = folded.links[name if name in folded.links else orbit_of(name)]
        assert load.nbytes == pytest.approx(alike.nbytes, rel=1e-9), name
    total = sum(load.nbytes * load.copies for load in folded.links.values())
    assert total == pytest.approx(sum(load.nbytes for load in unfolded.links.values()), rel=1e-9)


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_folding_changes_nothing(scheme, data):
    per_switch = data.draw(st.sampled_from((2, 4, 8)))
    workers_per_device = data.draw(st.sampled_from((1, 2, 4, 8)))
    num_workers = per_switch * data.draw(st.integers(2, 4))
    assume(per_switch % workers_per_device == 0)
    setup = small_setup(
        data.draw(st.sampled_from(sorted(KINDS))),
        num_workers=num_workers,
        workers_per_device=workers_per_device,
        workers_per_switch=per_switch,
        oversubscription=data.draw(st.sampled_from((1.0, 2.0, 8.0))),
        sync_cores=data.draw(st.sampled_from((None, CORES))),
        host_overhead_us=data.draw(st.sampled_from((0.0, 1.5))),
    )
    folded = simulate_step(setup, scheme)
    assert_alike(folded, simulate_step(replace(setup, is_folded=False), scheme))
