"""A group over several nodes, which COARSE_NODE separates here, gives the same bits as on a single node.

test_torch_backend.py compares the results of a single node with gloo.
"""

from __future__ import annotations

import pytest
from collective_scenarios import COLLECTIVES
from ranks import RankPool

pytestmark = pytest.mark.timeout(600)  # the first test starts the ranks, and may have to compile the backend


@pytest.mark.parametrize("name", [*COLLECTIVES, "ddp", "fsdp2"])
def test_gives_the_bits_of_one_node(name: str, two_nodes: RankPool) -> None:
    assert two_nodes.run(name) == two_nodes.run(name, is_on_one_node=True)


def test_mismatches_are_told_on_all_nodes(two_nodes: RankPool) -> None:
    for rank, (errors, after) in enumerate(two_nodes.run("mismatches_are_told_and_survived")):
        for what, (kind, text) in errors.items():
            assert kind == "DistBackendError", (what, text)
            assert f"rank {rank}, sequence number" in text, what
        assert after == [6.0] * 4


def test_late_ranks_of_all_nodes_are_named(two_nodes: RankPool) -> None:
    late, after, message = (text for _, text in two_nodes.run("late_ranks_are_named")[0])
    assert "Timed out waiting for rank(s) 1, 2" in late
    assert "the group is broken since" in after
    assert "recv from rank 1" in message


def test_a_rank_that_leaves_is_named_on_another_node(two_nodes: RankPool) -> None:
    for kind, text in two_nodes.run("rank_1_leaves_its_group")[::2]:
        assert kind == "DistBackendError"
        assert "rank 1 has left the group" in text


def test_other_nodes_hear_of_a_death_at_once(two_nodes: RankPool) -> None:
    """The last test of this pool: one of its ranks is gone afterwards."""
    two_nodes.submit("a_rank_dies")
    for errors in two_nodes.collect([0, 2]):
        for kind, text in errors:
            assert kind == "DistBackendError"
            assert "rank 1 died" in text
    two_nodes.close()
