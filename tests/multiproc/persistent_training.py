"""Short training with Adam through Session alone, bitwise the same in every run, for tests of persistent devices.

Parameters and gradients are in the host's memory or in a GPU's memory.
"""

from __future__ import annotations

import hashlib

import numpy as np
from harness import LIMIT_S

from coarse.client.memory.tensor_bytes import GpuBytes, gpu_context
from coarse.client.tensor_group import UpdateKind
from coarse.client.update_settings import SETTINGS_DTYPE, Rule
from coarse.env import Attempt
from coarse.kernels import _native
from coarse.schema import TensorSpec
from coarse.session import Session
from coarse.settings import Settings

STATES = ("exp_avg", "exp_avg_sq")
LENGTHS = (70_001, 33, 40_000, 5)  # several shards of 64 KiB, and two that are gathered
STEPS = 6
WORKERS = 2


def join(me, attempt=0, *, keep=60.0, **settings):
    return Session.join(
        identity=me.identity,
        store=me.store(f"store{attempt}"),
        settings=Settings(
            **{
                "timeout_s": LIMIT_S,
                "keep_devices": keep,
                "shard_bytes": 64 << 10,
                "profile": "off",
                **settings,
            }
        ),
        attempt=Attempt(job="test", number=attempt),
    )


def read(memory, gpu=""):
    """The float32 values of a tensor."""
    if not isinstance(memory, GpuBytes):
        return np.frombuffer(memory, dtype=np.float32).copy()
    values = np.empty(memory.nbytes // 4, dtype=np.float32)
    stream = _native.CudaStream(gpu_context(gpu))
    stream.copy_to_host(values.ctypes.data, memory.address, values.nbytes)
    stream.synchronize()
    return values


def write(memory, values, gpu=""):
    if not isinstance(memory, GpuBytes):
        np.frombuffer(memory, dtype=np.float32)[:] = values
        return
    stream = _native.CudaStream(gpu_context(gpu))
    stream.copy_to_device(memory.address, values.ctypes.data, values.nbytes)
    stream.synchronize()


def register(session, lengths=LENGTHS, state_names=STATES, gpu=""):
    specs = [
        TensorSpec(name=str(i), dtype="float32", num_elements=n, op="mean") for i, n in enumerate(lengths)
    ]
    group = session.register_parameters("model", specs, state_names=state_names, gpu=gpu)
    if group.recovered is None and session.identity.rank == 0:
        for index, length in enumerate(lengths):
            write(group.parameter(index), np.linspace(-1, 1, length, dtype=np.float32), gpu)
    session.barrier()
    return group


def write_settings(group, step):
    settings = np.frombuffer(group.settings(), dtype=SETTINGS_DTYPE)
    settings[:] = np.zeros((), dtype=SETTINGS_DTYPE)
    settings["rule"] = Rule.ADAM
    settings["gradient_scale"] = settings["parameter_scale"] = 1
    settings["step_size"] = 0.01 / step
    settings["first_weight"], settings["second_decay"], settings["second_weight"] = 0.1, 0.99, 0.01
    settings["second_scale"], settings["epsilon"] = 0.5, 1e-8
    # Tensor 1 has a gradient only in every other step, and the number of its next update in all steps.
    settings["update_number"] = [step, step // 2 + 1, step, step]
    settings["has_gradient"] = [1, step % 2, 1, 1]


def fill_slots(group, rank, step, gpu=""):
    for index, spec in enumerate(group.specs):
        gradient = np.random.default_rng([rank, step, index]).normal(size=spec.num_elements)
        write(group.buffer(index), gradient.astype(np.float32), gpu)


def take_step(group, rank, step, reach=lambda place: None, gpu=""):
    """Runs one training step; calls `reach` with the name of each place that it reaches."""
    fill_slots(group, rank, step, gpu)
    for index in range(len(LENGTHS)):
        reach(f"backward.push {index}")
        group.push(index)
    group.pull_all()
    reach("step.prepare")
    write_settings(group, step)
    for index in range(len(LENGTHS)):
        reach(f"step.push {index}")
        group.push(index, present=index != 1 or step % 2 == 1, update=UpdateKind.UPDATE_BY_MEAN)
    reach("step.pull")
    group.pull_all()
    reach("step.done")


def digest(group, gpu=""):
    found = hashlib.sha256()
    for index in range(len(group.specs)):
        found.update(read(group.parameter(index), gpu))
        for number in range(len(STATES)):
            found.update(read(group.state(index, number), gpu))
    return found.hexdigest()


def train(me, attempt, reach=None, gpu="", **settings):
    """Trains to the end, from the step in the memory devices; returns that step and the results."""
    with join(me, attempt, **settings) as session:
        me.session = session
        group = register(session, gpu=gpu)
        first = 0 if group.recovered is None else group.recovered.step
        for step in range(first + 1, STEPS + 1):
            take_step(
                group,
                me.rank,
                step,
                lambda place, step=step: reach(group, step, place) if reach else None,
                gpu,
            )
        session.barrier()
        updates = None if group.recovered is None else group.recovered.num_updates
        return first, updates, digest(group, gpu)


def finish(job, attempt, **settings):
    """Runs an attempt to its end; returns its first step, the updates of each tensor, and its digest."""
    results = job.run(WORKERS, lambda me: train(me, attempt, **settings))
    assert results[0] == results[1]
    return tuple(results[0])
