"""init_process_group("coarse"), with nothing imported, gives the bits of gloo.

Each scenario runs with the same seeds in two ranks under both backends. With two ranks a sum has one order of
additions, so that results must be equal bit for bit.
"""

from __future__ import annotations

import pytest
from collective_scenarios import COLLECTIVES
from ranks import RankPool
from training_scenarios import TRAINING

pytestmark = pytest.mark.timeout(400)  # the first test starts the ranks, and may have to compile the backend


@pytest.mark.parametrize("name", [*COLLECTIVES, *TRAINING])
def test_gives_the_bits_of_gloo(name: str, gloo: RankPool, coarse: RankPool) -> None:
    gloo.submit(name)
    coarse.submit(name)
    expected, found = gloo.collect(), coarse.collect()
    assert found == expected


def test_mismatches_name_rank_and_sequence_number_and_the_group_goes_on(coarse: RankPool) -> None:
    for rank, (errors, after) in enumerate(coarse.run("mismatches_are_told_and_survived")):
        for what, (kind, text) in errors.items():
            assert kind == "DistBackendError", (what, text)
            assert f"rank {rank}, sequence number" in text, what
        assert "rank 0 is at" in errors["shape"][1]
        assert "[3]" in errors["shape"][1]
        assert "[4]" in errors["shape"][1]
        assert "float32" in errors["dtype"][1]
        assert "float64" in errors["dtype"][1]
        assert "broadcast" in errors["operation"][1]
        assert "root 1" in errors["root"][1]
        assert "max" in errors["operator"][1]
        assert after == [3.0] * 4


def test_wrong_arguments_are_refused_at_once(coarse: RankPool) -> None:
    for errors in coarse.run("wrong_arguments_are_refused"):
        assert "float32 cannot be reduced" in errors["op"][1]
        assert "meta" in errors["device"][1]
        assert "one per rank" in errors["outputs"][1]
        assert "2 times" in errors["flat"][1]
