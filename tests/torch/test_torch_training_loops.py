"""Random training loops give the same results under COARSE as under torch DDP and torch's optimizers.

Other scenarios test one feature each; these test unplanned combinations.
"""

from __future__ import annotations

import pytest
from comparison import assert_same
from hypothesis import HealthCheck, given, settings
from parity_pool import WorkerPool
from tiers import IS_THOROUGH
from training_loops import TrainingLoop, training_loops

# Beside the most usual one: where gradients and parameters take other ways. Nodes share no tables of rows; where
# parameters are copies on a GPU, what is written to their `.data` is lost.
POOLS = {
    "direct_allreduce_pool": training_loops(),
    "two_node_pool": training_loops(has_rows=False),
    "stand_in_gpu_pool": training_loops(has_rows=False, writes_data=False),
    "stand_in_gpu_with_slots_pool": training_loops(has_rows=False),
    "nccl_pool": training_loops(has_rows=False, writes_data=False),
    "two_node_gpu_slots_pool": training_loops(has_rows=False),
}

any_loops = settings(
    max_examples=300 if IS_THOROUGH else 30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)


def check(loop: TrainingLoop, ddp_pool: WorkerPool, pool: WorkerPool) -> None:
    for each in (ddp_pool, pool):
        each.request(loop)
    try:
        expected = ddp_pool.collect()
    finally:
        found = pool.collect()
    for rank, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        assert_same(ours, theirs, loop.tolerance, f"worker {rank}")


@any_loops
@given(loop=training_loops())
def test_any_loop_equals_torch(loop: TrainingLoop, ddp_pool: WorkerPool, coarse_pool: WorkerPool) -> None:
    check(loop, ddp_pool, coarse_pool)


@pytest.mark.slow
@pytest.mark.parametrize("name", POOLS)
def test_any_loop_equals_torch_elsewhere(
    name: str, ddp_pool: WorkerPool, request: pytest.FixtureRequest
) -> None:
    pool = request.getfixturevalue(name)

    @any_loops
    @given(loop=POOLS[name])
    def check_all(loop: TrainingLoop) -> None:
        check(loop, ddp_pool, pool)

    check_all()
