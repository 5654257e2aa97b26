"""Events of the launcher for its dashboard: a pipe takes each line whole, whatever is in it, or not at all."""

from __future__ import annotations

import json
import os
import select

import pytest

from coarse.cli.workers.dashboard_process import _tell, line_of

LONG = 10_000


@pytest.mark.parametrize("text", ["", "worker 1 was killed", 'a "quoted" Grüße\nline', "\udcff.py"])
def test_an_event_is_a_line_of_json(text):
    line = line_of("fault", text)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"kind": "fault", "text": text}


@pytest.mark.parametrize("character", ["x", "é", "\x01", "\udcff", "😀"])
def test_a_text_that_is_too_long_for_a_pipe_is_cut(character):
    line = line_of("job", LONG * character)
    assert len(line) <= select.PIPE_BUF
    text = json.loads(line)["text"]
    kept = text.removesuffix("...")
    assert text != kept, "the cut is visible"
    assert kept == len(kept) * character
    assert len(line) > 0.8 * select.PIPE_BUF, "no more is cut than needed"


def test_lines_in_a_full_pipe_are_whole():
    reader, writer = os.pipe2(os.O_NONBLOCK)
    try:
        for number in range(100):
            _tell(writer, "fault", f"{number} " + LONG * "x")
        with open(reader, "rb", closefd=False) as pipe:
            numbers = [int(json.loads(line)["text"].split()[0]) for line in pipe.read().splitlines()]
    finally:
        os.close(reader)
        os.close(writer)
    assert numbers == list(range(len(numbers)))
    assert 1 < len(numbers) < 100
