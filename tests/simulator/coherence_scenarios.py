"""Random programs for the coherence protocol, run with messages that overtake each other."""

from __future__ import annotations

import random

from coarse.simulator.studies.remote_data_cache.caches.oracle import violations
from coarse.simulator.studies.remote_data_cache.caches.protocol import System

NUM_STEPS = 250
NUM_LINES = 4
"""Lines in all; caches of two lines, so that lines share sets."""


def run_scenario(coherence, seed, *, num_streams=1, **settings):
    """A system after a random program: reads, writes, ends of kernels, and messages in any order."""
    chance = random.Random(seed)
    system = System(
        num_nodes=3,
        cache_lines=2,
        coherence=coherence,
        epoch_bits=1 + seed % 2,
        private_probability=0.5,
        seed=seed,
        **settings,
    )
    for _ in range(NUM_STEPS):
        _step(system, chance, num_streams)
    _deliver_all(system, chance)
    return system


def _step(system, chance, num_streams):
    stream = chance.randrange(num_streams)
    kind = chance.random()
    if kind < 0.04:
        while not system.writes_have_ended(stream):
            _deliver_one(system, chance)
        system.end_kernel(stream)
    elif kind < 0.5 and system.messages:
        _deliver_one(system, chance)
    else:
        node, line = chance.randrange(system.num_nodes), chance.randrange(NUM_LINES)
        if system.can_access(node, line):
            access = system.write if chance.random() < 0.3 else system.read
            access(node, line, stream)


def _deliver_all(system, chance):
    while system.messages:
        _deliver_one(system, chance)


def _deliver_one(system, chance):
    """Rather a message that was sent late, so that others stay behind for long."""
    system.deliver(max(chance.randrange(len(system.messages)) for _ in range(3)))


def check_scenario(coherence, seed, **settings):
    """Fails with the first read that returned a value older than allowed, or an operation without an end."""
    system = run_scenario(coherence, seed, **settings)
    assert not [each for each in system.operations if each.ended < 0]
    assert not list(violations(system))
    return system
