"""What a node says to another about losses is checked before it counts."""

from __future__ import annotations

import pytest

from coarse.proxy.nodes.lost_nodes import LostNodes
from coarse.wire.device_job import DeviceJob
from coarse.wire.failure_messages import Failure, WorkerLoss


def job_of_three_nodes(**changed) -> DeviceJob:
    values = {
        "device": 0,
        "num_devices": 1,
        "num_clients": 1,
        "node": 0,
        "nodes": ((0,), (1,), (2,)),
        "local_clients": (0,),
        "memories": ("host",),
        "clients_in_memory": (0,),
        "num_sync_cores": 1,
        "scheduling": "queues",
        "spin_us": 0,
        "has_rings": False,
        "has_exchange": True,
        "has_nccl": False,
        "snapshot_pool_bytes": 0,
        "emulation": "",
        "directory": "",
        "listen_fd": -1,
        "peer_fds": (-1,),
        "link_fds": ((), (), ()),
        "token": "",
        "leader_pid": 0,
        "join_timeout_s": 1.0,
        "node_patience_ms": 1000,
        "heartbeat_s": 1.0,
        "keep_s": 0.0,
        "min_workers": 2,
    }
    return DeviceJob(**{**values, **changed})


def failures_after(text: str, **changed) -> list[str]:
    """How the session ends, if it does, when node 2 has said `text`."""
    failures: list[str] = []

    def unused(*_: object) -> None:
        raise AssertionError("it counted")

    lost = LostNodes(
        job_of_three_nodes(**changed),
        tell_peers=unused,
        tell_peer=unused,
        abort=lambda failure: failures.append(failure.text),
        can_go_on=lambda: True,
        lose_workers=unused,
        proxy=unused,
    )
    lost.hear_node(2, text)
    assert not lost.nodes
    return failures


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no JSON"),
        ("[" * 5000, "no JSON"),
        ('{"type": "reported", "node": ' + "9" * 5000 + "}", "no JSON"),
        ("[]", "no message of a loss"),
        ("{}", "no message of a loss"),
        ('{"type": ["ends"]}', "no message of a loss"),
        ('{"type": "other", "node": 1}', "no message of a loss"),
        ('{"type": "reported", "reason": "", "is_certain": true}', "node=None is not in [0, 2]"),
        ('{"type": "reported", "node": 3, "reason": "", "is_certain": true}', "node=3 is not in [0, 2]"),
        ('{"type": "settled", "node": -1}', "node=-1 is not in [0, 2]"),
        ('{"type": "settled", "node": "1"}', "node='1' is not in [0, 2]"),
    ],
)
def test_what_cannot_be_ends_the_session_with_its_sender(text, reason):
    (failure,) = failures_after(text)
    assert "node 2" in failure
    assert "it sent" in failure
    assert reason in failure


def test_nobody_is_believed_where_no_node_may_be_lost():
    report = '{"type": "reported", "node": 1, "reason": "", "is_certain": true}'
    (failure,) = failures_after(report, min_workers=0)
    assert "cannot go on without a node" in failure


def test_what_is_said_of_this_node_or_of_no_loss_does_nothing():
    assert not failures_after('{"type": "settled", "node": 0}')
    assert not failures_after('{"type": "settled", "node": 1}')


@pytest.mark.parametrize("text", ["", "[" * 5000, "[]", "null", '{"pid": 1e999}', '{"error": 1}'])
def test_a_failure_or_loss_that_cannot_be_read_is_told_as_it_is(text):
    assert text in Failure.from_node(text).text
    loss = WorkerLoss.from_node(1, text)
    assert (loss.rank, loss.fate) == (1, f"was lost: {text}")
