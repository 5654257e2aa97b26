"""Launch: what RANK and its like, torchrun's agent and TF_CONFIG say of who a worker is and where workers meet."""

from __future__ import annotations

import json

import pytest

from coarse.errors import RendezvousError
from coarse.launch import Launch
from coarse.socket_store import LocalAddress, SocketStore, StoreServer, TcpAddress

RANKS = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
AGENT = {**RANKS, "LOCAL_RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job"}


def tf_config(task, **cluster):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def test_without_variables_there_is_one_worker():
    launch = Launch.from_environment({})
    assert (launch.identity.rank, launch.identity.world_size, launch.address) == (0, 1, None)


def test_worker_0_serves_the_master_port():
    launch = Launch.from_environment(RANKS)
    assert (launch.identity.rank, launch.identity.world_size) == (1, 2)
    assert launch.address == TcpAddress("10.0.0.1", 29500)


def test_where_torchruns_agent_has_the_port_workers_of_one_node_meet_elsewhere():
    address = Launch.from_environment({**AGENT, "LOCAL_WORLD_SIZE": "2"}).address
    restarted = {**AGENT, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "1"}
    assert isinstance(address, LocalAddress)
    assert Launch.from_environment(restarted).address != address


def test_where_torchruns_agent_has_the_port_several_nodes_use_the_next_one():
    several = {**AGENT, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert Launch.from_environment(several).address == TcpAddress("10.0.0.1", 29501)


@pytest.mark.parametrize(("kind", "index", "rank"), [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)])
def test_tf_config_counts_the_chief_first(kind, index, rank):
    variables = tf_config({"type": kind, "index": index}, chief=["a:1"], worker=["b:2", "c:3"])
    launch = Launch.from_environment(variables)
    assert (launch.identity.rank, launch.identity.world_size) == (rank, 3)
    assert launch.address == TcpAddress("a", 1)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"TF_CONFIG": "{"}, "cannot be read"),
        (tf_config({"type": "ps", "index": 0}, worker=["a:1", "b:2"]), "no servers"),
        (tf_config({"type": "worker", "index": 0}, worker=["a", "b"]), "no host:port"),
        (tf_config({"type": "worker", "index": 2}, worker=["a:1", "b:2"]), "RANK=2 does not fit"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
    ],
)
def test_what_cannot_be_is_refused(variables, said):
    with pytest.raises(RendezvousError, match=said):
        Launch.from_environment(variables)


def test_a_store_that_nobody_serves_is_missed_by_name():
    with pytest.raises(RendezvousError, match=r"nobody answered at @coarse/.*/nobody within 0 s"):
        SocketStore(LocalAddress("nobody"), timeout_s=0.05)


def test_a_store_that_is_gone_is_told():
    server = StoreServer(TcpAddress("127.0.0.1", 0))
    store = SocketStore(TcpAddress("127.0.0.1", server.port), timeout_s=20.0)
    store.set("key", b"value")
    store.close()
    server.close()
    with pytest.raises(RendezvousError, match="worker 0, which served"):
        store.get("key", 0.0)
