"""NodeAgreement: what the workers of one node register, those of the others learn, also if some of them are lost."""

from __future__ import annotations

import pytest

from coarse.client.node_agreement import NodeAgreement
from coarse.errors import RendezvousError, WorkerLostError
from coarse.rendezvous.socket_store import SocketStore, TcpAddress, serve
from coarse.rendezvous.workers import NodeMap
from coarse.schema import TensorSpec
from coarse.wire.registration import GroupSchema

NODES = NodeMap(ranks=((0, 1), (2, 3)), boots=("a", "b"))
SCHEMA = GroupSchema(
    name="weights",
    specs=(TensorSpec(name="w", dtype="float32", num_elements=3),),
    shard_bytes=1 << 20,
    gather_bytes=1 << 10,
    algorithm="auto",
)


@pytest.fixture
def server():
    served = serve(TcpAddress("127.0.0.1", 0), timeout_s=10.0)
    yield served
    served.close()


def agreement(server, rank, **options):
    store = SocketStore(TcpAddress("127.0.0.1", server.port), timeout_s=10.0)
    return NodeAgreement(rank, NODES, store, timeout_s=0.3, **options)


def test_any_worker_of_a_node_publishes_if_workers_may_be_lost(server):
    with pytest.raises(TimeoutError):
        agreement(server, 3, may_lose_workers=True).confirm(1, SCHEMA, set)  # node 0 has not registered
    agreement(server, 1, may_lose_workers=True).confirm(1, SCHEMA, set)


def test_otherwise_the_first_one_does(server):
    with pytest.raises(TimeoutError):
        agreement(server, 3).confirm(1, SCHEMA, set)
    with pytest.raises(TimeoutError):
        agreement(server, 1).confirm(1, SCHEMA, set)


@pytest.mark.parametrize(("may_lose_workers", "error"), [(True, WorkerLostError), (False, RendezvousError)])
def test_without_worker_0_nothing_can_be_registered(server, may_lose_workers, error):
    surviving = agreement(server, 3, may_lose_workers=may_lose_workers)
    server.close()
    with pytest.raises(error, match="worker 0"):
        surviving.confirm(1, SCHEMA, set)
