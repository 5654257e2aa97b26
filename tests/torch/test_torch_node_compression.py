"""Digits train on two nodes whose gradients travel in fewer bytes, with the optimizer on workers and on devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import COARSE_RUN, launch

SCRIPT = Path(__file__).parent / "node_compression_script.py"


@pytest.mark.parametrize(
    ("compression", "arguments", "ratio"),
    [
        ("int8", (), 0.254),
        ("int8", ("offload",), 0.254),
        pytest.param("bf16", (), 0.5, marks=pytest.mark.slow),
        pytest.param("bf16", ("offload",), 0.5, marks=pytest.mark.slow),
        pytest.param("fp16", ("offload",), 0.5, marks=pytest.mark.slow),
    ],
)
def test_digits_reach_97_percent_with_the_same_bits_on_both_nodes(
    tmp_path: Path, compression: str, arguments: tuple[str, ...], ratio: float
) -> None:
    launch(COARSE_RUN, SCRIPT, (str(tmp_path), *arguments), COARSE_NODE_COMPRESSION=compression)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0]["digest"] == found[1]["digest"]
    for each in found:
        assert each["accuracy"] >= 0.97
        assert each["sent_per_gradient_byte"] == pytest.approx(ratio, abs=0.02)
        assert any(f"float32 gradients as {compression}" in line for line in each["decisions"])
