"""Random Keras training loops on two workers give the results of one process, or of tf.distribute in one process.

Workers always end with bitwise equal weights, optimizer states and logs.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from jobs import HERE, environment
from process_pool import ProcessPool
from tiers import IS_THOROUGH
from training_loops_of_keras import TrainingLoop, training_loops

pytestmark = [pytest.mark.timeout(3000), pytest.mark.slow]  # some loops take half a minute

WORKERS = 2
JUMPS = ("accuracy", "auc", "precision")
"""Metrics that a rounding changes by a whole row."""


def pool_of(name: str, num_processes: int, *, num_nodes: int = 1) -> ProcessPool:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environments = [
        environment(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            COARSE_NODE=str(rank * num_nodes // num_processes),
        )
        for rank in range(num_processes)
    ]
    return ProcessPool(name, HERE / "loop_worker.py", [name], environments)


@pytest.fixture(scope="module")
def reference() -> Iterator[ProcessPool]:
    pool = pool_of("reference", 1)
    yield pool
    pool.close()


@pytest.fixture(scope="module", params=[1, 2], ids=["one node", "two nodes"])
def workers(request: pytest.FixtureRequest) -> Iterator[ProcessPool]:
    pool = pool_of("workers", WORKERS, num_nodes=request.param)
    yield pool
    pool.close()


def check(loop: TrainingLoop, reference: ProcessPool, workers: ProcessPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for pool in (reference, workers):
            pool.request((loop, folder))
        try:
            (expected,) = reference.collect()
        finally:
            found = workers.collect()
    if "batch norm" not in loop.pieces:  # whose statistics are each worker's own
        for other in found[1:]:
            assert list(differences(found[0], other, tolerance=None)) == []
    if not loop.is_random:
        ours, theirs = (comparable(each, loop) for each in (found[0], expected))
        assert list(differences(ours, theirs, loop.tolerance)) == []


def comparable(seen: Any, loop: TrainingLoop) -> Any:
    """What there is of it in one process too."""
    if isinstance(seen, (list, tuple)):
        return [comparable(each, loop) for each in seen]
    if not isinstance(seen, dict):
        return seen
    left = dict(seen)
    if loop.reference == "one process":
        # Keras averages the losses of several outputs over the batches, of workers here, not over their rows.
        left = {name: each for name, each in left.items() if not name.endswith(("first_loss", "second_loss"))}
    if loop.policy != "float64":
        left = {name: each for name, each in left.items() if not any(metric in name for metric in JUMPS)}
    if "batches" in left:  # means over the workers of what each has of its own rows
        batches = left["batches"] if loop.reference == "one process" else []
        left["batches"] = [(number, told["loss"]) for number, told in batches if "loss" in told]
    return {name: comparable(each, loop) for name, each in left.items()}


def differences(ours: Any, theirs: Any, tolerance: float | None, where: str = "") -> Iterator[str]:
    """Where nested results are not the same; without a tolerance, where they have other bits."""
    if isinstance(ours, dict):
        if sorted(ours) != sorted(theirs):
            yield f"{where}: {sorted(ours)} and {sorted(theirs)}"
            return
        for name, each in ours.items():
            yield from differences(each, theirs[name], tolerance, f"{where}/{name}")
    elif isinstance(ours, (list, tuple)):
        if len(ours) != len(theirs):
            yield f"{where}: {len(ours)} and {len(theirs)}"
            return
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(*pair, tolerance, f"{where}/{number}")
    elif isinstance(ours, str) or ours is None:
        if ours != theirs:
            yield f"{where}: {ours} and {theirs}"
    else:
        left, right = (np.asarray(each) for each in (ours, theirs))
        if left.shape != right.shape:
            yield f"{where}: shapes {left.shape} and {right.shape}"
        elif tolerance is None:
            if left.tobytes() != right.tobytes():
                yield f"{where}: other bits"
        else:
            left, right = left.astype("f8"), right.astype("f8")
            if not np.allclose(left, right, rtol=tolerance, atol=tolerance, equal_nan=True):
                yield f"{where}: as far as {np.abs(left - right).max():g}, of values up to {np.abs(right).max():g}"


@settings(
    max_examples=60 if IS_THOROUGH else 20,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
    print_blob=True,
)
@given(loop=training_loops())
def test_any_loop_equals_one_process(
    loop: TrainingLoop, reference: ProcessPool, workers: ProcessPool
) -> None:
    check(loop, reference, workers)
