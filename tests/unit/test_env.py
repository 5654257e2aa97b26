"""A worker's identity from its launcher; contradictions are refused with the variable's name."""

from __future__ import annotations

import pytest

from coarse.env import WorkerIdentity
from coarse.errors import RendezvousError


def identity(rank, world_size, local_rank, local_world_size):
    return WorkerIdentity(
        rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size
    )


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, identity(0, 1, 0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, identity(1, 2, 1, 2)),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
            identity(5, 8, 1, 4),
        ),
        ({"LOCAL_RANK": "3"}, identity(0, 1, 0, 1)),
    ],
)
def test_identity_is_what_the_launcher_says(environ, expected):
    assert WorkerIdentity.from_environment(environ) == expected


@pytest.mark.parametrize(
    ("environ", "match"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set, although other launcher variables are.*coarse run"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE='' is not a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 does not fit WORLD_SIZE=2: ranks run from 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2"}, "LOCAL_RANK=2 does not fit"),
    ],
)
def test_a_launcher_that_contradicts_itself_is_told_how(environ, match):
    with pytest.raises(RendezvousError, match=match):
        WorkerIdentity.from_environment(environ)
