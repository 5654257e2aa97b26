"""Ranks of workers that mpirun and srun start."""

from __future__ import annotations

import pytest

from coarse.launchers import adopt_launcher

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "31234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[03-05,9],login",
}


def adopted(variables: dict[str, str]) -> dict[str, str]:
    environ = dict(variables)
    adopt_launcher(environ, parent_pid=41_234)
    return {name: value for name, value in environ.items() if variables.get(name) != value}


def test_mpich_on_one_node():
    assert adopted(MPICH) == {
        **dict(zip(RANKS, "1212", strict=True)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "21234",
    }


def test_open_mpi_on_several_nodes_leaves_the_address_to_the_user():
    names = (f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    variables = dict(zip(names, "3412", strict=True))
    assert adopted(variables) == dict(zip(RANKS, "3412", strict=True))


def test_a_step_of_slurm():
    assert adopted(SLURM) == {
        **dict(zip(RANKS, "4501", strict=True)),
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "21234",
    }


@pytest.mark.parametrize(
    ("nodes", "first"), [("a1", "a1"), ("b,c[1-2]", "b"), ("n[1,3]", "n1"), ("gpu-a[007-009]", "gpu-a007")]
)
def test_the_first_node_of_a_list(nodes, first):
    assert adopted(SLURM | {"SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == first


def test_what_the_user_or_torchrun_has_set_stays():
    assert adopted(MPICH | {"MASTER_ADDR": "head", "MASTER_PORT": "7"}) == dict(
        zip(RANKS, "1212", strict=True)
    )
    assert adopted(MPICH | {"RANK": "0", "WORLD_SIZE": "1"}) == {}


def test_a_batch_script_of_slurm_is_one_process():
    assert adopted({name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}) == {}
