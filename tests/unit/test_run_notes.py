"""Notes of workers to `coarse run`: nothing but whole notes arrives, and no other file is written to."""

from __future__ import annotations

import json
import os

import pytest

from coarse.cli.workers.run_notes import RunNotes
from coarse.status.launcher_notes import NotesPipe, tell_launcher

DECIDED = {"decisions": ["one", "two", "three"]}


@pytest.fixture
def pipe():
    made = NotesPipe()
    yield made
    made.close()


def end_of(rank, **values):
    usual = {"steps": 40, "seconds": 10.0, "peak_bytes": 1 << 30}
    return {"ended": rank, **usual, **values}


def test_notes_arrive_whole_and_in_order(pipe):
    for number in range(3):
        tell_launcher(pipe.name, {"number": number})
    assert [note["number"] for note in pipe.read()] == [0, 1, 2]
    assert pipe.read() == []


def test_what_is_no_note_is_left_out(pipe):
    os.write(pipe.inherited_fd, b'no note\n[1]\n{"a": 1}\n{"b"')
    assert pipe.read() == [{"a": 1}]
    os.write(pipe.inherited_fd, b": 2}\n")
    assert pipe.read() == [{"b": 2}]


def test_a_note_that_is_too_long_is_not_sent(pipe):
    tell_launcher(pipe.name, {"text": "a" * 5000})
    tell_launcher(pipe.name, {"text": "b"})
    assert pipe.read() == [{"text": "b"}]


def test_a_full_pipe_does_not_block(pipe):
    for _ in range(100):
        tell_launcher(pipe.name, {"text": "a" * 4000})
    assert 0 < len(pipe.read()) < 100


@pytest.mark.parametrize("name", ["", "3", "x:y", "-1:5", "3:"])
def test_without_a_pipe_nothing_is_sent(name):
    tell_launcher(name, DECIDED)


def test_a_descriptor_that_leads_elsewhere_is_not_written_to(pipe, tmp_path):
    reader, writer = os.pipe()
    with open(tmp_path / "file", "w+b") as file:
        for fd in (file.fileno(), writer):
            tell_launcher(f"{fd}:{pipe.name.partition(':')[2]}", DECIDED)
        assert file.read() == b""
    os.close(writer)
    assert os.read(reader, 10) == b""
    os.close(reader)


def test_only_the_first_session_is_announced():
    notes = RunNotes(is_quiet=False)
    assert notes.take([DECIDED, {"decisions": ["other"]}]) == ["one", "two", "three"]
    assert notes.take([DECIDED]) == []


def test_the_summary_adds_up_the_workers():
    notes = RunNotes(is_quiet=False)
    common = {"steps_s": 10.0, "samples": 320.0}
    ends = [end_of(0, blocked_s=1.0, **common), end_of(1, blocked_s=3.0, peak_bytes=2 << 30, **common)]
    notes.take([json.loads(json.dumps(each)) for each in ends])
    said = notes.summary(0, [])
    assert said == (
        "40 steps in 10.0 s (4 steps/s, 64 samples/s), blocked 20% of the time; peak memory 2 GiB per worker; "
        "faults: none"
    )


def test_the_summary_names_faults():
    notes = RunNotes(is_quiet=False)
    notes.take([end_of(0, device_peak_bytes=1 << 20)])
    said = notes.summary(2, ["worker 1 failed"])
    assert said.endswith("1 GiB per worker, 1 MiB per memory device; faults: worker 1 failed, 2 restart(s)")


def test_a_quiet_run_and_one_without_sessions_say_nothing():
    quiet = RunNotes(is_quiet=True)
    assert quiet.take([DECIDED, end_of(0)]) == []
    assert quiet.summary(1, []) == RunNotes(is_quiet=False).summary(1, []) == ""
