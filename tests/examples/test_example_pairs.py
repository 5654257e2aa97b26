"""Example pairs: switching from torch DDP to COARSE adds one line and changes one line, never more."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BEFORE = sorted(EXAMPLES.glob("*_ddp.py"))


def test_every_script_has_its_counterpart() -> None:
    scripts = sorted(path.name for path in EXAMPLES.glob("torch_*.py") if path not in BEFORE)
    assert scripts == [path.name.replace("_ddp", "") for path in BEFORE]
    assert len(scripts) == 3


@pytest.mark.parametrize("before", BEFORE, ids=lambda path: path.stem)
def test_pair_differs_in_two_lines(before: Path) -> None:
    after = before.with_name(before.name.replace("_ddp", ""))
    lines = difflib.ndiff(before.read_text().splitlines(), after.read_text().splitlines())
    assert [" ".join(line.split()) for line in lines if line[0] in "+-"] == [
        "+ import coarse.torch",
        "- model = torch.nn.parallel.DistributedDataParallel(model)",
        "+ model = coarse.torch.DistributedDataParallel(model)",
    ]


def test_readme_shows_the_very_two_lines() -> None:
    text = (EXAMPLES / "README.md").read_text()
    assert "+import coarse.torch\n" in text
    assert "-        model = torch.nn.parallel.DistributedDataParallel(model)\n" in text
    assert "+        model = coarse.torch.DistributedDataParallel(model)\n" in text


def test_keras_pair_differs_in_two_lines() -> None:
    before, after = (EXAMPLES / name for name in ("tf_digits_plain.py", "tf_digits.py"))
    lines = difflib.ndiff(before.read_text().splitlines(), after.read_text().splitlines())
    assert [" ".join(line.split()) for line in lines if line[0] in "+-" and line[1:].strip()] == [
        "+ import coarse.tensorflow",
        "- strategy = tf.distribute.get_strategy()",
        "+ strategy = coarse.tensorflow.Strategy()",
    ]


def test_a_process_group_differs_in_one_word() -> None:
    before, after = (EXAMPLES / f"process_group_{backend}.py" for backend in ("gloo", "coarse"))
    assert before.read_text().replace('"gloo"', '"coarse"') == after.read_text()
    assert before.read_text().count('"gloo"') == 1
