"""LauncherEnvironment: a worker's identity and rendezvous from torchrun, MPI, Slurm and TF_CONFIG."""

from __future__ import annotations

import json
import re

import pytest

from coarse.errors import RendezvousError
from coarse.rendezvous.launcher_environment import LauncherEnvironment, adopt_launcher, unserved
from coarse.rendezvous.socket_store import LocalAddress, SocketStore, TcpAddress, serve

RANKS = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
AGENT = {**RANKS, "LOCAL_RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job"}
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
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


def tf_config(task, **cluster):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def test_without_variables_there_is_one_worker():
    launch = LauncherEnvironment.from_environment({})
    assert (launch.identity.rank, launch.identity.world_size, launch.address) == (0, 1, None)


def test_worker_0_serves_the_master_port():
    launch = LauncherEnvironment.from_environment(RANKS)
    assert (launch.identity.rank, launch.identity.world_size) == (1, 2)
    assert launch.address == TcpAddress("10.0.0.1", 29500)


def test_where_torchruns_agent_has_the_port_workers_of_one_node_meet_elsewhere():
    address = LauncherEnvironment.from_environment({**AGENT, "LOCAL_WORLD_SIZE": "2"}).address
    restarted = {**AGENT, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "1"}
    assert isinstance(address, LocalAddress)
    assert LauncherEnvironment.from_environment(restarted).address != address


def test_where_torchruns_agent_has_the_port_several_nodes_use_the_next_one():
    several = {**AGENT, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert LauncherEnvironment.from_environment(several).address == TcpAddress("10.0.0.1", 29501)


@pytest.mark.parametrize(("kind", "index", "rank"), [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)])
def test_tf_config_counts_the_chief_first(kind, index, rank):
    variables = tf_config({"type": kind, "index": index}, chief=["a:1"], worker=["b:2", "c:3"])
    launch = LauncherEnvironment.from_environment(variables)
    assert (launch.identity.rank, launch.identity.world_size) == (rank, 3)
    assert launch.address == TcpAddress("a", 1)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"TF_CONFIG": "{"}, "cannot be read"),
        (tf_config({"type": "ps", "index": 0}, worker=["a:1", "b:2"]), "no parameter servers"),
        (tf_config({"type": "worker", "index": 0}, worker=["a", "b"]), "is not host:port"),
        (tf_config({"type": "worker", "index": 2}, worker=["a:1", "b:2"]), "RANK=2 does not fit"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
    ],
)
def test_what_cannot_be_is_refused(variables, said):
    with pytest.raises(RendezvousError, match=said):
        LauncherEnvironment.from_environment(variables)


def test_a_store_that_nobody_serves_is_missed_by_name():
    with pytest.raises(RendezvousError, match="no process answered at stores/nobody within 0 s"):
        SocketStore(LocalAddress("nobody"), timeout_s=0.05)


def test_a_store_that_is_gone_is_told():
    server = serve(TcpAddress("127.0.0.1", 0))
    store = SocketStore(TcpAddress("127.0.0.1", server.port), timeout_s=20.0)
    store.set("key", b"value")
    store.close()
    server.close()
    with pytest.raises(RendezvousError, match="worker 0, which served"):
        store.get("key", 0.0)


@pytest.mark.parametrize(
    ("host", "reason", "said"),
    [
        (
            "nowhere.invalid",
            "timed out",
            r"the name .* has no address: .*\. Set MASTER_ADDR to a name",
        ),
        ("127.0.0.1", "Address already in use", "the port is taken .* Choose a free MASTER_PORT"),
        (
            "127.0.0.1",
            "timed out",
            r"its own connection to it is not answered \(timed out\)\. Check for a firewall",
        ),
        (
            "127.0.0.1",
            "not permitted",
            r"not permitted\. Check that MASTER_ADDR is an address of worker 0's machine",
        ),
    ],
)
def test_what_keeps_worker_0_from_serving_is_told_apart(host, reason, said):
    error = unserved(host, 29_500, reason)
    assert re.fullmatch(f"worker 0 cannot serve {host}:29500: {said}.*", str(error))


def adopted(variables: dict[str, str]) -> dict[str, str]:
    environ = dict(variables)
    adopt_launcher(environ, parent_pid=41_234)
    return {name: value for name, value in environ.items() if variables.get(name) != value}


def test_mpich_on_one_node():
    assert adopted(MPICH) == {
        **dict(zip(NAMES, "1212", strict=True)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "21234",
    }


def test_open_mpi_on_several_nodes_leaves_the_address_to_the_user():
    names = (f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    variables = dict(zip(names, "3412", strict=True))
    assert adopted(variables) == dict(zip(NAMES, "3412", strict=True))


def test_a_step_of_slurm():
    assert adopted(SLURM) == {
        **dict(zip(NAMES, "4501", strict=True)),
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "21234",
    }


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a1", "a1"),
        ("b,c[1-2]", "b"),
        ("n[1,3]", "n1"),
        ("gpu-a[007-009]", "gpu-a007"),
        ("n[1-2]-ib,m", "n1-ib"),
        ("rack[2-3]gpu[04,7],m[1-2]", "rack2gpu04"),
    ],
)
def test_the_first_node_of_a_list(nodes, first):
    assert adopted(SLURM | {"SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == first


def test_steps_of_one_job_meet_at_different_ports():
    ports = {adopted(SLURM | {"SLURM_STEP_ID": str(step)})["MASTER_PORT"] for step in range(100)}
    next_job = adopted(SLURM | {"SLURM_JOB_ID": "31235"})["MASTER_PORT"]
    assert len(ports) == 100
    assert next_job not in ports


def test_nodes_that_slurm_does_not_name_have_to_be_told():
    """Workers other than the first waited for themselves, at 127.0.0.1."""
    unnamed = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    assert adopted(unnamed) == dict(zip(NAMES, "4501", strict=True))
    of_one_node = unnamed | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
    of_one_node |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    assert adopted(of_one_node)["MASTER_ADDR"] == "127.0.0.1"


def test_what_the_user_or_torchrun_has_set_stays():
    assert adopted(MPICH | {"MASTER_ADDR": "head", "MASTER_PORT": "7"}) == dict(
        zip(NAMES, "1212", strict=True)
    )
    assert adopted(MPICH | {"RANK": "0", "WORLD_SIZE": "1"}) == {}


def test_a_batch_script_of_slurm_is_one_process():
    assert adopted({name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}) == {}


def test_a_launch_without_torch_or_tensorflow_variables_is_that_of_mpirun(monkeypatch):
    monkeypatch.setattr("os.getppid", lambda: 41_234)
    launch = LauncherEnvironment.from_environment(MPICH)
    assert (launch.identity.rank, launch.identity.world_size) == (1, 2)
    assert launch.address == TcpAddress("127.0.0.1", 21_234)


def test_tf_config_counts_where_mpirun_has_set_ranks_too():
    launch = LauncherEnvironment.from_environment(
        MPICH | tf_config({"type": "worker", "index": 0}, worker=["a:1", "b:2"])
    )
    assert launch.identity.rank == 0


def test_workers_of_mpirun_on_several_nodes_are_told_what_to_say():
    with pytest.raises(RendezvousError, match=r"mpirun -x MASTER_ADDR=host"):
        LauncherEnvironment.from_environment(MPICH | {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"})
