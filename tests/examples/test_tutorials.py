"""The tutorials: the script of each page, changed as the page says, runs at every step and learns the digits."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FEWEST_PERCENT = 85.0


def changed(script: str, diff: str) -> str:
    """The script after a diff, whose lines of context and removal must stand in it once, one after the other."""
    lines = diff.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    assert script.count(before) == 1, f"the script has these lines {script.count(before)} times:\n{before}"
    return script.replace(before, after)


def steps(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Each version of the script, with the command lines that run it."""
    script = ""
    for language, text in BLOCK.findall(page.read_text()):
        if language == "python":
            script = text
        elif language == "diff":
            script = changed(script, text)
        elif script:
            yield script, text.splitlines()


def run(line: str, folder: Path) -> str:
    words = shlex.split(line)
    command = [sys.executable, "-m", "coarse"] if words[0] == "coarse" else [sys.executable]
    done = subprocess.run(
        [*command, *words[1:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["pytorch", "keras"])
def test_every_step_of_a_tutorial_runs(name, tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip({"pytorch": "crc32c", "keras": "tensorflow"}[name])
    commands = 0
    for script, lines in steps(TUTORIALS / f"{name}.md"):
        (tmp_path / "train.py").write_text(script)
        for line in lines:
            said = run(line, tmp_path)
            commands += 1
            if "train.py" in line:
                percents = [float(each) for each in re.findall(r"([\d.]+)% of the test digits", said)]
                assert len(set(percents)) == 1, said
                assert percents[0] > FEWEST_PERCENT
    assert commands >= 3
